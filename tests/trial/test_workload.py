"""Records of what is trained: what a script completes in the configuration of a candidate."""

from autotune.space.candidate import Candidate
from autotune.trial.workload import Probed


def test_a_script_whose_batches_vary_in_size_keeps_the_number_that_it_states():
    probed = Probed(
        ds_config={}, micro_batch_size=20, gradient_accumulation_steps=1, uneven=(2, 73), configured_micro_batch_size=8
    )
    candidate = Candidate(micro_batch_size=20)
    assert probed.completed(candidate.to_deepspeed(), candidate)["train_micro_batch_size_per_gpu"] == 8
