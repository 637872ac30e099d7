"""The command `predict`: forecast memory, step time and throughput of one configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from autotune.cli.options import AsJson, Target, option, read_settings, takes_settings
from autotune.cli.terminal import fitted


@takes_settings(
    "ranks", "device_memory_bytes", "max_length", "base_config", "name",
    ranks="Ranks, also more than this machine has.", device_memory_bytes="Memory of a device.",
    name="Study whose trials correct the forecast.",
)  # fmt: skip
def predict(
    target: Target,
    settings: Mapping[str, Any],
    knobs: Annotated[list[str] | None, option("KEY=VALUE", "A knob, over the baseline's value.", "--set")] = None,
    *,
    gpus: Annotated[
        str | None,
        option("8xH100", "Devices to answer for, by their data sheet, in place of this machine's.", "--device"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print memory, step time and throughput of a configuration, each with its interval, and what binds."""
    from autotune.report.progress import ProgressView

    with ProgressView() as view:
        view.opening(target)
        from autotune.advise.devices import read_devices
        from autotune.study.setup.capture import wanted_study
        from autotune.study.setup.forecasts import check_named, foresee
        from autotune.study.setup.request import studies_folder

        wanted, _ = wanted_study(target, settings, view)
        on = read_devices(gpus, "--device") if gpus is not None else None
        studies = studies_folder(Path(target))
        check_named(settings.get("name"), studies)
        answer = foresee(wanted, read_settings(knobs or ()), studies, view, on)
    print(json.dumps(answer.to_data(), indent=1) if as_json else fitted(str(answer)))
