"""What is concluded of two runs of a script."""

import pytest

from autotune.study.setup.script import _adds_up
from autotune.trial.result import Observed, Outcome, TrialResult


def ran(steps, losses):
    seen = Observed(
        micro_batch_size=4, loader_batch_size=4, gradient_accumulation_steps=steps, samples_per_step=4 * steps,
        tokens_per_step=None, zero_stage=0, dtype="fp32",
    )  # fmt: skip
    return TrialResult(outcome=Outcome.COMPLETE, observed=seen, losses=losses)


@pytest.mark.parametrize(
    ("before", "moved", "adds_up"),
    [
        ([3.0, 2.9, 2.8, 2.7], [6.0, 5.7], True),
        ([3.0, 2.9, 2.8, 2.7], [3.0, 2.9], False),
        ([3.63, 5.55, 4.10, 5.15], [6.43, 6.40], False),  # other weights and samples in each run
        ([], [6.0], False),
        ([None, 2.9], [6.0, 5.8], False),
    ],
)
def test_a_script_adds_up_its_micro_batches_only_where_each_step_says_so(before, moved, adds_up):
    assert _adds_up(ran(4, before), ran(8, moved)) is adds_up
