"""Convergence of a training script: its gradient noise, its learning rate, weights to start from."""

import re

import pytest

from autotune.scoring.convergence.noise_scale import noise_scale_of
from autotune.scoring.convergence.quality_gate import judge_gradient

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("home")]


@pytest.fixture
def run(bench):
    """Trains a script for a number of steps; knobs and fields of the request are given by name."""

    def run(script, *arguments, ranks=1, steps, **what):
        found = bench.plan(script, *arguments, ranks=ranks)
        return bench.applied(found, steps=steps, **what)

    return run


def first_steps(bench):
    """Weight moved and rate shown, at each step of the latest trial."""
    printed = bench.folder.log(0).read_text()
    return [(float(a), float(b)) for a, b in re.findall(r"^moved (\S+) shows (\S+)$", printed, re.MULTILINE)]


@pytest.mark.parametrize("made", [(), pytest.param(("--late",), marks=pytest.mark.system)])
def test_every_update_has_the_trials_share_of_the_scripts_rate_and_its_schedule_is_left_alone(run, bench, made):
    run("rates.py", *made, steps=6)
    plain = first_steps(bench)
    run("rates.py", *made, steps=6, learning_rate_factor=3.0)
    scaled = first_steps(bench)
    assert scaled[0][0] == pytest.approx(3 * plain[0][0], rel=1e-3)  # from there on the weights are others
    assert [shown for _, shown in plain[:5]] == [0.25, 0.125, 0.0625, 0.03125, 0.015625]
    assert [shown for _, shown in plain] == [shown for _, shown in scaled]


@pytest.mark.system
@pytest.mark.parametrize(
    "other",
    [{"precision": "bf16"}, *(pytest.param({"zero_stage": stage}, marks=pytest.mark.system) for stage in (1, 3))],
)
def test_a_schedule_made_from_the_engines_optimizer_moves_the_rate_where_that_is_deepspeeds(run, bench, other):
    """torch's schedules refuse that one, so that most trials of such a script crashed."""
    plain = run("rates.py", "--late", steps=6)
    shown = [rate for _, rate in first_steps(bench)]
    moved = run("rates.py", "--late", steps=6, **other)
    assert [rate for _, rate in first_steps(bench)] == shown
    (said,) = (change for change in moved.side_changes if change.startswith("Schedule:"))
    assert "`MultiplicativeLR` at rates.py:" in said and "`optimizer.optimizer`" in said
    assert "Schedule:" not in str(plain.side_changes)


@pytest.mark.system
def test_a_rate_that_the_script_moves_with_the_batch_is_not_moved_twice(run, bench):
    """It doubles the rate for twice the batch; the rule wants three times the rate, so 1.5 is left to do."""
    plain = run("rates.py", "--scales", steps=6, micro_batch_size=16)
    own, shown = first_steps(bench)[0]
    moved = run("rates.py", "--scales", steps=6, micro_batch_size=16, learning_rate_factor=3.0)
    assert shown == 0.5 and first_steps(bench)[0][0] == pytest.approx(1.5 * own, rel=1e-3)
    said = [change for change in moved.side_changes if change.startswith("Learning rate:")]
    assert len(said) == 1 and "2 times its own by itself" in said[0] and "multiply what it sets by 1.5" in said[0]
    assert not any(change.startswith("Learning rate:") for change in plain.side_changes)


@pytest.mark.parametrize("sharded", [(), pytest.param(("--sharded",), marks=pytest.mark.system)])
def test_a_script_starts_from_the_weights_of_another_run(run, tmp_path, sharded):
    path, still, ranks = tmp_path / "warm.pt", ("--rate", "0", *sharded), 2 if sharded else 1
    cold = run("rates.py", *still, ranks=ranks, steps=4)
    run("rates.py", "--rate", "0.5", *sharded, ranks=ranks, steps=8, save_weights=str(path))
    warm, again = (run("rates.py", *still, ranks=ranks, steps=4, weights=str(path)) for _ in range(2))
    assert path.exists() and warm.losses[0] < cold.losses[0] - 0.001
    assert again.losses == pytest.approx(warm.losses, rel=1e-5)


def test_a_replicate_draws_other_noise_than_its_original(run):
    """Another micro-batch draws other noise, too, and was refused for training worse."""
    own, other = (run("styles.py", "noise", steps=4, replicate=n).losses for n in (0, 1))
    first, *rest = (abs(a - b) for a, b in zip(own, other, strict=True))
    assert first < 0.01 < max(rest) / 2


@pytest.mark.parametrize("plain", [(), pytest.param(("--plain",), marks=pytest.mark.system)])
def test_the_noise_scale_of_a_script_is_that_of_brute_force(run, noise_scale_of_still, plain):
    knobs = {"micro_batch_size": 256, "gradient_accumulation_steps": 4}
    terms = run("still.py", *plain, ranks=2, steps=12, noise=True, **knobs).noise
    assert terms is not None and (terms.micro_batch_size, terms.n_micro, len(terms.micro_sq)) == (256, 8, 12)
    found = noise_scale_of(terms)
    assert found.resolved and found.samples == pytest.approx(noise_scale_of_still, rel=0.15)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("knobs", "clean"),
    [
        ({"zero_stage": 2, "gradient_accumulation_steps": 4}, True),
        ({"precision": "bf16", "gradient_accumulation_steps": 64}, False),
    ],
)
def test_the_gradient_of_a_scripts_optimizer_is_compared_with_the_micro_gradients(run, knobs, clean):
    found = run("still.py", ranks=2, steps=3, check_gradient=True, micro_batch_size=2, **knobs).gradient
    assert found is not None and found.n_micro == 2 * knobs["gradient_accumulation_steps"]
    assert found.error < 1e-6 if clean else "is off by" in judge_gradient(found, found, {})


@pytest.mark.system
def test_a_loss_that_lightning_and_deepspeed_both_divide_by_the_accumulation_is_judged_at_its_size(run):
    norms = []
    for micro, accumulation in ((8, 1), (2, 4)):
        knobs = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
        strategy = ("--strategy", "deepspeed_stage_1", "--ordered")
        found = run("lightning_fit.py", *strategy, steps=3, check_gradient=True, **knobs).gradient
        assert found is not None and found.error < 1e-5
        norms.append(found.norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)  # of the same eight samples
