"""Hook of `capture`: Python imports it at its start, and a rank is written down instead of run.

A rank is a Python process to which a launcher gave a rank number, or one that runs a user's script without a launcher;
launchers, tools and `python -c` run as usual. A rank waits until it is killed, so that the command does not go
on behind the training. The module imports nothing heavy, and runs the user's own sitecustomize afterwards.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterator

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("AUTOTUNE_CAPTURE", "")
# The capturing process: PID, and start time in ticks since boot.
BY = os.environ.get("AUTOTUNE_CAPTURE_BY", "")
# Variables with rank, local rank, world size and local world size, as torchrun, deepspeed and mpirun set them.
RANK_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
LAUNCHERS = ("torchrun", "deepspeed", "deepspeed.pt", "ds", "accelerate", "accelerate-launch", "horovodrun", "mpirun")
LAUNCHER_PACKAGES = ("torch", "deepspeed", "accelerate", "pip", "uv")
NODES = ("--nnodes", "--num_nodes", "--num_machines")
JOB_HOSTFILE = "/job/hostfile"
HERE_ONLY = ", and trials run on this one"


def started() -> tuple[str | None, str | None, list[str]]:
    """Returns script, module (one of both is None) and arguments of this process."""
    first, arguments = sys.argv[0], sys.argv[1:]
    if first == "-m":
        words = getattr(sys, "orig_argv", [])
        name = words[len(words) - len(arguments) - 1] if len(words) > len(arguments) else ""
        return None, name[2:] if name.startswith("-m") else name, arguments
    if first in ("", "-", "-c"):
        return None, None, arguments
    return os.path.abspath(first), None, arguments


def is_tool(script: str | None, module: str | None) -> bool:
    """Returns whether the process is not the user's script but a launcher, an installed command or a part of Python."""
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
    """Returns whether a script is a command that starts ranks."""
    return os.path.basename(script or "") in LAUNCHERS


def rank() -> list[int] | None:
    """Returns rank, local rank, world size and local world size as the launcher set them; None without a launcher."""
    for names in RANK_VARIABLES:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return [int(value) for value in values]
    return None


def module_file(name: str) -> str | None:
    """Returns the file that `python -m NAME` runs, without importing anything."""
    places = [os.getcwd(), *sys.path]
    found = None
    for part in name.split("."):
        found = importlib.machinery.PathFinder.find_spec(part, places)
        places = list((found and found.submodule_search_locations) or [])
    if places:
        found = importlib.machinery.PathFinder.find_spec("__main__", places)
    return found.origin if found else None


def refusal(started_as: str, arguments: list[str]) -> str | None:
    """Returns why a launcher must not go on (it would start other machines' ranks, or another tuner), or None."""
    for flag, name, value in flags(arguments):
        nodes = re.match(r"\d+", value)
        if name in NODES and nodes and int(nodes[0]) > 1:
            return f"it asks for {nodes[0]} machines ({flag}){HERE_ONLY}; say 1 there"
        if name == "--autotuning":
            return "--autotuning starts DeepSpeed's own tuner; leave it out"
        if name == "--hostfile" and hosts(value) > 1:
            return f"{value} names {hosts(value)} machines{HERE_ONLY}; give it this one only"
    if "accelerate" in os.path.basename(started_as) and (n := asked(arguments, "num_machines")) > 1:
        return (
            f"its Accelerate config asks for {n} machines (num_machines){HERE_ONLY}; say 1 there, or --num_machines 1"
        )
    own = os.path.basename(started_as).startswith(("deepspeed", "ds")) and "--hostfile" not in " ".join(arguments)
    if own and hosts(JOB_HOSTFILE) > 1:
        return f"{JOB_HOSTFILE} names {hosts(JOB_HOSTFILE)} machines{HERE_ONLY}; give --hostfile with this one only"
    return None


def flags(arguments: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields a launcher's flags up to the script: as they stand there, with underscores alone, and the value or next word."""
    for n, word in enumerate(arguments):
        is_module = n > 0 and arguments[n - 1] in ("-m", "--module") and not word.startswith("-")
        if is_module or word.endswith(".py"):
            return  # what follows is the script's own
        flag, _, value = word.partition("=")
        name = flag.replace("-", "_").replace("__", "--", 1)
        yield flag, name, value or "".join(arguments[n + 1 : n + 2])


def asked(arguments: list[str], key: str) -> int:
    """Returns the number that `accelerate launch` is given for a key, by a flag, its config or the user's default one; 1 if by none."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    given = {name: value for _, name, value in flags(arguments)}
    # With --cpu it does not look at the default one.
    own = os.path.join(home, "accelerate", "default_config.yaml") if "--cpu" not in given else ""
    stated = given.get(f"--{key}", "")
    return int(stated) if stated.isdigit() else number(given.get("--config_file") or own, key)


def hosts(path: str) -> int:
    """Returns how many machines a hostfile names."""
    return len({line.split()[0] for line in lines(path) if line.strip() and not line.lstrip().startswith("#")})


def number(path: str, key: str) -> int:
    """Returns the number that an Accelerate config states for a key; 1 if it states none."""
    found = [re.match(rf"{key}:\s*(\d+)", line) for line in lines(path)]
    return max([int(match[1]) for match in found if match], default=1)


def lines(path: str) -> list[str]:
    """Returns the lines of a file; none if it cannot be read."""
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
    """Waits until the command may go on without this process; returns False if the capturing process is dead."""
    until = time.monotonic() + 1.0
    while os.path.exists(path) and not os.path.exists(path + ".go"):
        time.sleep(0.02)
        if time.monotonic() > until:
            until += 1.0
            if not lives(BY):
                return False
    return True


def lives(process: str) -> bool:
    """Returns whether a process is alive, by its PID and start time; as `system.owner.Owner` does."""
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
    """Records this process and ends it, if it is a rank."""
    script, module, arguments = started()
    if script is None and module is None:
        return
    own = rank()
    if is_tool(script, module):
        reason = refusal(script or module or "", arguments)
        if reason:
            write(refused=reason)
            os._exit(1)
        if "accelerate" in (os.path.basename(script or "") + (module or "")):
            # On a CPU it starts one all the same.
            os.environ["AUTOTUNE_CAPTURE_ASKED"] = str(asked(arguments, "num_processes"))
        if own is None or module or is_launcher(script):
            return
    path = write(
        rank=own[0] if own else None,
        local_rank=own[1] if own else 0,
        world_size=own[2] if own else 1,
        local_world_size=own[3] if own else 1,
        script=script or module_file(module or "") or "",
        module=module or "",
        arguments=arguments,
        working_dir=os.getcwd(),
        environment=dict(os.environ),
        python=sys.prefix,
    )
    os._exit(0 if wait(path) else 1)


def hand_on() -> None:
    """Runs the sitecustomize that this one hides."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if FOLDER:
    capture()
hand_on()
