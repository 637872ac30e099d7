"""The engine for Ray: a placement group holds the machines, and an actor on each runs the agent.

If the machines share no file system with the coordinator, the actors copy the files.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import Unavailable, UserError
from autotune.executors.base import Status
from autotune.executors.cluster import Engine, JobState, Refused
from autotune.executors.node_agent import Settings, Spool, key_of
from autotune.executors.options import is_usual, number
from autotune.executors.ray_machine import ANSWER_TIMEOUT_S, NEVER_STARTED, Machine, stamp
from autotune.system import files
from autotune.trial.folder import TrialDir, read_record
from autotune.trial.request import TrialRequest
from autotune.trial.target import sources

OPTIONS = {
    "address": "the cluster's address, as HOST:PORT (default: RAY_ADDRESS, else the cluster that runs on this machine)",
    "cpus_per_rank": "processors that Ray sets aside for a rank (default: 1)",
    "gpus_per_rank": "GPUs of a rank (default: 1 where the cluster has any)",
    "resources": "resources of the cluster's own for each rank, as NAME:AMOUNT,NAME:AMOUNT",
    "exclusive": "yes (default) or no: machines that no other job of Ray uses meanwhile",
    "grow": "yes: wait for machines that its autoscaler may add; no (default): fail at once if there are too few",
    "files": "auto (default): use a shared file system where there is one; ray: have Ray carry all files",
    "idle": "seconds after which machines whose coordinator is gone are given back (default: 600)",
}
NAMESPACE = "autotune"
EXCHANGE_S = 0.2
# Files that the coordinator, or one machine, writes for all machines.
FOR_ALL = ("request.json", "ds_config.json", "job.json", "cancel", "master.json")


class Ray(Engine):
    """The engine of `--executor ray`.

    Args:
        ranks_per_node: Ranks on each machine; None for one per GPU.
    """

    name = "ray"

    def __init__(self, options: dict[str, str], ranks_per_node: int | None) -> None:
        self.options, self.ranks_per_node = options, ranks_per_node
        self._exclusive, self._shares = is_usual(options, "exclusive"), is_usual(options, "files", "auto", "ray")
        self._waits = not is_usual(options, "grow", "no", "yes")
        self._groups: dict[str, _Group] = {}

    def check(self, nodes: int) -> None:
        """Connects to the cluster."""
        try:
            import ray
        except ImportError:
            raise UserError("--executor ray: Ray is not installed here; pip install ray") from None
        if ray.is_initialized():
            return
        address = self.options.get("address") or os.environ.get("RAY_ADDRESS") or "auto"
        _check_listens(address)
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises many kinds
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Unavailable(f"--executor ray: no cluster answers at {address!r}: {said}") from None

    def launch(self, spool: Spool, nodes: int) -> str:
        """Requests a placement group and starts an agent on each of its machines; returns the group's name.

        Raises:
            Refused: The cluster has too few machines with the needed resources.
            Unavailable: No cluster answers any more.
        """
        self.check(nodes)  # the cluster may be another one by now
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        fit = [
            node
            for node in ray.nodes()
            if node["Alive"] and all(node["Resources"].get(k, 0) >= v for k, v in bundle.items())
        ]
        if len(fit) < nodes and not self._waits:
            what = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            raise Refused(f"{nodes} machines with {what} are needed, and the cluster has {len(fit)}")
        bundle = self._whole(bundle, fit)
        name = f"autotune-{uuid.uuid4().hex[:12]}"
        group = placement_group(
            [bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK", name=name, lifetime="detached"
        )
        settings = read_record(spool.settings, Settings)
        paths = {"PYTHONPATH": settings.exported["PYTHONPATH"]} if "PYTHONPATH" in settings.exported else {}
        actors = []
        for node in range(nodes):
            options = {
                "name": f"{name}-{node}", "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": 0,
                "max_concurrency": 8, "num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0),
                "runtime_env": {"env_vars": paths},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
            }  # fmt: skip
            actors.append(ray.remote(Machine).options(**options).remote(name, node))
        address = actors[0].address.remote()
        data = json.loads(spool.settings.read_text())
        started = [actor.start.remote(str(spool.path), data, address, self._shares) for actor in actors]
        self._groups[name] = _Group(group, actors, started)
        return name

    def standing(self, job: str) -> JobState:
        """Returns the state of a placement group and its agents."""
        if not self._is_connected():
            return JobState(Status.TAKEN, f"ray: the head of the cluster is gone, and {job} with it")
        from ray.util import placement_group_table

        group = self._group(job)
        if group is None:
            return JobState(Status.TAKEN, f"ray: there is no placement group {job} any more")
        state = placement_group_table(group.group).get("state", "REMOVED")
        if state == "PENDING":
            return JobState(Status.QUEUED, f"ray: {job} waits for machines that others use")
        if state != "CREATED":
            return JobState(Status.TAKEN, f"ray: placement group {job} is {state.lower()}: a machine was lost")
        status, failure = group.failure()
        return JobState(status, f"ray: {failure}") if failure else JobState(Status.RUNNING)

    def end(self, job: str) -> None:
        """Stops the agents and gives the machines back."""
        group = self._group(job) if self._is_connected() else None
        self._groups.pop(job, None)
        if group is None:
            return
        import ray
        from ray.util import remove_placement_group

        with contextlib.suppress(Exception):  # an actor that does not answer is killed below
            ray.get(
                [actor.stop.remote() for actor in group.actors], timeout=ANSWER_TIMEOUT_S if group.is_started() else 0.1
            )
        for actor in group.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(group.group)

    def exchange(self, job: str, spool: Spool, folder: TrialDir) -> None:
        """Copies new files between the trial's folder and the machines without a shared file system."""
        import ray

        # Asked at every look at a trial, so that whether the head still listens is left to `standing`.
        group = self._group(job) if ray.is_initialized() else None
        if group is not None and group.is_started() and (apart := group.apart()):
            group.carry(spool, folder, apart)

    def _is_connected(self) -> bool:
        """Returns whether the cluster's head listens; disconnects if not, or Ray ends this process a minute later."""
        import ray

        if not ray.is_initialized():
            return False
        try:
            _check_listens(ray.get_runtime_context().gcs_address)
        except Unavailable:
            self._groups.clear()
            ray.shutdown()
            return False
        return True

    def _group(self, job: str) -> "_Group | None":
        """Returns the placement group of a job, which another process may have made; None if it is gone."""
        if job not in self._groups:
            import ray
            from ray.util import get_placement_group

            try:
                group = get_placement_group(job)
                actors = [ray.get_actor(f"{job}-{node}", NAMESPACE) for node in range(group.bundle_count)]
            except Exception:  # Ray raises several kinds if there is none
                return None
            self._groups[job] = _Group(group, actors, [actor.is_apart.remote() for actor in actors])
        return self._groups[job]

    def _bundle(self) -> dict[str, float]:
        """Returns the resources that each machine must have."""
        import ray

        gpus = [
            node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0)
        ]
        ranks = self.ranks_per_node or int(min(gpus, default=1))
        per_rank = {
            "CPU": number(self.options, "cpus_per_rank", 1.0),
            "GPU": number(self.options, "gpus_per_rank", 1.0 if gpus else 0.0),
        }
        for item in filter(None, self.options.get("resources", "").split(",")):
            name, _, amount = item.partition(":")
            per_rank[name] = number({"resources": amount}, "resources", 1.0)
        return {name: amount * ranks for name, amount in per_rank.items() if amount}

    def _whole(self, bundle: dict[str, float], fit: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Returns the resources with all processors of a machine, so that no other job of Ray shares it."""
        if not self._exclusive or not fit:
            return bundle
        return bundle | {"CPU": min(node["Resources"].get("CPU", 0.0) for node in fit)}


def _check_listens(address: str) -> None:
    """Refuses an address at which no cluster listens; Ray would try it for minutes, and then end the process.

    Raises:
        Unavailable: Nobody listens there, or the host is unknown.
        UserError: The address is one of Ray Client (`ray://`).
    """
    if address.startswith("ray://"):
        raise UserError(f"--executor ray: {address!r} is an address of Ray Client; give the head's as HOST:PORT")
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise Unavailable(f"--executor ray: no cluster answers at {address!r}: {why}; is its head running?") from None


class _Group:
    """The actors of a placement group and the calls under way on them."""

    def __init__(self, group: Any, actors: list[Any], started: list[Any]) -> None:
        self.group, self.actors, self._started = group, actors, started
        self._states: list[Any] = []
        self._apart: list[int] | None = None
        self._carried: dict[tuple[int, Path], tuple[int, int]] = {}
        self._carried_at = 0.0

    def is_started(self) -> bool:
        """Returns whether every agent has started or failed to."""
        import ray

        return len(ray.wait(self._started, num_returns=len(self._started), timeout=0)[0]) == len(self._started)

    def apart(self) -> list[int]:
        """Returns the machines that share no file system with this one."""
        import ray

        if self._apart is None:
            try:
                self._apart = [node for node, is_apart in enumerate(ray.get(self._started)) if is_apart]
            except ray.exceptions.RayError:
                return []
        return self._apart

    def failure(self) -> tuple[Status, str]:
        """Returns why an agent ended, `lost` by itself or `taken` with its machine; the text is empty while all run.

        It does not wait, so that the answer may be a call late.
        """
        import ray

        waiting = self._states or self._started
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in done:
            try:
                said = ray.get(reference)
            except ray.exceptions.RayError as error:
                gone = isinstance(error, ray.exceptions.RayActorError)  # with its process or its machine
                return Status.TAKEN if gone else Status.LOST, " ".join(str(error).split())[:300]
            if isinstance(said, str) and said:
                return Status.TAKEN if said == NEVER_STARTED else Status.LOST, said
        if len(done) == len(waiting):
            self._states = [actor.state.remote() for actor in self.actors]
        return Status.RUNNING, ""

    def carry(self, spool: Spool, folder: TrialDir, apart: list[int]) -> None:
        """Sends new files to each machine and writes the files that it returns."""
        import ray

        if time.monotonic() - self._carried_at < EXCHANGE_S:
            return
        self._carried_at = time.monotonic()
        names = sorted(name for name in folder.names() if name in FOR_ALL or name.startswith("exit-"))
        answers = {}
        for node in apart:
            new = {name: data for name in names if (data := self._new(node, folder.path / name)) is not None}
            if "request.json" in new:
                target = Path(read_record(folder.request, TrialRequest).target)
                near = [path for path in sources(target) if path.is_relative_to(target.parent)]
                new |= {f"target/{path.relative_to(target.parent)}": path.read_bytes() for path in near}
            answers[node] = self.actors[node].exchange.remote(key_of(folder), spool.ordered(), new)
        for node, reference in answers.items():
            try:
                written = ray.get(reference, timeout=ANSWER_TIMEOUT_S)
            except Exception:  # the machine is gone; `failure` will tell
                continue
            for name, data in written.items():
                path = (spool.path if name.startswith("spool/") else folder.path) / name.removeprefix("spool/")
                files.write_bytes(path, data, sync=False)
                self._carried[node, path] = stamp(path)

    def _new(self, node: int, path: Path) -> bytes | None:
        try:
            if self._carried.get((node, path)) == stamp(path):
                return None
            self._carried[node, path] = stamp(path)
            return path.read_bytes()
        except FileNotFoundError:
            return None
