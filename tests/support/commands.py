"""Commands as a user types them, and what they leave."""

import contextlib
import io
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil

from autotune.cli.app import main


def autotune(*arguments: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def called(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same within this process, for commands whose process is not what is tested."""
    out, err, before, status = io.StringIO(), io.StringIO(), sys.argv, 0
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = ["autotune", *arguments]
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        finally:
            sys.argv = before
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a command that refused its input."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout
    return done.stderr.strip().splitlines()[-1]


def told(folder: Path) -> list[tuple[int, str]]:
    with sqlite3.connect(folder / "studies" / "autotune.db") as database:
        return database.execute("select number, state from trials order by number").fetchall()


def processes_of(folder: Path) -> list[int]:
    """Living processes that work in or for a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def read_by_deepspeed(zoo, paths):
    """The global batch of each configuration, as DeepSpeed works it out for one rank."""
    code = "from deepspeed.runtime.config import DeepSpeedConfig as Config\n"
    code += f"for path in {list(map(str, paths))}:\n    print(Config(path).train_batch_size)"
    return [int(line) for line in zoo.printed(code).splitlines() if line.isdigit()]
