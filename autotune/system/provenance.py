"""Where figures come from: libraries, processor, commit and date, for `environment.json`."""

import functools
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.system.machine import processor_flags, processor_name

# Distributions that a figure may depend on; those that are installed are listed.
LIBRARIES = (
    "torch", "deepspeed", "optuna", "numpy", "transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "datasets",
    "flash-attn", "triton", "mpi4py", "ray",
)  # fmt: skip
# Features of a processor by which training speeds differ, by the beginning of their names.
SPEED_FLAGS = ("avx", "amx", "fma", "sve", "asimd", "bf16", "f16c")


def provenance(project: Path) -> dict[str, Any]:
    """Returns what identifies this installation and a project's state, as plain data.

    Args:
        project: A folder in the project's git repository, if it has one.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(project),
        "libraries": {"autotune": __version__, **installed()},
        "processor": {
            "name": processor_name(),
            "flags": [flag for flag in processor_flags() if flag.startswith(SPEED_FLAGS)],
        },
    }


@functools.cache  # to look for what is not installed takes milliseconds each
def installed() -> dict[str, str]:
    """Returns the versions of `LIBRARIES` that are installed here."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(folder: Path) -> str | None:
    """Returns the commit of the git repository around a folder; None without one. It is read from git's files."""
    around = folder.absolute()
    dot_git = next((path / ".git" for path in (around, *around.parents) if (path / ".git").exists()), None)
    if dot_git is None:
        return None
    try:
        own = dot_git
        if dot_git.is_file():  # of a worktree or a submodule
            own = dot_git.parent / dot_git.read_text().removeprefix("gitdir:").strip()
        head = (own / "HEAD").read_text().strip()
        shared = own / (own / "commondir").read_text().strip() if (own / "commondir").exists() else own
        return _commit_of(shared, head.removeprefix("ref:").strip()) if head.startswith("ref:") else head
    except (OSError, ValueError):
        return None


def _commit_of(repository: Path, ref: str) -> str | None:
    if (path := repository / ref).is_file():
        return path.read_text().strip()
    lines = (repository / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), None)
