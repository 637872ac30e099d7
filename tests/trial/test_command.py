"""Words of a command line: templates, flags, and where the script starts."""

import subprocess

import pytest

from autotune.errors import UserError
from autotune.trial.command import (
    Invocation,
    check_templates,
    has_flag,
    pasted,
    start_of,
    with_flag,
    with_placeholders,
    without_flag,
    without_placeholders,
)


def test_templates_become_numbers_and_come_back():
    text, numbers = with_placeholders("a {micro_batch_size} b={zero_stage} {ds_config} {other}")
    assert (
        "{other}" in text
        and "{zero" not in text
        and without_placeholders(text, numbers) == "a {micro_batch_size} b={zero_stage} {ds_config} {other}"
    )
    assert without_placeholders("17150000031", numbers) == "17150000031"


def test_what_is_nearly_a_template_is_refused():
    check_templates(['{"use_reentrant": false} {x} {ds_config}'], "here")
    with pytest.raises(UserError, match=r"here: {micro_batch_siz} is no template. Did you mean 'micro_batch_size'"):
        check_templates(["--bsz {micro_batch_siz}"], "here")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--bs 8 --lr 1", "--bs 4 --lr 1"),
        ("--bs=8", "--bs=4"),
        ("--batch_size 8", "--batch_size 4"),
        ("--bs 8 --bs 16", "--bs 8 --bs 4"),
        ("--bsz 8", "--bsz 8 --bs 4"),
        ("--bs", "--bs 4"),
        ("", "--bs 4"),
    ],
)
def test_a_flag_is_changed_where_it_stands_or_added(before, after):
    found = with_flag(before.split(), ("--bs", "--batch_size"), "4")
    assert found == tuple(after.split()) and has_flag(found, ("--bs", "--batch_size"))


@pytest.mark.parametrize("before", ["--bf16=False --lr 1", "--bf16 false --lr 1", "--bf16 --lr 1", "--lr 1"])
def test_a_switch_is_set_whatever_value_it_had(before):
    """`--bf16=False` stayed in the exported command of a bf16 configuration."""
    assert with_flag(before.split(), ("--bf16",), None) == ("--lr", "1", "--bf16")


def test_a_switch_is_taken_away_with_its_value():
    assert without_flag("--bf16 true --lr 1 --bf16=True --fp16".split(), ("--bf16",)) == ("--lr", "1", "--fp16")


@pytest.mark.parametrize(
    ("command", "start"),
    [
        ("torchrun --n 2 train.py --a '1 2'", ("torchrun", "--n", "2", "train.py")),
        ("X=1 deepspeed ./train.py --a '1 2'", ("X=1", "deepspeed", "./train.py")),
        ("torchrun --n 2 \\\n  train.py \\\n  --a '1 2'\n", ("torchrun", "--n", "2", "train.py")),
        ("export X=1\ntorchrun train.py --a '1 2'", None),
        ("bash train.sh", None),
        ("bash train.sh --a '1 2'", None),
        ("cd /x && python train.py --a '1 2'", None),
        ("python $HERE/train.py --a '1 2'", None),
        ("python train.py --a '1 2' > log", None),
        ("python train.py --a '1 2", None),
    ],
)
def test_a_command_is_taken_apart_only_where_that_is_sure(command, start):
    given = Invocation(
        script="/x/train.py", working_dir="/x", arguments=("--local_rank={local_rank}", "--a", "1 2"), command=command
    )
    assert start_of(given) == start


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "launcher"), [(2, []), (4, []), (2, ["deepspeed", "--num_gpus", "2"])])
def test_variables_of_a_pasted_command_are_assigned_whatever_they_hold(ranks, launcher):
    """In quotation marks the whole assignment was the name of a command."""
    environment = {"NCCL_SOCKET_IFNAME": "^lo,docker0", "NOTE": "a b", "NONE": ""}
    command = "NCCL_SOCKET_IFNAME=^lo,docker0 NOTE='a b' NONE= torchrun --nproc_per_node 2 train.py --note '1 2'"
    given = Invocation(
        script="/x/train.py", working_dir="/x", arguments=("--note", "1 2"), environment=environment, world_size=2,
        command=command,
    )  # fmt: skip
    _, line = pasted(given, ("--note", "1 2"), {}, ranks, launcher)
    told = 'torchrun() { echo "$NCCL_SOCKET_IFNAME|$NOTE|$NONE|${*: -1}"; }; deepspeed() { torchrun "$@"; }; '
    done = subprocess.run(["bash", "-c", told + line], capture_output=True, text=True, check=True)
    assert done.stdout == "^lo,docker0|a b||1 2\n"
