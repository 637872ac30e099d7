"""Made-up measurements whose truth is known."""

from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.measured import Measured
from autotune.scoring.objective import Objective
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

LATENCY = Objective(name="latency", metric="step_time_s")
THROUGHPUT = Objective(name="throughput", metric="samples_per_s")
MEMORY = Objective(name="memory", metric="peak_memory_bytes", weight=0.5)
CONVERGENCE = Objective(name="convergence", metric="time_to_loss_s")
PASSED = GateVerdict(passed=True, excess=0.001, limit=0.02, n_steps=40)


def metrics(candidate, step_s, memory):
    batch = candidate.global_batch_size(1)
    return {"step_time_s": step_s, "samples_per_s": batch / step_s, "peak_memory_bytes": memory}


def measured(
    number,
    step_s=0.1,
    memory=100e6,
    *,
    rounds=(),
    micro=8,
    accumulation=1,
    outcome=Outcome.COMPLETE,
    feasible=True,
    **knobs,
):
    """A trial: its own step time, and those of its re-measurements (a sequence, or a mapping by round)."""
    candidate = Candidate(micro_batch_size=micro, gradient_accumulation_steps=accumulation, **knobs)
    again = dict(rounds) if isinstance(rounds, dict) else dict(enumerate(rounds, start=1))
    values = metrics(candidate, step_s, memory) if outcome is Outcome.COMPLETE else {}
    return Measured(
        trial=number, candidate=candidate, ds_config=candidate.to_deepspeed(), outcome=outcome, feasible=feasible, metrics=values,
        ci95={name: (0.99 * value, 1.01 * value) for name, value in values.items()},
        repeats={n: metrics(candidate, step, memory) for n, step in again.items()},
    )  # fmt: skip
