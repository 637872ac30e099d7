"""Training scripts in real ranks: what is found, what moves, what is refused."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from support.paths import SCRIPTS

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.report import diagnosis
from autotune.space.legality import why_illegal
from autotune.study.setup import plan
from autotune.study.spec.spec import StudySpec
from autotune.system.machine import extensions_dir
from autotune.trial.command import Invocation
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = LocalExecutor(["torch", "deepspeed"], tmp_path_factory.mktemp("server") / "server.log")
    executor.start()
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def plans():
    return {}


@pytest.fixture
def planned(executor, home, plans, tmp_path, monkeypatch):
    monkeypatch.chdir(home)

    def make(name, **overrides):
        key = name, str(overrides)
        if key not in plans:
            spec = StudySpec.of(SCRIPTS / name, {"ranks": 1, "global_batch": "free", **overrides})
            plans[key] = plan.plan(spec, executor, tmp_path / "study")
        return plans[key]

    return make


@pytest.fixture
def measure(executor, tmp_path):
    def run(found, steps=4, traced_steps=0, **changes):
        candidate = replace(found.baseline, **changes)
        request = TrialRequest(
            target=str(found.spec.target), candidate=candidate.values(), ds_config=found.ds_config(candidate),
            world_size=found.world_size, max_steps=steps, deadline_s=60, script=found.script(candidate), traced_steps=traced_steps,
        )  # fmt: skip
        return base.run(executor, tmp_path / "trial", request)

    return run


def facts(found):
    return (
        found.baseline.micro_batch_size,
        found.baseline.gradient_accumulation_steps,
        set(found.workload.script.movable),
    )


BOTH = {"micro_batch_size", "gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("dict_config.py", {"script_args": ("--batch_size", "4")}, (4, 1, BOTH)),
        ("training_data.py", {}, (8, 2, BOTH)),
        ("own_loader.py", {}, (8, 2, BOTH)),
        ("from_engine.py", {}, (8, 2, BOTH)),
        ("sequence_first.py", {}, (8, 2, BOTH)),
        ("hand_made.py", {}, (8, 2, {"gradient_accumulation_steps"})),
        ("dict_config.py", {"script_args": ("--batch_size", "{micro_batch_size}")}, (8, 1, BOTH)),
        ("hand_made.py", {"script_set": ["BATCH={micro_batch_size}"]}, (8, 2, BOTH)),
        ("chunks.py", {}, (8, 4, set())),
        ("own_flags.py", {}, (8, 2, {"gradient_accumulation_steps"})),
        ("own_flags.py", {"script_args": ("--rows", "{micro_batch_size}")}, (8, 2, BOTH)),
        (
            "own_flags.py",
            {"script_args": ("--rows", "6"), "arg_mappings": {"train_micro_batch_size_per_gpu": "--rows"}},
            (6, 2, BOTH),
        ),
        ("own_flags.py", {"script_args": ("--mapped", "1")}, (8, 2, BOTH)),
    ],
)
def test_a_probe_finds_the_batch_and_what_of_it_moves(planned, name, overrides, expected):
    assert facts(planned(name, **overrides)) == expected


CONFIG = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "zero_optimization": {"stage": 1},
}  # fmt: skip


def test_a_script_that_is_given_the_trials_json_and_other_fields_runs_what_was_asked_for(planned, measure, tmp_path):
    arguments = ("--conf", "{ds_config}", "--rows", "{train_micro_batch_size_per_gpu}", "--zero", "{zero_stage}")
    found = planned("own_flags.py", script_args=arguments, base_config=CONFIG, ranks=2)
    # A template leaves no value of the user's to start from.
    assert facts(found) == (8, 3, BOTH) and found.baseline.zero_stage == 1
    changes = {"zero_stage": 2, "micro_batch_size": 3, "gradient_accumulation_steps": 2}
    result = measure(found, **changes)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.observed.mismatch(replace(found.baseline, **changes), 2) is None
    assert (
        f"'--conf': '{tmp_path}/trial/ds_config.json', '--rows': '3', '--zero': '2'"
        in (tmp_path / "trial" / "rank-1.log").read_text()
    )
    assert {text.partition(" in it")[0] for text in result.side_changes} == {
        "Command line: `{micro_batch_size}`", "Command line: `{zero_stage}`",
    }  # fmt: skip


def test_a_module_gets_its_package_and_the_variables_of_its_launcher(executor, measure, home, tmp_path, monkeypatch):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text((SCRIPTS / "common.py").read_text())
    (package / "loop.py").write_text((SCRIPTS / "own_flags.py").read_text().replace("from common", "from .net"))
    (package / "train.py").write_text("from . import loop\n")  # which nobody would take for a training script
    how = Invocation(
        script=str(package / "train.py"), module="pkg.train", working_dir=str(tmp_path), environment={"ROWS": "{micro_batch_size}"},
        arguments=("--local_rank", "{local_rank}"), world_size=2, command="launcher -m pkg.train",
    )  # fmt: skip
    monkeypatch.chdir(home)
    found = plan.plan(StudySpec.of_command(how, {"global_batch": "free"}), executor, tmp_path / "study")
    assert found.world_size == 2 and facts(found) == (8, 2, BOTH)
    assert measure(found, micro_batch_size=5).samples_per_step == 5 * 2 * 2
    assert "'--local_rank': '1'" in (tmp_path / "trial" / "rank-1.log").read_text()


def test_the_flags_that_carry_something_are_known_by_all_their_names(planned):
    assert planned("dict_config.py").workload.script.flags == {"micro_batch_size": ["--batch_size"]}
    script = planned("training_data.py").workload.script
    assert script.flags["ds_config"] == ["--deepspeed_config"] and script.config_source.endswith("ds.json")
    mapped = planned("own_flags.py", script_args=("--mapped", "1")).workload.script
    assert mapped.flags == {"micro_batch_size": ["--rows"]} and mapped.config_source == ""


MICRO, ACCUM = {"micro_batch_size"}, {"gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("style", "overrides", "expected"),
    [
        ("workers", {}, (8, 2, BOTH)),
        ("batch sampler", {}, (8, 2, BOTH)),
        ("packed", {}, (8, 2, BOTH)),
        ("critic", {}, (8, 2, BOTH)),
        ("another model", {}, (8, 2, BOTH)),
        ("evaluates", {}, (8, 2, BOTH)),
        ("text flag", {}, (8, 2, BOTH)),
        ("own sampler", {}, (8, 2, ACCUM)),
        ("iterable", {}, (8, 2, ACCUM)),
        ("iterable", {"script_set": ["BATCH={micro_batch_size}"]}, (8, 2, BOTH)),
        ("only eight", {}, (8, 2, ACCUM)),
        ("own steps", {}, (8, 4, MICRO)),
        ("own steps", {"script_set": ["ACCUM={gradient_accumulation_steps}"]}, (8, 4, BOTH)),
    ],
)
def test_every_style_of_loop_moves_as_far_as_it_can(planned, measure, style, overrides, expected):
    found = planned("styles.py", script_args=(style,), **overrides)
    assert facts(found) == expected
    moved = {"micro_batch_size": 3, "gradient_accumulation_steps": 3}
    changes = {name: value for name, value in moved.items() if name in found.workload.script.movable}
    result = measure(found, zero_stage=1, **changes)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.samples_per_step == changes.get("micro_batch_size", 8) * changes.get(
        "gradient_accumulation_steps", expected[1]
    )
    assert (
        all(seconds > 0 for seconds in result.phase_times_s.values())
        and {"data", "forward", "backward", "step"} <= result.phase_times_s.keys()
    )


def test_a_scripts_step_is_taken_apart_and_traced_and_says_what_it_is_bound_by(planned, measure, tmp_path):
    found = planned("dict_config.py")
    result = measure(found, traced_steps=1)
    assert result.outcome is Outcome.COMPLETE, result.reason
    said = diagnosis.of_result(result, tmp_path / "trial", found.workload)
    known = {part.name: part.known for part in said.parts}
    assert said.bound_by and "traced" in known["launch overhead"] and "traced" in known["memory bandwidth"]


def test_what_cannot_run_otherwise_is_frozen_with_the_reason(planned):
    notes = planned("styles.py", script_args=("only eight",)).notes
    assert any("micro-batch of 4" in note and "eight samples here" in note for note in notes)


def test_a_script_that_counts_its_micro_batches_keeps_its_own_accumulation(planned):
    found = planned("styles.py", script_args=("own steps",))
    assert found.ds_config(found.baseline)["gradient_accumulation_steps"] == 1


def test_a_big_batch_cut_up_by_a_constant_moves_as_a_whole(planned):
    found = planned("chunks.py", script_set=["ACCUM={gradient_accumulation_steps}"], global_batch="keep")
    assert facts(found) == (8, 4, BOTH)


def test_inputs_are_cast_only_where_the_script_was_written_for_another_precision(planned, measure):
    found = planned("dict_config.py")
    assert not any("cast" in change for change in measure(found).side_changes)
    assert any("cast" in change for change in measure(found, precision="bf16").side_changes)


def test_a_scripts_own_recomputation_is_the_baselines_and_can_be_turned_off(planned, measure):
    found = planned("recomputes.py")
    assert found.baseline.checkpoint_every == 1
    for every, blocks in ((1, 4), (2, 2), (0, 0)):
        result = measure(found, checkpoint_every=every)
        assert result.outcome is Outcome.COMPLETE and result.observed.checkpointed_blocks == blocks


def test_what_does_not_move_is_frozen_with_the_remedy(planned):
    found = planned("hand_made.py")
    assert set(found.space["micro_batch_size"].all_values()) == {8}
    assert any("--set NAME={micro_batch_size}" in note for note in found.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 0, "micro_batch_size": 2, "gradient_accumulation_steps": 1},
        {"zero_stage": 1, "precision": "bf16", "micro_batch_size": 4, "checkpoint_every": 1},
        {"zero_stage": 2, "micro_batch_size": 3, "gradient_accumulation_steps": 3},
        {"zero_stage": 3, "precision": "torch_autocast", "micro_batch_size": 5, "checkpoint_every": 2},
    ],
    ids=["z0", "z1", "z2", "z3"],
)
@pytest.mark.parametrize("name", ["training_data.py", "own_loader.py", "from_engine.py"])
def test_a_trial_on_two_ranks_runs_what_was_asked_for(planned, measure, name, changes):
    found = planned(name, ranks=2)
    result = measure(found, **changes)
    assert result.outcome is Outcome.COMPLETE, result.reason
    candidate = replace(found.baseline, **changes)
    assert result.observed.mismatch(candidate, 2) is None
    assert result.samples_per_step == candidate.global_batch_size(2) and len(result.step_times_s) == 4


def test_hooks_change_no_digit_of_the_loss(planned, measure, tmp_path):
    result = measure(planned("dict_config.py"), steps=10)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment |= {"PRINT_LOSSES": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions_dir())}
    # DeepSpeed's shared-memory op would leave its files in /dev/shm for ever.
    code = (
        "import deepspeed, runpy, sys; deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False;"
        " del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS / "dict_config.py"), "--steps", "10"]
    plain = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    losses = [float(line.split()[1]) for line in plain.splitlines() if line.startswith("loss ")]
    assert result.losses == losses and len(losses) == 10


def test_what_carried_the_batch_is_told(planned, measure):
    assert "--batch_size 3` instead of 8" in str(measure(planned("dict_config.py"), micro_batch_size=3).side_changes)
    assert "DataLoader at own_loader.py:15 with `batch_size=3` instead of 8" in str(
        measure(planned("own_loader.py"), micro_batch_size=3).side_changes
    )


def test_nothing_that_was_not_seen_is_scored(planned, measure):
    result = measure(planned("hand_made.py"), micro_batch_size=3)
    assert result.outcome is Outcome.NOT_APPLIED and "micro_batch_size: 3 was asked for, 8 ran" in result.reason


def test_a_plain_backward_is_not_tried_at_stage_0_where_deepspeed_refuses_it(planned, measure):
    found = planned("hand_made.py")
    assert "refuses loss.backward()" in why_illegal(replace(found.baseline, zero_stage=0), found.setting)
    assert measure(found, zero_stage=0).outcome is Outcome.CRASHED


def test_a_study_of_another_command_line_is_another_study(planned):
    found = planned("dict_config.py"), planned("dict_config.py", script_args=("--batch_size", "4"))
    assert found[0].fingerprint()["script"] != found[1].fingerprint()["script"]


def test_ranks_fed_the_same_data_are_warned_about(planned):
    assert any("same data" in note for note in planned("hand_made.py", ranks=2).notes)
    assert not any("same data" in note for note in planned("own_loader.py", ranks=2).notes)


def test_a_trial_leaves_nothing_in_the_users_folder(planned, measure, home):
    result = measure(planned("own_loader.py"), steps=30)
    assert not list(home.iterdir())
    assert "torch.save of the model is not carried out in trials" in result.caveats


def test_what_a_script_saves_for_itself_it_can_read_and_nobody_finds_later(planned, measure, home, tmp_path):
    result = measure(planned("saves.py", ranks=2), steps=4)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert "torch.save of the model is not carried out in trials" in result.caveats
    assert not list(home.iterdir()) and not (tmp_path / "trial" / "scratch").exists()


def test_a_file_that_a_script_writes_by_itself_is_told(planned, home):
    found = planned("saves.py", script_args=("--log",))
    assert any(f"writes {home}/out/log.txt, in every trial" in note for note in found.notes)
    shutil.rmtree(home / "out")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("saves.py", ("--reload",), "best.pt back, but trials do not save the model"),
        ("no_engine.py", (), "without calling deepspeed.initialize"),
        ("dict_config.py", ("--no-such-flag",), "exited with status 2"),
        ("dict_config.py", ("--steps", "0"), "ended after 0 optimizer steps"),
        ("stranger.py", (), "the optimizer given to deepspeed.initialize holds none of the model's parameters"),
    ],
)
def test_a_script_that_cannot_be_probed_is_refused_with_its_log(planned, name, arguments, said):
    with pytest.raises(UserError, match=said) as error:
        planned(name, script_args=arguments)
    assert "rank-0.log" in str(error.value)


def test_too_few_steps_are_no_measurement(planned, measure):
    result = measure(planned("dict_config.py", script_args=("--steps", "4")), steps=100)
    assert result.outcome is Outcome.CRASHED and "ended after 4 optimizer steps, and 5 are needed" in result.reason
