import pytest

from autotune.space import own_tuner


@pytest.mark.parametrize("config", [{}, {"autotuning": {"enabled": False, "arg_mappings": {}}}, {"autotuning": None}])
def test_a_configuration_without_deepspeeds_own_tuner_stays_as_it_is(config):
    assert own_tuner.off(config) is config and own_tuner.notes(config) == []


def test_a_section_that_ends_trainings_is_turned_off_and_said_to():
    section = {"enabled": True, "end_profile_step": 7, "arg_mappings": {"train_micro_batch_size_per_gpu": "--bsz"}}
    config = {"autotuning": section, "gradient_clipping": 1.0}
    assert own_tuner.off(config) == {"autotuning": {**section, "enabled": False}, "gradient_clipping": 1.0}
    assert config["autotuning"]["enabled"]
    (note,) = own_tuner.notes(config)
    assert "after 7 steps" in note and "turn it off in your own file" in note


def test_bounds_for_deepspeeds_own_tuner_are_not_passed_over_in_silence():
    section = {"metric": "latency", "max_train_micro_batch_size_per_gpu": 16, "fast": False, "mp_size": 1}
    (note,) = own_tuner.notes({"autotuning": section})
    assert "`metric`, `max_train_micro_batch_size_per_gpu` state there is for --goal and --space here" in note
    assert "mp_size" not in note and "fast" not in note
