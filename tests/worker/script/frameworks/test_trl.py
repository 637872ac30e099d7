"""Scripts of TRL's own SFTTrainer, which packs samples into rows."""

import pytest
from support.paths import SCRIPTS

from autotune.trial.request import TailCheck
from autotune.trial.result import Outcome
from autotune.trial.target import inspect_target

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("home")]
IMPORTS = inspect_target(SCRIPTS / "trl_sft.py").imports


def test_rows_that_trl_packs_are_counted_as_samples_without_padding_up_to_the_worst_of_them(bench):
    found = bench.plan("trl_sft.py", "--packing", "--max_length", "128", "--per_device_train_batch_size", "4")
    cannot, data, profile = dict(found.setting.data_cannot), found.workload.data, found.workload.profile
    assert all("packs its samples already" in cannot[name] for name in ("packing", "max_length", "pad_to_multiple_of"))
    assert data.longest == 128 and 120 < profile.sequence <= 128 and "tokens/s compare" in " ".join(found.notes)
    # All rows are full, so that each rank's own batches have the shape of the worst one.
    check = TailCheck(longest_at=data.longest_at)
    result = bench.measure(found, steps=6, tail=check, lengths=data.table, zero_stage=1)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.tail["length"] == 128 and result.tail["samples"] == result.observed.loader_batch_size == 4
    assert result.taken_in["real_tokens"] == result.taken_in["tokens"] and not result.lengths
    assert result.expected["tokens"] == pytest.approx(result.observed.tokens_per_step, rel=0.05)
