"""Where the ranks of a trial stood at its deadline: each leaves its stack in its log, which tells for whom the others waited."""

import re
from collections.abc import Mapping
from pathlib import Path

# The line in the log above the stack.
HEAD = "\n[autotune: the deadline has passed; this rank stood here]\n"
# Bytes at the end of a log that hold the stack.
TAIL_BYTES = 64 << 10
# As Python's faulthandler writes them, the innermost first.
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
# What is called here waits for other ranks.
_COLLECTIVES = re.compile(r"/torch/distributed/|/deepspeed/comm/")
_LIBRARIES = re.compile(r"/site-packages/|/lib/python3[^/]*/|/autotune/worker/")


def waited_for(logs: Mapping[int, str]) -> str:
    """Returns for which ranks the others waited in a collective, and where these stood; empty where the stacks do not tell.

    Args:
        logs: The end of each rank's log.
    """
    stacks = {rank: list(_FRAME.finditer(log.rpartition(HEAD)[2])) for rank, log in logs.items() if HEAD in log}
    waiting = [rank for rank, frames in stacks.items() if frames and _COLLECTIVES.search(frames[0]["path"])]
    behind = {rank: frames for rank, frames in stacks.items() if frames and rank not in waiting}
    if not waiting or not behind or len(waiting) + len(behind) < len(logs):
        return ""
    frames = next(iter(behind.values()))
    place = next((frame for frame in frames if not _LIBRARIES.search(frame["path"])), frames[0])
    where = f"{Path(place['path']).name}:{place['line']} ({place['function']})"
    return f"{_ranks(waiting)} waited for {_ranks(list(behind))}, which stood at {where}"


def _ranks(numbers: list[int]) -> str:
    named = ", ".join(map(str, numbers[:4])) + ", ..." * (len(numbers) > 4)
    return f"rank{'s' * (len(numbers) > 1)} {named}"
