"""Patching what is imported already, and what will be."""

import functools
import subprocess
import sys

import pytest

from autotune.worker import project
from autotune.worker.script import patching


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package `shelf` whose module `shelf.books` defines count() and Book."""
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "__init__.py").write_text("")
    (tmp_path / "shelf" / "books.py").write_text(
        "def count():\n    return 1\nclass Book:\n    def pages(self):\n        return 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in ("shelf", "shelf.books"):
        sys.modules.pop(name, None)


def double(original, *args):
    return 2 * original(*args)


def test_a_module_is_patched_before_anybody_binds_its_names(library):
    patching.after_import("shelf.books", lambda module: patching.patch(module, "count", double))
    from shelf.books import Book, count

    assert count() == 2 and Book().pages() == 10


def test_a_module_that_is_there_is_patched_at_once(library):
    import shelf.books

    patching.after_import("shelf.books", lambda module: patching.patch(module.Book, "pages", double))
    assert shelf.books.Book().pages() == 20
    patching.patch(shelf.books.Book, "pages", double)
    assert shelf.books.Book().pages() == 20, "it is there already"


def test_two_callbacks_of_one_module_are_both_called(library):
    for factor in (3, 5):
        hook = functools.partial(lambda factor, original: factor * original(), factor)
        patching.after_import("shelf.books", lambda module, hook=hook: patching.patch(module, "count", hook))
    import shelf.books

    assert shelf.books.count() == 15
    assert shelf.books.__spec__.loader.get_source("shelf.books").startswith("def count")


def test_what_a_version_does_not_have_is_left_alone(library):
    import shelf.books

    patching.patch(shelf.books, "no_such_function", double)
    assert not hasattr(shelf.books, "no_such_function")


@pytest.mark.parametrize("indexed", ["never", "with the library", "before it"])
def test_modules_that_have_bound_a_function_have_the_patched_one_too(library, monkeypatch, indexed):
    """Ranks look at those modules alone that the server noted before it forked them, and at what came since."""
    monkeypatch.setattr(patching, "_holders", {})
    monkeypatch.setattr(patching, "_indexed", {})
    (library / "shelf" / "reader.py").write_text("from shelf.books import count, count as n_books\nBook = str\n")
    if indexed == "before it":
        patching.index_copies()
    import shelf.books
    import shelf.reader

    if indexed == "before it":
        assert {shelf.books, shelf.reader} <= {*patching.imported_since()}

    if indexed == "with the library":
        patching.index_copies()
    book = shelf.books.Book
    patching.patch_everywhere(shelf.books, {"count": double, "Book": double, "no_such_function": double})
    assert shelf.reader.count() == shelf.reader.n_books() == shelf.books.count() == 2
    again = functools.partial(double)
    patching.patch_everywhere(shelf.books, {"count": again})  # the copies of what is patched already, too
    assert shelf.reader.count() == shelf.reader.n_books() == shelf.books.count() == 4
    assert shelf.reader.Book is str and shelf.books.Book is not book
    sys.modules.pop("shelf.reader")


def test_a_function_that_a_package_hands_on_is_patched_where_it_is_defined_too(library, monkeypatch):
    """A script that clips by `torch.nn.utils.clip_grad.clip_grad_norm_` was not seen to clip."""
    (library / "shelf" / "__init__.py").write_text("from shelf.books import count\n")
    import shelf.books

    for name in ("_holders", "_indexed"):
        monkeypatch.setattr(patching, name, {})
    patching.index_copies()
    patching.patch_everywhere(shelf, {"count": double})
    assert shelf.count() == shelf.books.count() == 2


def test_a_module_that_does_not_exist_stays_missing(library):
    patching.after_import("no_such_module", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import no_such_module  # noqa: F401


@pytest.mark.parametrize(
    ("name", "caller", "line"),
    [("shelf", "train.py", 2), ("deepspeed", "train.py", None), ("shelf", "<frozen runpy>", None)],
)
def test_what_a_library_makes_for_the_user_is_found_where_the_user_asks_for_it(
    tmp_path, monkeypatch, name, caller, line
):
    """A DataLoader of a library kept its batch, although the user's code says which; of none is what Python runs a library by."""
    monkeypatch.setattr(project, "_roots", [])
    monkeypatch.chdir(tmp_path)
    project.settle(tmp_path / "train.py")
    made = {"users_frame": patching.users_frame, "__name__": f"{name}.data"}
    exec(compile("def make():\n    return users_frame(through_libraries=True)", "/elsewhere/data.py", "exec"), made)
    code = compile("\nframe = make()", caller if caller[0] == "<" else str(tmp_path / caller), "exec")
    exec(code, users := {"make": made["make"], "__name__": "__main__"})
    assert (users["frame"] and users["frame"].f_lineno) == line


@pytest.mark.process
def test_patching_imports_no_framework():
    code = "import sys, autotune.worker.script.patching as p; print({'torch', 'deepspeed'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
