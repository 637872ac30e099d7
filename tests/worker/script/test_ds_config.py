"""DeepSpeed configurations as scripts pass them."""

import copy
import json
from pathlib import Path

import numpy
import pytest

from autotune.errors import UserError
from autotune.worker.script import ds_config


class Attributes(dict):
    """As many programs write it; it cannot be copied, since it raises KeyError where Python asks for an attribute."""

    __getattr__ = dict.__getitem__


def stated():
    zero = Attributes(stage=1, offload_optimizer=Attributes(device="nvme", nvme_path=Path("/nvme")))
    rates = {"type": "Adam", "params": {"lr": numpy.float32(0.5), "betas": (0.9, 0.95)}}
    return Attributes(train_batch_size=numpy.int64(8), zero_optimization=zero, optimizer=rates)


def test_a_dict_of_the_users_own_classes_is_read_as_json_has_it():
    """It ended in `KeyError: '__deepcopy__'`."""
    with pytest.raises(KeyError):
        copy.deepcopy(stated())
    found = ds_config.read(stated())
    assert copy.deepcopy(found) == json.loads(json.dumps(found)) == {
        "train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.5, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
    }  # fmt: skip


def test_what_a_script_passed_holds_the_trials_configuration_in_its_own_classes():
    given, section = stated(), {"stage": 1}
    given["plain"] = section
    ds_config.put(given, {"zero_optimization": {"stage": 3}, "plain": {"stage": 2}, "bf16": {"enabled": True}})
    assert given == {"zero_optimization": {"stage": 3}, "plain": {"stage": 2}, "bf16": {"enabled": True}}
    assert given.zero_optimization.stage == 3
    assert section == {"stage": 1}  # that another configuration of the script may share


def test_a_number_that_nobody_has_filled_in_is_named():
    """It read `TypeError: '>' not supported between instances of 'str' and 'int'`."""
    own = {"train_batch_size": "auto", "zero_optimization": {"reduce_bucket_size": "auto"}, "gradient_clipping": 1.0}
    with pytest.raises(UserError, match=r'has "auto" for train_batch_size, which only .* state a number'):
        ds_config.refuse_auto(own)
    ds_config.refuse_auto(own | {"train_batch_size": 8})


@pytest.mark.parametrize(
    ("edits", "changed"),
    [
        ({}, {}),
        ({"steps_per_print": 5, "zero_optimization": {"stage": 3, "overlap_comm": True}},
         {"steps_per_print": 5, "zero_optimization.stage": 3}),
        ({"optimizer": None}, None),  # the script takes parts of the file
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}, "optimizer": {"type": "Lion"}}, None),
    ],
)  # fmt: skip
def test_a_dict_that_a_script_fills_from_a_file_is_told_from_one_of_its_own(tmp_path, edits, changed):
    own = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "optimizer": {"type": "AdamW"}}
    (tmp_path / "model.json").write_text('{"width": 16}')
    (tmp_path / "ds.json").write_text(json.dumps(own))
    files = [str(tmp_path / name) for name in ("gone.json", "model.json", "ds.json")]
    edited = {key: value for key, value in (own | edits).items() if value is not None}
    assert ds_config.filled_from(edited, files) == (None if changed is None else (files[-1], changed))


def test_a_large_file_that_a_flag_names_is_taken_for_data_and_a_folder_for_none(tmp_path):
    """Each rank of each trial read the data set of `--data train.json` once more, and a folder of such a name ended the probe."""
    own, files = {"optimizer": {"type": "AdamW"}}, [tmp_path / name for name in ("folder.json", "data.json", "ds.json")]
    files[0].mkdir()
    for file, n_blank in zip(files[1:], (2**20, 0), strict=True):
        file.write_text(json.dumps(own) + " " * n_blank)
    assert ds_config.filled_from(own, map(str, files)) == (str(files[2]), {})


@pytest.mark.parametrize(
    ("code", "itself"),
    [
        ('args.deepspeed_config = os.path.join(out, "deepspeed_config.json")', True),  # as in BEiT and VideoMAE
        ("def configure(args):\n    if args.deepspeed:\n        args.deepspeed_config = write(args)", True),
        ("if not args.deepspeed_config:\n    args.deepspeed_config = write(args)", False),
        ('if getattr(args, "deepspeed_config", None) is None:\n    args.deepspeed_config = write(args)', False),
        ("args.deepspeed_config = args.deepspeed_config or write(args)", False),
        ('args.config = "deepspeed_config"', False),
    ],
)
def test_a_script_that_sets_deepspeeds_flag_whatever_was_given_is_known(tmp_path, code, itself):
    """Its exported command had `--deepspeed_config ds_config.json`, in place of which the script read a file that it wrote itself."""
    (tmp_path / "setup.py").write_text(code)
    (tmp_path / "train.py").write_text("import setup\n")
    assert ds_config.sets_flag_itself(tmp_path / "train.py") == itself
