"""What `check` tells of a plan."""

from dataclasses import replace
from pathlib import Path

from support.instant import plan_of, spec_of

from autotune.cli.check import check_data, lines
from autotune.space.candidate import Candidate
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


def test_one_candidate_that_is_left_is_shown_with_its_values():
    """Global batches of 4 to 6 beside a baseline of 8: it ended in an error of autotune itself."""
    spec = spec_of(space=[{"micro_batch_size": [4, 8]}], global_batch="4..6")
    found = check_data(plan_of(spec, global_batch=(4, 6)), TrialResult(outcome=Outcome.COMPLETE), Path("rank0.log"))
    said = "\n".join(lines(found))
    assert "1 candidate can run here, of 2 in the space. Tuned:\n\n  micro_batch_size  4\n" in said


def test_what_a_kept_global_batch_overrules_is_told():
    """A stated accumulation was nowhere to be seen, and stated micro-batches were gone without a word."""

    def told(**knobs):
        spec = spec_of(space=[{"zero_stage": [0, 1]} | knobs], global_batch="keep")
        plan = replace(plan_of(spec), full_space=spec.space.keeping(Candidate(micro_batch_size=8), 1))
        plan = replace(plan, space=plan.full_space)
        found = check_data(plan, TrialResult(outcome=Outcome.COMPLETE), Path("rank0.log"))
        assert all("the global batch of 8 is kept" in each["reason"] for each in found["not_proposed"])
        return [each["name"] for each in found["knobs"]], [
            (each["knob"], each["value"]) for each in found["not_proposed"]
        ]

    steps = "gradient_accumulation_steps"
    assert told(micro_batch_size=[4, 8]) == (["zero_stage", "micro_batch_size", steps], [])
    both = told(micro_batch_size=[2, 3, 8], **{steps: [1, 2]})
    assert both == (["zero_stage", "micro_batch_size", steps], [("micro_batch_size", 3)])
    assert told(**{steps: [1, 2]}) == (["zero_stage"], [(steps, 2)]) and told() == (["zero_stage"], [])
