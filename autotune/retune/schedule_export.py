"""Schedules written for cron, systemd and Kubernetes, which call `autotune retune STUDY --if-due`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.retune.schedule import Schedule

# How often the other scheduler asks where the rule is an interval; a run begins soon after it is due.
ASK_HOURLY, ASK_DAILY = "17 * * * *", "17 3 * * *"
DAY_S = 86400.0
PLAIN = re.compile(r"[\w./:@+=-]+")  # a word that needs no quotes


def export(form: str, schedules: Sequence[Schedule], folder: Path, storage: str | None) -> str:
    """The schedules in the form of another scheduler.

    Args:
        form: One of `FORMS`.
        schedules: The schedules, whose texts `Schedule.of` has checked.
        folder: Folder in which the commands run: the one above `studies`.
        storage: The database, unless it is the usual one. Its URL is left to the environment.

    Raises:
        UserError: There is no such form, or the folder's name cannot be written in it.
    """
    if form not in FORMS:
        raise UserError(f"schedule export: unknown form {form!r}. Known: {', '.join(FORMS)}")
    if not str(folder).isprintable():
        raise UserError(f"schedule export: {str(folder)!r} cannot be written into a schedule; move to another folder")
    where = "# AUTOTUNE_STORAGE must hold the database's URL where this runs\n" if storage else ""
    join, write = FORMS[form]
    return where + join.join(write(each, _name(each, schedules), str(folder)) for each in schedules)


def _asks_daily(schedule: Schedule) -> bool:
    return schedule.every_s is not None and schedule.every_s >= 2 * DAY_S


def _fields(schedule: Schedule) -> str:
    return schedule.cron or (ASK_DAILY if _asks_daily(schedule) else ASK_HOURLY)


def _command(schedule: Schedule) -> list[str]:
    return [sys.executable, "-m", "autotune.cli", "retune", schedule.study, "--if-due"]


def _name(schedule: Schedule, schedules: Sequence[Schedule]) -> str:
    """A name for the schedule: its study's, with its number where the study has several."""
    alone = sum(each.study == schedule.study for each in schedules) == 1
    return f"retune-{schedule.study}" if alone else f"retune-{schedule.study}-{schedule.number}"


def _cron(schedule: Schedule, _: str, folder: str) -> str:
    # A crontab ends a command at an unescaped %.
    command = f"cd {shlex.quote(folder)} && {shlex.join(_command(schedule))}".replace("%", "\\%")
    return f"# {schedule.study}: {schedule.when}; add with `crontab -e`\n{_fields(schedule)} {command}\n"


def _systemd(schedule: Schedule, name: str, folder: str) -> str:
    unit = f"autotune-{name}"
    # systemd escapes in quotes as JSON does, and expands % everywhere and $ in commands.
    words = (word if PLAIN.fullmatch(word) else json.dumps(word, ensure_ascii=False) for word in _command(schedule))
    command = " ".join(words).replace("%", "%%").replace("$", "$$")
    return (
        f"# ~/.config/systemd/user/{unit}.service\n"
        f"[Unit]\nDescription=Re-tune {schedule.study} if it is due ({schedule.when})\n\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={folder.replace('%', '%%')}\nExecStart={command}\n"
        "# 3: a better configuration was put in place\nSuccessExitStatus=3\n\n"
        f"# ~/.config/systemd/user/{unit}.timer\n[Unit]\nDescription=Ask whether {schedule.study} is due\n\n"
        f"[Timer]\nOnCalendar={'daily' if _asks_daily(schedule) else 'hourly'}\nPersistent=true\n\n"
        f"[Install]\nWantedBy=timers.target\n\n# systemctl --user enable --now {unit}.timer\n"
    )


def _kubernetes(schedule: Schedule, name: str, _: str) -> str:
    retune = f"{shlex.join(['autotune', 'retune', schedule.study, '--if-due'])}; s=$?; [ $s -eq 3 ] || exit $s"
    return f"""apiVersion: batch/v1
kind: CronJob
metadata:
  name: {name.lower().replace("_", "-").replace(".", "-")}
spec:
  schedule: {json.dumps(_fields(schedule))}
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
              command: ["sh", "-c", {json.dumps(retune)}]
              resources: {{limits: {{nvidia.com/gpu: 1}}}}
              volumeMounts: [{{name: work, mountPath: /work}}]
          volumes: [{{name: work, persistentVolumeClaim: {{claimName: YOUR-CLAIM}}}}]  # holds the studies folder
"""


# By form: the text between two schedules, and what writes one of them (schedule, name, folder).
FORMS: dict[str, tuple[str, Callable[[Schedule, str, str], str]]] = {
    "cron": ("", _cron), "systemd": ("\n", _systemd), "k8s": ("---\n", _kubernetes),
}  # fmt: skip
