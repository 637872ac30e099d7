"""What `check` tells of a plan."""

from pathlib import Path

from support.instant import plan_of, spec_of

from autotune.cli.check import check_data
from autotune.trial.result import Outcome, TrialResult


def test_a_knob_of_which_no_value_can_run_is_not_said_to_be_tuned():
    """`overlap_comm` was listed as tuned "when zero_stage is 1 or 2" where no stage but 0 can run."""
    buckets = {
        "zero_stage": [0, 1],
        "zero_optimization.contiguous_gradients": {"choices": [None, False], "when": {"zero_stage": [1]}},
    }
    spec = spec_of(space=[{"micro_batch_size": [4, 8], **buckets}])
    names = {}
    for sparse in ("", "Embedding"):
        found = check_data(plan_of(spec, sparse=sparse), TrialResult(outcome=Outcome.COMPLETE), Path("rank0.log"))
        names[sparse] = [knob["name"] for knob in found["knobs"] if knob["n_values"] > 1]
    assert names == {"": ["micro_batch_size", *buckets], "Embedding": ["micro_batch_size"]}
