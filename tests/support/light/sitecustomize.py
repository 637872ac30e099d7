"""Gives the agents of an engine ranks that take half a second and train nothing, so that an outage costs seconds.

Everything else of an agent is the real one: its orders, files, signals and end.
"""

import sys

if "autotune.executors.node_agent" in sys.orig_argv:
    import math
    import time
    from pathlib import Path

    from autotune.executors import local
    from autotune.executors.base import Status
    from autotune.space.candidate import Candidate
    from autotune.trial.folder import TrialDir, read_record, write_record
    from autotune.trial.request import TrialRequest
    from autotune.trial.result import Exit, Observed, Outcome, RankReport

    TAKES_S = 0.5

    def report(rank: int, candidate: Candidate, n_ranks: int) -> RankReport:
        batch = candidate.global_batch_size(n_ranks)
        step_s = 0.02 + 0.001 * batch * (1.3 if candidate.checkpoint_every else 1.0)
        return RankReport(
            rank=rank, outcome=Outcome.COMPLETE, phase="done", losses=[1 + 2 / (1 + i * batch / 100) for i in range(24)],
            step_times_s=[step_s * (1 + 0.01 * math.sin(7 * i)) for i in range(24)], cpu_times_s=[step_s] * 24,
            peak_memory_bytes={"steady": 10**8 + 10**6 * candidate.micro_batch_size},
            observed=Observed(
                micro_batch_size=candidate.micro_batch_size, loader_batch_size=candidate.micro_batch_size,
                gradient_accumulation_steps=candidate.gradient_accumulation_steps, samples_per_step=batch,
                tokens_per_step=None, zero_stage=candidate.zero_stage, dtype="float32",
            ),
        )  # fmt: skip

    class Job:
        def __init__(self, folder: TrialDir, end: Path, node: int) -> None:
            self.folder, self.end, self.request = folder, end, read_record(folder.request, TrialRequest)
            each = self.request.world_size // self.request.nodes
            self.ranks, self.until = range(node * each, (node + 1) * each), time.monotonic() + TAKES_S

        def poll(self) -> Status:
            if self.end.exists():
                return Status.EXITED
            if time.monotonic() < self.until:
                return Status.RUNNING
            for rank in self.ranks:
                found = report(rank, Candidate.of(self.request.candidate), self.request.world_size)
                write_record(self.folder.report(rank), found)
            write_record(self.end, Exit(codes=dict.fromkeys(self.ranks, 0), wall_s=TAKES_S))
            return Status.EXITED

        def cancel(self) -> None:
            if not self.end.exists():
                write_record(self.end, Exit(codes=dict.fromkeys(self.ranks, -15), killed="cancel"))

    class Light:
        cold_reason = ""

        def __init__(self, *_: object) -> None:
            pass

        def start(self) -> None:
            pass

        def close(self) -> None:
            pass

        def submit_part(self, folder: TrialDir, end: Path, part: dict) -> Job:
            return Job(folder, end, int(part.get("node", 0)))

    local.LocalExecutor = Light
