"""A traced run: repeats a trial of a study under torch's profiler."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.study.folder import trial_path
from autotune.study.spec.yaml_file import elsewhere
from autotune.trial.folder import TrialDir, record_in
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.trial.target import inspect_target

TRACED_STEPS = 2
DEADLINES = 3  # of an ordinary trial
BUDGET_S = 5.0  # enough for the step time that the trace is compared with


def path_in(folder: Path, number: int) -> Path:
    """The folder of the traced run of a trial."""
    return trial_path(folder, number) / "profile"


def run(
    folder: Path, number: int, environment: Mapping[str, str], on_wait: Callable[[], None], on_tick: Callable[[], None]
) -> None:
    """Repeats a trial of a study and traces it.

    Args:
        environment: Variables that the launch command sets.

    Raises:
        UserError: The trial cannot be run again, or did not complete; the message says why.
    """
    source = TrialDir(trial_path(folder, number))
    request = record_in(source.request, TrialRequest)
    if request is None:
        raise UserError(
            f"diagnose: {source.request} is gone or of another version, and it says how trial {number} was run;"
            " without --profile it is diagnosed from what was kept"
        )
    if where := elsewhere(folder):
        raise UserError(
            f"diagnose: the trials of this study ran {where}, and only what ran on this machine alone can be traced"
            " here"
        )
    target = Path(request.target)
    if not target.is_file():
        raise UserError(f"diagnose: {target} is not there any more, so trial {number} cannot be run again")
    # The traced steps come on top of those of a trial, which may have taken its whole deadline.
    deadline_s, budget_s = DEADLINES * request.deadline_s, min(request.budget_s, BUDGET_S)
    request = replace(
        request, rivals=(), noise=False, min_samples=0, budget_s=budget_s, deadline_s=deadline_s, traced_steps=TRACED_STEPS
    )  # fmt: skip
    imports = inspect_target(target, launched=request.script is not None).imports
    log = folder / "trials" / "server.log"
    with contextlib.closing(LocalExecutor(imports, log, environment)) as executor:
        executor.start()
        with executor.turn(on_wait):
            result = base.run(executor, path_in(folder, number), request, on_tick)
    if result.outcome is not Outcome.COMPLETE:
        log = TrialDir(path_in(folder, number)).log(result.failed_rank or 0)
        raise UserError(f"diagnose: run again, trial {number} ended with {result.end} (see {log})")
