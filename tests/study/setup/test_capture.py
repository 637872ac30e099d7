"""Launch commands as people type them: what they would start, found out without starting it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from support.commands import processes_of
from support.zoo import wait_until

from autotune.errors import UserError
from autotune.study.setup import capture
from autotune.trial.command import Invocation

pytestmark = pytest.mark.process

# It says so where it runs, which it never should.
SCRIPT = "import deepspeed, pathlib\npathlib.Path('it-ran').touch()\ndeepspeed.initialize()\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a script, and the temporary folder that is looked through afterwards."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    (home / "train.py").write_text(SCRIPT)
    before = set(psutil.Process().children(recursive=True))  # the warm server of other tests
    yield home
    assert not list((tmp_path / "scratch").iterdir()) and not list(home.rglob("it-ran"))
    assert set(psutil.Process().children(recursive=True)) <= before


def captured(command: str, **how) -> Invocation:
    return capture.capture(command, Path.cwd(), **how)[0]


def ranks(n: int, what: str, **more: int) -> str:
    """A launcher as short as possible: `n` processes at once."""
    each = (
        f"RANK={r} LOCAL_RANK={r} WORLD_SIZE={more.get('world', n)} LOCAL_WORLD_SIZE={n} {what.format(rank=r)}"
        for r in range(n)
    )
    return " & ".join([*each, "wait"])


def test_a_script_without_a_launcher(folder):
    found = captured("python train.py --lr 1e-3 'two words'")
    assert found == Invocation(
        script=str(folder / "train.py"), working_dir=str(folder), arguments=("--lr", "1e-3", "two words"),
        command="python train.py --lr 1e-3 'two words'",
    )  # fmt: skip


def test_a_training_that_the_command_starts_in_the_background_is_waited_for(folder):
    """It "started no training script that can be seen", as its shell had ended."""
    found = captured("(sleep 0.3; exec python train.py --lr 1) > out.log 2>&1 &")
    assert (found.script, found.arguments) == (str(folder / "train.py"), ("--lr", "1"))


def test_a_module_is_found_without_importing_its_package(folder):
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "pkg" / "train.py").write_text(SCRIPT)
    found = captured("python -m pkg.train --bsz 4")
    assert (found.script, found.module, found.arguments) == (
        str(folder / "pkg" / "train.py"),
        "pkg.train",
        ("--bsz", "4"),
    )


def test_ranks_folder_and_variables_of_a_launcher(folder):
    (folder / "sub").mkdir()
    found = captured(f"export HF_HOME=/data MASTER_PORT=1; cd sub; {ranks(2, 'python ../train.py')}")
    assert (found.world_size, found.working_dir, found.script) == (2, str(folder / "sub"), str(folder / "train.py"))
    assert found.environment == {"HF_HOME": "/data"}


def test_the_number_that_a_launcher_gives_each_rank_is_no_constant(folder):
    found = captured(ranks(2, "python train.py --local_rank={rank} --device cpu:{rank} --lr 0"))
    assert found.arguments == ("--local_rank={local_rank}", "--device", "cpu:{local_rank}", "--lr", "0")


def test_templates_survive_a_script_of_the_shell(folder):
    (folder / "train.sh").write_text("BSZ=$1 python train.py --zero=$2 --config $3\n")
    found = captured("bash train.sh {train_micro_batch_size_per_gpu} {zero_stage} {ds_config}")
    assert found.arguments == ("--zero={zero_stage}", "--config", "{ds_config}")
    assert found.environment == {"BSZ": "{train_micro_batch_size_per_gpu}"} and found.fixed_environment == {}


def test_a_template_that_does_not_arrive_is_named(folder):
    with pytest.raises(UserError, match=r"\{micro_batch_size\} did not arrive.*train\.py"):
        captured("echo {micro_batch_size}; python train.py --zero {zero_stage}")


def test_what_else_the_command_runs_is_skipped_and_said(folder):
    (folder / "prepare.py").write_text("open('it-ran', 'w')")
    found, notes = capture.capture(f"python prepare.py; {ranks(2, 'python train.py')}", folder)
    assert Path(found.script).name == "train.py" and len(notes) == 2
    assert notes[0] == "prepare.py of your command was not run; run it yourself first if the training needs it"
    assert notes[1] == "train.py is the first training that your command starts, and the one that is tuned"


def test_python_in_the_shells_own_service_runs(folder):
    (folder / "value.txt").write_text("7")
    found = captured("python train.py --n $(python -c 'print(open(\"value.txt\").read())')")
    assert found.arguments == ("--n", "7")


@pytest.mark.parametrize("training", ["python train.py", ranks(2, "python train.py"), ranks(2, "python elsewhere.py")])
def test_nothing_that_comes_after_the_training_is_run(folder, training):
    (folder / "elsewhere.py").write_text("from somewhere import main\nmain()\n")
    assert Path(captured(f"{training}; touch it-ran").script).name in training


def test_a_users_own_sitecustomize_still_runs(folder, monkeypatch):
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import os\nos.environ['FROM_SITE'] = '1'\n")
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    found = captured("python train.py $(python -c 'import os; print(os.environ[\"FROM_SITE\"])')")
    assert found.arguments == ("1",) and "PYTHONPATH" not in found.environment


def test_arguments_and_a_folder_beside_a_command_of_a_study_reach_the_script(folder):
    """Arguments stood on a line of their own, where the shell took them for a command, and a folder from Python was passed over."""
    (folder / "study.yaml").write_text("command: |\n  python train.py --lr 1\n")
    (folder / "sub").mkdir()
    shutil.copy("train.py", "sub")
    spec, _ = capture.wanted_study("study.yaml", {"script_args": ("--steps", "3"), "working_dir": "sub"})
    assert spec.how().arguments == ("--lr", "1", "--steps", "3") and spec.target.parent == folder / "sub"
    with pytest.raises(UserError, match=r"working_dir: there is no folder .*away"):
        capture.wanted_study("python train.py", {"working_dir": "away"})


STARTS = ("PYTHONPATH=lib", "export PYTHONPATH=lib;", "exec env PYTHONPATH=lib")


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("launcher", "start"),
    [
        *(("python", start) for start in STARTS),
        ("torchrun --nproc_per_node 2", STARTS[0]),
        *(pytest.param("torchrun --nproc_per_node 2", start, marks=pytest.mark.system) for start in STARTS[1:]),
    ],
)
def test_a_command_that_sets_the_path_of_modules_anew_is_seen_too(folder, start, launcher):
    """Its training was run, for up to three minutes, and was not found."""
    assert captured(f"{start} {launcher} train.py").environment["PYTHONPATH"] == "lib"


@pytest.mark.system
def test_a_command_that_activates_an_environment_is_seen_where_it_sets_the_path_of_modules(folder):
    """Activation puts the environment's programs before ours."""
    programs = Path(sys.prefix) / "bin"
    (folder / "train.sh").write_text(f"export PATH={programs}:$PATH\nexport PYTHONPATH=lib\ntorchrun train.py\n")
    found = captured("bash train.sh")
    assert found.environment["PYTHONPATH"] == "lib"
    assert found.environment["PATH"] == f"{programs}:{programs}:{os.environ['PATH']}"


def test_the_path_of_programs_is_that_of_the_command(folder):
    found = captured("PATH=$PATH:/more python train.py")
    assert found.environment["PATH"] == f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}:/more"


def test_a_folder_that_a_launcher_adds_is_kept(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert captured("PYTHONPATH=$PYTHONPATH:/more python train.py").environment == {"PYTHONPATH": "/mine:/more"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-launcher train.py", "no-such-launcher: command not found"),
        ("echo out of luck; exit 3", "ended with status 3 and started no training script: out of luck"),
        ("true", "started no training script that can be seen"),
        ("python -c 'print(1)'", "started no training script that can be seen"),
        ("python one.py; python other/one.py", r"several scripts \(one.py, other/one.py\)"),
        (ranks(2, "python train.py", world=8), "2 of 8 ranks here"),
        ("torchrun --nnodes=2 --nproc_per_node 2 train.py", "asks for 2 machines"),
        ("python -m torch.distributed.run --nnodes 2 train.py", "asks for 2 machines"),
        ("deepspeed --num_nodes 3 train.py", "asks for 3 machines"),
        ("deepspeed --hostfile hosts train.py", "hosts names 2 machines"),
        ("deepspeed --autotuning run train.py", "DeepSpeed's own tuner"),
        ("HF_HOME=hf accelerate launch train.py", "config asks for 2 machines"),
        ("python -m no_such.module", "no module 'no_such.module'"),
    ],
)
def test_a_command_that_cannot_be_tuned_ends_in_one_sentence(folder, command, said):
    (folder / "other").mkdir()
    for path in ("one.py", "other/one.py"):
        (folder / path).write_text("open('it-ran', 'w')")
    (folder / "hosts").write_text("# ours\na slots=2\nb slots=2\n")
    (folder / "hf" / "accelerate").mkdir(parents=True)
    (folder / "hf" / "accelerate" / "default_config.yaml").write_text("num_machines: 2\n")
    with pytest.raises(UserError, match=said) as error:
        captured(command)
    assert "\n" not in str(error.value)


def test_the_script_that_trains_is_taken_where_there_are_several(folder):
    (folder / "prepare.py").write_text("print('ready')\n")
    assert Path(captured("python prepare.py && python train.py").script).name == "train.py"


def test_a_command_that_waits_for_something_is_given_up_and_ended(folder):
    with pytest.raises(UserError, match=r"within 1 s; does it wait for something.*waiting for peers"):
        captured("echo waiting for peers; sleep 60 & sleep 61", deadline_s=1.0)
    assert wait_until(lambda: processes_of(folder) == [])


def test_an_interrupt_while_the_command_starts_leaves_nothing_of_it(folder, monkeypatch):
    start = subprocess.Popen

    def interrupted(*arguments, **options):
        started = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return started

    monkeypatch.setattr(capture.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        captured("sleep 60 & sleep 61")
    assert wait_until(lambda: processes_of(folder) == [])


@pytest.mark.system
def test_another_python_is_refused(folder):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "other"], check=True)
    with pytest.raises(UserError, match="install autotune there"):
        captured("other/bin/python train.py")


TORCHRUN = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("command", "arguments", "environment"),
    [
        (
            "torchrun --standalone --nproc_per_node 2 train.py --bsz {micro_batch_size}",
            ("--bsz", "{micro_batch_size}"),
            TORCHRUN,
        ),
        pytest.param(
            "deepspeed --num_gpus 2 train.py --deepspeed",
            ("--local_rank={local_rank}", "--deepspeed"),
            {},
            marks=[pytest.mark.system, pytest.mark.smoke],
        ),
        pytest.param(
            "accelerate launch --config_file two.yaml train.py",
            (),
            TORCHRUN | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            marks=pytest.mark.system,
        ),
        pytest.param("X=1 bash train.sh", ("--lr", "1"), TORCHRUN | {"X": "1"}, marks=pytest.mark.system),
    ],
)
def test_the_launchers_that_people_use(folder, monkeypatch, command, arguments, environment):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # of the tests; torchrun sets it where nobody did
    (folder / "two.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 2\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2}\n"
    )
    (folder / "train.sh").write_text("set -e\ntorchrun --standalone --nproc_per_node=2 train.py --lr 1\ntouch it-ran\n")
    found = captured(command)
    assert (found.script, found.working_dir, found.world_size) == (str(folder / "train.py"), str(folder), 2)
    assert found.arguments == arguments and environment.items() <= found.environment.items()
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT", "TMPDIR", capture.CAPTURE, capture.MARK} & found.environment.keys()


@pytest.mark.parametrize("asked", ["--config_file=three.yaml", "--num_processes 3"])
def test_a_launcher_that_starts_fewer_processes_than_asked_is_said(folder, monkeypatch, asked):
    """`accelerate launch --cpu` starts one, whatever number it is given; behind a module its own flags were read as the launcher's."""
    (folder / "accelerate").write_text("import subprocess, sys; subprocess.run([sys.executable, 'train.py'])")
    (folder / "three.yaml").write_text("use_cpu: true\nnum_processes: 3\n")
    (folder / "accelerates" / "accelerate").mkdir(parents=True)
    (folder / "accelerates" / "accelerate" / "default_config.yaml").write_text(
        "num_machines: 2\n"
    )  # not read with --cpu
    monkeypatch.setenv("HF_HOME", str(folder / "accelerates"))
    found, notes = capture.capture(
        f"python accelerate launch --cpu {asked} -m train --num_processes 9 --num_nodes 2", folder
    )
    assert found.world_size is None and not [name for name in found.environment if name.startswith(capture.CAPTURE)]
    assert [note for note in notes if "asks for 3 processes" in note and "`--ranks 3`" in note], notes


def test_the_hook_imports_nothing_of_ours_and_does_nothing_by_itself(folder):
    code = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"
    environment = os.environ | {"PYTHONPATH": str(capture.HOOK)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    modules, path = json.loads(done.stdout)
    assert not {"autotune", "torch", "deepspeed", "yaml"} & {name.partition(".")[0] for name in modules}
    assert str(capture.HOOK) not in path
