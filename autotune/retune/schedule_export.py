"""Schedules written for cron, systemd and Kubernetes, which call `autotune retune STUDY --if-due`."""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from apscheduler.triggers.cron import CronTrigger

from autotune.errors import UserError
from autotune.executors.kubernetes import carried, object_name, pod
from autotune.retune.schedule import Schedule, weekdays

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_OF_A_COMMAND = 998  # characters that Debian's cron takes; others take more
# Folder of the container; characters of a CronJob's name, to whose runs Kubernetes gives longer ones.
MOUNTED_AT, MOST_OF_A_NAME = "/project", 52
LAST = (59, 23, 31, 12)  # values of a crontab's fields before the weekday
PLAIN = re.compile(r"[\w./:@+=-]+")  # a word that needs no quotes
# Variables that the command needs on this machine beside those that change measurements; another scheduler does not set them.
NEEDED = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip


def export(
    form: str, schedules: Sequence[Schedule], folder: Path, storage: str | None, n_gpus: Mapping[str, int] | None = None
) -> str:
    """The schedules in the form of another scheduler.

    Args:
        form: One of `FORMS`.
        schedules: The schedules, whose texts `Schedule.of` has checked.
        folder: Folder in which the commands run: the one above `studies`.
        storage: The database, unless it is the usual one. Its URL is left to the environment.
        n_gpus: GPUs that the trials of a study need, by study; none of those left out.

    Raises:
        UserError: The folder's name cannot be written in it.
    """
    if not str(folder).isprintable():
        raise UserError(f"schedule export: {str(folder)!r} cannot be written into a schedule; move to another folder")
    where = "# AUTOTUNE_STORAGE must hold the database's URL where this runs\n" if storage else ""
    join, write = FORMS[form]
    texts = [
        # The number first: a long study's name is cut, and two may differ in what an object's name cannot hold.
        write(Job(each, f"retune-{each.number}-{each.study}", str(folder), (n_gpus or {}).get(each.study, 0)))
        for each in schedules
    ]
    return where + join.join(texts)


class Job(NamedTuple):
    """A schedule to be written."""

    schedule: Schedule
    name: str
    folder: str
    n_gpus: int

    @property
    def fields(self) -> str:
        """When the other scheduler asks whether the study is due, as fields of a crontab; soon after it is due."""
        every_s = self.schedule.every_s
        if every_s is None:
            return _plain_fields(self.schedule.cron or "* * * * *")
        if every_s < HOUR_S:
            return f"*/{int(every_s // 60)} * * * *"
        return "17 3 * * *" if every_s >= 2 * DAY_S else "17 * * * *"

    @property
    def on_calendar(self) -> str:
        """The same in the words of systemd; a cron rule is asked for every 5 minutes."""
        every_s = self.schedule.every_s
        if every_s is None or every_s < HOUR_S:
            return f"*:0/{int(every_s // 60) if every_s else 5}"
        return "daily" if every_s >= 2 * DAY_S else "hourly"

    @property
    def command(self) -> list[str]:
        """The command that re-tunes if it is due."""
        return [sys.executable, "-m", "autotune", "retune", self.schedule.study, "--if-due"]


def time_zone() -> str:
    """The local time zone, in which the fields of a crontab count."""
    return str(CronTrigger.from_crontab("0 0 * * *").timezone)


def _environment() -> dict[str, str]:
    """The variables of this environment that the command needs."""
    found = {name: os.environ[name] for name in NEEDED if name in os.environ} | carried()
    found = {name: value for name, value in found.items() if value.isprintable()}
    if "PATH" in found:  # shells that start shells repeat folders
        found["PATH"] = os.pathsep.join(dict.fromkeys(found["PATH"].split(os.pathsep)))
    return found


def _plain_fields(cron: str) -> str:
    """A rule as every cron reads it: Kubernetes knows no weekday 7, and none but APScheduler the last day of a month.

    It may fire more often than the rule: `--if-due` waits for the right day.
    """
    *fields, _ = cron.split()
    minute, hour, day, month = (
        re.sub(r"(?<![\d-])(\d+)/", rf"\1-{last}/", field) for field, last in zip(fields, LAST, strict=True)
    )
    allowed = weekdays(cron)
    weekday = "*" if len(allowed) == 7 else ",".join(map(str, allowed))
    return " ".join([minute, hour, "*" if "last" in day.lower() else day, month, weekday])


def _cron(job: Job) -> str:
    variables = [f"{name}={value}" for name, value in _environment().items()]
    # A crontab ends a command at an unescaped %.
    command = f"cd {shlex.quote(job.folder)} && {shlex.join(['env', *variables, *job.command])}".replace("%", "\\%")
    if len(command) > MOST_OF_A_COMMAND:
        raise UserError(
            f"schedule export: the command has {len(command)} characters with this PATH, and cron takes at most"
            f" {MOST_OF_A_COMMAND}; leave folders out of PATH, or use --systemd or `autotune schedule run`"
        )
    where = f"times are those of {time_zone()}"
    return f"# {job.schedule.study}: {job.schedule.when}; {where}; add with `crontab -e`\n{job.fields} {command}\n"


def _systemd(job: Job) -> str:
    unit, study = f"autotune-{job.name}", job.schedule.study
    # systemd escapes in quotes as JSON does, and expands % everywhere and $ in commands.
    words = (word if PLAIN.fullmatch(word) else json.dumps(word, ensure_ascii=False) for word in job.command)
    command = " ".join(words).replace("%", "%%").replace("$", "$$")
    variables = "".join(
        f"Environment={json.dumps(f'{name}={value}', ensure_ascii=False).replace('%', '%%')}\n"
        for name, value in _environment().items()
    )
    return (
        f"# ~/.config/systemd/user/{unit}.service\n"
        f"[Unit]\nDescription=Re-tune {study} if it is due ({job.schedule.when}, {time_zone()})\n\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={job.folder.replace('%', '%%')}\n{variables}ExecStart={command}\n"
        "# 3: a better configuration was put in place\nSuccessExitStatus=3\n\n"
        f"# ~/.config/systemd/user/{unit}.timer\n[Unit]\nDescription=Ask whether {study} is due\n\n"
        f"[Timer]\nOnCalendar={job.on_calendar}\nPersistent=true\n\n"
        f"[Install]\nWantedBy=timers.target\n\n# systemctl --user enable --now {unit}.timer\n"
    )


def _kubernetes(job: Job) -> str:
    retune = f"{shlex.join(['autotune', 'retune', job.schedule.study, '--if-due'])}; s=$?; [ $s -eq 3 ] || exit $s"
    # The image has its own PATH; kernels and profiles are kept on the volume.
    kept = carried() | {"AUTOTUNE_CACHE": f"{MOUNTED_AT}/.cache/autotune"}
    container: dict[str, Any] = {
        "name": "retune",
        "image": "YOUR-IMAGE",
        "command": ["sh", "-c", retune],
        "env": [{"name": name, "value": value} for name, value in kept.items()],
    }
    container |= {"resources": {"limits": {"nvidia.com/gpu": job.n_gpus}}} if job.n_gpus else {}
    template = {"spec": pod(container, MOUNTED_AT, "YOUR-CLAIM")}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": object_name(job.name, MOST_OF_A_NAME)},
        "spec": {
            "schedule": job.fields,
            "timeZone": time_zone(),
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {"spec": {"backoffLimit": 0, "template": template}},
        },
    }
    return (
        "# YOUR-IMAGE: with autotune, torch and DeepSpeed. YOUR-CLAIM: the volume that holds the studies folder.\n"
        "# Exit status 3 says that a better configuration was put in place, which is no failure.\n"
        + yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=math.inf)
    )


# By form: the text between two schedules, and what writes one of them.
FORMS: dict[str, tuple[str, Callable[[Job], str]]] = {
    "cron": ("", _cron), "systemd": ("\n", _systemd), "k8s": ("---\n", _kubernetes),
}  # fmt: skip
