"""Several coordinators on one study, on a real PostgreSQL: nothing is taken twice, nothing is lost, whoever is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState
from support import postgres
from support.coordinate import SPACE, coordinate
from support.instant import Instant, Watcher, plan_of, report, runner_of, spec_of

from autotune.errors import UserError
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.study.parallel import ClaimedTrial, TrialPool
from autotune.study.runner import Runner
from autotune.study.storage import database, leases, records, urls
from autotune.study.storage.leases import Owner, StudyLeases
from autotune.study.storage.records import StoreError
from autotune.study.storage.tables import LEASE
from autotune.system import processes as liveness
from autotune.trial.result import Outcome, TrialResult

# Of a kernel that nobody here can ask whether the process lives.
ELSEWHERE = Owner("elsewhere", "another kernel", 1, "0", "x")


@pytest.fixture(scope="session")
def programs() -> Path:
    found = postgres.binaries()
    if found is None:
        pytest.skip("PostgreSQL is not installed (on Debian: apt-get install postgresql)")
    return found


@pytest.fixture(scope="module")
def server(programs: Path) -> Iterator[postgres.Postgres]:
    with postgres.running(programs) as server:
        yield server


@pytest.fixture
def url(server: postgres.Postgres) -> Iterator[str]:
    """The database, with no study in it afterwards."""
    yield server.url
    storage = records.open_storage(server.url)
    for name in records.study_names(storage):
        records.delete_study(storage, name)
    with storage.engine.begin() as connection:
        connection.execute(LEASE.delete())


class Coordinator:
    """A process that leads or helps a study; forked, which spares it the imports."""

    def __init__(
        self, role: str, folder: Path, log: Path, url: str, trials: int, seconds: float, patience_s: float
    ) -> None:
        def main() -> None:
            sys.stdout = open(log, "w")  # noqa: SIM115
            # Who is dead is seen by the process number, so that this need not be quick.
            leases.HEARTBEAT_S, records.PATIENCE_S, database.PATIENCE_S = 1.0, patience_s, patience_s
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


def until(fact: Callable[[], bool], timeout_s: float = 60) -> None:
    """Waits for a fact."""
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.05)


def study_of(url: str):
    return records.load_study(records.open_storage(url), "s")


def told(url: str) -> int:
    storage = records.open_storage(url)
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
    assert leases.leases(records.open_storage(url), "s") == []


# Claims.


def ledger_of(url: str, owner: Owner | None = None) -> StudyLeases:
    return StudyLeases(records.open_storage(url), "s", owner)


def begun(url: str):
    """A study with no trial, and its database."""
    storage = records.open_storage(url)
    return records.create_study(storage, "s", ["minimize"], ["m"])


@pytest.mark.system
def test_who_was_taken_for_dead_cannot_tell_his_trial(url):
    study, dead, alive = begun(url), ledger_of(url, ELSEWHERE), ledger_of(url)
    asked = dead.claim(study)
    held = next(lease for lease in leases.leases(alive.storage, "s") if lease.trial == asked.number)
    assert alive.take_over(records.running(study)[0], held)
    assert not dead.tell(asked, TrialState.COMPLETE, [1.0], {"a": 1}, {})
    assert study.get_trials()[0].state is TrialState.RUNNING
    assert alive.tell(asked, TrialState.COMPLETE, [2.0], {"a": 2}, {"fits": 0.0})
    ended = study.get_trials()[0]
    assert (ended.state, ended.values, ended.user_attrs["a"], ended.constraints) == (
        TrialState.COMPLETE,
        [2.0],
        2,
        {"fits": 0.0},
    )


@pytest.mark.system
def test_a_trial_is_told_once_though_the_answer_was_lost(url):
    study, ledger = begun(url), ledger_of(url)
    asked = ledger.claim(study)
    assert ledger.tell(asked, TrialState.COMPLETE, [1.0], {}, {})
    assert ledger.tell(asked, TrialState.COMPLETE, [1.0], {}, {})  # the same call again, as after a lost connection
    assert not ledger_of(url).tell(asked, TrialState.COMPLETE, [3.0], {}, {})
    assert study.get_trials()[0].values == [1.0]


@pytest.mark.system
def test_of_two_who_take_over_a_trial_one_gets_it(url):
    study, dead = begun(url), ledger_of(url, ELSEWHERE)
    dead.claim(study)
    held, trial = leases.leases(dead.storage, "s")[0], records.running(study)[0]
    assert [ledger_of(url).take_over(trial, held) for _ in range(2)] == [True, False]


@pytest.mark.system
def test_one_that_stirs_in_the_last_moment_is_not_taken_over(url):
    study, slow = begun(url), ledger_of(url, ELSEWHERE)
    slow.claim(study)
    held, trial = leases.leases(slow.storage, "s")[0], records.running(study)[0]
    slow.look()
    assert not ledger_of(url).take_over(trial, held)


@pytest.mark.system
def test_a_coordinator_elsewhere_is_dead_when_its_beat_stands_still_for_long(url):
    study, other, ledger = begun(url), ledger_of(url, ELSEWHERE), ledger_of(url)
    other.claim(study)
    for _ in range(leases.STALE_LOOKS):
        ledger.look()
        assert ledger.abandoned(records.running(study)) == []
    other.look()
    ledger.look()
    for _ in range(leases.STALE_LOOKS - 1):
        ledger.look()
        assert ledger.abandoned(records.running(study)) == []
    ledger.look()
    assert [trial.number for trial, _ in ledger.abandoned(records.running(study))] == [0]


@pytest.mark.system
def test_a_dead_process_of_this_machine_is_known_at_once(url):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.here(), pid=child.pid, started=liveness.started(child.pid))
    study, other, ledger = begun(url), ledger_of(url, owner), ledger_of(url)
    other.claim(study)
    assert ledger.abandoned(records.running(study)) == []
    child.kill()
    until(lambda: len(ledger.abandoned(records.running(study))) == 1)  # though nobody has waited for it yet
    child.communicate()


def test_a_clock_that_is_set_buries_nobody(monkeypatch):
    """The moment of the boot moves with the clock, and with it whatever is counted from there."""
    here = Owner.here()
    assert Owner.read(str(here)) == here and here.lives()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert here.lives() and Owner.here().started == here.started
    assert replace(here, started="1").lives() is False  # its number is used again


@pytest.mark.system
def test_a_running_trial_that_nobody_holds_is_abandoned(url):
    study = begun(url)
    study.ask()
    assert len(ledger_of(url).abandoned(records.running(study))) == 1


@pytest.mark.system
def test_while_one_decides_the_others_wait(url):
    begun(url)
    first, second, order = ledger_of(url), ledger_of(url), []

    def wait() -> None:
        with second.turn():
            order.append("second")

    with first.turn():
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.system
def test_what_was_decided_after_the_turn_was_lost_is_not_claimed(url):
    study, ledger = begun(url), ledger_of(url)
    asked = ledger.claim(study)
    with ledger.turn():
        ledger._turn.invalidate()
        ledger._turn.close()
        with pytest.raises(leases.TurnLost):
            ledger.describe(asked, {}, {CANDIDATE_ATTR: "x"})
    assert CANDIDATE_ATTR not in study.get_trials()[0].user_attrs


@pytest.mark.system
def test_a_second_leader_is_refused_and_told_how_to_help(url):
    refused = rf"run by process {os.getpid()}.*autotune worker s"
    with ledger_of(url).leading(print), pytest.raises(UserError, match=refused), ledger_of(url).leading(print):
        pass
    with ledger_of(url).leading(print):
        pass


@pytest.mark.system
def test_a_leader_elsewhere_is_waited_for_and_then_replaced(url, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    assert ledger_of(url, ELSEWHERE).acquire(leases.LEAD)
    said = []
    with ledger_of(url).leading(said.append):
        assert "process 1 on elsewhere ran this study" in said[0]


# Whole studies.


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
    until(lambda: "began" in worker.log)
    worker.kill()
    ended(lead)
    assert_whole(url, 8)
    failed = [t for t in study_of(url).get_trials() if t.state is TrialState.FAIL]
    assert len(failed) == 1 and failed[0].user_attrs["reason"] == "the run ended before the trial did"


@pytest.mark.system
def test_a_candidate_that_takes_two_coordinators_along_is_not_given_to_a_third(url, tmp_path):
    def opened(trials, leases):
        runner = Runner(plan_of(spec_of(trials=trials, finalists=0)), Instant(), tmp_path / "s", leases, Watcher())
        runner.open()
        return runner

    opened(2, url).run()
    claimed = []
    for _ in range(2):
        dead = opened(5, ledger_of(url, replace(Owner.here(), pid=2**22 + 1)))  # no process has that number
        dead.proposer.start()
        claimed.append(dead.proposer.next().candidate)
        runner = opened(5, ledger_of(url, Owner.here()))
        assert runner._teller.recover(runner.leases.abandoned(records.running(runner.study)), 1) == []
    assert claimed[0] == claimed[1]
    states = [(t.state.name, t.user_attrs["outcome"]) for t in runner.study.get_trials()]
    assert states[2:] == [("FAIL", "lost"), ("PRUNED", "crashed")]


@pytest.mark.system
def test_without_its_leader_a_study_goes_on_and_the_next_leader_finishes_it(url, start, tmp_path):
    lead, worker = start("lead", 20, 0.2), start("help", 20, 0.2)
    until(lambda: told(url) > 4)
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
        until(lambda: told(own.url) > 3)
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
        until(lambda: told(own.url) > 3)
        own.kill()
        assert lead.wait(60) == 2
        log = lead.log
        assert "what was told before is kept. Run the same command again to go on" in log
        assert postgres.PASSWORD not in log and postgres.QUOTED not in log
        own.start()
        ended(start("lead", 12, 0.0, at=own.url))
        assert_whole(own.url, 12)


# Several at once in one coordinator.


def test_two_slots_run_two_trials_at_once_and_each_candidate_once(tmp_path):
    running, most = [0], [0]

    def behaviour(candidate):
        running[0] += 1
        most[0] = max(most[0], running[0])
        end = time.monotonic() + 3  # until a second one has come
        while most[0] < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        running[0] -= 1
        return report(candidate)

    executor = Instant(behaviour)
    spec = spec_of(trials=7, finalists=0, space=[SPACE], stop_below=0, overlap=True)
    runner = Runner(
        plan_of(spec), executor, tmp_path / "s", records.default_url(tmp_path), Watcher(), [executor, executor]
    )
    runner.run()
    assert most[0] == 2
    measured = runner.measured()
    assert len({m.candidate for m in measured}) == len(measured) == 7
    caveats = [records.told_data(t)["caveats"] for t in records.told_trials(runner.study)]
    assert caveats[0] == [] and any("ran on this host at the same time" in text for found in caveats for text in found)


def test_ctrl_c_gives_every_trial_under_way_back(tmp_path):
    executor = Instant(lambda candidate: time.sleep(0.5) or report(candidate))
    runner = runner_of(tmp_path, executor, trials=20, slots=[executor, executor])
    original, calls = runner.proposer.next, [0]

    def interrupted():
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return original()

    runner.proposer.next = interrupted
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert records.running(runner.study) == []
    again = runner_of(tmp_path, Instant(), trials=8, finalists=0)
    again.run()
    assert len(records.told_trials(again.study)) == 8


def test_flights_return_what_ended_and_stop_the_rest():
    flights = TrialPool(["a", "b"], side_by_side=True)

    def quick(executor, tick):
        time.sleep(0.05)
        return TrialResult(outcome=Outcome.COMPLETE, wall_s=1.0)

    def endless(executor, tick):
        while True:
            tick()
            time.sleep(0.01)

    class Asked:
        number = 1

    one, other = (ClaimedTrial(asked=Asked(), candidate=Candidate(micro_batch_size=n)) for n in (1, 2))
    flights.start(one, quick)
    flights.start(other, endless)
    ((claim, result),) = flights.landed(None)
    assert claim is one and "up to 2 trials ran on this host" in result.caveats[0]
    flights.stop()
    assert flights.claims == [other] and flights.results() == {}


def test_the_next_candidate_is_not_sought_beside_one_under_way(tmp_path):
    runner = runner_of(tmp_path, Instant(), trials=8, sampler="physics", finalists=0, stop_below=0)
    runner.run()
    asked = [runner.proposer.claim().candidate for _ in range(4)]
    assert len(set(asked)) == 4
    assert not set(asked) & {m.candidate for m in runner.measured()}


# Storage URLs.


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:se:c/r@et@host:5432/db", "postgresql://ann:***@host:5432/db"),
        ("postgresql+psycopg://ann@host/db?sslmode=require", "postgresql+psycopg://ann@host/db?sslmode=require"),
        ("postgresql://host/db?user=ann&password=secret&x=1", "postgresql://host/db?user=ann&password=***&x=1"),
        ("sqlite:////home/a:b@c/x.db", "sqlite:////home/a:b@c/x.db"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert urls.redact_url(url) == shown
    assert urls.redact_url(shown) == shown


def test_a_url_written_down_without_its_secrets_leaves_them_to_the_driver():
    assert urls.with_password("postgresql://ann:***@host/db?password=***&x=1") == "postgresql://ann@host/db?x=1"
    assert urls.with_password("postgresql://host/db?password=***") == "postgresql://host/db"
    assert urls.with_password("postgresql://ann:secret@host/db") == "postgresql://ann:secret@host/db"


def test_the_study_file_does_not_keep_the_password():
    text = spec_of(storage="postgresql://ann:secret@host/db").to_yaml()
    assert "secret" not in text and "postgresql://ann:***@host/db" in text


@pytest.mark.system
def test_a_wrong_password_is_said_in_one_line_without_it(server):
    wrong = server.url.replace(postgres.QUOTED, "guessed")
    with pytest.raises(StoreError, match=r"password authentication failed.*Check user and password") as error:
        records.open_storage(wrong)
    assert "guessed" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.system
def test_a_password_that_the_file_did_not_keep_is_asked_for(server, monkeypatch):
    masked = urls.redact_url(server.url)
    with pytest.raises(StoreError, match="does not keep the password: pass --storage"):
        records.open_storage(masked)
    monkeypatch.setenv("PGPASSWORD", postgres.PASSWORD)
    assert records.study_names(records.open_storage(masked)) == []


@pytest.mark.system
def test_a_database_that_is_not_there_is_named_with_what_to_do(server):
    with pytest.raises(StoreError, match=r'database "none" does not exist\. Make it first'):
        records.open_storage(server.url.replace("/postgres", "/none"))


def test_a_missing_driver_is_named_with_how_to_install_it():
    if __import__("importlib.util").util.find_spec("pymysql"):
        pytest.skip("the driver is installed")
    with pytest.raises(StoreError, match=r'pip install "autotune\[mysql\]"'):
        records.open_storage("mysql://ann:pw@localhost/x")


# The commands.

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
        [sys.executable, "-m", "autotune.cli", *arguments],
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
    until((tmp_path / "studies" / "small" / "study.yaml").exists, 120)
    worker = command("worker", "small", "--storage", url, cwd=tmp_path)
    said = [process.communicate(timeout=240)[0] for process in (run, worker)]
    assert (run.returncode, worker.returncode) == (0, 0), said
    trials = records.told_trials(records.load_study(records.open_storage(url), "small"))
    assert len(trials) == len({t.user_attrs[CANDIDATE_ATTR] for t in trials}) == 6
    # It helps, or everything was measured while it imported torch.
    assert "helping small, led by process" in said[1] or "measures the finalists again and writes the answer" in said[1]
    written = [path.read_bytes() for path in (tmp_path / "studies").rglob("*") if path.is_file()]
    for secret in (postgres.PASSWORD, postgres.QUOTED):
        assert not any(secret.encode() in content for content in written)
        assert secret not in "".join(said)
    # What study.yaml names is enough, where the password comes from elsewhere.
    found = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "status", "small", "--json"],
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
    records.create_study(records.open_storage(records.default_url(tmp_path / "studies")), "s", ["minimize"], ["m"])
    assert "is a file, which one run at a time writes to" in refusal("worker", "s", cwd=tmp_path)
    assert "no study 's' in postgresql" in refusal("worker", "s", "--storage", url, cwd=tmp_path)
