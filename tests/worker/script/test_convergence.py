"""What is asked about convergence of a training script: its gradient noise, its learning rate, weights to start from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paths import MODELS

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.scoring.convergence.noise_scale import noise_scale_of
from autotune.scoring.convergence.quality_gate import judge_gradient
from autotune.study.setup import plan
from autotune.study.setup.plan import Plan
from autotune.study.spec.spec import StudySpec
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult

pytestmark = pytest.mark.process

RATES = MODELS / "scripts" / "rates.py"
Run = Callable[..., TrialResult]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(["torch", "deepspeed"], tmp_path_factory.mktemp("server") / "server.log")
    yield executor
    executor.close()


@pytest.fixture
def run(executor: LocalExecutor, tmp_path: Path) -> Run:
    found: dict[str, Plan] = {}
    n = 0

    def run(
        script: Path,
        *,
        arguments: tuple[str, ...] = (),
        ranks: int = 1,
        knobs: dict[str, Any] | None = None,
        **what: Any,
    ) -> TrialResult:
        nonlocal n
        n += 1
        if str(arguments) not in found:
            spec = StudySpec.of(script, {"ranks": ranks, "global_batch": "free", "script_args": arguments})
            found[str(arguments)] = plan.plan(spec, executor, tmp_path / "study")
        planned = found[str(arguments)]
        candidate = replace(planned.baseline, **(knobs or {}))
        request = TrialRequest(
            target=str(script), candidate=candidate.values(), ds_config=planned.ds_config(candidate), world_size=ranks,
            deadline_s=60, script=planned.script(candidate), **{"budget_s": 60.0, "min_samples": 10**9, **what},
        )  # fmt: skip
        result = base.run(executor, tmp_path / str(n), request)
        assert result.outcome is Outcome.COMPLETE, result.reason
        return result

    return run


def first_steps(log: Path) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"^moved (\S+) shows (\S+)$", log.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("made", [(), ("--late",)])
def test_every_update_of_a_script_has_the_trials_share_of_its_rate_and_its_schedule_goes_its_own_way(
    run: Run, tmp_path: Path, made: tuple[str, ...]
) -> None:
    run(RATES, arguments=made, max_steps=6)
    run(RATES, arguments=made, max_steps=6, learning_rate_factor=3.0)
    plain, scaled = first_steps(tmp_path / "1" / "rank-0.log"), first_steps(tmp_path / "2" / "rank-0.log")
    assert scaled[0][0] == pytest.approx(3 * plain[0][0], rel=1e-3)  # from there on the weights are others
    assert [shown for _, shown in plain] == [0.25, 0.125, 0.0625, 0.03125, 0.015625]
    assert [shown for _, shown in plain] == [shown for _, shown in scaled]


def test_a_rate_that_the_script_moves_with_the_batch_is_not_moved_twice(run: Run, tmp_path: Path) -> None:
    """It doubles the rate for twice the batch; the rule wants three times as much, of which half as much again is left to do."""
    knobs = {"micro_batch_size": 16}
    plain = run(RATES, arguments=("--scales",), knobs=knobs, max_steps=6)
    moved = run(RATES, arguments=("--scales",), knobs=knobs, max_steps=6, learning_rate_factor=3.0)
    (own, shown), (ours, _) = (first_steps(tmp_path / name / "rank-0.log")[0] for name in ("1", "2"))
    assert shown == 0.5 and ours == pytest.approx(1.5 * own, rel=1e-3)
    said = [change for change in moved.side_changes if change.startswith("Learning rate:")]
    assert len(said) == 1 and "2 times its own by itself" in said[0] and "multiply what it sets by 1.5" in said[0]
    assert not any(change.startswith("Learning rate:") for change in plain.side_changes)


@pytest.mark.parametrize("sharded", [(), ("--sharded",)])
def test_a_script_starts_from_the_weights_that_another_run_of_it_left(
    run: Run, tmp_path: Path, sharded: tuple[str, ...]
) -> None:
    path, still = tmp_path / "warm.pt", ("--rate", "0")
    cold = run(RATES, arguments=(*still, *sharded), ranks=2, max_steps=4)
    run(RATES, arguments=("--rate", "0.5", *sharded), ranks=2, max_steps=8, save_weights=str(path))
    warm = run(RATES, arguments=(*still, *sharded), ranks=2, max_steps=4, weights=str(path))
    assert path.exists() and warm.losses[0] < cold.losses[0] - 0.001
    again = run(RATES, arguments=(*still, *sharded), ranks=2, max_steps=4, weights=str(path))
    assert again.losses == pytest.approx(warm.losses, rel=1e-5)


@pytest.mark.parametrize("plain", [(), ("--plain",)])
def test_the_noise_scale_of_a_script_is_that_of_brute_force(
    run: Run, noise_scale_of_still: float, plain: tuple[str, ...]
) -> None:
    script = MODELS / "scripts" / "still.py"
    knobs = {"micro_batch_size": 64, "gradient_accumulation_steps": 4}
    terms = run(script, arguments=plain, ranks=2, knobs=knobs, noise=True, max_steps=40).noise
    assert terms is not None and (terms.micro_batch_size, terms.n_micro, len(terms.micro_sq)) == (64, 8, 40)
    found = noise_scale_of(terms)
    assert found.resolved and found.samples == pytest.approx(noise_scale_of_still, rel=0.15)


@pytest.mark.parametrize(
    ("knobs", "clean"), [({"zero_stage": 2}, True), ({"precision": "bf16", "gradient_accumulation_steps": 64}, False)]
)
def test_what_a_scripts_optimizer_gets_is_held_against_the_micro_gradients(
    run: Run, knobs: dict[str, Any], clean: bool
) -> None:
    knobs = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, **knobs}
    found = run(MODELS / "scripts" / "still.py", ranks=2, knobs=knobs, check_gradient=True, max_steps=3).gradient
    assert found is not None and found.n_micro == 2 * knobs["gradient_accumulation_steps"]
    assert found.error < 1e-6 if clean else "is off by" in judge_gradient(found, found, {})


def test_what_lightning_and_deepspeed_both_divide_by_the_accumulation_is_judged_at_its_size(run: Run) -> None:
    norms = []
    for micro, accumulation in ((8, 1), (2, 4)):
        knobs = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
        arguments = ("--strategy", "deepspeed_stage_1", "--ordered")
        found = run(
            MODELS / "scripts" / "lightning_fit.py", arguments=arguments, knobs=knobs, check_gradient=True, max_steps=3
        ).gradient
        assert found is not None and found.error < 1e-5
        norms.append(found.norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)  # of the same eight samples
