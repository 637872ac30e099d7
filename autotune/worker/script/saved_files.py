"""Files that a script takes for saved: they lie in the trial's folder, and are found where the script looks for them."""

import builtins
import contextlib
import glob
import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.worker.script.patching import patch

StrPath = str | os.PathLike[str]


class PathList:
    """A file with paths that all ranks of a trial add to."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, path: StrPath) -> None:
        """Adds a path."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", errors="surrogateescape") as file:
            file.write(f"{os.path.abspath(path)}\n")

    def paths(self) -> list[str]:
        """Returns the paths so far, each once."""
        with contextlib.suppress(OSError):
            return list(dict.fromkeys(self._file.read_text(errors="surrogateescape").splitlines()))
        return []


def made_folders(scratch: Path) -> PathList:
    """The folders that the script of a trial made, which `remove_empty` removes when its ranks have ended, however."""
    return PathList(scratch / "made-folders")


def remove_empty(folders: PathList) -> None:
    """Removes those of some folders that are empty, and folders of none but such."""
    for folder in sorted(folders.paths(), key=len, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


class SavedFiles:
    """The files of all ranks: one may write what others read."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._names = scratch, PathList(scratch / "saved-files")

    def install(self) -> None:
        """Patches Python's functions that look for files and read them."""
        globber = getattr(glob, "_StringGlobber", None)  # of pathlib; Python 3.13's has the functions of os bound
        bound = getattr(globber, "scandir", None) is os.scandir
        patch(os, "stat", self.stat)
        os.supports_follow_symlinks.add(os.stat)  # shutil looks there
        patch(os, "listdir", self.listdir)
        patch(os, "scandir", self.scandir)
        if globber is not None and bound:
            globber.scandir, globber.lstat = staticmethod(os.scandir), staticmethod(os.stat)
        patch(builtins, "open", self.open)
        io.open = builtins.open

    def place(self, path: StrPath) -> Path:
        """Returns where in the trial's folder a file of this path is, if the script has saved it."""
        return self._scratch / hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()

    def placed(self, path: StrPath) -> Path:
        """Returns the same for a file that is now put there, and notes its name."""
        self._names.add(path)
        return self.place(path)

    def replaces(self, path: StrPath) -> bool:
        """Returns whether what the script has saved is read for a path: of what trials leave out, an earlier training's file is."""
        saved = self.place(path)
        return saved.exists() and (saved.stat().st_size > 0 or not os.path.lexists(path))

    def moved(self, folder: StrPath, to: StrPath) -> None:
        """Moves what was saved in a folder with it."""
        here, there = os.path.abspath(folder), os.path.abspath(to)
        for name in self._within(here):
            with contextlib.suppress(FileNotFoundError):  # another rank has moved it
                os.replace(self.place(name), self.placed(there + name.removeprefix(here)))

    def removed(self, folder: StrPath) -> None:
        """Removes what was saved in a folder with it."""
        for name in self._within(os.path.abspath(folder)):
            self.place(name).unlink(missing_ok=True)

    def stat(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of a file: scripts ask for its size, and ranks wait for what one of them writes."""
        try:
            return original(path, *args, **kwargs)
        except FileNotFoundError:
            if isinstance(path, str | os.PathLike) and kwargs.get("dir_fd") is None:
                with contextlib.suppress(FileNotFoundError):
                    return original(self.place(path))
            raise

    def open(self, original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
        """Opens a file, as to take its checksum."""
        try:
            return original(file, *args, **kwargs)
        except FileNotFoundError:
            if isinstance(file, str | os.PathLike) and os.path.lexists(self.place(file)):
                return original(self.place(file), *args, **kwargs)
            raise

    def listdir(self, original: Callable[..., Any], path: Any = ".") -> list[Any]:
        """Returns the names in a folder."""
        found: list[Any] = original(path)
        return found + self._further(path)

    def scandir(self, original: Callable[..., Any], path: Any = ".") -> Any:
        """Returns the entries of a folder, as `glob` reads them."""
        entries, further = original(path), self._further(path)
        return _Entries(entries, [_Entry(name, os.path.join(path, name)) for name in further]) if further else entries

    def _further(self, path: Any) -> list[str]:
        """Returns the names in a folder of files that are in the trial's folder alone."""
        if not isinstance(path, str | os.PathLike):
            return []
        folder = os.path.abspath(path)
        here = [name for name in self._within(folder) if os.path.dirname(name) == folder]
        return [os.path.basename(name) for name in here if not os.path.lexists(name)]

    def _within(self, folder: str) -> list[str]:
        """Returns the paths of saved files in a folder and the folders in it."""
        here = [name for name in self._names.paths() if name.startswith(os.path.join(folder, ""))]
        return [name for name in here if os.path.lexists(self.place(name))]


@dataclass(frozen=True)
class _Entry:
    """A file that is in the trial's folder, as `os.scandir` yields files."""

    name: str
    path: str

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, **_: Any) -> bool:
        return True

    def is_dir(self, **_: Any) -> bool:
        return False

    def is_symlink(self) -> bool:
        return False

    def stat(self, **_: Any) -> os.stat_result:
        return os.stat(self.path)


class _Entries(contextlib.ExitStack):
    """Entries of a folder, with further ones after them."""

    def __init__(self, entries: Any, further: list[_Entry]) -> None:
        super().__init__()
        self.enter_context(entries)
        self._all = itertools.chain(entries, further)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._all)
