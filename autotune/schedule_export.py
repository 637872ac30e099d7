"""Schedules for other schedulers: each of them calls `autotune retune STUDY --if-due`, which knows by itself whether it is."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune import UserError
from autotune.schedule import Schedule
from autotune.spec import check_name

# How often another scheduler asks, where the rule is an interval: it is due soon after it should be.
ASK_HOURLY = "17 * * * *"
ASK_DAILY = "17 3 * * *"
DAY_S = 86400.0


def export(form: str, schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    """The schedules as another scheduler reads them.

    Args:
        form: One of `FORMS`.
        schedules: What to export.
        folder: Where the commands run: the folder above `studies`.
        storage: The database, where it is not the usual one; its password is left to the environment.

    Raises:
        UserError: There is no such form.
    """
    if form not in FORMS:
        raise UserError(f"schedule export: unknown form {form!r}. Known: {', '.join(FORMS)}")
    for each in schedules:  # which another scheduler runs: whoever writes to the database may not say what
        try:
            check_name(each.study)
        except ValueError as error:
            raise UserError(
                f"schedule export: schedule {each.number}: {error}; autotune schedule remove {each.number}"
            ) from None
    return FORMS[form](schedules, folder, storage)


def _fields(schedule: Schedule) -> str:
    if schedule.cron:
        return schedule.cron
    assert schedule.every_s is not None
    return ASK_DAILY if schedule.every_s >= 2 * DAY_S else ASK_HOURLY


def _command(schedule: Schedule, program: str = "") -> str:
    return (
        f"{program or shlex.join([sys.executable, '-m', 'autotune.cli'])} retune {shlex.quote(schedule.study)} --if-due"
    )


def _name(schedule: Schedule, schedules: Sequence[Schedule]) -> str:
    """A name for the schedule: its study's, with its number where the study has several."""
    alone = sum(each.study == schedule.study for each in schedules) == 1
    return f"retune-{schedule.study}" if alone else f"retune-{schedule.study}-{schedule.number}"


def _where(storage: str | None) -> str:
    return "# AUTOTUNE_STORAGE must hold the database's URL where this runs\n" if storage else ""


def _cron(schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    lines = [
        f"# {each.study}: {each.when}; add with `crontab -e`\n{_fields(each)} {_in(folder, _command(each))}\n"
        for each in schedules
    ]
    return _where(storage) + "".join(lines)


def _in(folder: Path, command: str) -> str:
    # A crontab takes % for the end of the line.
    return f"cd {shlex.quote(str(folder))} && {command}".replace("%", "\\%")


def _slurm(schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    lines = [
        f"#SCRON --job-name={_name(each, schedules)}\n#SCRON --time=02:00:00\n#SCRON --chdir={folder}\n{_fields(each)} {_command(each)}\n"
        for each in schedules
    ]
    return (
        "# add with `scrontab -e`; partition, account and devices as your cluster wants them\n"
        + _where(storage)
        + "".join(lines)
    )


def _systemd(schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    parts = []
    for each in schedules:
        unit = f"autotune-{_name(each, schedules)}"
        hourly = "daily" if each.every_s and each.every_s >= 2 * DAY_S else "hourly"
        parts.append(
            f"# ~/.config/systemd/user/{unit}.service\n[Unit]\nDescription=Re-tune {each.study} if it is due ({each.when})\n\n"
            f"[Service]\nType=oneshot\nWorkingDirectory={folder}\nExecStart={_command(each)}\n"
            "# 3: a better configuration was put in place\nSuccessExitStatus=3\n\n"
            f"# ~/.config/systemd/user/{unit}.timer\n[Unit]\nDescription=Ask whether {each.study} is due\n\n"
            f"[Timer]\nOnCalendar={hourly}\nPersistent=true\n\n[Install]\nWantedBy=timers.target\n\n"
            f"# systemctl --user enable --now {unit}.timer\n"
        )
    return _where(storage) + "\n".join(parts)


def _k8s(schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    parts = [
        f"""apiVersion: batch/v1
kind: CronJob
metadata:
  name: {_name(each, schedules).lower().replace("_", "-").replace(".", "-")}
spec:
  schedule: "{_fields(each)}"
  concurrencyPolicy: Forbid
  jobTemplate:
    spec:
      backoffLimit: 0
      template:
        spec:
          restartPolicy: Never
          containers:
            - name: retune
              image: YOUR-IMAGE  # with autotune, torch and DeepSpeed
              workingDir: /work
              # 3 says that a better configuration was put in place, which is no failure
              command: ["sh", "-c", "{_command(each, "autotune")}; s=$?; [ $s -eq 3 ] || exit $s"]
              resources: {{limits: {{nvidia.com/gpu: 1}}}}
              volumeMounts: [{{name: work, mountPath: /work}}]
          volumes: [{{name: work, persistentVolumeClaim: {{claimName: YOUR-CLAIM}}}}]  # holds the studies folder
"""
        for each in schedules
    ]
    return _where(storage) + "---\n".join(parts)


def _github(schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    times = "\n".join(f'    - cron: "{fields}"' for fields in dict.fromkeys(map(_fields, schedules)))
    steps = "\n".join(
        f"      - name: {_name(each, schedules)}\n        run: |\n          {_command(each, 'autotune')}; s=$?\n"
        "          [ $s -eq 3 ] || exit $s"
        for each in schedules
    )
    return f"""# .github/workflows/retune.yml; the runner keeps its studies folder from run to run
name: retune
on:
  schedule:
{times}
concurrency: retune
jobs:
  retune:
    runs-on: [self-hosted, gpu]
    defaults: {{run: {{shell: "bash --noprofile --norc {{0}}", working-directory: {folder}}}}}
    steps:
{_where(storage).replace("#", "      #") if storage else ""}{steps}
"""


FORMS: dict[str, Callable[[Sequence[Schedule], Path, str | None], str]] = {
    "cron": _cron, "systemd": _systemd, "slurm": _slurm, "k8s": _k8s, "github": _github,
}  # fmt: skip
