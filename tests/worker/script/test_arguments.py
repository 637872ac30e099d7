"""A script's own flags, as argparse has parsed them."""

import argparse
import functools
import sys
from pathlib import Path

import pytest

from autotune.worker.script.arguments import Arguments


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line as a script does in a trial; gives what it got, what was noted, and the flags that carry something."""

    def run(parser, line, *, own=False, ds_config=Path("/trial/ds_config.json"), **moves):
        changes, flags = [], {}
        hooked = Arguments(moves.get, ds_config, changes.append, flags)
        original = parser.parse_known_args
        parser.parse_known_args = functools.partial(hooked.parse, lambda parser, *args: original(*args), parser)
        monkeypatch.setattr(sys, "argv", ["train.py", *([] if own else line.split())])
        return parser.parse_args(line.split() if own else None), changes, flags

    return run


def parser_of(*flags, **defaults):
    parser = argparse.ArgumentParser()
    for names in flags:
        parser.add_argument(*names.split(), type=int, default=8)
    parser.set_defaults(**defaults)
    return parser


def test_the_flag_whose_value_ran_is_moved_and_its_names_are_known(parse):
    parser = parser_of("--train_batch_size", "-b --batch-size")
    found, changes, flags = parse(parser, "--train_batch_size 64 -b 4", micro_batch_size=(4, 2))
    assert (found.batch_size, found.train_batch_size) == (2, 64)
    assert changes == ["Command line: `--batch-size 2` instead of 4."] and flags == {
        "micro_batch_size": ["--batch-size", "-b"]
    }


def test_a_default_is_moved_too(parse):
    assert parse(parser_of("--gas"), "", gradient_accumulation_steps=(8, 3))[0].gas == 3


def test_what_stays_is_left_alone(parse):
    found, changes, flags = parse(parser_of("--batch_size"), "--batch_size 4", micro_batch_size=None)
    assert (found.batch_size, changes, flags) == (4, [], {})


def test_what_no_flag_sets_is_no_flag(parse):
    found, changes, flags = parse(parser_of(batch_size=8), "", micro_batch_size=(8, 2))
    assert (
        found.batch_size == 2
        and flags == {}
        and changes == ["Arguments: `batch_size` is 2 instead of 8 once they are parsed."]
    )


def test_a_list_in_the_code_is_not_the_users_command_line(parse):
    _, changes, flags = parse(parser_of("--batch_size"), "--batch_size 8", own=True, micro_batch_size=(8, 2))
    assert flags == {} and "a list that it makes" in changes[0]


@pytest.mark.parametrize("in_trial", [True, False])
def test_the_path_of_the_configuration_is_the_trials_and_in_a_probe_the_users(parse, in_trial):
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--ds_config")
    found, _, flags = parse(parser, "--deepspeed --ds_config my.json", ds_config=Path("/t.json") if in_trial else None)
    assert found.ds_config == ("/t.json" if in_trial else "my.json") and found.deepspeed is True
    assert flags == {"ds_config": ["--ds_config"]}


def test_transformers_arguments_are_known_where_they_are_parsed(parse):
    parser = parser_of("--per_device_train_batch_size")
    for flag in ("--deepspeed", "--bf16", "--fp16"):
        parser.add_argument(flag)
    found, _, flags = parse(parser, "--deepspeed zero2.json", micro_batch_size=(8, 1))
    assert (found.deepspeed, found.per_device_train_batch_size) == ("zero2.json", 1)
    assert {"deepspeed", "bf16", "fp16", "micro_batch_size", "ds_config"} == flags.keys()


def test_a_rank_is_told_its_number_as_the_deepspeed_launcher_does(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert parse(parser_of("--local_rank"), "")[0].local_rank == 3
