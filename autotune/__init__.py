"""autotune: find the DeepSpeed configuration that trains your model best, by measuring it.

`run` tunes a model, `load_study` reads what a study found, `predict` says what a configuration will need, `export` writes it for other
tools. What is imported here is nearly nothing; the rest comes with the first use, since every rank of every trial imports this.
"""

__all__ = [
    "Estimate",
    "Exported",
    "Pick",
    "Prediction",
    "StudyResult",
    "UserError",
    "__version__",
    "export",
    "load_study",
    "predict",
    "run",
]
__version__ = "0.1.0"

TYPE_CHECKING = False  # typing's own takes longer to import than all of this
if TYPE_CHECKING:
    from autotune.library import Estimate, Pick, Prediction, StudyResult, export, load_study, predict, run
    from autotune.report.export import Exported


class UserError(Exception):
    """What the user gave cannot be used; the message says where, what, what is known, and what to do."""

    def __str__(self) -> str:
        """The message on one line, whatever it quotes: no control characters, which a terminal would obey, and not without end."""
        lines = [line.strip() for line in super().__str__().splitlines()]
        text = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(filter(None, lines))
        )
        return text if len(text) <= 2000 else f"{text[:1500]} ... {text[-400:]}"


if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports a public name when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("autotune.report.export" if name == "Exported" else "autotune.library"), name)

    def __dir__():
        return sorted({*globals(), *__all__})
