"""The commands `run` (tune a target and print the answer) and `submit` (do so inside an engine, driver and trials)."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.answer import print_answer
from autotune.cli.options import AsJson, Target, option, same_command, takes_settings
from autotune.errors import UserError, unknown
from autotune.system import processes
from autotune.system.files import shown
from autotune.system.signals import status_of

SETTINGS_OF_A_RUN = (
    "name", "space", "goal", "objectives", "quick", "trials", "time_budget_s", "trial_deadline_s", "ranks", "executor",
    "nodes", "executor_options", "patience_s", "hostfile", "base_config", "global_batch", "device_memory_bytes", "max_length",
    "with_eval", "with_save", "sampler", "stop_below", "memory_filter", "stop_trials", "parallel", "overlap", "storage",
    "seed", "learning_rate_rule", "branch", "branch_tokens", "from_checkpoint", "script_set",
)  # fmt: skip


@takes_settings(*SETTINGS_OF_A_RUN)
def run(
    target: Target,
    settings: Mapping[str, Any],
    *,
    as_json: AsJson = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Forget the study's earlier trials and begin anew.", rich_help_panel="How it searches"
        ),
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history", help="Do not start from what related studies found.", rich_help_panel="How it searches"
        ),
    ] = False,
) -> int:
    """Tune a target, and write and print the answer.

    Returns:
        Exit status: 0 a configuration can be recommended, 1 none can, 130 the user stopped it, 143 SIGTERM did, 129 SIGHUP did.
    """
    from autotune.report.progress import ProgressView

    began_s = time.monotonic() - processes.age_s()
    opened = False
    try:
        with ProgressView() as view:
            view.opening(target)
            from autotune.study.setup.request import requested

            with requested(target, settings, view) as request:
                opened = True
                from autotune.session import NOTHING_KEPT, tune  # takes a second, in which the engine starts

                tuned = tune(request, fresh=fresh, learn=not no_history, view=view, began_s=began_s)
    except KeyboardInterrupt as stop:  # the second one, or one at the very end
        if not opened:
            raise
        kept = "stopped at once; what was measured is kept. To go on, run"
        print(f"autotune: {kept}: {same_command('--fresh')}", file=sys.stderr)
        return status_of(stop)
    if tuned.report is None:
        print(f"autotune: {NOTHING_KEPT.format('command')}", file=sys.stderr)
        assert tuned.stopped is not None
        return status_of(tuned.stopped)
    print_answer(tuned.report, [shown(path) for path in tuned.written], as_json=as_json)
    if tuned.refused is not None:
        raise tuned.refused
    if tuned.stopped is not None:
        print(f"autotune: stopped; this is the best so far. To go on, run: {same_command('--fresh')}", file=sys.stderr)
        return status_of(tuned.stopped)
    if not tuned.report.recommended["picks"]:
        print(f"autotune: {tuned.report.why_nothing}, so there is nothing to recommend", file=sys.stderr)
        return 1
    return 0


@takes_settings(*(name for name in SETTINGS_OF_A_RUN if name != "executor"))
def submit(
    target: Target,
    settings: Mapping[str, Any],
    *,
    executor: Annotated[str, option("slurm|ray|kubernetes", "The engine that runs the driver and its trials.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the study's earlier trials.")] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not start from what related studies found.")
    ] = False,
) -> None:
    """Submit a run of a target with the options of `autotune run`, and print what became of it."""
    from autotune.executors import kubernetes, ray, slurm
    from autotune.executors import submit as engines
    from autotune.executors.driver_job import DriverJob
    from autotune.executors.options import check_names
    from autotune.study.setup.capture import wanted_study
    from autotune.study.setup.request import studies_folder

    if executor not in engines.ENGINES:
        raise UserError(f"--executor: {unknown(executor, engines.ENGINES)}")
    wanted, _ = wanted_study(target, {**settings, "executor": "local" if executor == "kubernetes" else executor})
    options = wanted.executor_options
    known = {"slurm": slurm.OPTIONS, "ray": ray.OPTIONS, "kubernetes": kubernetes.OPTIONS}[executor]
    check_names(executor, options, known)
    job = DriverJob(
        name=wanted.name,
        arguments=run_arguments(sys.argv[2:], executor),
        folder=Path.cwd(),
        log=studies_folder(Path(target)).absolute() / wanted.name / "driver.log",
        options=options,
        nodes=wanted.n_nodes,
        at_once=wanted.at_once if executor == "kubernetes" else wanted.parallel,
        ranks=wanted.stated_ranks,
        files=[wanted.target.absolute()],
    )
    job.log.parent.mkdir(parents=True, exist_ok=True)
    print(engines.ENGINES[executor](job))


def run_arguments(given: list[str], executor: str) -> list[str]:
    """Returns the arguments of the driver's `autotune run`, made from those of `submit`.

    In Kubernetes trials run in the driver's pod or in pods that it calls, so the engine and its options are left out.
    """
    if executor != "kubernetes":
        return given
    left, script = list[str](), False
    words = iter(given)
    for word in words:
        script = script or word == "--"
        name, has_value, _ = word.partition("=")
        if not script and name in ("--executor", "--executor-option"):
            if not has_value:
                next(words, None)
        else:
            left.append(word)
    return left
