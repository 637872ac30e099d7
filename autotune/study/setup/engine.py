"""Makes the executor of a study: local, Slurm, Ray, hosts over ssh, or pods of Kubernetes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.errors import UserError
from autotune.executors import cluster, pods
from autotune.executors.base import Executor
from autotune.executors.cluster import ClusterExecutor, Engine
from autotune.executors.local import LocalExecutor
from autotune.executors.options import check_names, is_usual, number
from autotune.executors.ssh import read_hostfile
from autotune.study.spec.spec import StudySpec


def own_variables(spec: StudySpec) -> dict[str, str]:
    """Returns the variables that the user's launch command sets."""
    return dict(spec.how().fixed_environment) if spec.inspected.kind == "script" else {}


def executor_of(spec: StudySpec, folder: Path, slot: int = 0) -> Executor:
    """Returns the executor of a study, not yet started.

    Args:
        folder: The study's folder; other machines must see it under the same path.
        slot: Which of the trials at once it runs, counted from 0.
    """
    target, environment, nodes = spec.inspected, own_variables(spec), spec.n_nodes
    options = dict(spec.executor_options)
    ranks_per_node = spec.ranks // nodes if spec.ranks else None
    engine: Engine
    match spec.executor:
        case "slurm":
            from autotune.executors import slurm

            check_names(spec.executor, options, slurm.OPTIONS)
            inside = is_usual(options, "allocation", "auto", "new") and "SLURM_JOB_ID" in os.environ
            shape = options, ranks_per_node, f"autotune-{spec.name}"
            engine = slurm.Steps(*shape, slot) if inside else slurm.Slurm(*shape)
        case "ray":
            from autotune.executors import ray

            check_names(spec.executor, options, ray.OPTIONS)
            engine = ray.Ray(options, ranks_per_node)
        case _ if spec.hostfile is not None:
            from autotune.executors import ssh

            check_names("a hostfile", options, ssh.OPTIONS)
            engine = ssh.Hosts(options, list(read_hostfile(spec.hostfile)))
        case _ if nodes > 1 and pods.BOARD in os.environ:
            check_names("the pods of a JobSet", options, pods.OPTIONS)
            engine = pods.Pods(options)
        case _:
            check_names(spec.executor, options, {})
            if nodes > 1:
                raise UserError(
                    "--nodes: several machines take --executor slurm or ray, --hostfile, or `autotune submit --executor"
                    " kubernetes`"
                )
            return LocalExecutor(target.imports, folder / "trials" / "server.log", environment)
    idle_s = number(options, "idle", 600.0, cluster.LEAST_IDLE_S)
    return ClusterExecutor(
        engine, folder / "trials" / "agents", cluster.settings_for(target.imports, environment, idle_s), nodes,
        patience_s=spec.patience_s,
    )  # fmt: skip


@contextlib.contextmanager
def executor_for(
    spec: StudySpec, folder: Path, on_queue: Callable[[str], None] = lambda _: None, *, wait: bool = True
) -> Iterator[Executor]:
    """Starts the executor of a study and closes it in the end.

    Args:
        on_queue: As of `Executor`.
        wait: True waits until the executor is ready. False leaves that to its `start`; a server on this machine is
            launched at once, so that it can begin with its imports.
    """
    executor = executor_of(spec, folder)
    executor.on_queue = on_queue
    try:
        if wait:
            executor.start()
        elif isinstance(executor, LocalExecutor):
            executor.launch()
        yield executor
    finally:
        executor.close()
