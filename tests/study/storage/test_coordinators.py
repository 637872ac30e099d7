"""Several coordinators on one study, on a real PostgreSQL: the budget is kept, though processes and servers are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState
from support import postgres
from support.coordinate import coordinate
from support.instant import Instant, Watcher, plan_of, spec_of
from support.zoo import wait_until

from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study import proposals
from autotune.study.runner import Runner
from autotune.study.storage import database, leases, records
from autotune.study.storage.database import StoreError
from autotune.study.storage.leases import Owner, StudyLeases


class Coordinator:
    """A process that leads or helps a study; forked, which spares it the imports."""

    def __init__(
        self, role: str, folder: Path, log: Path, url: str, trials: int, seconds: float, patience_s: float
    ) -> None:
        def main() -> None:
            sys.stdout = open(log, "w")  # noqa: SIM115
            # Who is dead is seen by the process number, so that this need not be quick.
            leases.HEARTBEAT_S, database.PATIENCE_S = 1.0, patience_s
            try:
                coordinate(role, folder, trials, seconds, "random", url)
            except StoreError as error:
                print(error, flush=True)
                sys.exit(2)

        self._log = log
        self._process = multiprocessing.get_context("fork").Process(target=main)
        self._process.start()

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text() if self._log.exists() else ""

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait(self, timeout_s: float = 120) -> int | None:
        """Its exit status; None if it has not ended."""
        self._process.join(timeout_s)
        return self._process.exitcode


@pytest.fixture
def start(tmp_path: Path, url: str) -> Iterator[Callable[..., Coordinator]]:
    """Starts coordinators, none of which outlives the test."""
    started: list[Coordinator] = []

    def begin(role: str, trials: int, seconds: float, *, at: str = url, patience_s: float = 60) -> Coordinator:
        started.append(Coordinator(role, tmp_path, tmp_path / f"{len(started)}.log", at, trials, seconds, patience_s))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def ended(*processes: Coordinator) -> None:
    for process in processes:
        assert process.wait() == 0, process.log


def study_of(url: str):
    return records.load_study(database.open_storage(url), "s")


def told(url: str) -> int:
    storage = database.open_storage(url)
    count = len(records.told_trials(records.load_study(storage, "s"))) if "s" in records.study_names(storage) else 0
    storage.engine.dispose()
    return count


def assert_whole(url: str, n_trials: int) -> None:
    """The budget to the trial, no candidate twice, none lost, nobody holds anything."""
    study = study_of(url)
    trials = study.get_trials(deepcopy=False)
    keys = [t.user_attrs[CANDIDATE_ATTR] for t in records.told_trials(study)]
    assert len(keys) == len(set(keys)) == n_trials
    assert not [t for t in trials if t.state is TrialState.RUNNING]
    assert {t.user_attrs[CANDIDATE_ATTR] for t in trials if CANDIDATE_ATTR in t.user_attrs} == set(keys)
    assert sorted(t.number for t in trials) == list(range(len(trials)))
    assert leases.leases(database.open_storage(url), "s") == []


@pytest.mark.system
@pytest.mark.smoke
def test_three_coordinators_share_a_budget(url, start):
    ended(start("lead", 30, 0.05), start("help", 30, 0.05), start("help", 30, 0.05))
    assert_whole(url, 30)
    owners = Counter(t.user_attrs[leases.TOLD_BY_ATTR] for t in records.told_trials(study_of(url)))
    assert len(owners) == 3
    roles = Counter(t.user_attrs["role"] for t in records.told_trials(study_of(url)))
    assert roles == {"baseline": 1, "search": 29}


@pytest.mark.system
def test_a_killed_worker_costs_a_retry_and_no_trial(url, start):
    lead, worker = start("lead", 8, 0.4), start("help", 8, 0.4)
    assert wait_until(lambda: "began" in worker.log)
    worker.kill()
    ended(lead)
    assert_whole(url, 8)
    failed = [t for t in study_of(url).get_trials() if t.state is TrialState.FAIL]
    assert len(failed) == 1 and failed[0].user_attrs["reason"] == "the run ended before the trial did"


@pytest.mark.system
def test_a_candidate_that_takes_three_coordinators_along_is_not_the_first_of_a_fourth(url, tmp_path):
    def opened(trials, leases):
        runner = Runner(plan_of(spec_of(trials=trials, finalists=0)), Instant(), tmp_path / "s", leases, Watcher())
        runner.open()
        return runner

    opened(2, url).run()
    claimed = []
    for _ in range(proposals.MAX_LOST + 1):
        dead = opened(
            6, StudyLeases(database.open_storage(url), "s", replace(Owner.here(), pid=2**22 + 1))
        )  # no process has that number
        dead.proposer.start()
        claimed.append(dead.proposer.next().candidate)
        runner = opened(6, StudyLeases(database.open_storage(url), "s"))
        assert runner._teller.recover(runner.leases.abandoned(records.running(runner.study)), 1) == []
    assert len(set(claimed[:-1])) == 1 and claimed[-1] != claimed[0]
    states = [(t.state.name, t.user_attrs["outcome"]) for t in runner.study.get_trials()]
    assert states[2:] == [("FAIL", "lost")] * len(claimed)


@pytest.mark.system
def test_without_its_leader_a_study_goes_on_and_the_next_leader_finishes_it(url, start, tmp_path):
    lead, worker = start("lead", 20, 0.2), start("help", 20, 0.2)
    assert wait_until(lambda: told(url) > 4)
    lead.kill()
    ended(worker)
    assert told(url) == 20
    ended(start("lead", 20, 0.0))
    assert_whole(url, 20)
    assert list((tmp_path / "s" / "trials").glob("*/repeat-1"))


@pytest.mark.system
def test_a_database_that_is_killed_and_comes_back_costs_nothing(programs, start):
    with postgres.running(programs) as own:
        workers = [start(role, 14, 0.2, at=own.url) for role in ("lead", "help")]
        assert wait_until(lambda: told(own.url) > 3)
        own.kill()
        time.sleep(4)
        own.start()
        ended(*workers)
        assert_whole(own.url, 14)
        # One that was just being begun has no candidate, and is closed.
        assert not [
            t for t in study_of(own.url).get_trials() if t.state is TrialState.FAIL and CANDIDATE_ATTR in t.user_attrs
        ]
    assert any("is away" in worker.log for worker in workers)


@pytest.mark.system
def test_a_database_that_stays_away_ends_the_run_with_what_to_do_and_the_run_can_go_on(programs, start):
    with postgres.running(programs) as own:
        lead = start("lead", 12, 0.2, at=own.url, patience_s=2)
        assert wait_until(lambda: told(own.url) > 3)
        own.kill()
        assert lead.wait(60) == 2
        log = lead.log
        assert "what was told before is kept. Run the same command again to go on" in log
        assert postgres.PASSWORD not in log and postgres.QUOTED not in log
        own.start()
        ended(start("lead", 12, 0.0, at=own.url))
        assert_whole(own.url, 12)


STUDY = """
target: ok.py
name: small
ranks: 1
base_config: {train_micro_batch_size_per_gpu: 8}
space: [{micro_batch_size: [2, 4, 8, 16]}, {zero_stage: [0, 1]}]
global_batch: free
objectives: [latency, memory]
trials: 6
trial_budget_s: 0.3
stop_below: 0
stop_trials: false
finalists: 0
"""


def command(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.system
def test_a_worker_helps_a_run_and_the_password_is_nowhere(url, models, tmp_path):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    (tmp_path / "small.yaml").write_text(STUDY)
    run = command("run", "small.yaml", "--storage", url, cwd=tmp_path)
    assert wait_until((tmp_path / "studies" / "small" / "study.yaml").exists, 120)
    worker = command("worker", "small", "--storage", url, cwd=tmp_path)
    said = [process.communicate(timeout=240)[0] for process in (run, worker)]
    assert (run.returncode, worker.returncode) == (0, 0), said
    trials = records.told_trials(records.load_study(database.open_storage(url), "small"))
    assert len(trials) == len({t.user_attrs[CANDIDATE_ATTR] for t in trials}) == 6
    # It helps, or everything was measured while it imported torch.
    assert "helping small, led by process" in said[1] or "measures the finalists again and writes the answer" in said[1]
    written = [path.read_bytes() for path in (tmp_path / "studies").rglob("*") if path.is_file()]
    for secret in (postgres.PASSWORD, postgres.QUOTED):
        assert not any(secret.encode() in content for content in written)
        assert secret not in "".join(said)
    # What study.yaml names is enough, where the password comes from elsewhere.
    found = subprocess.run(
        [sys.executable, "-m", "autotune", "status", "small", "--json"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PGPASSWORD": postgres.PASSWORD}, check=False,
    )  # fmt: skip
    assert json.loads(found.stdout)["n_trials"] == 6


def refusal(*arguments: str, cwd: Path) -> str:
    process = command(*arguments, cwd=cwd)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "Traceback" not in said, said
    return said.strip().splitlines()[-1]


@pytest.mark.system
def test_a_worker_says_what_it_lacks(url, tmp_path):
    records.create_study(database.open_storage(records.default_url(tmp_path / "studies")), "s", ["minimize"], ["m"])
    assert "is a file, which one run at a time writes to" in refusal("worker", "s", cwd=tmp_path)
    assert "no study 's' in postgresql" in refusal("worker", "s", "--storage", url, cwd=tmp_path)
