"""TensorFloat-32 as a knob: where it is legal, what it changes, and that DeepSpeed does not get it."""

import pytest

from autotune.forecast.knobs import Knobs
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import ConfigError
from autotune.space.legality import Setting, why_illegal
from autotune.space.torch_settings import TF32, has_tf32, in_words

PLAIN = Candidate(micro_batch_size=4)
WITH = Candidate.of({"micro_batch_size": 4, TF32: True})


def test_it_is_torchs_and_another_numerics():
    assert WITH.to_deepspeed() == PLAIN.to_deepspeed() and WITH.other_numerics == {TF32: True} != PLAIN.other_numerics
    assert (
        Candidate.from_key(WITH.key) == WITH and WITH.describe() == "micro-batch 4 x 1, fp32, ZeRO 0, allow_tf32=true"
    )
    assert WITH.changes_from(PLAIN) == [f"{TF32} true instead of torch's default"]
    assert "torch.set_float32_matmul_precision('high')" in in_words(dict(WITH.config))[0] and in_words({}) == []


@pytest.mark.parametrize(
    ("setting", "values", "words"),
    [
        (Setting(), {}, "has no TensorFloat-32"),
        (Setting(accelerator="cuda"), {}, "from compute capability 8.0"),
        (Setting(accelerator="cuda", tf32=True), {"precision": "bf16"}, "and precision bf16 makes none"),
        (Setting(accelerator="cuda", tf32=True), {}, None),
    ],
)
def test_it_is_illegal_where_no_product_would_use_it(setting, values, words):
    found = why_illegal(Candidate.of({**WITH.values(), **values}), setting)
    assert found is None if words is None else words in found


def test_devices_have_it_by_their_compute_capability():
    known = {("cuda", "8.0"): True, ("cuda", "12.0"): True, ("cuda", "7.5"): False, ("cuda", "gfx942"): False}
    known |= {("cpu", ""): False, ("xpu", "9.0"): False}
    assert {key: has_tf32(*key) for key in known} == known


@pytest.mark.parametrize(
    ("name", "value", "words"), [("torch.allow_tf23", True, "Did you mean"), (TF32, 1, "true or false")]
)
def test_another_name_or_value_is_refused(name, value, words):
    with pytest.raises(ConfigError, match=words):
        Candidate.of({"micro_batch_size": 4, name: value})


def test_a_forecast_multiplies_at_its_rate():
    assert list(Knobs.of([PLAIN, WITH]).products) == ["fp32", "tf32"]
