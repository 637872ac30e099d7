"""The command `submit`: run a study inside an engine, driver and trials."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import Target, takes_settings
from autotune.cli.run import SETTINGS_OF_A_RUN
from autotune.errors import UserError, unknown


@takes_settings(*(name for name in SETTINGS_OF_A_RUN if name != "executor"))
def submit(
    target: Target,
    settings: Mapping[str, Any],
    *,
    executor: Annotated[
        str, typer.Option(metavar="slurm|ray|kubernetes", help="The engine that runs the driver and its trials.")
    ],
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
        ranks=wanted.stated_ranks,
        files=[wanted.target.absolute()],
    )
    job.log.parent.mkdir(parents=True, exist_ok=True)
    print(engines.ENGINES[executor](job))


def run_arguments(given: list[str], executor: str) -> list[str]:
    """The arguments of `autotune run` for those of `submit`; in a pod they are local, or `pods` calls the others."""
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
