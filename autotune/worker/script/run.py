"""Run the user's training script under hooks until it has been measured."""

import argparse
import builtins
import functools
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autotune.space import torch_settings
from autotune.system.toolkit import is_built
from autotune.trial.request import TrialRequest
from autotune.worker import project
from autotune.worker.device import free_bytes
from autotune.worker.measure import experts
from autotune.worker.measure.ledger import TooFewSteps
from autotune.worker.measure.recorder import Recorder
from autotune.worker.measure.stages import stages
from autotune.worker.rank import connect, join_on_host, prepare_device, set_seed
from autotune.worker.script import execute, schedules, trackers
from autotune.worker.script.arguments import Arguments
from autotune.worker.script.by_hand import ByHand, leave_clipping_out
from autotune.worker.script.context import ScriptContext, ScriptError
from autotune.worker.script.engine import EngineHooks
from autotune.worker.script.frameworks import accelerate, huggingface, lightning
from autotune.worker.script.isolation import Isolation
from autotune.worker.script.loaders import Loaders
from autotune.worker.script.patching import after_import, patch, patch_everywhere, users_frame
from autotune.worker.script.steps import StepHooks

# Where click is, and Typer's copy of it.
CLICK = ("click.core", "typer._click.core")
SPAWNS = (
    "the script starts its ranks itself, by torch.multiprocessing, where no trial sees them: let torchrun start them, and call the"
    " function that they run with `int(os.environ['LOCAL_RANK'])`"
)
# Of a script whose arguments are wrong: its parser has said which.
USAGE_STATUS = 2


def run_script(recorder: Recorder, request: TrialRequest) -> None:
    """Runs the script until it has been measured, which ends the process, or to the script's own end."""
    memory = prepare_device(request, recorder.report)
    recorder.enter("build")
    # To ask about another rank's device starts a context there, and NCCL takes memory of each.
    probes = memory.cuda and not request.candidate
    own = free_bytes([torch.cuda.current_device()]) if probes else ()
    connect(request)
    if probes:
        rows: list[tuple[int, ...]] = [()] * request.world_size
        dist.all_gather_object(rows, own)
        memory.free_bytes = tuple(itertools.chain.from_iterable(rows))
    context = ScriptContext(recorder, request, memory)
    steps = _install_hooks(context)
    # A script that seeds nothing begins alike in all trials. Its ranks share torch's seed alone, as under a launcher.
    set_seed(request.seed + recorder.report.rank)
    torch.manual_seed(request.seed)
    why = ""
    try:
        execute.execute(Path(request.target), context.script)
    except SystemExit as end:
        if end.code not in (None, 0):
            context.abort(_exited(end))
        why = f"; it exits at {_place(end)}"
    except BaseException as error:
        context.abort(error)
    recorder.event(phase="script_ended")  # what follows waits for all ranks
    try:
        steps.script_ended()
    except (ScriptError, TooFewSteps) as error:
        caught = f"; it caught an exception of the engine's: {context.raised}" if context.raised else ""
        context.abort(type(error)(f"{error}{why}{caught}"))
    except BaseException as error:
        context.abort(error)


def _place(end: SystemExit) -> str | None:
    """Returns `file:line` of the user's code that a script exits at."""
    frames = [each for each in traceback.walk_tb(end.__traceback__) if project.holds(each[0].f_code.co_filename)]
    return f"{Path(frames[-1][0].f_code.co_filename).name}:{frames[-1][1]}" if frames else None


def _ask(_original: Callable[..., Any], prompt: object = "") -> NoReturn:
    """Stands in for `input`, which finds nothing to read in a rank."""
    raise EOFError(f"the script asks for {f'input ({prompt})' if prompt else 'input'}, which nobody gives in a trial")


def _exited(end: SystemExit) -> ScriptError:
    """Returns the error of a script that ended itself, with what it had caught before, as Hydra's `main` does."""
    if isinstance(end.code, str):
        return ScriptError(f"the script ended itself: {end.code}")
    said = f"the script exited with status {end.code}"
    caught = end.__context__
    if end.code == USAGE_STATUS or not isinstance(caught, Exception):
        return ScriptError(said)
    error = ScriptError(f"{said} after {type(caught).__name__}: {caught}".removesuffix(": "))
    error.__cause__ = caught
    return error


def _leave(own_pid: int, original: Callable[[int], NoReturn], status: int) -> NoReturn:
    """Ends a script that calls `os._exit` as `sys.exit` does: many do so at their end, and nothing would be left of the trial.

    What ends a forked process or another thread's wait so, as a watchdog does, is left alone.
    """
    caller = sys._getframe(2)  # of the function that stands in for Python's
    alone = os.getpid() != own_pid or threading.current_thread() is not threading.main_thread()
    if alone or not project.holds(caller.f_code.co_filename):
        original(status)
    raise SystemExit(status)


def _start_process(context: ScriptContext, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notes that the user's code starts a process before it trains: if the trial comes to no end, that may be why."""
    if context.meter is None and users_frame(through_libraries=True) is not None:
        context.recorder.event(phase="other_process")
    return original(*args, **kwargs)


def _compile(context: ScriptContext, original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes events around the loading of an op, which compiles it the first time."""
    if not is_built(builder.name, Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""))):
        context.recorder.event(compiling=builder.name)
    try:
        return original(builder, *args, **kwargs)
    finally:
        context.recorder.event(compiling="")


class Joining:
    """Hooks on what joins the ranks: they have joined already, on their devices alone.

    Scripts and libraries do not see that: what asks first would not join them, and so not get the backend that it names.
    """

    def __init__(self) -> None:
        self._joined = False

    def install(self) -> None:
        """Patches torch's functions, which DeepSpeed and frameworks call, too."""
        patch(dist, "init_process_group", self.join)
        patch(dist, "destroy_process_group", lambda _original, *_args, **_kwargs: None)
        patch(dist, "is_initialized", self.is_joined)

    def join(self, _original: Callable[..., Any], backend: str | None = None, *_args: Any, **_kwargs: Any) -> None:
        """Stands in for torch's `init_process_group`."""
        self._joined = True
        if backend is None or "gloo" in str(backend).lower():
            join_on_host()

    def is_joined(self, original: Callable[[], bool]) -> bool:
        """Returns whether the ranks have joined, as far as the caller can know."""
        caller = sys._getframe(2)  # of the function that stands in for torch's
        return original() and (self._joined or str(caller.f_globals.get("__name__")).startswith("autotune."))


def _install_hooks(context: ScriptContext) -> StepHooks:
    """Patches all entry points before the script can bind them; for good, since the process ends with the trial."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    own = torch_settings.in_words(dict(context.candidate.config)) if context.candidate is not None else []
    for text in (*context.script.side_changes, *own):
        context.changed(text)
    steps = StepHooks(context)
    attach = steps.attach if context.candidate is not None else ByHand(context).install(steps.attach)
    if context.script.probed.clips:
        leave_clipping_out(context)
    EngineHooks(context, attach, steps.others.attach).install()
    steps.install()
    stages.install(context.candidate, context.changed)
    experts.layers.install(context.candidate, context.changed)
    arguments = Arguments(context)
    patch(argparse.ArgumentParser, "parse_known_args", arguments.parse)
    for name in CLICK:
        after_import(name, lambda module: patch(module.Command, "parse_args", arguments.parse_click))
    Loaders(context).install()
    schedules.install(context)
    Joining().install()
    patch(builtins, "input", _ask)
    patch(os, "_exit", functools.partial(_leave, os.getpid()))
    spawns = dict.fromkeys(("spawn", "start_processes"), lambda *_args, **_kwargs: context.abort(ScriptError(SPAWNS)))
    patch_everywhere(torch.multiprocessing, spawns)
    for owner, name in ((subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start")):
        patch(owner, name, functools.partial(_start_process, context))
    for adapter in (accelerate, huggingface, lightning):
        adapter.install(context)
    Isolation(context).install()
    trackers.install(context)
    patch(OpBuilder, "jit_load", functools.partial(_compile, context))
    return steps
