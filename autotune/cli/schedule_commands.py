"""The commands `autotune schedule add`, `list`, `remove`, `run` and `export`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from autotune.cli.options import AsJson, Command, OnlyStudy, Storage, StudyName
from autotune.errors import UserError

schedule = typer.Typer(name="schedule", no_args_is_help=True, rich_markup_mode=None, help="When studies are re-tuned.")
command = partial(schedule.command, cls=Command)


@command("add")
def schedule_add(
    study: StudyName,
    every: Annotated[str | None, typer.Option(metavar="7d", help="This long after the last run.")] = None,
    cron: Annotated[
        str | None, typer.Option(metavar='"0 3 * * 0"', help="Five fields, as in a crontab; local time.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="environment-change", help="Only if the environment has changed.")
    ] = None,
    storage: Storage = None,
) -> None:
    """Re-tune STUDY again and again."""
    from autotune.cli import schedule as schedule_command

    schedule_command.schedule_add(study, storage, every, cron, on)


@command("list")
def schedule_list(storage: Storage = None, as_json: AsJson = False) -> None:
    """List the schedules."""
    from autotune.cli import schedule as schedule_command

    schedule_command.schedule_list(storage, as_json=as_json)


@command("remove")
def schedule_remove(
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", max=2**31 - 1, help="As `autotune schedule list` shows it.")
    ],
    storage: Storage = None,
) -> None:
    """Remove a schedule."""
    from autotune.cli import schedule as schedule_command

    schedule_command.schedule_remove(number, storage)


@command("run")
def schedule_run(storage: Storage = None) -> None:
    """Run what is due until Ctrl-C. Of several daemons one leads; another takes over when it dies."""
    from autotune.cli import schedule as schedule_command

    schedule_command.schedule_run(storage)


@command("export")
def schedule_export(
    study: OnlyStudy = None,
    cron: Annotated[bool, typer.Option("--cron", help="Lines of a crontab.")] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="A service and a timer.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="A Kubernetes CronJob.")] = False,
    storage: Storage = None,
) -> None:
    """Print the schedules for a scheduler of yours, which calls `autotune retune STUDY --if-due`."""
    from autotune.cli.schedule import schedule_exported

    forms = {"cron": cron, "systemd": systemd, "k8s": k8s}
    wanted = [name for name, given in forms.items() if given]
    if len(wanted) != 1:
        raise UserError(f"schedule export: give one of {', '.join(f'--{name}' for name in forms)}")
    schedule_exported(wanted[0], study, storage)
