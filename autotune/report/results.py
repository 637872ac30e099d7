"""What a study found, as typed values for Python."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune.errors import UserError
from autotune.forecast.prediction import Interval
from autotune.system import files

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from autotune.report.data import StudyReport
    from autotune.report.export import Exported

Scalar: TypeAlias = str | int | float | bool | None
FilePath: TypeAlias = str | os.PathLike[str]
RECOMMENDED = "recommended"


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A configuration that a study picked.

    Attributes:
        name: What it was picked for: `recommended`, `drop_in`, `lowest_latency` and so on, or `baseline`.
        trial: Number of its trial.
        candidate: Its knobs by name, as `micro_batch_size` and `zero_stage`.
        ds_config: Its complete DeepSpeed configuration.
        scores: What was measured, by metric (`autotune ls metrics`), with 95 % intervals.
        speedup: Throughput over the baseline's, with its 95 % interval; None without a baseline that completed, or where the interval is
            so wide that it says nothing.
        reasons: Why it was picked, in sentences.
        script_side_changes: What it takes besides the configuration, in sentences.
    """

    name: str
    trial: int
    candidate: Mapping[str, Scalar]
    ds_config: Mapping[str, Any] = field(repr=False)
    scores: Mapping[str, Interval] = field(repr=False)
    speedup: Interval | None
    reasons: Sequence[str]
    script_side_changes: Sequence[str]


class StudyResult:
    """The findings of a study, as `autotune.run` and `autotune.load_study` return them: a snapshot that stays so."""

    def __init__(self, report: StudyReport) -> None:
        self._report = report

    @property
    def name(self) -> str:
        """The study's name."""
        return self._report.name

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return Path(self._report.study["folder"]).absolute()

    @property
    def objectives(self) -> list[str]:
        """What was optimised: names of metrics, in order."""
        return self._report.objectives

    @property
    def picks(self) -> dict[str, Pick]:
        """The picks by name; empty where nothing can be recommended."""
        return {name: _pick(name, data) for name, data in self._report.picks.items()}

    @property
    def recommended(self) -> Pick:
        """The best compromise of the objectives.

        Raises:
            UserError: Nothing can be recommended, and why.
        """
        if RECOMMENDED not in self._report.picks:
            raise UserError(f"study {self.name!r}: {self._report.why_nothing}, so there is nothing to recommend")
        return _pick(RECOMMENDED, self._report.picks[RECOMMENDED])

    @property
    def baseline(self) -> Pick | None:
        """The configuration that all others are compared with; None if it did not complete."""
        return _pick("baseline", self._report.baseline) if self._report.baseline else None

    def trials_dataframe(self) -> pd.DataFrame:
        """Every trial, by number, with the columns of `trials.csv`; units are in the names.

        Such are `outcome`, `reason`, `marks`, `speedup`, `wall_s`; each metric with both ends of its 95 % interval, as
        `step_time_s`, `step_time_s_low`, `step_time_s_high`; each knob, as `candidate.zero_stage`.
        """
        import pandas as pd

        from autotune.report.tables import records

        columns, found = records(self._report)
        return pd.DataFrame(found, columns=columns).set_index("trial")

    @property
    def front(self) -> pd.DataFrame:
        """The trials that no other one beats on every objective; columns as of `trials_dataframe`."""
        return self.trials_dataframe().loc[[point["trial"] for point in self._report.front]]

    @property
    def caveats(self) -> list[str]:
        """What to know before relying on the answer, in sentences."""
        return self._report.caveats()

    def ds_config(self, pick: str | None = None, *, trial: int | None = None) -> dict[str, Any]:
        """The DeepSpeed configuration of a pick, complete: `deepspeed.initialize(..., config=study.ds_config())`.

        Args:
            pick: Name of the pick; `recommended` by default.
            trial: A trial instead of a pick.

        Raises:
            UserError: There is no such pick or trial.
        """
        config: dict[str, Any] = json.loads(self.export(pick=pick, trial=trial).text)
        return config

    def export(
        self,
        path: FilePath | None = None,
        *,
        pick: str | None = None,
        trial: int | None = None,
        format: str = "deepspeed",  # noqa: A002
    ) -> Exported:
        """A pick in the form that another tool takes; arguments and errors as for `autotune.export`."""
        from autotune.report.export import export_pick

        if pick is not None and trial is not None:
            raise UserError("export: give pick or trial, not both")
        if not isinstance(pick, str | None):
            raise UserError(f"pick: the name of a pick is needed, not {pick!r}")
        file = None if path is None else Path(path_text(path, "path: the name of a file"))
        found = export_pick(self._report, pick, trial, format, file)
        if file is not None:
            with errors_in_words():
                found.write(file)
        return found

    def report(self, path: FilePath | None = None) -> Path:
        """Writes the study as one HTML page that works offline; returns its path.

        Args:
            path: The page, as `out.html`, or a folder, into which `report.json` and `trials.csv` come too; by default
                the study's own folder.

        Raises:
            UserError: It cannot be written.
        """
        from autotune.report.files import write_report

        with errors_in_words():
            where = self.folder if path is None else Path(path_text(path, "path: the name of a page or a folder"))
            return write_report(self._report, where)[0]

    def plot_front(self, x: str | None = None, y: str | None = None) -> go.Figure:
        """The trials over two metrics, by default the first two objectives: front, picks and baseline are marked.

        Raises:
            UserError: A metric is unknown or was not measured.
        """
        from autotune.report import plots

        return plots.front(self._report, x, y)

    def plot_parallel(self, metric: str | None = None) -> go.Figure:
        """A line for each trial through its knobs and objectives, coloured by a metric; errors as of `plot_front`."""
        from autotune.report import plots

        return plots.parallel(self._report, metric)

    def plot_losses(self, across: str = "samples", *, difference: bool = False) -> go.Figure:
        """The loss curves of the trials.

        Args:
            across: `samples`, `seconds` or `steps`.
            difference: Show how far each curve is above the baseline's.
        """
        from autotune.report import plots

        return plots.losses(self._report, across, difference=difference)

    def plot_forecast(self, metric: str | None = None) -> go.Figure:
        """What trials measured against what was forecast, with 90 % intervals.

        Args:
            metric: `step_time_s` or `peak_memory_bytes`; by default the first that was forecast.
        """
        from autotune.report import plots

        return plots.forecast(self._report, metric)

    def _repr_html_(self) -> str:
        """The answer for a notebook."""
        from autotune.report.notebook import answer_html

        return answer_html(self._report)

    def __repr__(self) -> str:
        from autotune.report.readme import recommended_words

        picked, said = self._report.picks.get(RECOMMENDED), recommended_words(self._report)
        found = f"recommended trial {picked['trial']}" if picked else "nothing to recommend"
        found += f", {said}" if said else ""
        return f"<{type(self).__name__} {self.name!r}: {len(self._report.trials)} trials; {found}>"

    def __str__(self) -> str:
        """The answer as `autotune run` prints it."""
        import io

        from rich.console import Console

        from autotune.report.answer import Answer

        plain = Console(file=io.StringIO(), width=100, highlight=False, force_jupyter=False, color_system=None)
        with plain.capture() as said:
            plain.print(Answer(self._report), crop=False)
        return said.get().rstrip("\n")


def _pick(name: str, data: Mapping[str, Any]) -> Pick:
    from autotune.report.data import interval, measured

    speedup, around = data.get("speedup"), data.get("speedup_ci95")
    return Pick(
        name=name,
        trial=data["trial"],
        candidate=dict(data["candidate"]),
        ds_config=json.loads(json.dumps(data["ds_config"])),  # a copy, which the caller may change
        scores={metric: Interval(value, *interval(data, metric, value)) for metric, value in measured(data).items()},
        speedup=Interval(speedup, *(around or (speedup, speedup))) if speedup is not None else None,
        reasons=tuple(data.get("reasons") or ()),
        script_side_changes=tuple(data.get("script_side_changes") or ()),
    )


def path_text(given: FilePath, wanted: str) -> str:
    """A path as a text, also where an object gives it as bytes.

    Raises:
        UserError: It is no path; the sentence says what is wanted.
    """
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"{wanted} is needed, not {given!r}")
    return os.fsdecode(given)


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Turn an error of the disk, or of a database's damaged row, into a UserError.

    Raises:
        UserError: The disk is full, the folder cannot be written, or a row cannot be read.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        said = files.words(error)
        if said is None:
            raise
        raise UserError(said) from None
    except Exception as error:
        from autotune.study.storage import database

        if (damage := database.in_words(error)) is None:
            raise
        raise damage from None
