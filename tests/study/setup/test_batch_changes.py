"""What a training does later than trials see: batches that its script or its configuration changes."""

import textwrap

import pytest

from autotune.study.setup.batch_changes import batch_changes, notes, outside


@pytest.fixture
def script(tmp_path):
    """Writes a training script and returns its path."""

    def write(text, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return write


def test_a_script_that_sets_its_engines_batch_anew_is_found(script):
    assert batch_changes(script("def after(epoch): engine.set_train_batch_size(64 * epoch)\n")) == ["train.py, line 1"]
    assert batch_changes(script("loader = DataLoader(data, batch_size=8)\n")) == []


def test_modules_of_the_users_own_are_looked_at_too(script):
    script("def grow(engine, n): engine.set_train_micro_batch_size(n)\n", "schedule.py")
    assert notes(script("import schedule\n"), {}) == [
        "the script may change its batch while it trains (schedule.py, line 1): trials see its first seconds alone, so the answer"
        " is that for the batch which it begins with, and less sure where only some trials came to the next one"
    ]


def test_schedules_of_deepspeed_are_named_where_they_are_switched_on():
    random_ltd = {"data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}
    config = {"curriculum_learning": {"enabled": True}, "data_efficiency": {"enabled": True, **random_ltd}}
    (note,) = notes(None, config)
    assert note.startswith("`curriculum_learning` and `data_efficiency.data_routing.random_ltd` of your")
    assert notes(None, {"data_efficiency": {"enabled": False, **random_ltd}, "curriculum_learning": {}}) == []


def test_a_range_of_one_global_batch_is_said_as_one():
    """It read "they keep to 16..16"."""
    assert ["keep to 16." in outside(32, (16, 16))[0], "keep to 8..16." in outside(32, (8, 16))[0]] == [True, True]
    assert outside(16, (8, 16)) == outside(16, None) == []
