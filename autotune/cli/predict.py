"""`autotune predict`: forecast memory, step time and throughput of one configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.report.progress import ProgressView
from autotune.space.deepspeed import Scalar, check_plain
from autotune.study.setup.capture import wanted_study
from autotune.study.setup.forecasts import foresee
from autotune.study.setup.plan import studies_folder
from autotune.study.spec.yaml_file import read_value


def predict(target: str, overrides: Mapping[str, Any], settings: Sequence[str], *, as_json: bool) -> int:
    """`autotune predict`: memory, step time and throughput of a configuration, each with its interval, and what binds.

    Args:
        target: A `model.py`, a training script, a `study.yaml`, or a launch command.
        overrides: Fields of `StudySpec` that go before those of the file; None where nothing is said.
        settings: The configuration as KEY=VALUE, over the baseline's.
        as_json: Print JSON.

    Returns:
        Exit status 0.

    Raises:
        UserError: A knob or value is wrong, or the configuration cannot run here.
    """
    with ProgressView() as view:
        answer = foresee(
            wanted_study(target, overrides, view)[0], read_settings(settings), studies_folder(Path(target)), view
        )
    print(json.dumps(answer.to_data(), indent=1) if as_json else "\n".join(answer.lines()))
    return 0


def read_settings(settings: Sequence[str]) -> dict[str, Scalar]:
    """Knobs from KEY=VALUE texts.

    Raises:
        UserError: One is none.
    """
    found: dict[str, Scalar] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"--set {text}: KEY=VALUE is needed, as in --set zero_stage=3")
        read = read_value(value)
        if not isinstance(read, str | int | float | bool | None):
            raise UserError(f"--set {text}: a plain value is needed, not {value!r}, as in --set zero_stage=3")
        check_plain(read, f"--set {name}")
        found[name.strip()] = read
    return found
