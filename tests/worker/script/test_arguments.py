"""A script's own flags, as argparse has parsed them."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import click
import pytest
import typer
import typer.core

from autotune.trial.command import STATED
from autotune.worker.script.arguments import Arguments
from autotune.worker.script.patching import patch
from autotune.worker.script.run import CLICK


def arguments_of(value, changes, flags, files, ds_config=None):
    """The hooks of a trial with a JSON, or of a probe, which has none."""
    return Arguments(SimpleNamespace(
        value=value, changed=changes.append, report=SimpleNamespace(flags=flags), left_out=[], json_flags=files,
        candidate=ds_config, recorder=SimpleNamespace(folder=SimpleNamespace(ds_config=ds_config)),
        draw_sizes=None,
    ))  # fmt: skip


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line as in a trial; returns the arguments, the changes noted, and the flags of fields."""

    def run(parser, line, *, own=None, files=None, ds_config=Path("/trial/ds_config.json"), **moves):
        changes, flags = [], {}
        files = {} if files is None else files
        hooked = arguments_of(moves.get, changes, flags, files, ds_config)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", PARSE)  # put back after the test
        patch(argparse.ArgumentParser, "parse_known_args", hooked.parse)
        monkeypatch.setattr(sys, "argv", ["train.py", *line.split()])
        return parser.parse_args(own), changes, flags

    return run


PARSE = argparse.ArgumentParser.parse_known_args


def parser_of(*flags, **defaults):
    parser = argparse.ArgumentParser()
    for names in flags:
        parser.add_argument(*names.split(), type=int, default=8)
    parser.set_defaults(**defaults)
    return parser


BOTH = parser_of("--train_batch_size", "-b --batch-size")


@pytest.mark.parametrize(
    ("parser", "line", "moves", "parsed", "change", "flags"),
    [
        (BOTH, "--train_batch_size 64 -b 4", {"micro_batch_size": (4, 2)}, {"batch_size": 2, "train_batch_size": 64},
         "Command line: `--batch-size 2` instead of 4.", {"micro_batch_size": ["--batch-size", "-b"]}),
        (parser_of("--gas"), "", {"gradient_accumulation_steps": (8, 3)}, {"gas": 3},
         "Command line: `--gas 3` instead of 8.", {"gradient_accumulation_steps": ["--gas"]}),
        (parser_of("--batch_size"), "--batch_size 4", {"micro_batch_size": None}, {"batch_size": 4}, None, {}),
        (parser_of(batch_size=8), "", {"micro_batch_size": (8, 2)}, {"batch_size": 2},
         "Arguments: `batch_size` is 2 instead of 8 once they are parsed.", {}),
    ],
    ids=["the flag whose value ran", "a default", "no change", "no flag"],
)  # fmt: skip
def test_arguments_that_hold_a_tuned_value_are_moved(parse, parser, line, moves, parsed, change, flags):
    found, changes, known = parse(parser, line, **moves)
    assert vars(found) == parsed and known == flags and changes == ([change] if change else [])


@pytest.mark.parametrize("flag", ["--batch", "--images-per-gpu", "--device_batch_size", "--mbs", "--local_bs"])
def test_other_names_of_the_batch_are_known(parse, flag):
    parser = parser_of("--eval_batch", "--workers_per_gpu", "--batch_steps_total", "--num_batch", flag)
    found, changes, _ = parse(parser, "", micro_batch_size=(8, 2))
    assert changes == [f"Command line: `{flag} 2` instead of 8."]
    assert [value for value in vars(found).values() if value != 8] == [2]


@pytest.mark.parametrize(
    "flag", ["--accumulate", "--accum_iter", "--n-accum", "--accumulate_grad_batches", "--grad-accum-every"]
)
def test_other_names_of_the_accumulation_are_known(parse, flag):
    parser = parser_of("--accumulate_stats", "--gas_price", "--accuracy", flag)
    found, changes, _ = parse(parser, "", gradient_accumulation_steps=(8, 2))
    assert changes == [f"Command line: `{flag} 2` instead of 8."]
    assert [value for value in vars(found).values() if value != 8] == [2]


@pytest.mark.parametrize("kind", [str, Path])
def test_flags_that_name_a_json_file_are_noted_by_its_path(parse, tmp_path, monkeypatch, kind):
    """Whether it is DeepSpeed's shows when the script gives it to `deepspeed.initialize`."""
    monkeypatch.chdir(tmp_path)
    parser, files = argparse.ArgumentParser(), {}
    parser.add_argument("data")
    parser.add_argument("--ds", default="./ds.json", type=kind)
    parser.add_argument("--log", default="log.csv")
    found, _, flags = parse(parser, "train.json", files=files)
    assert (found.ds, flags, files) == (kind("./ds.json"), {}, {str(tmp_path / "ds.json"): ["--ds"]})


def test_a_list_in_the_code_is_not_the_users_command_line(parse):
    _, changes, flags = parse(parser_of("--batch_size"), "", own=["--batch_size", "8"], micro_batch_size=(8, 2))
    assert flags == {} and "a list that it makes" in changes[0]


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("--config sft.yaml --batch_size 8", ["--batch_size", "8"]),
        ("--config sft.yaml", []),
        ("run --batch_size 8", ["--batch_size", "8"]),
        ("--batch_size 8", ["--batch_size", "4", "--batch_size", "8"]),
    ],
    ids=["TRL's file", "nothing beside it", "a command that the script takes out", "words of a file before it"],
)
def test_a_line_of_which_a_script_takes_some_words_is_the_users(parse, line, own):
    _, changes, flags = parse(parser_of("--batch_size"), line, own=own, micro_batch_size=(8, 2))
    assert flags == {"micro_batch_size": ["--batch_size"]}
    assert changes == ["Command line: `--batch_size 2` instead of 8."]


def test_the_flags_of_a_command_are_known_and_moved_once(parse):
    """Its own parser is called within the parent's, with a list of its own."""
    parser = argparse.ArgumentParser()
    train = parser.add_subparsers().add_parser("train")
    train.add_argument("--batch-size", type=int, default=8)
    train.add_argument("--deepspeed_config")
    line = "train --batch-size 4 --deepspeed_config my.json"
    found, changes, flags = parse(parser, line, micro_batch_size=(4, 8))
    assert (found.batch_size, found.deepspeed_config) == (8, "/trial/ds_config.json")
    assert changes == ["Command line: `--batch-size 8` instead of 4."]
    assert flags == {"micro_batch_size": ["--batch-size"], "ds_config": ["--deepspeed_config"]}


def test_what_is_on_or_a_share_is_no_batch_of_one(parse):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_norm", action="store_true")
    parser.add_argument("--gradient_accumulation", action="store_true")
    parser.add_argument("--batch_share", type=float, default=1.0)
    line = "--batch_norm --gradient_accumulation"
    found, changes, _ = parse(parser, line, micro_batch_size=(1, 2), gradient_accumulation_steps=(1, 2))
    assert changes == [] and (found.batch_norm, found.gradient_accumulation, found.batch_share) == (True, True, 1.0)


@pytest.mark.parametrize("in_trial", [True, False])
def test_the_path_of_the_configuration_is_the_trials_and_in_a_probe_the_users(parse, in_trial):
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--ds_config", type=Path)
    found, _, flags = parse(parser, "--deepspeed --ds_config my.json", ds_config=Path("/t.json") if in_trial else None)
    assert found.ds_config == Path("/t.json" if in_trial else "my.json") and found.deepspeed is True
    assert flags == {"ds_config": ["--ds_config"]}
    parser = argparse.ArgumentParser()
    parser.add_argument("ds_config")
    assert parse(parser, "my.json")[2] == {}, (
        "no flag: `export --format command` put the first of none into the command"
    )


def test_transformers_arguments_are_known_where_they_are_parsed(parse):
    parser = parser_of("--per_device_train_batch_size")
    for flag in ("--deepspeed", "--bf16", "--fp16"):
        parser.add_argument(flag)
    found, _, flags = parse(parser, "--deepspeed zero2.json", micro_batch_size=(8, 1))
    assert (found.deepspeed, found.per_device_train_batch_size) == ("zero2.json", 1)
    assert {"deepspeed", "bf16", "fp16", "micro_batch_size", "ds_config", STATED} == flags.keys()


def test_a_switch_that_turns_deepspeed_on_takes_no_path(parse):
    """DeepSpeed's own `--deepspeed`, as in DeepSpeed-Chat; its `--deepspeed_config` is refused beside a dict in the code."""
    parser = parser_of("--per_device_train_batch_size")
    parser.add_argument("--deepspeed", action="store_true")
    for flag in ("--deepspeed_config", "--gradient_checkpointing"):
        parser.add_argument(flag)
    assert parse(parser, "--deepspeed", micro_batch_size=(8, 1))[2] == {
        "micro_batch_size": ["--per_device_train_batch_size"]
    }


def test_switches_that_are_on_by_default_or_need_a_value_are_known(parse):
    """TRL turns recomputation and bf16 on, and its `--bf16` alone is an error."""
    parser = parser_of("--per_device_train_batch_size")
    parser.add_argument("--deepspeed")
    parser.add_argument("--bf16", type=bool, default=None)
    parser.add_argument("--fp16", type=bool, default=False, nargs="?", const=True)
    parser.add_argument("--gradient_checkpointing", type=bool, default=True, nargs="?", const=True)
    parser.add_argument("--no_gradient_checkpointing", action="store_false", dest="gradient_checkpointing")
    assert parse(parser, "")[2][STATED] == ["--bf16", "--gradient_checkpointing"]


def test_a_rank_is_told_its_number_as_the_deepspeed_launcher_does(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert parse(parser_of("--local_rank"), "")[0].local_rank == 3


@pytest.mark.parametrize(
    ("line", "change", "flags"),
    [
        ("--seed 1 train --batch-size 4 --epochs 1", "Command line: `--batch-size 2` instead of 4.", ["--batch-size", "-b"]),
        ("train -b4", "Command line: `--batch-size 2` instead of 4.", ["--batch-size", "-b"]),
        (None, "the script parses a list that it makes; `--batch-size 2` in it instead of 4.", None),
    ],
    ids=["a command of a group", "a short option", "a list in the code"],
)  # fmt: skip
@pytest.mark.parametrize("package", ["click", "typer"])
def test_arguments_of_click_and_typer_are_moved(monkeypatch, package, line, change, flags):
    changes, found, ran = [], {}, []
    command = {"click": click.Command, "typer": typer.core.TyperCommand.__bases__[0]}[package]
    assert command.__module__ in CLICK  # where trials wait for it
    hooked = arguments_of({"micro_batch_size": (4, 2)}.get, changes, found, {})
    monkeypatch.setattr(command, "parse_args", command.parse_args)  # put back after the test
    patch(command, "parse_args", hooked.parse_click)
    monkeypatch.setattr(sys, "argv", ["train.py", *(line or "train").split()])
    main = {"click": with_click, "typer": with_typer}[package](ran)
    main(["train", "--batch-size", "4"] if line is None else None, standalone_mode=False)
    assert ran == [(2, 1 if line and "--epochs" in line else 9)] and changes[0].endswith(change)
    assert found.get("micro_batch_size") == flags


def with_click(ran):
    @click.group()
    @click.option("--seed", type=int)
    def main(seed):
        pass

    @main.command()
    @click.option("--batch-size", "-b", default=8)
    @click.option("--epochs", default=9)
    def train(batch_size, epochs):
        ran.append((batch_size, epochs))

    return main


def with_typer(ran):
    main = typer.Typer()

    @main.callback()
    def options(seed: int = 0):
        pass

    @main.command()
    def train(batch_size: Annotated[int, typer.Option("--batch-size", "-b")] = 8, epochs: int = 9):
        ran.append((batch_size, epochs))

    return main


def test_what_a_first_parser_leaves_of_the_command_line_is_of_the_command_line(parse):
    """timm reads `-c FILE` by a parser, and the rest by another: its flags were said to stand in a list that it makes."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("-c")
    main = parser_of("-b --batch-size")

    class TwoStages:
        def parse_args(self, own):
            given, left = first.parse_known_args(own)
            main.set_defaults(batch_size=4)  # as FILE says
            return main.parse_args(left if given.c else [])

    for line, change in (
        ("-c vit.yaml", "Command line: `--batch-size 2` instead of 4."),
        ("--other", "Arguments: the script parses a list that it makes; `--batch-size 2` in it instead of 4."),
    ):
        found, changes, flags = parse(TwoStages(), line, micro_batch_size=(4, 2))
        assert found.batch_size == 2 and changes == [change] and ("micro_batch_size" in flags) == (line != "--other")
