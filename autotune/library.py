"""The library: what the commands do, from Python, by the same functions; nothing is printed unless asked for.

Keyword arguments are the keys of a `study.yaml`, and are read as they are there: `"10m"`, `"4GiB"`, `"8..64"`. What is wrong with
one ends as a `UserError`, which names the flag of the command line: `--time-budget` is `time_budget_s`. Nothing heavy is imported
before it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from autotune import UserError, files, urls

if TYPE_CHECKING:
    import pandas as pd

    from autotune.commands import Tuned
    from autotune.forecasting import Answer
    from autotune.report import StudyReport
    from autotune.report.export import Exported
    from autotune.spec import StudySpec

Scalar: TypeAlias = str | int | float | bool | None
FilePath: TypeAlias = str | os.PathLike[str]
# Names of presets, or what would stand in their files.
Presets: TypeAlias = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
RECOMMENDED = "recommended"


class Estimate(NamedTuple):
    """A figure with its interval, in the unit that its name ends with.

    Attributes:
        value: The figure.
        low: Lower end of the interval: 95 % of what was measured, 90 % of what is predicted.
        high: Upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A configuration that a study picked.

    Attributes:
        name: What it was picked for: `recommended`, `drop_in`, `lowest_latency` and so on, or `baseline`.
        trial: Number of its trial.
        candidate: Its knobs by name, as `micro_batch_size` and `zero_stage`.
        ds_config: Its complete DeepSpeed configuration.
        scores: What was measured, by metric (`autotune ls metrics`), with 95 % intervals.
        speedup: Throughput over the baseline's, with its 95 % interval; None if the baseline did not complete.
        reasons: Why it was picked, in sentences.
        script_side_changes: What it takes besides the configuration, in sentences.
    """

    name: str
    trial: int
    candidate: Mapping[str, Scalar]
    ds_config: Mapping[str, Any] = field(repr=False)
    scores: Mapping[str, Estimate] = field(repr=False)
    speedup: Estimate | None
    reasons: Sequence[str]
    script_side_changes: Sequence[str]


class StudyResult:
    """What a study has found: made by `autotune.run` and `autotune.load_study`, a snapshot that does not change afterwards."""

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
        return list(self._report.study["objectives"])

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

    @property
    def trials(self) -> pd.DataFrame:
        """Every trial, by number, with the columns of `trials.csv`.

        Such are `outcome`, `reason`, `marks`, `speedup`, `wall_s`; each metric with both ends of its 95 % interval, as
        `step_time_s`, `step_time_s_low`, `step_time_s_high`; each knob, as `candidate.zero_stage`.
        """
        import pandas as pd

        from autotune.report import takeaway

        columns, lines = takeaway.rows(self._report)
        return pd.DataFrame(lines, columns=columns).set_index("trial")

    @property
    def front(self) -> pd.DataFrame:
        """The trials that no other one beats on every objective; columns as of `trials`."""
        return self.trials.loc[[point["trial"] for point in self._report.front]]

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
        from autotune.report import summary

        if pick is not None and trial is not None:
            raise UserError("export: give pick or trial, not both")
        found = summary.export(self._report, pick, trial, format)
        if path is not None:
            with _in_words():
                found.write(Path(path))
        return found

    def report(self, path: FilePath | None = None) -> Path:
        """Writes the study as one HTML page that works offline.

        Args:
            path: The page, as `out.html`, or a folder, into which `report.json` and `trials.csv` come too; by default the
                study's own folder.

        Returns:
            The page.

        Raises:
            UserError: It cannot be written.
        """
        from autotune.report import html, takeaway

        where = self.folder if path is None else Path(path)
        with _in_words():
            if where.suffix.lower() not in (".html", ".htm"):
                return takeaway.write(self._report, where, single_file=False)[0]
            html.write(self._report, where)
        return where

    def __repr__(self) -> str:
        picked = self._report.picks.get(RECOMMENDED)
        found = f"recommended trial {picked['trial']}" if picked else "nothing to recommend"
        if picked and picked["speedup"]:
            found += f", {picked['speedup']:.2f}x the baseline's throughput"
        return f"<{type(self).__name__} {self.name!r}: {len(self._report.trials)} trials; {found}>"

    def __str__(self) -> str:
        """The answer as `autotune run` prints it."""
        import io

        from rich.console import Console

        from autotune.report import console

        text = io.StringIO()
        plain = Console(
            file=text, width=100, highlight=False, force_terminal=False, force_jupyter=False, color_system=None
        )
        plain.print(console.render_answer(self._report))
        return text.getvalue().rstrip("\n")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a configuration will need, before it runs; intervals are 90 %. As text it is what `autotune predict` prints.

    Attributes:
        candidate: Its knobs by name.
        ranks: Ranks.
        peak_memory_bytes: Of one rank.
        step_time_s: Of an optimizer step.
        samples_per_s: Of all ranks together.
        tokens_per_s: The same in tokens; None where samples are not token sequences.
        memory_terms_bytes: What the memory is made of.
        step_time_terms_s: What the step time is made of.
        device_memory_bytes: What a rank may use.
        fits_probability: That it fits.
        largest_micro_batch_size: The largest that surely fits, all else the same; None if none does.
        binds: What limits `memory` and `time`, in words.
        measured: What the study measured of this very configuration, by metric; empty if it did not.
        notes: What to know, in sentences.
        text: All of it, for people.
    """

    candidate: Mapping[str, Scalar]
    ranks: int
    peak_memory_bytes: Estimate
    step_time_s: Estimate
    samples_per_s: Estimate
    tokens_per_s: Estimate | None
    memory_terms_bytes: Mapping[str, float] = field(repr=False)
    step_time_terms_s: Mapping[str, float] = field(repr=False)
    device_memory_bytes: float
    fits_probability: float
    largest_micro_batch_size: int | None
    binds: Mapping[str, str]
    measured: Mapping[str, float]
    notes: Sequence[str]
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def run(
    target: FilePath,
    *,
    name: str | None = None,
    space: Presets | None = None,
    objectives: Presets | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    trials: int | None = None,
    time_budget_s: float | str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    executor: str | None = None,
    executor_options: Mapping[str, str] | None = None,
    hostfile: FilePath | None = None,
    base_config: Mapping[str, Any] | FilePath | None = None,
    global_batch: str | int | tuple[int, int] | None = None,
    device_memory_bytes: int | str | None = None,
    sampler: str | None = None,
    stop_below: float | str | None = None,
    memory_filter: bool | None = None,
    stop_trials: bool | None = None,
    storage: str | None = None,
    parallel: int | None = None,
    overlap: bool | None = None,
    learning_rate_rule: str | None = None,
    seed: int | None = None,
    trial_budget_s: float | str | None = None,
    trial_deadline_s: float | str | None = None,
    min_samples: int | None = None,
    finalists: int | None = None,
    repeats: int | None = None,
    branch: bool | None = None,
    branch_tokens: int | None = None,
    from_checkpoint: FilePath | None = None,
    script_args: Sequence[str] | str | None = None,
    script_set: Mapping[str, str] | None = None,
    arg_mappings: Mapping[str, str] | None = None,
    working_dir: FilePath | None = None,
    fresh: bool = False,
    history: bool = True,
    progress: bool = False,
) -> StudyResult:
    """Tunes a model or a training script, as `autotune run` does, and writes the same files into `studies/NAME/`.

    The same call again goes on where the study was: finished trials are kept, and the budget is the total. It takes no
    `if __name__ == "__main__"`: trials run in processes of their own, which import the target and nothing else.

    Args:
        target: A `model.py`, a training script, a `study.yaml`, or a launch command such as `torchrun train.py`.
        name: Name of the study; by default the file's, or its folder's.
        space: What is tuned: knobs with their values, as `{"zero_stage": [0, 1, 2]}`, presets, or a list of both.
        objectives: What is optimised: presets, or mappings with a `metric`.
        constraints: Bounds by metric, as `{"peak_memory_bytes": {"max": "4GiB"}}`.
        trials: Trials in all, resumed ones and the baseline included.
        time_budget_s: Seconds in all after which no trial is started, or a text such as `"10m"`.
        ranks: Ranks of each trial; by default the launch command's, else one for each GPU.
        nodes: Machines that the ranks are spread over.
        executor: What runs the trials: `local`, `slurm` or `ray`.
        executor_options: What it is told, as `{"partition": "gpu"}`.
        hostfile: Machines that `local` reaches over ssh.
        base_config: Your DeepSpeed configuration, the baseline: a mapping, or the path of its JSON.
        global_batch: Samples of an optimizer step: `"keep"`, `"free"`, a number, or lowest and highest.
        device_memory_bytes: Memory limit of a device, or a text such as `"4GiB"`.
        sampler: What proposes candidates; see `autotune ls samplers`.
        stop_below: Share of improvement below which the study ends, as 0.01 or `"1%"`; 0 for never.
        memory_filter: Whether to pass by what surely does not fit.
        stop_trials: Whether trials that are clearly worse end early.
        storage: Database URL; by default `AUTOTUNE_STORAGE`, else SQLite in `studies/autotune.db`.
        parallel: Trials at once, on disjoint devices or nodes.
        overlap: Whether they may share a host, where they disturb one another.
        learning_rate_rule: How the learning rate follows the batch: auto, none, linear, sqrt, adascale, surge.
        seed: Seed of weights, data order and search.
        trial_budget_s: Seconds that one trial trains.
        trial_deadline_s: Seconds after which a trial is killed.
        min_samples: Samples that a trial trains on at least.
        finalists: How many of the best are measured again at the end, beside the baseline.
        repeats: How often each of them is.
        branch: Whether another global batch is checked by a branch before it may be recommended.
        branch_tokens: Tokens that each side of a branch trains on.
        from_checkpoint: Weights that noise probe and branches start from.
        script_args: The script's own arguments, as a list, or as one text that is split as a shell does.
        script_set: Constants of the script to replace, as `{"BATCH": "{micro_batch_size}"}`.
        arg_mappings: Flags of the script by DeepSpeed's name of what they carry.
        working_dir: Folder that a script runs in.
        fresh: Forget the study's earlier trials.
        history: Start from what related studies on this machine found.
        progress: Print to standard error how far it is.

    Returns:
        What was found; `picks` is empty where nothing can be recommended.

    Raises:
        UserError: An argument or the target cannot be used, or the study cannot go on; in one sentence.
        KeyboardInterrupt: The user stopped it (SIGTERM too, in the main thread). Every process was ended and what was found so
            far was written: `autotune.load_study` reads it, and the same call goes on.
    """
    said = dict(locals())  # the arguments; nothing else is defined yet
    _outside_of_trials()
    overrides = {
        key: _plain(value, key) for key, value in said.items() if key not in ("target", "fresh", "history", "progress")
    }
    overrides |= {"script_args": _words(script_args), "storage": storage or os.environ.get(urls.VARIABLE) or None}
    from autotune import commands

    with _in_words():
        tuned = commands.tune(_target(target), overrides, fresh=fresh, learn=history, show=progress)
    if tuned.stopped is not None:
        raise type(tuned.stopped)(_stopped(tuned)) from None
    assert tuned.report is not None
    return StudyResult(tuned.report)


def load_study(study: FilePath, *, storage: str | None = None) -> StudyResult:
    """What a study has found so far, also while another process runs it.

    Args:
        study: Its name below `studies/`, or the path of its folder, as `elsewhere/studies/x`.
        storage: Database URL; by default `AUTOTUNE_STORAGE`, else what its `study.yaml` says, else `autotune.db` beside its folder.

    Raises:
        UserError: There is no such study, or its database does not answer.
    """
    from autotune import commands
    from autotune.report import summary

    text = os.fspath(study)
    folder = Path(text).absolute() if os.sep in text else Path("studies").absolute() / text
    with _in_words():
        found, url = commands.locate(folder.name, storage or os.environ.get(urls.VARIABLE) or None, folder.parent)
        return StudyResult(summary.load(folder.name, url, found))


def predict(
    target: FilePath,
    *,
    set: Mapping[str, Scalar] | None = None,  # noqa: A002
    ranks: int | None = None,
    device_memory_bytes: int | str | None = None,
    base_config: Mapping[str, Any] | FilePath | None = None,
    name: str | None = None,
    script_args: Sequence[str] | str | None = None,
    progress: bool = False,
) -> Prediction:
    """Says what a configuration will need before it runs, as `autotune predict` does.

    The first call profiles the target (a script is run once); later ones answer from the cache.

    Args:
        target: As for `run`.
        set: Knobs that differ from the baseline's, as `{"zero_stage": 3}`; also any DeepSpeed setting by its path.
        ranks: Ranks, also more than this machine has.
        device_memory_bytes: Memory of a device, or a text such as `"80GiB"`.
        base_config: The baseline, as for `run`.
        name: The study whose trials correct the forecast; by default that of the target.
        script_args: As for `run`.
        progress: Print to standard error that the target is profiled.

    Raises:
        UserError: A knob or value is wrong, or the configuration cannot run here; in one sentence.
    """
    _outside_of_trials()
    settings = {str(key): _plain(value, f"set: {key}") for key, value in (set or {}).items()}
    for key, value in settings.items():
        if not isinstance(value, Scalar):
            raise UserError(f"set: {key}: a plain value is needed, not {value!r}")
    given = {"name": name, "ranks": ranks, "device_memory_bytes": device_memory_bytes, "base_config": base_config}
    overrides = {key: _plain(value, key) for key, value in given.items()} | {"script_args": _words(script_args)}
    from autotune import forecasting, plan

    file = _target(target)
    with _in_words():
        wanted = wanted_study(file, overrides, show=progress)
        return _prediction(forecasting.foresee(wanted, settings, plan.studies_folder(Path(file)), show=progress))


def export(
    study: StudyResult | FilePath,
    path: FilePath | None = None,
    *,
    pick: str | None = None,
    trial: int | None = None,
    format: str = "deepspeed",  # noqa: A002
) -> Exported:
    """A configuration that a study found, in the form that another tool takes, as `autotune export` does.

    Args:
        study: The study, or what `load_study` takes.
        path: A file to write it to; its folder is made.
        pick: Name of the pick; `recommended` by default.
        trial: A trial instead of a pick.
        format: `deepspeed` (the JSON), `accelerate`, `hf-args` or `command`.

    Returns:
        The `text`, and as `notes` what someone who uses it has to know and cannot read in it.

    Raises:
        UserError: There is no such study, pick, trial or format, or the file cannot be written.
    """
    found = study if isinstance(study, StudyResult) else load_study(study)
    return found.export(path, pick=pick, trial=trial, format=format)


def wanted_study(target: str, overrides: Mapping[str, Any], *, show: bool) -> StudySpec:
    """The study that a TARGET means; what a launch command takes to import is left out where there is none.

    Args:
        target: As for `run`.
        overrides: Fields of `StudySpec` that are said.
        show: Tell the terminal that a launch command is run.

    Raises:
        UserError: It means none, and why.
    """
    from autotune import spec

    if spec.stated_command(target, overrides) is None:
        return spec.StudySpec.of(Path(target), overrides)
    from autotune import commands

    return commands.wanted_study(target, overrides, show=show)[0]


def _pick(name: str, data: Mapping[str, Any]) -> Pick:
    from autotune.report import interval, measured

    speedup, around = data.get("speedup"), data.get("speedup_ci95")
    return Pick(
        name=name,
        trial=data["trial"],
        candidate=dict(data["candidate"]),
        ds_config=json.loads(json.dumps(data["ds_config"])),  # whoever changes it changes his own
        scores={metric: Estimate(value, *interval(data, metric, value)) for metric, value in measured(data).items()},
        speedup=Estimate(speedup, *(around or (speedup, speedup))) if speedup is not None else None,
        reasons=tuple(data.get("reasons") or ()),
        script_side_changes=tuple(data.get("script_side_changes") or ()),
    )


def _prediction(answer: Answer) -> Prediction:
    data = answer.to_data()

    def estimate(said: Mapping[str, float]) -> Estimate:
        return Estimate(said["value"], said["low"], said["high"])

    def terms(name: str) -> dict[str, float]:
        return {term["name"]: term["value"] for term in data[name]["terms"]}

    return Prediction(
        candidate=data["candidate"],
        ranks=data["ranks"],
        peak_memory_bytes=estimate(data["peak_memory_bytes"]),
        step_time_s=estimate(data["step_time_s"]),
        samples_per_s=estimate(data["samples_per_s"]),
        tokens_per_s=estimate(data["tokens_per_s"]) if data["tokens_per_s"] else None,
        memory_terms_bytes=terms("peak_memory_bytes"),
        step_time_terms_s=terms("step_time_s"),
        device_memory_bytes=data["device_memory_bytes"],
        fits_probability=data["fits_probability"],
        largest_micro_batch_size=data["largest_micro_batch_size"],
        binds=data["binds"],
        measured=data["measured"],
        notes=tuple(data["notes"]),
        text="\n".join(answer.lines()),
    )


def _target(given: Any) -> str:
    if not isinstance(given, str | os.PathLike):
        raise UserError(
            f"target: the path of a model.py, a training script or a study.yaml is needed, or a launch command, not {type(given).__name__}:"
            " trials import the file in processes of their own"
        )
    return str(os.fspath(given))


def _words(given: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The script's arguments; None where nothing is said."""
    try:
        words = shlex.split(given) if isinstance(given, str) else [str(word) for word in given or ()]
    except ValueError as error:
        raise UserError(f"script_args: {error}: {given}") from None
    return tuple(words) or None


def _plain(value: Any, where: str) -> Any:
    """What a YAML file could have said: also of tuples, ranges, paths, and of numpy's numbers and arrays.

    Raises:
        UserError: It could not.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)  # numpy's is one, too, and no YAML
    if isinstance(value, str):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(item, where) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    raise UserError(f"{where}: numbers, texts, lists and mappings are needed, not {type(value).__name__}")


def _outside_of_trials() -> None:
    """Refuses to begin a study from within a trial, which would begin the next one.

    Raises:
        UserError: It says what to do.
    """
    from autotune.executors.host import MARK

    if os.environ.get(MARK):
        raise UserError(
            "autotune was called by the file that its own trials import: put the call below `if __name__ == '__main__':`,"
            " or into another file"
        )


def _stopped(tuned: Tuned) -> str:
    if tuned.report is None:
        return "stopped before the first trial ended; nothing to keep"
    folder = Path(tuned.report.study["folder"])
    return f"stopped; the best so far: autotune.load_study({str(folder)!r}); the same call goes on"


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """A disk that is full or a folder that cannot be written is no traceback either.

    Raises:
        UserError: In place of an OSError that says something about the disk.
    """
    try:
        yield
    except OSError as error:
        said = files.words(error)
        if said is None:
            raise
        raise UserError(said) from None
