"""Ctrl-C, SIGTERM and SIGHUP: whichever command they meet, it says how to go on, and leaves nothing."""

import errno
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.commands import called
from support.instant import WORKLOAD
from support.paths import MODELS

import autotune
from autotune import session
from autotune.cli import app, doctor
from autotune.executors.local import LocalExecutor
from autotune.study.setup import forecasts, profile_cache
from autotune.system.signals import Terminated


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, whose temporary folder it is, too."""
    monkeypatch.setattr(LocalExecutor, "launch", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shutil.copyfile(MODELS / "ok.py", tmp_path / "model.py")
    return tmp_path


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (Terminated(signal.SIGTERM), 143)])
def test_a_second_stop_of_a_run_says_how_to_go_on_too(place, monkeypatch, stop, status):
    """It said only `stopped`."""

    def stopped(*_, **__):
        raise stop

    monkeypatch.setattr(session, "tune", stopped)
    done = called("run", "model.py", "--trials", "3", "--fresh", cwd=place)
    assert done.returncode == status
    assert done.stderr.endswith("what was measured is kept. To go on, run: autotune run model.py --trials 3\n")


@pytest.mark.process
@pytest.mark.parametrize("started", [["-m", "autotune"], ["-c", "from autotune.cli import main; main()"]])
def test_ctrl_c_while_the_commands_are_imported_shows_no_traceback(tmp_path, started):
    """The first 0.2 s of every command."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(autotune.__file__).parents[1])])}
    done = subprocess.run(
        [sys.executable, *started, "ls"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autotune: stopped\n")


@pytest.mark.process
def test_a_reader_that_has_read_enough_is_no_failure():
    """It ended with status 1, which `set -o pipefail` takes for one."""
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` has done
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "--version"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


ANSWER = "from autotune.report.console import AnswerConsole\nAnswerConsole().print('the answer')\nprint('and more')"
LOG = """
import sys
from autotune.report.console import ProgressConsole
from autotune.system.signals import status_of
try:
    ProgressConsole().print('a line')
except KeyboardInterrupt as stop:
    print('stopped', file=sys.stderr, flush=True)
    sys.exit(status_of(stop))
"""


@pytest.mark.process
@pytest.mark.parametrize(("stream", "code", "status"), [("stdout", ANSWER, 0), ("stderr", LOG, 141)])
def test_an_answer_whose_reader_is_gone_is_no_failure_and_a_run_of_which_nobody_reads_stops_in_order(
    stream, code, status
):
    """rich ended the process at once with status 1, and a run wrote no answer."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(Path(autotune.__file__).parents[1])}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, **streams)
    os.close(writer)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (status, b"", b"")


@pytest.mark.process
def test_what_the_locale_cannot_show_is_printed_as_an_escape(tmp_path):
    """It was an error of autotune itself, also where the answer of a long study was to be printed."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(autotune.__file__).parents[1])}
    command = [sys.executable, "-m", "autotune", "init", "modèle"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "wrote mod\\xe8le/model.py" in done.stdout, done.stderr


@pytest.mark.parametrize(("stopped", "status"), [(True, 130), (False, 1)])
def test_another_pipe_that_broke_is_no_reader_that_has_read_enough(monkeypatch, stopped, status):
    """Of a run that was stopped with its `tee`, or whose server had died, the status was 0."""

    def ended(**_):
        try:
            try:
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            finally:
                if stopped:
                    raise KeyboardInterrupt
        except BaseException as error:
            raise SystemExit(1) from error

    monkeypatch.setattr(app, "app", ended)
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_each_command_in_a_sentence(place, monkeypatch, number, status):
    """Commands without a handler of their own were ended by it at once, and left their temporary folders."""
    monkeypatch.setattr(session, "default_storage", lambda: os.kill(os.getpid(), number))
    before = signal.signal(number, lambda *_: None)
    try:
        done = called("history", cwd=place)
    finally:
        signal.signal(number, before)
    assert (done.returncode, done.stderr) == (status, "autotune: stopped\n")


LOSING = """
import os, sys, time
from autotune.system.signals import status_of, terminable, undisturbed
try:
    with terminable(), undisturbed():
        print("begun", flush=True)
        time.sleep(1)
except KeyboardInterrupt as stop:
    print("said to nobody", flush=True)
    open(sys.argv[1], "w").write("written")
    os._exit(status_of(stop))
"""


@pytest.mark.process
@pytest.mark.parametrize("ignored", [False, True])
def test_a_lost_terminal_ends_a_command_as_ctrl_c_does_and_not_under_nohup(tmp_path, ignored):
    """A study that lost its connection ended at once, without an answer."""
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", LOSING, str(tmp_path / "answer")])
    said = b""
    # The terminal takes the end of the line apart from its text: where it is gone by then, the child cannot write it.
    while not said.endswith(b"\n"):
        said += os.read(terminal, 100)
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert (status, (tmp_path / "answer").exists()) == ((0, False) if ignored else (129, True))


def test_a_forecast_that_is_stopped_leaves_no_folder(place, monkeypatch):
    def stopped(_, folder, __):
        assert folder.parent == place
        raise KeyboardInterrupt

    monkeypatch.setattr(forecasts, "executor_for", stopped)
    monkeypatch.setattr(profile_cache, "load", lambda *_: WORKLOAD)
    monkeypatch.setattr(profile_cache, "known", lambda workload, *_: workload)
    assert called("predict", "model.py", cwd=place).returncode == 130
    assert [path.name for path in place.iterdir() if path.name.startswith("autotune-")] == []


def test_the_doctor_ends_its_server_where_it_is_stopped_while_that_starts(place, monkeypatch):
    def stopped(_):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(LocalExecutor, "start", stopped)
    monkeypatch.setattr(LocalExecutor, "close", lambda _: ended.append(True))
    with pytest.raises(KeyboardInterrupt):
        list(doctor._trial(place, build=False))
    assert ended


@pytest.mark.process
def test_an_answer_that_fills_the_disk_ends_in_one_sentence():
    """Python added an error of its own, and the status was 120."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autotune", "schema"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "autotune: No space left on device. Free some space\n")
