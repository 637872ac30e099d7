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


if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports a public name when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("autotune.report.export" if name == "Exported" else "autotune.library"), name)

    def __dir__():
        return sorted({*globals(), *__all__})
