"""The user's project: which files are the user's own code, and not a library's, wherever libraries are installed."""

import functools
import os
import sysconfig
from pathlib import Path

# Files that lie in the main folder of a project.
MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git", ".hg")
# Libraries that are never the user's code, even where a script of theirs is run in a checkout of them.
FRAMEWORKS = frozenset(
    """accelerate autotune deepspeed diffusers huggingface_hub lightning lightning_fabric numpy pandas
    peft pyarrow pytorch_lightning safetensors sentence_transformers setfit tokenizers torch torchvision transformers
    trl""".split()
)
INSTALLED_FOLDERS = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def settle(script: Path, working_dir: str | None = None) -> None:
    """States the target, for good: a rank runs only one.

    The project is the target's folder and its working folder, or the folder around each that has a project's files; and the
    target itself, also where a library brings it.
    """
    _scripts[:] = [str(script.absolute()), str(script.resolve())]
    places = [Path(each).parent for each in _scripts]
    places += [Path(working_dir).absolute()] if working_dir else []
    _roots[:] = dict.fromkeys(f"{_project_of(place)}{os.sep}" for place in places)
    _is_users.cache_clear()
    _is_library.cache_clear()


def holds(path: str) -> bool:
    """Returns whether a file is the user's own code; before `settle`, none is, nor is `<frozen os>` or `<string>` ever."""
    return path in _scripts or (path[:1] not in ("", "<") and _is_users(path))


@functools.cache
def _is_users(path: str) -> bool:
    path = os.path.abspath(path)
    if path.startswith(INSTALLED_FOLDERS):
        return False
    # The innermost root counts: a project may lie inside another project's environment.
    root = max((root for root in _roots if path.startswith(root)), key=len, default="")
    return bool(root) and not _is_library(Path(path).parent, Path(root))


@functools.cache
def _is_library(folder: Path, root: Path) -> bool:
    """Returns whether a folder in the project belongs to an environment, an installation folder or a framework there."""
    if folder == root:  # also one that is an environment itself, as after `python -m venv .`
        return False
    framework = folder.name in FRAMEWORKS and (folder / "__init__.py").exists()
    if framework or folder.name in ("site-packages", "dist-packages") or (folder / "pyvenv.cfg").exists():
        return True
    installed = any(folder.glob("*.dist-info"))  # made by `pip install --target`
    return installed or _is_library(folder.parent, root)


def _project_of(place: Path) -> Path:
    home = Path(os.path.expanduser("~"))  # of a user without one it is "~", around no place
    found = (folder for folder in (place, *place.parents) if any((folder / marker).exists() for marker in MARKERS))
    root = next(found, place)
    return place if root in (home, *home.parents) else root


_roots: list[str] = []
_scripts: list[str] = []
