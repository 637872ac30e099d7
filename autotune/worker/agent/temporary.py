"""The folder for a trial's temporary files: ranks end without finalizers, so it is removed with all that is in it."""

import contextlib
import getpass
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from autotune.system import temporary
from autotune.system.processes import MARK
from autotune.trial.target import is_read_by_imports
from autotune.worker import project

# The path of a Unix socket has at most 107 bytes; multiprocessing and torch put theirs up to 34 bytes below TMPDIR.
MAX_PATH_BYTES = 107 - 34
# Caches that libraries keep in the temporary folder, by the variable that moves them: all trials share them.
SHARED_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor_{user}", "TIKTOKEN_CACHE_DIR": "data-gym-cache"}

# File with the names of imported modules, and the modules that no server needs: ours, the target, and generated ones.
IMPORTS = "autotune-imports"
OWN_MODULES = ("autotune", "__main__", "__mp_main__", "transformers_modules")


def make_folder() -> Path | None:
    """Makes the folder; None if there is no place for it, or if sockets in it would have too long a path."""
    with contextlib.suppress(OSError):
        path = Path(tempfile.mkdtemp(prefix=temporary.prefix(os.environ.get(MARK, ""))))
        if len(os.fsencode(path)) <= MAX_PATH_BYTES:
            return path
        path.rmdir()
    return None


def environment(folder: Path | None) -> dict[str, str]:
    """The variables that move a rank's temporary files into the folder, and its caches to where they would be."""
    if folder is None:
        return {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    caches = {name: str(folder.parent / place.format(user=user)) for name, place in SHARED_CACHES.items()}
    return {name: place for name, place in caches.items() if name not in os.environ} | {"TMPDIR": str(folder)}


def note_imports(modules: Iterable[ModuleType]) -> None:
    """In a rank: leaves the names of the library modules among those that it imported, which the server then preloads.

    It leaves none where the target has set variables that they read meanwhile, as the server would import them without.
    """
    folder = Path(os.environ.get("TMPDIR", ""))
    # Without a folder of the trial's own, TMPDIR is the user's.
    if os.environ.get("LOCAL_RANK") != "0" or not folder.name.startswith(temporary.PREFIX) or _read() != _READ_AT_FIRST:
        return
    with contextlib.suppress(Exception):  # a module may run code when it is asked for its name; the trial is over
        names = [name for name in map(_library, modules) if name]
        (folder / IMPORTS).write_text("\n".join(names))


def _read() -> dict[str, str]:
    """Returns the variables that libraries read as they are imported."""
    return {name: value for name, value in os.environ.items() if is_read_by_imports(name)}


# In a warm server, and in the ranks that are forked from it.
_READ_AT_FIRST = _read()


def set_ahead(items: Iterable[str]) -> None:
    """In a server: sets variables that the target will set before it imports what reads them; see `Target.imports`."""
    for name, _, value in (item.partition("=") for item in items):
        os.environ[name.removesuffix("?")] = os.environ.get(name[:-1], value) if name.endswith("?") else value
    _READ_AT_FIRST.update(_read())


def _library(module: ModuleType) -> str:
    """Returns the name by which a module can be imported; empty for ours and the user's."""
    name = str(getattr(getattr(module, "__spec__", None), "name", ""))
    found = sys.modules.get(name) is module and not name.startswith(OWN_MODULES)
    return name if found and not project.holds(getattr(module, "__file__", None) or "") else ""


def noted_imports(folder: Path | None) -> list[str]:
    """In the supervisor: the names that a rank left there."""
    with contextlib.suppress(OSError):
        return (folder / IMPORTS).read_text().split() if folder is not None else []
    return []
