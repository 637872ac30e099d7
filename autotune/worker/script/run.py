"""Run the user's training script under hooks until it has been measured."""

from __future__ import annotations

from pathlib import Path

from autotune.trial.request import TrialRequest
from autotune.worker.measure.recorder import Recorder
from autotune.worker.rank import connect, prepare_device
from autotune.worker.script import execute, hooks
from autotune.worker.script.context import ScriptContext, ScriptError


def run_script(recorder: Recorder, request: TrialRequest, rank: int, listener: int) -> None:
    """Runs the script until it has been measured, which ends the process, or to the script's own end.

    Raises:
        ScriptError: It ended before it had been measured.
    """
    memory = prepare_device(request)
    recorder.enter("build")
    connect(request, rank, listener, cuda=memory.cuda)
    context = ScriptContext(recorder, request, memory)
    steps = hooks.install(context)
    try:
        execute.execute(Path(request.target), context.script)
    except SystemExit as end:
        if end.code not in (None, 0):
            context.abort(ScriptError(f"the script exited with status {end.code}"))
    except BaseException as error:
        context.abort(error)
    steps.script_ended()
