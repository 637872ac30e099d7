"""Settings of the data: names, values, and where they can do nothing."""

import pytest

from autotune.space.candidate import FIELDS, Candidate
from autotune.space.data import AGAINST_PADDING, KNOBS, retraining
from autotune.space.deepspeed import ConfigError
from autotune.space.legality import DATA_RULES, Setting, why_illegal

SETTING = Setting(lengths=(3, 512), data_cannot=(("packing", "the model takes no `position_ids`"),))


def candidate(**values):
    named = {name if name in FIELDS else f"data.{name}": value for name, value in values.items()}
    return Candidate.of({"micro_batch_size": 4} | named)


def test_settings_of_the_data_are_no_part_of_the_deepspeed_configuration():
    found = candidate(num_workers=4, packing=True)
    assert found.data_changes == {"num_workers": 4, "packing": True}
    assert found.to_deepspeed() == Candidate(micro_batch_size=4).to_deepspeed()
    assert retraining(dict(found.config)) == {"packing": True}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_workrs", 2, "Did you mean"),
        ("num_workers", -1, "at least 0"),
        ("packing", 3, "true or false"),
        ("max_length", "long", "whole number"),
    ],
)
def test_a_wrong_setting_is_refused(name, value, words):
    with pytest.raises(ConfigError, match=words):
        candidate(**{name: value})


ALIKE = Setting(lengths=(8, 8))
NOTHING = Setting(data_cannot=tuple((name, f"no {name}") for name in KNOBS))
POINTLESS = [
    ({"packing": True}, SETTING, "position_ids"),
    ({"prefetch_factor": 4}, SETTING, "need data.num_workers"),
    ({"pin_memory": True}, SETTING, "on a CPU"),
    ({"max_length": 512}, SETTING, "no sample is longer"),
    ({"group_by_length": True}, SETTING, "one micro-batch a step"),
    ({"packing": True, "micro_batch_size": 1}, Setting(), "of one sample"),
    ({"packing": True, "pad_to_multiple_of": 8}, Setting(), "not padded"),
    ({"packing": True, "group_by_length": True, "gradient_accumulation_steps": 2}, Setting(), "no padding to save"),
    ({"packing": True, "token_budget": True}, Setting(), "no padding to save"),
    ({"group_by_length": True, "token_budget": True, "gradient_accumulation_steps": 2}, Setting(), "together already"),
    ({"token_budget": True, "micro_batch_size": 1}, Setting(), "of one sample"),
    ({"token_budget": True}, Setting(pipeline_stages=2), "of one size"),
    ({"token_budget": True}, Setting(fewest_in_row=9), "one of 9 holds it"),
    ({"token_budget": True, "max_length": 64}, Setting(fewest_in_row=2), "neither where it packs"),
    *(({name: KNOBS[name].least is None or 8}, ALIKE, "one length") for name in AGAINST_PADDING),
    *(({name: KNOBS[name].least is None or 8}, NOTHING, f"no {name}") for name in KNOBS),
    *(
        ({name: value}, Setting(accelerator="cuda", loader=((name, value), ("num_workers", 8))), "has that value")
        for name, value in (
            ("num_workers", 8),
            ("prefetch_factor", 4),
            ("pin_memory", True),
            ("persistent_workers", True),
        )
    ),
]


@pytest.mark.parametrize(("values", "setting", "words"), POINTLESS)
def test_what_would_do_nothing_is_not_proposed(values, setting, words):
    assert words in (why_illegal(candidate(**values), setting) or "")


def test_every_rule_of_the_data_is_met_by_a_case_above():
    cases = [(candidate(**values), setting) for values, setting, _ in POINTLESS]
    assert all(any(rule.broken(c, dict(c.config), setting) for c, setting in cases) for rule in DATA_RULES)


def test_what_acts_is_proposed():
    assert why_illegal(candidate(group_by_length=True), Setting(lengths=(3, 512), steps_grouped=50)) is None
    for data in ({"num_workers": 2, "prefetch_factor": 4}, {"max_length": 256}, {"pad_to_multiple_of": 8}):
        assert why_illegal(candidate(**data), SETTING) is None
    own = Setting(loader=(("num_workers", 4),), lengths=(8, 8))
    assert "has that value" in (why_illegal(candidate(num_workers=4), own) or "")
    assert why_illegal(candidate(num_workers=0), own) is None
    assert "one length" in (why_illegal(candidate(pad_to_multiple_of=8), own) or "")
