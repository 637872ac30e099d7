"""Do projections to more ranks and over slower links come true?

`python benchmarks/project.py [--rounds 3] [--rate 1gbit] [--rows FILE]` measures configurations of code-gpt on 1 and 2
ranks, learns from these, projects to 4 ranks on this machine and, as root where iproute2 is there, to two "nodes"
(network namespaces joined by a link that `tc` holds to a bandwidth) of one and of two ranks each, and measures those
too. With `--rows` measurements are kept there, and those of earlier calls count too; `--rounds 0` measures nothing
more.

What is compared. The step time of a configuration on the target against what `autotune project` makes of the trials on
1 and 2 ranks and of the stated links; no trial on the target is learned from. This machine's ranks share its cores, as
devices do not: four ranks on two cores compute half as fast each, and so what a device computes on the target is what
it computes here times cores over ranks. On a cluster a device computes like one here, and that step falls away. The
links within a node are stated as the one-second measurement of rates finds them there, which trains nothing; the link
between nodes as it was shaped, its latency as a one-kilobyte all-reduce finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, complete, request_of, write
from scipy.stats import kendalltau

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.forecast.cluster import Cluster, Projector
from autotune.forecast.predictor import ForecastInputs, Predictor
from autotune.space.candidate import Candidate
from autotune.study.setup.forecasts import foresee_workload
from autotune.study.spec.spec import StudySpec
from autotune.trial.folder import TrialDir, read_record
from autotune.trial.profile import Machine
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

TARGET = ROOT / "studies" / "code-gpt" / "study.yaml"
STEPS = 8
CANDIDATES = [
    Candidate.of({"micro_batch_size": micro, "zero_stage": stage, **more})
    for micro, stage, more in (
        (2, 0, {}), (8, 0, {}), (4, 1, {}), (2, 1, {"gradient_accumulation_steps": 4}),
        (2, 2, {"gradient_accumulation_steps": 3}), (4, 3, {}), (4, 1, {"precision": "bf16"}),
        (8, 2, {"precision": "bf16"}), (4, 1, {"precision": "torch_autocast"}), (4, 1, {"checkpoint_every": 1}),
        (4, 2, {"zero_optimization.reduce_bucket_size": 65536}), (2, 3, {"gradient_accumulation_steps": 2}),
    )
]  # fmt: skip


class Place(NamedTuple):
    """Somewhere to measure: ranks, and how many of them are on a node (0: all on this machine, as it is)."""

    name: str
    ranks: int
    per_node: int = 0


SOURCES = (Place("1 rank", 1), Place("2 ranks", 2))
HERE = Place("4 ranks", 4)
NODES = (Place("2 nodes of 1", 2, 1), Place("2 nodes of 2", 4, 2))


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def nodes(rate: str) -> Iterator[None]:
    """Two network namespaces, joined by a link of that bandwidth each way."""
    names = ["autotune-node0", "autotune-node1"]
    try:
        for name in names:
            run(f"ip netns add {name}")
        run(f"ip link add atnode0 netns {names[0]} type veth peer name atnode1 netns {names[1]}")
        for n, name in enumerate(names):
            run(f"ip -n {name} addr add 10.231.7.{n + 1}/24 dev atnode{n}")
            for device in ("lo", f"atnode{n}"):
                run(f"ip -n {name} link set {device} up")
            # A deep queue: what waits must not be dropped, or TCP's recovery would be measured.
            run(f"tc -n {name} qdisc replace dev atnode{n} root tbf rate {rate} burst 256kb limit 64mb")
        yield
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                run(f"ip netns del {name}")


def can_shape() -> str:
    """Why links cannot be shaped here; empty if they can."""
    if os.geteuid() != 0:
        return "not root"
    try:
        with nodes("1gbit"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", "") or error).strip()


class Rig:
    """One server for each place, since where ranks go is said before it forks them."""

    def __init__(self, folder: Path, foreseen: ForecastInputs, spec: StudySpec) -> None:
        self.folder, self.foreseen, self.spec = folder, foreseen, spec
        self.n = itertools.count()
        self._executors: dict[int, LocalExecutor] = {}

    def executor(self, place: Place) -> LocalExecutor:
        if place.per_node not in self._executors:
            paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            own = {"OMP_NUM_THREADS": "1", "AUTOTUNE_RANKS_PER_NODE": str(place.per_node), "PYTHONPATH": paths}
            log = self.folder / f"server{place.per_node}.log"
            self._executors[place.per_node] = LocalExecutor(["torch", "project_nodes"], log, own)
        return self._executors[place.per_node]

    def step_s(self, place: Place, candidate: Candidate) -> float | None:
        config = candidate.to_deepspeed(self.foreseen.base_config)
        request = request_of(
            self.spec.target, candidate, ds_config=config, world_size=place.ranks, max_steps=STEPS, deadline_s=60.0
        )
        result = base.run(self.executor(place), self.folder / f"{next(self.n):04d}", request)
        if result.outcome is not Outcome.COMPLETE or result.steps is None:
            print(f"{place.name}: {candidate.describe()}: {result.outcome} {result.reason}", file=sys.stderr)
            return None
        return result.steps.median_s

    def rates(self, place: Place) -> Machine:
        path = self.folder / f"rates-{next(self.n)}"
        complete(self.executor(place), path, TrialRequest(target="", mode="rates", world_size=place.ranks))
        return read_record(TrialDir(path).machine, Machine)

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()


def rate_bytes(rate: str) -> float:
    units = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
    unit = next(name for name in units if rate.endswith(name))
    return float(rate.removesuffix(unit)) * units[unit]


def shared(alone: Machine, there: Machine, ranks: int) -> Machine:
    """The machine as one of so many ranks has it that share its cores; links as they were found with as many."""
    share = min(1.0, len(os.sched_getaffinity(0)) / ranks)
    names = ("memory_bytes_per_s", "host_bytes_per_s", "optimizer_bytes_per_s")
    rates = {name: share * rate for name in names if (rate := getattr(alone, name)) is not None}
    waits = {name: seconds / share for name in ("op_s", "launch_s") if (seconds := getattr(alone, name)) is not None}
    return replace(there, flops={name: share * rate for name, rate in alone.flops.items()}, **rates, **waits)


def projected(
    foreseen: ForecastInputs, learned: Predictor, machines: dict[str, Machine], place: Place, rate: float
) -> dict[Candidate, tuple[float, ...]]:
    """Step times with their intervals that `autotune project` says for a place."""
    there = machines[place.name]
    flat = machines[HERE.name if place.ranks == HERE.ranks else SOURCES[1].name]
    flat = shared(machines[SOURCES[1].name], flat, place.ranks)
    cluster = Cluster(
        devices=place.ranks, per_node=place.per_node or place.ranks, intra_bytes_per_s=flat.link_bytes_per_s,
        intra_latency_s=flat.link_alpha_s, inter_bytes_per_s=rate, inter_latency_s=there.link_alpha_s,
    )  # fmt: skip
    # What a device computes there; see above.
    projector = Projector(learned, cluster, replace(foreseen, machine=flat, world_size=place.ranks))
    said = {candidate: projector.one(candidate, place.ranks).step_time_s for candidate in CANDIDATES}
    return {candidate: (term.value, term.low, term.high) for candidate, term in said.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="1gbit", help="of the link between nodes, as tc takes it")
    parser.add_argument("--rows", type=Path, help="where measurements are kept")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    spec = StudySpec.load(TARGET, {"ranks": 2})
    foreseen = foresee_workload(spec)
    why_not = can_shape()
    places = [*SOURCES, HERE, *([] if why_not else NODES)]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        if not why_not:
            stack.enter_context(nodes(arguments.rate))
        rows = arguments.rows or Path(name) / "rows.jsonl"
        rows.touch()
        rig = Rig(Path(name), foreseen, spec)
        stack.callback(rig.close)
        for number in range(arguments.rounds):
            for place in places:
                keep(rows, place, machine=asdict(rig.rates(place)))
            for candidate, place in itertools.product(CANDIDATES, places):
                step = rig.step_s(place, candidate)
                keep(rows, place, candidate=candidate.values(), step_s=step)
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        kept = [json.loads(line) for line in rows.read_text().splitlines()]
    told = figures(kept, foreseen, rate_bytes(arguments.rate))
    write("project", {"rate": arguments.rate, "nodes_not_run": why_not, **told})


def keep(rows: Path, place: Place, **what: Any) -> None:
    rows.parent.mkdir(parents=True, exist_ok=True)
    with rows.open("a") as file:
        file.write(json.dumps({"place": place.name, **what}) + "\n")


def figures(rows: list[dict[str, Any]], foreseen: ForecastInputs, rate: float) -> dict[str, Any]:
    """What was projected beside what was measured, of the medians over the rounds."""
    steps: dict[str, dict[Candidate, list[float]]] = {}
    seen: dict[str, list[Machine]] = {}
    for row in rows:
        if "machine" in row:
            seen.setdefault(row["place"], []).append(Machine(**row["machine"]))
        elif row["step_s"] is not None:
            steps.setdefault(row["place"], {}).setdefault(Candidate.of(row["candidate"]), []).append(row["step_s"])
    machines = {name: typical(some) for name, some in seen.items()}
    medians = {name: {c: statistics.median(some) for c, some in row.items()} for name, row in steps.items()}
    learned = Predictor(foreseen.profile, machines["2 ranks"], foreseen.base_config)
    for place in SOURCES:
        for candidate, step in medians[place.name].items():
            learned.learn(candidate, peak_memory_bytes=None, step_time_s=step, machine=machines[place.name])
    found: dict[str, Any] = {"rounds": max(len(some) for row in steps.values() for some in row.values())}
    for place in (HERE, *NODES):
        if place.name in medians:
            found[place.name] = compared(medians[place.name], projected(foreseen, learned, machines, place, rate))
    links = {name: {"alpha_s": m.link_alpha_s, "bytes_per_s": m.link_bytes_per_s} for name, m in machines.items()}
    sources = {place.name: {c.describe(): step for c, step in medians[place.name].items()} for place in SOURCES}
    found |= {"links": links, "sources": sources}
    return found


def typical(machines: list[Machine]) -> Machine:
    """The medians of several measurements of one machine."""
    first = asdict(machines[0])
    numbers = [name for name, value in first.items() if isinstance(value, float)]
    middle = {name: statistics.median(getattr(machine, name) for machine in machines) for name in numbers}
    flops = {name: statistics.median(machine.flops[name] for machine in machines) for name in first["flops"]}
    return replace(machines[0], **middle, flops=flops)


def compared(real: dict[Candidate, float], said: dict[Candidate, tuple[float, ...]]) -> dict[str, Any]:
    pairs = [(said[c], step) for c, step in real.items()]
    off = sorted(abs(value / step - 1) for (value, _, _), step in pairs)
    return {
        "kendall_tau": float(kendalltau([value for (value, _, _), _ in pairs], [step for _, step in pairs]).statistic),
        "error_median": statistics.median(off), "error_highest": off[-1],
        "within_15_percent": statistics.mean(each <= 0.15 for each in off),
        "interval_90_holds": statistics.mean(low <= step <= high for (_, low, high), step in pairs),
        "configurations": {c.describe(): {"projected_s": said[c][0], "measured_s": step} for c, step in real.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
