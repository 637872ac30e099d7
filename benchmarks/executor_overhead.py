"""What each engine costs a 2-rank trial beyond the trial itself: local, Slurm, Ray and ssh, interleaved, on the loopback of one machine.

`engine_s` is the time from giving a trial to the engine until its result is there, less the time that its ranks ran; `beyond_steps_s` less
its training steps only, so that the start of the ranks counts too. `first_s` is the first trial of a study, which waits until the machines
are there and have imported torch. `python benchmarks/executor_overhead.py [ROUNDS]`; engines that are not installed are left out, aloud.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from clusters import ray_cluster, slurm, two_hosts, why_no_hosts, why_no_ray, why_no_slurm

from autotune.candidate import Candidate
from autotune.executors import base
from autotune.executors.agents import AgentExecutor, settings_for
from autotune.executors.base import Executor
from autotune.executors.hosts import Hosts
from autotune.executors.local import LocalExecutor
from autotune.executors.ray import Ray
from autotune.executors.slurm import Slurm
from autotune.spec import read_hostfile
from autotune.trial import Outcome, TrialRequest

TARGET = Path(__file__).parent.parent / "studies" / "code-gpt" / "model.py"
STEPS = 7
TARGETS_S = {"local": 0.6, "slurm": 3.0, "ray": 3.0}


def trial_of(executor: Executor, folder: Path, nodes: int) -> dict[str, float]:
    candidate = Candidate(micro_batch_size=8, zero_stage=1)
    request = TrialRequest(
        target=str(TARGET), candidate=candidate.values(), ds_config=candidate.to_deepspeed(), world_size=2, nodes=nodes, max_steps=STEPS,
        budget_s=1e6,
    )  # fmt: skip
    start = time.perf_counter()
    result = base.run(executor, folder, request)
    wall = time.perf_counter() - start
    assert result.outcome is Outcome.COMPLETE, result.reason
    return {"engine_s": wall - result.wall_s, "beyond_steps_s": wall - sum(result.step_times_s)}


@contextlib.contextmanager
def engines(root: Path) -> Iterator[dict[str, tuple[Executor, int]]]:
    """Every engine that is installed here, and the machines of a trial on it."""
    settings = settings_for(["torch"], {}, 600.0)
    with contextlib.ExitStack() as stack:
        found: dict[str, tuple[Executor, int]] = {"local": (LocalExecutor(["torch"], root / "server.log"), 1)}
        for name, why in (("slurm", why_no_slurm()), ("ray", why_no_ray()), ("ssh", why_no_hosts())):
            if why:
                print(f"left out: {name}: {why}", file=sys.stderr)
        if not why_no_slurm():
            stack.enter_context(slurm(root / "slurm"))
            found["slurm"] = AgentExecutor(Slurm({}, 1, "autotune-benchmark"), root / "slurm-agents", settings, 2), 2
        if not why_no_ray():
            stack.enter_context(ray_cluster())
            found["ray"] = AgentExecutor(Ray({}, 1), root / "ray-agents", settings, 2), 2
            found["ray, files by ray"] = AgentExecutor(Ray({"files": "ray"}, 1), root / "ray-files", settings, 2), 2
        if not why_no_hosts():
            hosts = stack.enter_context(two_hosts(root / "hosts"))
            engine = Hosts({"ssh": hosts.ssh, "address": "10.203.0.1"}, list(read_hostfile(hosts.hostfile)))
            found["ssh"] = AgentExecutor(engine, root / "ssh-agents", settings, 2), 2
        yield found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, engines(Path(name)) as found:
        # One Ray group fits the cluster at a time, so the two ways of carrying files are measured one after the other.
        for part in ([name for name in found if "files" not in name], [name for name in found if "files" in name]):
            taken: dict[str, list[dict[str, float]]] = {engine: [] for engine in part}
            try:
                for number in range(rounds + 1):
                    for engine in part:
                        executor, nodes = found[engine]
                        if number == 0:
                            executor.start()
                        taken[engine].append(trial_of(executor, Path(name) / f"{engine}-{number}", nodes))
            finally:
                for engine in part:
                    found[engine][0].close()
            for engine, trials in taken.items():
                figures[engine] = {"first_s": trials[0]["engine_s"]}
                figures[engine] |= {key: statistics.median(each[key] for each in trials[1:]) for key in trials[0]}
                figures[engine]["rounds"] = trials[1:]
    targets = {
        engine: {"wanted_s": wanted, "met": figures[engine]["engine_s"] < wanted}
        for engine, wanted in TARGETS_S.items()
        if engine in figures
    }
    write("executor_overhead", {"engines": figures, "targets": targets})


if __name__ == "__main__":
    main()
