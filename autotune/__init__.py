"""autotune: find the DeepSpeed configuration that trains your model best, by measuring it.

`run` tunes a model, `load_study` reads what a study found, `predict` forecasts a configuration, `export` writes it for
other tools. They are imported when first used: every rank of every trial imports this package.
"""

__version__ = "0.1.0"

__all__ = ["UserError", "__version__", "export", "load_study", "predict", "run"]

TYPE_CHECKING = False  # typing's own takes longer to import than all of this
if TYPE_CHECKING:
    from autotune.api import export, load_study, predict, run
    from autotune.errors import UserError


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("autotune.errors" if name == "UserError" else "autotune.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
