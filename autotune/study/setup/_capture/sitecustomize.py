"""Python imports this at its start, where a launch command is run to see what it starts: a rank is written down instead of run.

A rank is a Python process that a launcher gave a rank number, or one that runs a user's script without a launcher;
launchers, tools and `python -c` run as ever. It waits until it is ended, so that nothing comes after a training that
never ran. Imports nothing heavy, and hands on to the sitecustomize that the user has.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("AUTOTUNE_CAPTURE", "")
# Who waits for the records: a process's number, and when it began in ticks since the boot.
BY = os.environ.get("AUTOTUNE_CAPTURE_BY", "")
# Variables that hold the rank, the rank on this machine, the ranks, and the ranks on this machine: torchrun, deepspeed,
# mpirun.
RANK_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
LAUNCHERS = ("torchrun", "deepspeed", "deepspeed.pt", "ds", "accelerate", "accelerate-launch", "horovodrun", "mpirun")
LAUNCHER_PACKAGES = ("torch", "deepspeed", "accelerate", "pip", "uv")
NODES = ("--nnodes", "--num_nodes", "--num_machines")
JOB_HOSTFILE = "/job/hostfile"


def started() -> tuple[str | None, str | None, list[str]]:
    """The script or module that this process was started with, and its arguments."""
    first, arguments = sys.argv[0], sys.argv[1:]
    if first == "-m":
        words = getattr(sys, "orig_argv", [])
        name = words[len(words) - len(arguments) - 1] if len(words) > len(arguments) else ""
        return None, name[2:] if name.startswith("-m") else name, arguments
    if first in ("", "-", "-c"):
        return None, None, arguments
    return os.path.abspath(first), None, arguments


def is_tool(script: str | None, module: str | None) -> bool:
    """Whether this is no script of the user's: a launcher, an installed command, a part of Python."""
    if module:
        package = module.partition(".")[0]
        return package in LAUNCHER_PACKAGES or package in getattr(sys, "stdlib_module_names", ())
    beside = {
        os.path.dirname(os.path.abspath(sys.executable)),
        os.path.join(sys.prefix, "bin"),
        os.path.expanduser("~/.local/bin"),
    }
    return is_launcher(script) or os.path.dirname(script or "") in beside


def is_launcher(script: str | None) -> bool:
    """Whether this is a command that starts ranks."""
    return os.path.basename(script or "") in LAUNCHERS


def rank() -> list[int] | None:
    """This process's rank, local rank, ranks and ranks on this machine, as its launcher says; None without one."""
    for names in RANK_VARIABLES:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return [int(value) for value in values]
    return None


def module_file(name: str) -> str | None:
    """The file that `python -m NAME` runs, found without importing anything."""
    places = [os.getcwd(), *sys.path]
    found = None
    for part in name.split("."):
        found = importlib.machinery.PathFinder.find_spec(part, places)
        places = list((found and found.submodule_search_locations) or [])
    if places:
        found = importlib.machinery.PathFinder.find_spec("__main__", places)
    return found.origin if found else None


def refusal(started_as: str, arguments: list[str]) -> str | None:
    """Why a launcher must not go on: it would start ranks on other machines, or another tuner. None otherwise."""
    for n, word in enumerate(arguments):
        if word.endswith(".py"):
            break  # what follows is the script's own
        name, _, value = word.partition("=")
        name, value = (
            name.replace("-", "_").replace("__", "--", 1),
            value or (arguments[n + 1] if n + 1 < len(arguments) else ""),
        )
        nodes = re.match(r"\d+", value)
        if name in NODES and nodes and int(nodes[0]) > 1:
            return (
                f"it asks for {nodes[0]} machines ({word.partition('=')[0]}), and trials run on this one; say 1 there"
            )
        if name == "--autotuning":
            return "--autotuning starts DeepSpeed's own tuner; leave it out"
        if name == "--hostfile" and hosts(value) > 1:
            return f"{value} names {hosts(value)} machines, and trials run on this one; give it this one only"
        if name == "--config_file" and machines(value) > 1:
            return (
                f"{value} asks for {machines(value)} machines (num_machines), and trials run on this one; say 1 there"
            )
    if (
        os.path.basename(started_as).startswith(("deepspeed", "ds"))
        and "--hostfile" not in " ".join(arguments)
        and hosts(JOB_HOSTFILE) > 1
    ):
        return f"{JOB_HOSTFILE} names {hosts(JOB_HOSTFILE)} machines, and trials run on this one; give --hostfile with this one only"
    return None


def hosts(path: str) -> int:
    """How many machines a hostfile names."""
    return len({line.split()[0] for line in lines(path) if line.strip() and not line.lstrip().startswith("#")})


def machines(path: str) -> int:
    """How many machines an Accelerate config asks for."""
    found = [re.match(r"num_machines:\s*(\d+)", line) for line in lines(path)]
    return max([int(match[1]) for match in found if match], default=1)


def lines(path: str) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def write(**what: object) -> str:
    """Writes a record for the process that captures the command, and returns its path."""
    path = os.path.join(FOLDER, f"{time.time_ns():020d}-{os.getpid()}.json")
    with open(path + ".draft", "w") as file:
        json.dump(what, file)
    os.rename(path + ".draft", path)
    return path


def wait(path: str) -> bool:
    """Waits until the command may go on without this process; where it may not, whoever ran it ends all of it.

    False if nobody is left who could.
    """
    until = time.monotonic() + 1.0
    while os.path.exists(path) and not os.path.exists(path + ".go"):
        time.sleep(0.02)
        if time.monotonic() > until:
            until += 1.0
            if not lives(BY):
                return False
    return True


def lives(process: str) -> bool:
    """Whether a process lives, as far as that can be told."""
    pid, _, since = process.partition(":")
    if not since:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return False
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0] not in (b"Z", b"X") and fields[19].decode() == since


def capture() -> None:
    """Writes this process down and ends it, if it is a rank."""
    script, module, arguments = started()
    if script is None and module is None:
        return
    own = rank()
    if is_tool(script, module):
        reason = refusal(script or module or "", arguments)
        if reason:
            write(refused=reason)
            os._exit(1)
        if own is None or module or is_launcher(script):
            return
    path = write(
        rank=own,
        script=script or module_file(module or ""),
        module=module,
        arguments=arguments,
        working_dir=os.getcwd(),
        environment=dict(os.environ),
        python=sys.prefix,
    )
    os._exit(0 if wait(path) else 1)


def hand_on() -> None:
    """Runs the sitecustomize that this one stands before."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if FOLDER:
    capture()
hand_on()
