"""What TRL's packing asks of SFTConfig, and where it would train on other samples."""

from types import SimpleNamespace

import pytest

from autotune.space.candidate import Candidate
from autotune.trial.workload import DataShape
from autotune.worker.data import witness
from autotune.worker.script.frameworks import trl_packing as trl

OWN = {"packing": False, "packing_strategy": "bfd", "max_length": 1024, "eval_packing": None, "eval_strategy": "no"}
TABLE = ((10.0, 90), (110.0, 10))


def shape(table=TABLE, n_samples=100):
    return DataShape(fields=(), n_seen=100, n_samples=n_samples, table=table)


def trainer(collator=SimpleNamespace(padding_free=False), **own):  # noqa: B008
    return SimpleNamespace(args=SimpleNamespace(**OWN | own), data_collator=collator)


def test_a_row_holds_a_micro_batch_of_mean_samples_and_the_longest_one():
    assert trl.row_tokens(TABLE, 8) == 160 and trl.row_tokens(TABLE, 2) == 110


def test_only_what_differs_becomes_a_flag_and_evaluation_stays_as_it_is():
    assert trl.in_rows(SimpleNamespace(**OWN), 160) == {"packing": True, "max_length": 160}
    own = SimpleNamespace(**OWN | {"packing_strategy": "wrapped", "eval_strategy": "IntervalStrategy.STEPS"})
    assert trl.in_rows(own, 1024) == {"packing": True, "packing_strategy": "bfd", "eval_packing": False}


@pytest.mark.parametrize(
    ("own", "data", "words"),
    [
        ({}, shape(), ""),
        ({"max_length": 110}, shape(), "cut to 110 tokens"),
        ({}, shape(n_samples=1000), "could not all be read"),
        ({"max_length": None}, shape(n_samples=1000), ""),
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, shape(), "skip_prepare"),
    ],
)
def test_rows_that_would_hold_other_samples_are_refused(own, data, words):
    why = trl.why_not(trainer(**own), data)
    assert why is not None and words in why and bool(why) is bool(words)


def test_a_trainer_or_a_collator_that_is_not_trls_is_no_matter_of_its_packing():
    assert trl.why_not(trainer(collator=len), shape()) is None
    assert trl.why_not(SimpleNamespace(args=SimpleNamespace(), data_collator=len), shape()) is None


def test_what_a_script_packs_itself_needs_none_of_the_settings_against_padding():
    for own in ({"packing": True}, {"padding_free": True}):
        found = trl.of_own(SimpleNamespace(**OWN | own))
        assert {"packing", "group_by_length", "token_budget", "max_length"} <= found.keys()
    assert not trl.of_own(SimpleNamespace(**OWN))


def test_rows_that_hold_other_numbers_of_samples_did_not_act(monkeypatch):
    watch = witness.watch
    texts = SimpleNamespace(lengths=[([160], 160), ([158], 158)], row=None)
    monkeypatch.setattr(watch, "batches", SimpleNamespace(rows=lambda: {(1, 7), (1, 10)}, texts=texts))
    monkeypatch.setattr(watch, "candidate", Candidate(micro_batch_size=8))
    for tokens, per_row, words in ((160, 7.9, ""), (160, 6.0, "hold 6.0 samples"), (150, 7.9, "no rows of up to 150")):
        monkeypatch.setattr(watch, "row_tokens", tokens)
        monkeypatch.setattr(watch, "per_row", per_row)
        said = witness.witness("token_budget")(None, True)
        assert (words in said) if words else said is None
