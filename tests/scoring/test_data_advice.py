"""What the data costs a step, in words."""

from dataclasses import replace

from autotune.scoring.data_advice import data_notes
from autotune.scoring.step_parts import Evidence, StepObservation

CANDIDATE = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
EVIDENCE = Evidence(
    seen=StepObservation(trial=0, candidate=CANDIDATE, samples_per_s=1.0, outcome="complete"), world_size=1, ranks=[]
)


def test_waiting_for_data_names_the_workers_that_would_hide_it():
    (said,) = data_notes(EVIDENCE, 0.75, 0.2)
    assert said.startswith("75% of a step is waiting") and "by 4 or more workers" in said and "4.00x" in said
    (said,) = data_notes(replace(EVIDENCE, loader={"num_workers": 4}), 0.75, 0.2)
    assert "although 4 workers" in said and "with 16 or more" in said and "4.00x" in said
    (said,) = data_notes(replace(EVIDENCE, loader={"num_workers": 1}), 0.75, 0.2)
    assert "although a worker loads it" in said
    (said,) = data_notes(replace(EVIDENCE, data_cannot={"num_workers": "data() is a stream"}), 0.75, 0.2)
    assert said.endswith("data() is a stream")


def test_padding_says_what_packing_and_grouping_would_bring():
    lengths = tuple((float(n), 1) for n in range(1, 101))
    packing, budget, grouping = data_notes(replace(EVIDENCE, padding=0.5, lengths=lengths), 0.0, 1.0)
    assert "50% of the tokens are padding" in packing and "2.00x" in packing and "data.packing" in packing
    assert "data.group_by_length" in grouping and "data.token_budget" in budget and "67" in budget
    (said,) = data_notes(replace(EVIDENCE, padding=0.5, data_cannot={"packing": "no ids"}), 0.0, 1.0)
    assert said.endswith("cannot be packed: no ids")
    _, _, more = data_notes(replace(EVIDENCE, padding=0.5, lengths=lengths, steps_grouped=50), 0.0, 1.0)
    assert "sorted by length within 50 steps" in more
    assert data_notes(replace(EVIDENCE, padding=0.01), 0.0, 1.0) == []


def test_nothing_is_advised_that_the_trial_did_already():
    lengths = tuple((float(n), 1) for n in range(1, 101))

    def notes(**own):
        seen = replace(EVIDENCE.seen, candidate=CANDIDATE | {f"data.{name}": value for name, value in own.items()})
        return data_notes(replace(EVIDENCE, seen=seen, padding=0.15, lengths=lengths), 0.0, 1.0)

    _, budget = notes(group_by_length=True)
    assert "instead of 56" in budget and len(notes(group_by_length=False)) == 3
    assert len(notes(token_budget=512)) == 1
    assert "instead of 38" in notes(max_length=40)[1]


def test_rows_of_a_scripts_trainer_are_named_with_the_micro_batch_that_holds_the_longest_sample():
    lengths = ((10.0, 90), (110.0, 10))
    _, said, _ = data_notes(replace(EVIDENCE, padding=0.5, lengths=lengths, loader={"num_workers": 0}), 0.0, 1.0)
    assert "20 tokens on average instead of 29" in said and "from a micro-batch of 6 on" in said
