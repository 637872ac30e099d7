"""What to do with a study's answer, in sentences with commands; page, notebook and notes show the same ones."""

import math
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

from autotune.report.data import StudyReport
from autotune.report.gains import pick_words
from autotune.report.started import started
from autotune.search.stopping import ALL_SLOW, NONE_FITS
from autotune.space.space import EXHAUSTED
from autotune.study.events import DECIDING_SHARE, STOPPED, UNFINISHED, n_spent
from autotune.study.spec.yaml_file import as_run
from autotune.study.storage.generations import generation_of
from autotune.system.units import format_bytes
from autotune.trial.command import EXPORTED_CONFIG

# The time that is stated for what was left out is this many times as long as it was expected to take.
SPARE = 1.5
# A study with other constraints is another one, and `autotune run` refuses to go on with it.
LOOSEN = "loosen the constraints and begin anew with --fresh"


def next_steps(report: StudyReport) -> list[str]:
    """The next steps, the first one first; commands stand in backticks."""
    name, pick = shlex.quote(report.name), report.picks.get("recommended")
    base, generation = generation_of(report.name)
    if generation:  # as the dashboard shows it; no command goes on with this search
        holds = f"`autotune status {shlex.quote(base)}` shows the answer that holds today"
        return [f"This is the search of re-tuning {generation} of study {base}: {holds}."]
    if later := report.study.get("replaced_by"):
        return [f"A re-tuning has replaced this answer by that of {later}; `autotune status {name}` shows it."]
    if report.study.get("retuned"):
        said = f"A re-tuning runs now, and this answer stands until it ends; `autotune status {name}` follows it."
        return [said, *([] if pick is None or report.is_baseline(pick) else _with_answer(report, name))]
    if report.study.get("under_way"):
        return [
            f"Wait: another process runs the study now. This is its answer so far; `autotune status {name}` follows it."
        ]
    again, found = reproduce(report), []
    # `autotune run` does not go on with the search of a re-tuning, nor with that of another text of the target.
    edited = report.study.get("edited")
    is_over = generation_of(str(report.study.get("stored_as") or ""))[1] > 0 or edited
    if is_over:
        pass
    elif left := report.trials_left:
        # A study.yaml that was itself the target keeps its own number, whatever --trials said.
        on = f"{again} --trials {report.study['trials_wanted']}"
        found.append(
            f"Go on: the search was stopped with {left} trial{'s' * (left > 1)} left; `{on}` continues where it was."
        )
    elif _ended(report) == UNFINISHED:
        found.append(f"Go on: the best were not all checked and measured again; `{again}` does so.")
    if pick is None:
        other = [f"The target was edited since: `{again} --fresh` begins anew with it."]
        found += other if edited else _without_answer(report, again)
    elif report.is_baseline(pick):
        anew = f"Keep your configuration. `autotune retune {name} --force` searches anew."
        found.append(anew if is_over else _kept(report, again))
    else:
        found += _with_answer(report, name)
        if not is_over and (checks := _checks(report, again)) and not report.trials_left:
            found.append(f"What reads better is not checked so far: `{checks}` does so, and searches no further.")
    if pick is not None:
        found.append(
            f"After a change of device, libraries, model or data: `autotune changes {name}` says what may no longer hold."
        )
    return found


def reproduce(report: StudyReport) -> str:
    """The command that runs the study again, with the options of its last run."""
    base, generation = generation_of(report.name)
    file = as_run(Path(report.study.get("folder") or base)).name
    return shlex.join(["autotune", *(["retune", base] if generation else ["run", f"studies/{base}/{file}"])])


def _more(report: StudyReport) -> str:
    """The option that lets the search go on: what it expects set aside, more time, or more trials, by what ended it."""
    budget_s, wanted = report.study.get("time_budget_s"), report.study.get("trials_wanted")
    n_trials, spent_s = n_spent(report.outcomes, wanted), report.study.get("wall_s") or 0.0
    left, trials = n_trials < (wanted or 0), f"--trials {2 * n_trials}"
    time = f"--time-budget {math.ceil(2 * max(budget_s, spent_s) / 60)}m" if budget_s else ""
    settled = _ended(report).startswith(STOPPED)
    if left and time and not settled:
        return time
    # Earlier runs count in the budget, and a search that goes on may take as long again.
    scarce = budget_s is not None and 2 * spent_s > budget_s
    return " ".join(["--stop-below 0"] * settled + [trials] * (not settled or not left) + [time] * scarce)


def _kept(report: StudyReport, again: str) -> str:
    """What to do with the baseline as the answer: a better trial may lack a check that would have taken too long."""
    if report.trials_left or _ended(report) == UNFINISHED:
        return "Until then keep your configuration."
    if checks := _checks(report, again):
        return (
            f"Keep your configuration until what reads better is checked: `{checks}` does so, and searches no further."
        )
    if _exhausted(report):
        return f"Keep your configuration: {_nothing_left(report, again)}."
    return f"Keep your configuration. `{again} {_more(report)}` looks further."


def _checks(report: StudyReport, again: str) -> str:
    """The command that makes the check that would have taken too long, with the time for it; empty if none was left out."""
    needed_s, spent_s = report.study.get("unchecked_s") or 0.0, report.study.get("wall_s") or 0.0
    if not needed_s or not report.unchecked:
        return ""
    minutes = math.ceil(SPARE * max(needed_s / DECIDING_SHARE, spent_s + needed_s) / 60)
    return f"{again} --trials {n_spent(report.outcomes)} --time-budget {minutes}m"


def _ended(report: StudyReport) -> str:
    return str(report.study.get("ended") or "")


def _exhausted(report: StudyReport) -> bool:
    """Whether the search has nothing to propose any more, nor what only a longer run would include: more trials change nothing."""
    return _ended(report).startswith((EXHAUSTED, ALL_SLOW, NONE_FITS)) and not report.study.get("left_out")


def _nothing_left(report: StudyReport, again: str) -> str:
    """What a search that has nothing to propose any more leaves untried."""
    ended = _ended(report)
    if ended == EXHAUSTED:
        return "nothing is left to try in this search space"
    if ended.startswith(ALL_SLOW):
        return "no configuration that is left in this search space is worth a trial"
    return f"no configuration that is left in this search space is expected to fit the memory (`{again} --no-filter` tries it)"


def _with_answer(report: StudyReport, name: str) -> list[str]:
    pick, other = report.picks["recommended"], report.picks.get("drop_in")
    command = f"; `autotune export {name} --format command` prints your command with it" if report.invocation else ""
    begun = started(report)
    # A model.py's own configuration may have the usual name.
    named = f"tuned_{EXPORTED_CONFIG}" if report.study.get("base_config") else EXPORTED_CONFIG
    file = begun.exported if begun is not None else named
    found = [f"Train with it: `autotune export {name} -o {file}` writes its configuration{command}."]
    carried = begun.carried if begun is not None else ()
    if any(not text.startswith(carried) for text in pick.get("script_side_changes") or ()):
        found.append("Change your training as listed under the recommendation, too: the JSON does not carry all of it.")
    if other is not None and other["trial"] != pick["trial"] and not report.is_baseline(other):
        found.append(
            f"If the global batch and the numerics must stay as they are: `autotune export {name} --pick drop_in`"
            f" ({pick_words(report, ['drop_in'], other)})."
        )
    return found


def _without_answer(report: StudyReport, again: str) -> list[str]:
    ends = Counter(report.outcomes)
    if not ends["complete"] and 2 * (ends["oom"] + ends["predicted_oom"]) >= len(report.trials):
        smaller = "`--space batch,zero,offload` tries smaller micro-batches, ZeRO stages and offloading"
        found = [f"Need less memory: {smaller}; more ranks (`--ranks`) share the states."]
        stated, study = report.study.get("device_memory_bytes"), {**report.study, "device_memory_bytes": None}
        own = replace(report, study=study).memory_limit_bytes
        if stated and own and stated < own:
            sizes = f"{format_bytes(stated)} a rank, which may have {format_bytes(own)} here"
            found.append(f"Or state a higher limit: `--device-memory` allows {sizes}.")
        return found
    bounded = any(trial["outcome"] == "complete" and trial.get("feasible") is False for trial in report.trials)
    if ends["complete"] and _exhausted(report):
        return [f"{_nothing_left(report, again).capitalize()}{f': {LOOSEN}' * bounded}."]
    if ends["complete"] and report.trials_left:
        return [f"Or {LOOSEN}."] * bounded
    if ends["complete"]:
        return [f"Look further: `{again} {_more(report)}`{f'; or {LOOSEN}' * bounded}."]
    return [
        "Mend the target: the reasons are in the table of trials, the whole output in each trial's folder (`rank-0.log`);"
        f" then `{again} --fresh` starts over.",
        "`autotune check` with your file runs two steps and says what is wrong.",
    ]
