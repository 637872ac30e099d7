"""What is concluded of two runs of a script."""

import pytest

from autotune.study.setup.script import _growth
from autotune.trial.result import Observed, Outcome, TrialResult


def ran(steps, losses):
    seen = Observed(
        micro_batch_size=4, loader_batch_size=4, gradient_accumulation_steps=steps, samples_per_step=4 * steps,
        tokens_per_step=None, zero_stage=0, dtype="fp32",
    )  # fmt: skip
    return TrialResult(outcome=Outcome.COMPLETE, observed=seen, losses=losses)


@pytest.mark.parametrize(
    ("before", "moved", "growth"),
    [
        ([3.0, 2.9, 2.8, 2.7], [6.0, 5.7], 1),
        ([3.0, 2.9, 2.8, 2.7], [3.0, 2.9], 0),
        ([3.63, 5.55, 4.10, 5.15], [6.43, 6.40], 0),  # other weights and samples in each run
        ([3.0, 2.9, 2.8, 2.7], [1.5, 1.4], -1),
        ([3.0, 2.9, 2.8, 2.7], [1.5, 5.8], 0),
        ([], [6.0], 0),
        ([None, 2.9], [6.0, 5.8], 0),
    ],
)
def test_a_loss_grows_or_falls_with_the_accumulation_only_where_each_step_says_so(before, moved, growth):
    assert _growth(ran(4, before), ran(8, moved)) == growth
