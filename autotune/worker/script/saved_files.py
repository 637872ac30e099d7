"""Files that a script takes for saved: they lie in the trial's folder, and are found where the script looks for them."""

import builtins
import contextlib
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


class SavedFiles:
    """The files of all ranks: one may write what others read."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._names = scratch, scratch / "saved-files"

    def install(self) -> None:
        """Patches Python's functions that look for files and read them."""
        patch(os, "stat", self.stat)
        os.supports_follow_symlinks.add(os.stat)  # shutil looks there
        patch(os, "listdir", self.listdir)
        patch(os, "scandir", self.scandir)
        patch(builtins, "open", self.open)
        io.open = builtins.open

    def place(self, path: StrPath) -> Path:
        """Returns where in the trial's folder a file of this path is, if the script has saved it."""
        return self._scratch / hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()

    def placed(self, path: StrPath) -> Path:
        """Returns the same for a file that is now put there, and notes its name."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        with self._names.open("a", errors="surrogateescape") as file:
            file.write(f"{os.path.abspath(path)}\n")
        return self.place(path)

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
        if not isinstance(path, str | os.PathLike) or not self._names.exists():
            return []
        folder = os.path.abspath(path)
        names = dict.fromkeys(self._names.read_text(errors="surrogateescape").splitlines())
        here = [name for name in names if os.path.dirname(name) == folder and not os.path.lexists(name)]
        return [os.path.basename(name) for name in here if os.path.lexists(self.place(name))]


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
