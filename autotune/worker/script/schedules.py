"""torch's learning-rate schedules in a trial: DeepSpeed's optimizer, which they refuse, gives them torch's inside it."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import patch, place_of, users_frame


def install(context: ScriptContext) -> None:
    """Patches all schedules of torch, each of which looks at its optimizer before its base class does."""
    if context.candidate is None:
        return
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
            patch(kind, "__init__", functools.partial(_made, context))


def _made(context: ScriptContext, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a schedule.

    At ZeRO 0 in fp32 `deepspeed.initialize` returns torch's optimizer, from which many a script makes its schedule;
    elsewhere it returns one that is no `Optimizer`, around the same parameter groups.
    """
    given = args[0] if args else kwargs.get("optimizer")
    inside = getattr(given, "optimizer", None)
    if not isinstance(given, Optimizer) and isinstance(inside, Optimizer):
        args, kwargs = ((inside, *args[1:]), kwargs) if args else ((), {**kwargs, "optimizer": inside})
        place = place_of(users_frame(through_libraries=True))
        context.changed(
            f"Schedule: the `{type(schedule).__name__}`{f' at {place}' if place else ''} is made from"
            " `optimizer.optimizer`, as torch's schedules do not take DeepSpeed's optimizer."
        )
    original(schedule, *args, **kwargs)
