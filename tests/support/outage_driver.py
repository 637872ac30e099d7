"""The driver of a study whose machines and database are taken away: `support/outages.py` starts it and strikes.

`python outage_driver.py FOLDER`, where `driver.json` in the folder names engine, options, nodes and database. The loop, the engine,
its agents and the database are real; what is planned on and what ranks do is made up.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from autotune.errors import UserError
from autotune.executors import base, cluster, pods
from autotune.executors.cluster import ClusterExecutor, Engine, settings_for
from autotune.executors.ray import Ray
from autotune.executors.slurm import Slurm
from autotune.executors.ssh import Hosts
from autotune.study.events import Event, Kind
from autotune.study.runner import Runner
from autotune.study.storage.database import failing_in_words, open_storage
from autotune.study.storage.leases import StudyLeases
from autotune.system.signals import terminable
from support.instant import Watcher, plan_of, spec_of

SPACE = {"micro_batch_size": [2, 4, 8, 16], "gradient_accumulation_steps": [1, 2], "checkpoint_every": [0, 1]}
PATIENCE_S = 90.0


class Said(Watcher):
    """Prints what the study says."""

    def emit(self, event: Event) -> None:
        if event.kind is Kind.NOTE:
            print(event.text, flush=True)


def engine_of(given: dict[str, Any]) -> Engine:
    match given["engine"]:
        case "slurm":
            return Slurm(given["options"], given["nodes"], "autotune-outages")
        case "kubernetes":
            os.environ |= {pods.BOARD: given["board"], pods.MACHINES: "2"}
            return pods.Pods(given["options"])
        case "ray":
            return Ray(given["options"], 1)
        case _:
            return Hosts(given["options"], given["hosts"])


def run(folder: Path, given: dict[str, Any]) -> None:
    """Runs the study to its end.

    Raises:
        UserError: It cannot go on.
    """
    base.RETRY_S, cluster.ASK_S = (0.3, 1.0), 0.3  # an outage here lasts seconds
    spec = spec_of(
        space=[SPACE], trials=given["trials"], finalists=0, stop_trials=False, stop_below=0, global_batch="free",
        objectives=["latency", "throughput"],
    )  # fmt: skip
    plan = replace(plan_of(spec), world_size=given["nodes"])
    plan = replace(plan, spec=spec.model_copy(update={"nodes": given["nodes"], "ranks": given["nodes"]}))
    held = StudyLeases(open_storage(given["url"]), spec.name)
    held.storage.patience_s = PATIENCE_S
    settings, said = settings_for([], {}, 60.0), Said()
    agents = folder / "s" / "trials" / "agents"
    executor = ClusterExecutor(engine_of(given), agents, settings, given["nodes"], patience_s=PATIENCE_S)
    executor.on_queue = said.say
    try:
        executor.start()
        with held.leading(said.say):
            Runner(plan, executor, folder / "s", held, said).run()
    finally:
        executor.close()


def main() -> int:
    faulthandler.register(signal.SIGUSR1)
    folder = Path(sys.argv[1])
    given = json.loads((folder / "driver.json").read_text())
    try:
        with failing_in_words(given["url"]), terminable():
            run(folder, given)
    except UserError as error:
        print(f"autotune: {error}", flush=True)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
