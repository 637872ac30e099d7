"""The library: tune, read and export studies from Python, by the functions behind the commands.

Keyword arguments are the keys of a `study.yaml` and are read alike: `"10m"`, `"4GiB"`, `"8..64"`. A wrong one raises a
`UserError` that names the flag of the command line, if it has one: `--time-budget` is `time_budget_s`. Nothing is printed unless asked
for, and nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune.errors import UserError
from autotune.forecast.prediction import Interval, Prediction
from autotune.report.results import FilePath, Pick, Scalar, StudyResult, errors_in_words, path_text
from autotune.study.spec.settings import with_settings
from autotune.study.storage import urls

if TYPE_CHECKING:
    from autotune.report.export import Exported
    from autotune.session import Tuned
    from autotune.study.listeners import Callback


__all__ = ["Interval", "Pick", "Prediction", "StudyResult", "export", "load_study", "predict", "run"]

# Names of presets, or what would stand in their files.
Presets: TypeAlias = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def run(
    target: FilePath,
    *,
    name: str | None = None,
    space: Presets | None = None,
    goal: str | None = None,
    objectives: Presets | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    quick: bool | None = None,
    trials: int | None = None,
    time_budget_s: float | str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    executor: str | None = None,
    executor_options: Mapping[str, str] | None = None,
    patience_s: float | str | None = None,
    hostfile: FilePath | None = None,
    base_config: Mapping[str, Any] | FilePath | None = None,
    checkpoint_every: int | None = None,
    global_batch: str | int | tuple[int, int] | None = None,
    device_memory_bytes: int | str | None = None,
    max_length: int | None = None,
    with_eval: bool | None = None,
    with_save: bool | None = None,
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
    callbacks: Sequence[Callback] = (),
) -> StudyResult:
    """Tune a model or a training script, as `autotune run` does, and write the same files into `studies/NAME/`.

    The same call again goes on where the study was; the budget is the total. Trials run in other processes, which
    import the target only. If nothing can be recommended, the result's `picks` are empty.

    Args:
        target: A `model.py`, a training script, a `study.yaml`, or a launch command such as `torchrun train.py`.
        {settings}
        fresh: Forget the study's earlier trials.
        history: Start from what related studies on this machine found.
        progress: Show how far it is: in a notebook below the cell, else on standard error. The logger `autotune` of
            Python's `logging` is told in any case.
        callbacks: Called after each trial with Optuna's study and trial, as those of `optuna.study.Study.optimize`:
            `optuna_integration.MLflowCallback()`, or a function of yours. `study.stop()` in one ends the search;
            an exception in one ends the run.

    Raises:
        UserError: An argument or the target cannot be used, or the study cannot go on; in one sentence.
        KeyboardInterrupt: The user stopped it (SIGTERM and SIGHUP, too, in the main thread); `load_study` reads what was found.
    """
    return _run(dict(locals()))  # the arguments; nothing else is defined yet


def _run(arguments: dict[str, Any]) -> StudyResult:
    """Tune with the arguments of `run`."""
    _outside_of_trials()
    names = ("target", "fresh", "history", "progress", "callbacks")
    target, fresh, learn, progress, callbacks = (arguments.pop(name) for name in names)
    if not (isinstance(callbacks, list | tuple) and all(callable(each) for each in callbacks)):
        raise UserError(f"callbacks: give a list of functions of a study and its trial, not {callbacks!r}")
    overrides = {key: _plain(value, key) for key, value in arguments.items()}
    overrides["script_args"] = _words(arguments["script_args"])
    overrides["storage"] = arguments["storage"] or os.environ.get(urls.VARIABLE) or None
    from autotune.report.notebook import viewer
    from autotune.study.events import Broadcast
    from autotune.study.listeners import LogSink
    from autotune.study.setup.request import requested

    with errors_in_words(), viewer(progress) as view:
        heard = Broadcast(LogSink(), view)
        with requested(_target(target), overrides, heard) as request:
            from autotune.session import tune  # takes a second, in which the engine starts

            tuned = tune(request, fresh=fresh, learn=learn, view=heard, callbacks=callbacks)
    if (stop := tuned.stopped) is not None:
        stop.args = (_stopped(tuned),)
        raise stop.with_traceback(None) from None
    if tuned.refused is not None:
        raise tuned.refused
    assert tuned.report is not None
    return StudyResult(tuned.report)


run.__doc__ = with_settings(run.__doc__ or "")


def load_study(study: FilePath, *, storage: str | None = None) -> StudyResult:
    """The findings of a study so far, also while another process runs it.

    Args:
        study: Its name below `studies/`, or the path of its folder, as `elsewhere/studies/x`.
        storage: Database URL; by default `AUTOTUNE_STORAGE`, else what its `study.yaml` says, else `autotune.db` beside
            its folder.

    Raises:
        UserError: There is no such study, or its database does not answer.
    """
    from autotune import session

    text = path_text(study, "load_study: the name of a study or the path of its folder")
    if not isinstance(storage, str | None):
        raise UserError(f"storage: the URL of a database is needed as a text, not {storage!r}")
    folder = Path(text).absolute()
    studies, name = (folder.parent, folder.name) if os.sep in text else (Path("studies").absolute(), text)
    if (studies / name).is_file():
        raise UserError(f"load_study: {text} is a file; give the study's name, or the path of its folder")
    with errors_in_words():
        url = storage or os.environ.get(urls.VARIABLE) or None
        return StudyResult(session.open_study(name, url, studies).report)


def predict(
    target: FilePath,
    *,
    set: Mapping[str, Scalar] | None = None,  # noqa: A002
    ranks: int | None = None,
    device_memory_bytes: int | str | None = None,
    max_length: int | None = None,
    base_config: Mapping[str, Any] | FilePath | None = None,
    name: str | None = None,
    script_args: Sequence[str] | str | None = None,
    progress: bool = False,
) -> Prediction:
    """Forecast memory and speed of a configuration before it runs, as `autotune predict` does.

    The first call profiles the target (a script is run once); later ones answer from the cache.

    Args:
        target: As for `run`.
        set: Knobs that differ from the baseline's, as `{"zero_stage": 3}`; also any DeepSpeed setting by its path.
        ranks: Ranks, also more than this machine has.
        device_memory_bytes: Memory of a device, or a text such as `"80GiB"`.
        max_length: Tokens that a sample may reach, if more than what was seen: then that has to fit.
        base_config: The baseline, as for `run`.
        name: The study whose trials correct the forecast; by default that of the target.
        script_args: As for `run`.
        progress: Show that the target is profiled.

    Raises:
        UserError: A knob or value is wrong, or the configuration cannot run here; in one sentence.
    """
    _outside_of_trials()
    if set is not None and not isinstance(set, Mapping):
        raise UserError(f"set: knobs by name are needed, as in {{'zero_stage': 3}}, not {set!r}")
    settings = {str(key): _plain(value, f"set: {key}") for key, value in (set or {}).items()}
    for key, value in settings.items():
        if not isinstance(value, Scalar):
            raise UserError(f"set: {key}: a plain value is needed, not {value!r}")
    given = {"name": name, "ranks": ranks, "device_memory_bytes": device_memory_bytes, "base_config": base_config}
    given["max_length"] = max_length
    overrides = {key: _plain(value, key) for key, value in given.items()} | {"script_args": _words(script_args)}
    from autotune.report.notebook import viewer
    from autotune.study.setup import forecasts, request
    from autotune.study.setup.capture import wanted_study

    file = _target(target)
    with errors_in_words(), viewer(progress) as view:
        wanted, studies = wanted_study(file, overrides, view)[0], request.studies_folder(Path(file))
        forecasts.check_named(name, studies)
        return forecasts.foresee(wanted, settings, studies, view)


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
        The `text`, and as `notes` what its user has to know besides.

    Raises:
        UserError: There is no such study, pick, trial or format, or the file cannot be written.
    """
    found = study if isinstance(study, StudyResult) else load_study(study)
    return found.export(path, pick=pick, trial=trial, format=format)


def _target(given: Any) -> str:
    if not isinstance(given, str | os.PathLike):
        raise UserError(
            "target: the path of a model.py, a training script or a study.yaml is needed, or a launch command,"
            f" not {type(given).__name__}: trials import the file in processes of their own"
        )
    return os.fsdecode(given)


def _words(given: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The script's arguments; None where nothing is said."""
    if not isinstance(given, str | list | tuple | None):
        raise UserError(f"script_args: a list of arguments or a text is needed, not {given!r}")
    try:
        words = shlex.split(given) if isinstance(given, str) else [str(word) for word in given or ()]
    except ValueError as error:
        raise UserError(f"script_args: {error}: {given}") from None
    return tuple(words) or None


def _plain(value: Any, where: str) -> Any:
    """The value as a YAML file would hold it, for tuples, ranges, paths, and numpy's numbers and arrays too."""
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # numpy's float is one, too, and no YAML
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
    """Refuse to begin a study from within a trial, which would begin the next one."""
    from autotune.system.processes import MARK

    if os.environ.get(MARK):
        raise UserError(
            "autotune was called by the file that its own trials import: put the call below"
            " `if __name__ == '__main__':`, or into another file"
        )


def _stopped(tuned: Tuned) -> str:
    from autotune.session import NOTHING_KEPT

    if tuned.report is None:
        return NOTHING_KEPT.format("call")
    folder = Path(tuned.report.study["folder"])
    return f"stopped; the best so far: autotune.load_study({str(folder)!r}); the same call goes on"
