"""Plans and measures the training scripts in `models/scripts/` in real ranks; each is probed once for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.study.setup import plan as planning
from autotune.study.setup.plan import Plan
from autotune.study.spec.spec import StudySpec
from autotune.system.toolkit import extensions_dir
from autotune.trial.folder import TrialDir
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult
from support.paths import SCRIPTS

# DeepSpeed's shared-memory op would leave its files in /dev/shm for ever.
PLAIN = (
    "import deepspeed, runpy, sys; deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False;"
    " del sys.argv[0]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]);"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Bench:
    """Runs scripts on one warm server.

    Args:
        executor: The server.
        root: Where the files of trials go.

    Attributes:
        folder: The files of the latest trial.
    """

    def __init__(self, executor: LocalExecutor, root: Path) -> None:
        self.executor, self.root, self.n = executor, root, 0
        self.folder = TrialDir(root)
        self._plans: dict[str, Plan] = {}

    def plan(self, script: str | Path, *arguments: str, ranks: int = 1, **overrides: Any) -> Plan:
        """The plan of a script, from its probe and a second run."""
        key = str((script, arguments, ranks, overrides))
        if key not in self._plans:
            given = {"ranks": ranks, "global_batch": "free", "script_args": arguments, **overrides}
            spec = StudySpec.of(SCRIPTS / script, given)
            self._plans[key] = planning.plan(spec, self.executor, self._next())
        return self._plans[key]

    @staticmethod
    def candidate(found: Plan, **changes: Any) -> Candidate:
        """The baseline with some knobs changed, without its settings that act on nothing then."""
        changed = replace(found.baseline, **changes)
        return replace(changed, config=()) if why_illegal(changed, found.setting) is not None else changed

    def measure(self, found: Plan, *, steps: int = 3, legal: bool = True, **changes: Any) -> TrialResult:
        """A short trial of the baseline with some knobs changed; fields of `TrialRequest` go into the request."""
        own = {name: changes.pop(name) for name in tuple(changes) if name in TrialRequest.__dataclass_fields__}
        candidate = self.candidate(found, **changes)
        assert not legal or why_illegal(candidate, found.setting) is None
        self.folder = TrialDir(self._next())
        request = TrialRequest(
            target=str(found.spec.target), candidate=candidate.values(), ds_config=found.ds_config(candidate),
            world_size=found.world_size, script=found.script(candidate),
            **{"max_steps": steps, "min_samples": 10**9, "budget_s": 60.0, "deadline_s": 90.0, **own},
        )  # fmt: skip
        return base.run(self.executor, self.folder.path, request)

    def applied(self, found: Plan, *, steps: int = 3, **changes: Any) -> TrialResult:
        """The same, and all changes must have been seen."""
        result = self.measure(found, steps=steps, **changes)
        knobs = {name: value for name, value in changes.items() if name not in TrialRequest.__dataclass_fields__}
        candidate = self.candidate(found, **knobs)
        assert result.outcome is Outcome.COMPLETE, result.reason
        share = found.workload.data_parallel(found.world_size)
        copies = share // candidate.ranks_per_replica
        assert result.observed is not None and result.observed.mismatch(candidate, copies) is None
        assert result.samples_per_step == candidate.global_batch_size(share)
        return result

    def _next(self) -> Path:
        self.n += 1
        return self.root / f"{self.n:04d}"


def own_port() -> str:
    """This process's own port, outside the range that the kernel hands out, where a free one may be taken before it is used."""
    return str(20000 + os.getpid() % 10000)


def losses_without_hooks(script: str, *arguments: str, ranks: int, cwd: Path) -> list[float]:
    """The values that a script prints as `loss VALUE` when it runs without hooks."""
    there = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": own_port(),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    # Sums depend on the number of threads, which is that of `conftest.py` here and there.
    cpu = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions_dir())}
    environment = os.environ | there | cpu | {"PRINT_LOSSES": "1"}
    command = [sys.executable, "-c", PLAIN, str(SCRIPTS / script), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd}
    ranked = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    running = [subprocess.Popen(command, env=own, **pipes) for own in ranked]
    ends = [process.communicate() for process in running]
    assert not any(process.returncode for process in running), ends[0][1]
    return [float(line.split()[1]) for line in ends[0][0].splitlines() if line.startswith("loss ")]
