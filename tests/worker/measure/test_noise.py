"""The gradient noise that ranks measure, beside a brute-force computation from the same weights."""

from dataclasses import replace

import pytest
from support.paths import MODELS

from autotune.scoring.convergence.noise_scale import noise_scale, noise_scale_of
from autotune.trial.result import Outcome

pytestmark = pytest.mark.process

MICRO, STEPS = 256, 12
CELLS = [
    (2, 2, "fp32", 3),
    (1, 4, "fp32", 1),
    *(
        pytest.param(*each, marks=pytest.mark.system)
        for each in ((2, 2, "fp32", 0), (2, 2, "bf16", 0), (2, 2, "bf16", 2), (2, 2, "torch_autocast", 1))
    ),
]


@pytest.mark.parametrize(("ranks", "steps", "precision", "stage"), CELLS)
def test_the_noise_scale_is_that_of_brute_force(zoo, noise_scale_of_still, ranks, steps, precision, stage):
    truth = noise_scale_of_still
    result = zoo.run(
        "still", micro=MICRO, gradient_accumulation_steps=steps, precision=precision, zero_stage=stage,
        world_size=ranks, noise=True, max_steps=STEPS, min_samples=10**9, budget_s=60.0,
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETE, result.reason
    terms = result.noise
    assert terms is not None and len(terms.micro_sq) == len(terms.mean_sq) == STEPS
    assert (terms.micro_batch_size, terms.n_micro) == (MICRO, ranks * steps)
    found = noise_scale(terms.micro_sq, terms.mean_sq, micro_batch_size=terms.micro_batch_size, n_micro=terms.n_micro)
    assert found.resolved and found.low <= truth * 1.05 and truth * 0.95 <= found.high
    assert found.samples == pytest.approx(truth, rel=0.15)


def test_without_being_asked_nothing_is_hooked(zoo):
    assert zoo.run("still", max_steps=4, budget_s=0.0).noise is None


@pytest.mark.parametrize(("rate", "ends_early"), [("0.0", True), pytest.param("1e-3", False, marks=pytest.mark.system)])
def test_a_probe_goes_on_while_the_loss_falls_however_well_it_knows_the_noise_by_then(zoo, tmp_path, rate, ends_early):
    target = tmp_path / "model.py"
    target.write_text((MODELS / "still.py").read_text().replace("lr=0.0", f"lr={rate}"))
    result = zoo.run(target, micro=512, gradient_accumulation_steps=2, noise=True, max_steps=100, budget_s=60.0)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.noise is not None
    assert any(noise_scale_of(_first(result.noise, n)).precise for n in range(11, 50))
    assert (len(result.losses) < 100) == ends_early


def _first(terms, n):
    return replace(terms, micro_sq=terms.micro_sq[:n], mean_sq=terms.mean_sq[:n])
