"""Studies without a worker: an engine whose trials are over at once, and what a study is planned on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune import session
from autotune.executors.base import Status
from autotune.report import load
from autotune.report.files import write_answer
from autotune.report.readme import recommended_words
from autotune.space import feasibility
from autotune.space.candidate import Candidate
from autotune.space.rule import Setting
from autotune.study import budget
from autotune.study.events import Event, EventSink, Kind, Progress
from autotune.study.measure import ENDLESS_SAMPLES
from autotune.study.runner import Runner
from autotune.study.setup.plan import Plan
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import History
from autotune.study.storage.leases import StudyLeases
from autotune.system import files
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, NoiseTerms, Observed, Outcome, RankReport
from autotune.trial.target import inspect_target
from autotune.trial.workload import Environment, Workload
from support.paths import MODELS

STEPS = 24
ENVIRONMENT = Environment(
    accelerator="cpu", device_name="stub", n_devices=2, device_memory_bytes=2**34, bf16=True, fp16=False, n_cores=2,
    versions={"deepspeed": "0.19.8"},
)  # fmt: skip
WORKLOAD = Workload(
    n_parameters=1000, n_trainable=1000, n_samples=4096, n_blocks=4, block_class="Block", block_share=0.9, float_buffers=False,
    client_optimizer=False, environment=ENVIRONMENT,
)  # fmt: skip
# A noise scale of 16 samples, well resolved.
NOISE = NoiseTerms(micro_batch_size=2, n_micro=4, micro_sq=[4 + 0.1 * (i % 3) for i in range(30)], mean_sq=[2.0] * 30)
# What the rank of an instant trial reports, given its candidate; None is a rank that dies without a word.
Behaviour = Callable[[Candidate], "RankReport | None"]


def report(candidate: Candidate, **changes: Any) -> RankReport:
    """A complete trial: bf16 is quicker, recomputing slower, a larger batch worth more than it costs, and the loss falls."""
    batch = candidate.global_batch_size(1)
    step_s = 0.02 + 0.001 * batch * (0.6 if candidate.precision == "bf16" else 1.0) * (
        1.3 if candidate.checkpoint_every else 1.0
    )
    whole = RankReport(
        rank=0,
        outcome=Outcome.COMPLETE,
        phase="done",
        step_times_s=[step_s * (1 + 0.01 * math.sin(7 * i)) for i in range(STEPS)],
        cpu_times_s=[step_s] * STEPS,
        losses=[1 + 2 / (1 + i * batch / 100) for i in range(STEPS)],
        peak_memory_bytes={"steady": 10**8 + 10**6 * candidate.micro_batch_size},
        observed=Observed(
            micro_batch_size=candidate.micro_batch_size,
            loader_batch_size=candidate.micro_batch_size,
            gradient_accumulation_steps=candidate.gradient_accumulation_steps,
            samples_per_step=batch,
            tokens_per_step=None,
            zero_stage=candidate.zero_stage,
            dtype="float32",
        ),
        noise=NOISE,
    )
    return replace(whole, **changes)


def failed(outcome: Outcome, reason: str) -> RankReport:
    """A trial that ended badly."""
    return RankReport(rank=0, outcome=outcome, phase="build", reason=reason, failed_at=0.0)


class Instant:
    """An engine whose trials take no time.

    Attributes:
        behaviour: What the ranks report.
        ran: The candidates that were run, in order, but for the noise probe.
        requests: What was asked for, in order.
        gated: What the quality gate asked for, in order; not among the others.
        lost: How many of the next trials end without a word from whoever watched them.
        stop_at: Raise KeyboardInterrupt in the trial with this number, counted from 0.
        over: Whether the time of its trials is over.
    """

    hosts, over = frozenset({"here"}), False

    def __init__(self, behaviour: Behaviour = report) -> None:
        self.behaviour, self.ran, self.lost, self.stop_at = behaviour, list[Candidate](), 0, -1
        self.requests: list[TrialRequest] = []
        self.gated: list[TrialRequest] = []

    @property
    def ends_at_s(self) -> float:
        """When its trials are ended: what a study sets is left out, since only a busy machine would come to it."""
        return 0.0 if self.over else math.inf

    @ends_at_s.setter
    def ends_at_s(self, _: float) -> None:
        pass

    def start(self) -> None:
        """It is ready."""

    def submit(self, folder: TrialDir) -> Instant:
        request = read_record(folder.request, TrialRequest)
        candidate = Candidate.of(request.candidate)
        if request.check_gradient and request.min_samples >= ENDLESS_SAMPLES and request.max_steps < 100:
            self.gated.append(request)
        elif request.noise:
            self.requests.append(request)
        else:
            self.requests.append(request)
            self.ran.append(candidate)
            if len(self.ran) - 1 == self.stop_at:
                raise KeyboardInterrupt
        if self.lost:
            self.lost -= 1
            return self
        found = self.behaviour(candidate)
        good = found is not None and found.outcome is Outcome.COMPLETE
        ranks = range(request.world_size)
        if found is not None:
            for rank in ranks:
                write_record(folder.report(rank), replace(found, rank=rank), sync=False)
        codes = dict.fromkeys(ranks, 0 if good else 1)
        write_record(folder.exit, Exit(codes=codes, first_failed=None if good else 0, wall_s=1.0), sync=False)
        return self

    def poll(self) -> Status:
        return Status.EXITED

    def cancel(self) -> None:
        pass

    @contextmanager
    def turn(self, _: object) -> Iterator[None]:
        yield

    def build_op(self, _: str, on_tick: object = None) -> None:
        return None


class Clock:
    """The clock of a study's budget, which only its trials move: a busy machine spends none of it.

    Attributes:
        now_s: The time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self.now_s))
        monkeypatch.setattr(budget, "load_per_core", lambda: 0.0)

    def takes(self, seconds: float) -> Behaviour:
        """Trials that take some time each."""

        def behaviour(candidate: Candidate) -> RankReport:
            self.now_s += seconds
            return report(candidate)

        return behaviour


class Watcher(EventSink):
    """Writes down the notes and the progress of a study."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended_with: list[Progress] = []

    def emit(self, event: Event) -> None:
        if event.kind is Kind.NOTE:
            self.said.append(event.text)
        elif event.progress is not None:
            self.ended_with.append(event.progress)


SPACE = {
    "micro_batch_size": [2, 4, 8, 16],
    "gradient_accumulation_steps": [1, 2],
    "precision": ["fp32", "bf16"],
    "checkpoint_every": [0, 1],
}


def spec_of(**changes: Any) -> StudySpec:
    """A study of `ok.py` on a space of 32 candidates."""
    few = {
        "name": "s",
        "space": [SPACE],
        "trials": 6,
        "finalists": 2,
        "repeats": 1,
        "sampler": "random",
        "branch": False,
    }
    return StudySpec.of(MODELS / "ok.py", few | changes)


def plan_of(spec: StudySpec, *, baseline: Candidate | None = None, **setting: Any) -> Plan:
    """The plan of a study that needs no rank to be worked out."""
    baseline = baseline or Candidate(micro_batch_size=8)
    facts = Setting(**{"n_blocks": 4, "n_samples": 4096} | setting)
    return Plan(
        spec=spec,
        target=inspect_target(spec.target),
        workload=WORKLOAD,
        world_size=1,
        base_config={},
        baseline=baseline,
        space=feasibility.pruned(spec.space, baseline, facts),
        full_space=spec.space,
        setting=facts,
    )


def runner_of(
    folder: Path,
    executor: Instant,
    *,
    watcher: EventSink | None = None,
    baseline: Candidate | None = None,
    slots: Sequence[Instant] = (),
    planned: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Runner:
    """A runner of the study in a folder; a second one resumes what the first began.

    Args:
        folder: Where the study's folder and database lie.
        executor: The engine.
        watcher: Receives the events.
        baseline: The baseline.
        slots: Engines for trials at once.
        planned: Fields of the plan that differ.
        changes: Fields of the spec that differ.
    """
    plan = replace(plan_of(spec_of(**changes), baseline=baseline), **(planned or {}))
    return Runner(plan, executor, folder / "s", records.default_url(folder), watcher or Watcher(), slots)


def recorded(
    folder: Path,
    executor: Instant,
    *,
    watcher: EventSink | None = None,
    learn: bool = False,
    planned: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Runner:
    """A runner as `session.tune` makes it."""
    plan = replace(plan_of(spec_of(**changes)), **(planned or {}))
    name = plan.spec.name
    held = StudyLeases(open_storage(records.default_url(folder)), name)
    return session.opened_runner(plan, executor, folder / name, held, watcher or Watcher(), learn=learn)


def finished(studies: Path, name: str, **changes: Any) -> None:
    """Leaves a finished study below a folder of studies, as `autotune run` does."""
    spec = spec_of(**{"name": name} | changes)
    Runner(plan_of(spec), Instant(), studies / name, records.default_url(studies), Watcher()).run()
    files.write_text(studies / name / "study.yaml", spec.to_yaml(studies / name))


def answered(studies: Path, executor: Instant | None = None, **changes: Any) -> Path:
    """Leaves the finished study `s` with its history, recommendation and files; returns the folder of the studies."""
    runner = recorded(studies, executor or Instant(), **changes)
    runner.run()
    found = load.load("s", records.default_url(studies), studies / "s")
    list(write_answer(found, studies / "s"))
    History(runner.storage.engine).recommended("s", 0, found.picks.get("recommended"), recommended_words(found))
    runner.storage.engine.dispose()
    return studies
