"""Answers trials from a table of earlier measurements and their noise: compares searches in seconds, not hours."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from autotune.errors import UserError
from autotune.executors.base import Executor, Status
from autotune.scoring import step_times
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.study.measure import ENDLESS_SAMPLES
from autotune.system.units import format_bytes
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, Observed, Outcome, RankReport

# Prefix of the columns that hold knobs; the others are measurements.
KNOB = "knob:"
COLUMNS = (
    "repeat", "outcome", "reason", "step_time_s", "ci95_s", "n_steps", "inner_s", "boundary_s", "samples_per_step",
    "tokens_per_step", "peak_memory_bytes", "time_to_loss_s", "final_loss", "losses", "startup_s", "wall_s",
)  # fmt: skip
# Steps of a trial and standard deviation of the logarithm of their times, if the table has none.
STEPS, SPREAD = 24, 0.01
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class TableError(UserError):
    """A truth table that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement of one configuration.

    Attributes:
        repeat: Number of the measurement, among those of the same configuration.
        values: Numbers by column.
        losses: Mean losses of equal parts of the trial, in order.
    """

    candidate: Candidate
    repeat: int
    outcome: Outcome
    reason: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    losses: Sequence[float] = ()

    def to_cells(self) -> dict[str, str]:
        """Returns the row's cells by column."""
        cells = {f"{KNOB}{name}": json.dumps(value) for name, value in self.candidate.values().items()}
        cells |= {"repeat": str(self.repeat), "outcome": str(self.outcome), "reason": self.reason}
        cells |= {name: f"{value:.6g}" for name, value in self.values.items() if name in COLUMNS}
        return cells | {"losses": " ".join(f"{loss:.5g}" for loss in self.losses)}


def read_table(path: Path) -> list[Row]:
    """Reads a truth table, a CSV file that may be compressed (`.csv.gz`).

    Raises:
        TableError: The file is missing, or is not a truth table.
    """
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        return [_row(cells) for cells in table.to_dict("records")]
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}") from None
    except (KeyError, ValueError, UserError) as error:
        raise TableError(f"{path}: not a truth table as benchmarks/truth.py writes it: {error}") from None


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Writes a truth table atomically."""
    import pandas as pd

    cells = [row.to_cells() for row in rows]
    knobs = sorted({name for row in cells for name in row if name.startswith(KNOB)})
    draft = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(cells, columns=[*knobs, *COLUMNS]).to_csv(draft, index=False)
    draft.replace(path)


def _row(cells: Mapping[str, str]) -> Row:
    knobs: dict[str, Scalar] = {
        n.removeprefix(KNOB): json.loads(text) for n, text in cells.items() if n.startswith(KNOB) and text
    }
    texts = ("outcome", "reason", "losses", "repeat")
    return Row(
        candidate=Candidate.of(knobs),
        repeat=int(cells["repeat"]),
        outcome=Outcome(cells["outcome"]),
        reason=cells["reason"],
        values={name: float(cells[name]) for name in COLUMNS if name not in texts and cells.get(name)},
        losses=[float(loss) for loss in cells["losses"].split()],
    )


class Answered:
    """The job of a trial whose measurement is written already."""

    reason = ""

    def poll(self) -> Status:
        """Returns that it has ended."""
        return Status.EXITED

    def cancel(self) -> None:
        """Does nothing."""


class ReplayExecutor(Executor):
    """Executor that answers each trial with the next measurement of its configuration, in random order.

    A trial whose stated memory is too small runs out of it; a trial that a rival beats stops as early as a real one.

    Args:
        seed: Seed of the order of the repeats, and of the step times within a trial.

    Attributes:
        spent_s: Seconds that the trials so far took when they were measured.
        launched: The configurations, in order.
    """

    def __init__(self, rows: Sequence[Row], seed: int = 0) -> None:
        self.spent_s = 0.0
        self.launched: list[Candidate] = []
        self._rng = random.Random(seed)
        self._rows: dict[Candidate, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.candidate, []).append(row)
        for some in self._rows.values():
            self._rng.shuffle(some)

    def submit(self, folder: TrialDir) -> "Answered":
        """Writes the reports and the exit that the ranks and their agent would write."""
        request = read_record(folder.request, TrialRequest)
        candidate = Candidate.of(request.candidate)
        some = self._rows.get(candidate, [])
        if not some:
            said = f"the truth table holds no measurement of {candidate.describe()}"
            if request.min_samples < ENDLESS_SAMPLES:
                raise TableError(said)
            # A check, whose reference may be no configuration of the space.
            some = [Row(candidate=candidate, repeat=0, outcome=Outcome.NOT_APPLIED, reason=said)]
        some.append(some.pop(0))
        row = some[-1]
        report = self._report(request, row)
        step_s = sum(report.step_times_s)
        wall_s = row.values.get("startup_s", 0.0) + step_s if report.step_times_s else row.values.get("wall_s", 0.0)
        self.spent_s += wall_s
        self.launched.append(candidate)
        for rank in range(request.world_size):
            write_record(folder.report(rank), RankReport(**{**vars(report), "rank": rank}), sync=False)
        good = report.outcome in (Outcome.COMPLETE, Outcome.STOPPED_EARLY)
        codes = dict.fromkeys(range(request.world_size), 0 if good else 1)
        write_record(folder.exit, Exit(codes=codes, first_failed=None if good else 0, wall_s=wall_s), sync=False)
        return Answered()

    def _report(self, request: TrialRequest, row: Row) -> RankReport:
        values, limit = row.values, request.device_memory_bytes
        peak = values.get("peak_memory_bytes", 0.0)
        if row.outcome is Outcome.COMPLETE and limit is not None and peak > limit:
            reason = f"{format_bytes(peak)}, over the stated limit"
            return RankReport(rank=0, outcome=Outcome.OOM, phase="warmup", reason=reason, failed_at=0.0)
        if row.outcome is not Outcome.COMPLETE:
            return RankReport(rank=0, outcome=row.outcome, phase="measure", reason=row.reason, failed_at=0.0)
        times, candidate = self._times(row), row.candidate
        whole = RankReport(
            rank=0,
            outcome=Outcome.COMPLETE,
            phase="done",
            step_times_s=times,
            cpu_times_s=times,
            losses=self._losses(row, len(times)),
            micro_step_s={name: values[f"{name}_s"] for name in ("inner", "boundary") if values.get(f"{name}_s")},
            peak_memory_bytes={"step": int(peak)},
            startup_s={"import": values.get("startup_s", 0.0)},
            observed=Observed(
                micro_batch_size=candidate.micro_batch_size,
                loader_batch_size=candidate.micro_batch_size,
                gradient_accumulation_steps=candidate.gradient_accumulation_steps,
                samples_per_step=int(values.get("samples_per_step") or candidate.global_batch_size(request.world_size)),
                tokens_per_step=int(values["tokens_per_step"]) if values.get("tokens_per_step") else None,
                zero_stage=candidate.zero_stage,
                dtype=DTYPES.get(candidate.precision, "float32"),
            ),
        )
        for n in range(1, len(times)):
            rival = step_times.beaten_by(request.rivals, times[:n], peak)
            if rival is not None:
                why = f"worse than trial {rival.trial} had read on every objective"
                cut = replace(whole, step_times_s=times[:n], cpu_times_s=times[:n], losses=whole.losses[:n])
                return replace(cut, outcome=Outcome.STOPPED_EARLY, reason=why, phase="measure")
        return whole

    def _times(self, row: Row) -> list[float]:
        """Returns step times with the measured median and a spread that follows from its confidence interval."""
        n, median = int(row.values.get("n_steps") or STEPS), row.values["step_time_s"]
        n = max(n, step_times.LEAST_TIMED_STEPS)
        # Half-width of the 95 % interval of a median: 1.96 x 1.25 sd / sqrt(n).
        spread = row.values.get("ci95_s", 0.0) / median * n**0.5 / 2.46 or SPREAD
        drawn = [self._rng.gauss(0.0, min(spread, 0.3)) for _ in range(n)]
        centre = sorted(drawn)[n // 2]
        return [median * 1.05] * step_times.SETUP_STEPS + [median * (1 + each - centre) for each in drawn]

    @staticmethod
    def _losses(row: Row, n: int) -> list[float | None]:
        """Returns a loss per step: the table's losses, interpolated linearly between the middles of their parts."""
        if not row.losses:
            return [1.0] * n
        middles = (np.arange(len(row.losses)) + 0.5) / len(row.losses)
        return [float(loss) for loss in np.interp((np.arange(n) + 0.5) / n, middles, row.losses)]
