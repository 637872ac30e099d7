"""What mattered: the shares and factors that a sum of terms finds."""

import random

import pytest

from autotune.report import series
from autotune.scoring.effects import MIN_TRIALS, effects

REFERENCE = {"precision": "fp32", "stage": 0, "bucket": None}


def drawn(n, *, noise=0.02, seed=0):
    """Trials of a machine on which bf16 halves the time, stage 3 adds a half, and the bucket does nothing."""
    rng = random.Random(seed)
    trials = []
    for _ in range(n):
        values = {
            "precision": rng.choice(["fp32", "bf16"]),
            "stage": rng.choice([0, 1, 3]),
            "bucket": rng.choice([None, 16, 20]),
        }
        time = (0.5 if values["precision"] == "bf16" else 1.0) * {0: 1.0, 1: 1.0, 3: 1.5}[values["stage"]]
        trials.append((values, time * rng.lognormvariate(0, noise)))
    return trials


def test_the_knob_that_moves_most_comes_first_and_the_idle_one_counts_nothing():
    found = effects("step_time_s", drawn(40), REFERENCE)
    assert [effect.knob for effect in found.knobs] == ["precision", "stage", "bucket"]
    assert found.knobs[2].share < 0.02 and found.explained > 0.95


def test_a_factor_is_that_of_the_machine():
    found = {
        effect.knob: {level.value: level.factor for level in effect.levels}
        for effect in effects("step_time_s", drawn(60), REFERENCE).knobs
    }
    assert found["precision"]["bf16"] == pytest.approx(0.5, rel=0.05) and found["stage"][3] == pytest.approx(
        1.5, rel=0.05
    )
    assert found["precision"]["fp32"] == found["bucket"][None] == 1.0


def test_noise_alone_is_not_explained():
    rng = random.Random(1)
    found = effects("step_time_s", [(values, rng.lognormvariate(0, 0.3)) for values, _ in drawn(40)], REFERENCE)
    assert found.explained < 0.1


def test_shares_add_up_to_no_more_than_all():
    assert sum(effect.share for effect in effects("step_time_s", drawn(30), REFERENCE).knobs) <= 1.01


@pytest.mark.parametrize("trials", [drawn(MIN_TRIALS - 1), [(REFERENCE, 1.0)] * 10, []])
def test_too_few_trials_or_knobs_tell_nothing(trials):
    assert effects("step_time_s", trials, REFERENCE) is None


def test_a_metric_that_is_zero_somewhere_is_left_out_there():
    trials = [*drawn(20), (REFERENCE, 0.0)]
    assert effects("step_time_s", trials, REFERENCE).n == 20


def test_one_value_for_all_trials_has_no_spread_to_explain():
    assert effects("peak_memory_bytes", [(values, 5.0) for values, _ in drawn(20)], REFERENCE).explained == 0.0


def test_knobs_that_only_changed_together_have_one_effect():
    """Each had the square root of the factor, as if it were known what each of them did."""
    trials = [
        ({**values, "offload": "cpu" if values["precision"] == "bf16" else None}, time) for values, time in drawn(40)
    ]
    first, *others = effects("step_time_s", trials, REFERENCE).knobs
    assert first.knobs == ("precision", "offload") and first.levels[1].factor == pytest.approx(0.5, rel=0.1)
    assert [each.knobs for each in others] == [("stage",), ("bucket",)]
    assert list(series.effect_names([first]).values()) == ["precision with offload"]
