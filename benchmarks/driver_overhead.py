"""What the driver adds to each trial: ask, write the request, read the reports, tell, say how it stands.

`python benchmarks/driver_overhead.py [TRIALS]`: a study of so many trials on the default space whose trials take no time, for each sampler.
"""

from __future__ import annotations

import io
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import write
from rich.console import Console

from autotune import store, trial
from autotune.candidate import Candidate, Setting
from autotune.console import ProgressView
from autotune.executors.base import Status
from autotune.plan import Plan
from autotune.search import SAMPLERS
from autotune.spec import StudySpec
from autotune.study import Progress, Runner
from autotune.target import inspect_target
from autotune.trial import Environment, Exit, Observed, Outcome, RankReport, TrialDir, TrialRequest, Workload

TARGET = Path(__file__).parent.parent / "studies" / "code-gpt" / "model.py"
STEPS, LAST = 60, 20
N_PARAMETERS, N_SAMPLES = 1_000_000, 100_000


class Instant:
    """An engine whose trials are over at once; it writes what the ranks of a real one write."""

    spent_s = 0.0

    def submit(self, folder: TrialDir) -> Instant:
        start = time.perf_counter()
        request = trial.read(folder.request, TrialRequest)
        candidate = Candidate.of(request.candidate)
        batch = candidate.global_batch_size(request.world_size)
        step_s = 0.02 + 0.001 * batch * (0.6 if candidate.precision == "bf16" else 1.0) * (
            1.3 if candidate.checkpoint_every else 1.0
        )
        report = RankReport(
            rank=0,
            outcome=Outcome.COMPLETE,
            phase="done",
            step_times_s=[step_s * (1 + 0.02 * math.sin(7 * i)) for i in range(STEPS)],
            cpu_times_s=[step_s] * STEPS,
            losses=[3 + 2 / (1 + i * batch / 200) + 0.05 * math.sin(5 * i) for i in range(STEPS)],
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
        )
        trial.write(folder.report(0), report, sync=False)
        trial.write(folder.exit, Exit(codes={0: 0}, wall_s=STEPS * step_s), sync=False)
        self.spent_s += time.perf_counter() - start
        return self

    def poll(self) -> Status:
        return Status.EXITED

    def cancel(self) -> None:
        pass

    @contextmanager
    def turn(self, _: object) -> Iterator[None]:
        yield

    def build_ops(self, _: object) -> None:
        return None


class Clock(ProgressView):
    """Notes when each trial was told."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.told_at = [time.perf_counter()]

    def ended(self, progress: Progress) -> None:
        super().ended(progress)
        self.told_at.append(time.perf_counter())


def measure(sampler: str, n_trials: int, folder: Path) -> dict[str, float]:
    to_loss = {"name": "convergence", "metric": "time_to_loss_s"}  # which needs no probe, and so leaves the batch free
    given = {"objectives": ["latency", "throughput", to_loss, "memory"], "finalists": 0, "stop_below": 0}
    spec = StudySpec.of(TARGET, {"sampler": sampler, "trials": n_trials, "name": sampler, **given})
    environment = Environment(
        accelerator="cpu",
        device_name="",
        n_devices=2,
        device_memory_bytes=2**34,
        bf16=True,
        fp16=False,
        n_cores=2,
        versions={},
    )
    workload = Workload(
        n_parameters=N_PARAMETERS,
        n_trainable=N_PARAMETERS,
        n_samples=N_SAMPLES,
        n_blocks=4,
        block_class="Block",
        block_share=0.9,
        float_buffers=False,
        client_optimizer=False,
        environment=environment,
    )
    setting = Setting(n_blocks=4, n_samples=N_SAMPLES)
    baseline = Candidate(micro_batch_size=8)
    space = spec.space.pruned(baseline, setting)
    plan = Plan(
        spec=spec,
        target=inspect_target(spec.target),
        workload=workload,
        world_size=1,
        base_config={},
        baseline=baseline,
        space=space,
        full_space=spec.space,
        setting=setting,
    )
    executor, clock = Instant(), Clock()
    runner = Runner(plan, executor, folder / sampler, store.default_url(folder), clock)
    start = time.perf_counter()
    runner.run()
    wall = time.perf_counter() - start
    gaps = [after - before for before, after in zip(clock.told_at, clock.told_at[1:], strict=False)]
    # The stub's own time is the trial's; it is the same for all of them.
    own = executor.spent_s / len(gaps)
    return {
        "mean_s": (wall - executor.spent_s) / len(gaps),
        f"median_of_last_{LAST}_s": statistics.median(gaps[n_trials - LAST : n_trials]) - own,
        "largest_s": max(gaps) - own,
    }


def main() -> None:
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as name:
        figures = {sampler: measure(sampler, n_trials, Path(name)) for sampler in (sys.argv[2:] or SAMPLERS)}
    write("driver_overhead", {"n_trials": n_trials, "seconds_per_trial": figures})


if __name__ == "__main__":
    main()
