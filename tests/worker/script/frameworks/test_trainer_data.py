"""Settings of the data by the arguments of transformers' Trainer and of TRL's SFTConfig."""

import pytest

from autotune.trial.result import Outcome

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("home")]


def measured(bench, found, **settings):
    """A trial with settings of the data and its outcome, checked against what ran."""
    config = tuple(sorted({f"data.{name}": value for name, value in settings.items()}.items()))
    changed = tuple(f"data.{name}" for name in settings)
    lengths = found.workload.data.table
    return bench.measure(found, steps=8, config=config, changed_from=dict.fromkeys(changed), lengths=lengths)


def test_a_trainers_own_arguments_carry_the_settings_of_the_data(bench):
    found = bench.plan("hf_lengths.py")
    assert not {"group_by_length", "packing", "max_length", "num_workers"} & set(dict(found.setting.data_cannot))
    result = measured(bench, found, group_by_length=True, max_length=32, num_workers=1, prefetch_factor=4)
    assert result.outcome is Outcome.COMPLETE, result.reason
    said = " ".join(result.side_changes)
    for flag in ("--dataloader_num_workers 1", "--train_sampling_strategy group_by_length", "--max_length 32"):
        assert flag in said
    # 50 steps of 8 samples sorted together: hardly any padding is left, whatever lengths the trial's few steps saw.
    assert result.expected["tokens"] < 1.1 * result.expected["real_tokens"]


@pytest.mark.system
def test_what_a_script_packs_itself_is_left_alone(bench):
    cannot = dict(bench.plan("hf_lengths.py", "--packing", "True").setting.data_cannot)
    assert all("packs its samples already" in cannot[name] for name in ("packing", "group_by_length", "max_length"))


@pytest.mark.system
def test_a_trainer_that_groups_already_says_so_and_its_rate_is_that_of_the_data_set(bench):
    found = bench.plan("hf_lengths.py", "--train_sampling_strategy", "group_by_length")
    assert "already" in dict(found.setting.data_cannot)["group_by_length"]
    result = measured(bench, found)
    assert result.expected["tokens"] < 1.1 * result.expected["real_tokens"]
