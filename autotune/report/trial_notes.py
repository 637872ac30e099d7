"""Notes on single trials, for the caveats of an answer: which failed, at first or later, and which cannot be recommended."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from autotune.errors import printable
from autotune.scoring.measured import set_apart
from autotune.trial.result import FAILURES, MACHINE_BUSY, RAN, WRITES_FILES, Outcome

Data: TypeAlias = Mapping[str, Any]
# Characters of a failed trial's reason that are shown beside the answer: of its begin, and of its end, which says what to do.
FIRST, LAST = 140, 160
# Where a trial ended, by its phase; the reasons of the other phases say it themselves.
PLACES = {
    "start": "at its start", "import": "in the imports", "build": "in build", "initialize": "in initialize", "warmup": "in the warm-up",
    "measure": "in the timed steps",
}  # fmt: skip


def of(trials: Sequence[Data]) -> list[str]:
    """The notes on a study's trials, which are rows of its report."""
    return [
        *_baseline_over(trials), *_out_of_memory(trials), *_failures(trials), *_failures_again(trials), *_set_apart(trials),
        *_slowed(trials),
    ]  # fmt: skip


def _baseline_over(trials: Sequence[Data]) -> list[str]:
    """That the baseline is no answer, and why: what is recommended may be worse than it."""
    for trial in trials:
        if trial["trial"] == 0 and trial.get("outcome") == Outcome.COMPLETE:
            if trial.get("feasible") is False:
                return ["the baseline breaks a constraint: others are compared with it, but it cannot be recommended"]
            if doubt := trial.get("doubt"):
                return [f"others are compared with the baseline, but it cannot be recommended: {doubt}"]
    return []


def _out_of_memory(trials: Sequence[Data]) -> list[str]:
    """The trials that ran out of memory, where they are why the baseline is all that was measured."""
    own, *others = trials or [{}]
    ends = Counter(trial.get("outcome") for trial in others)
    ran_out, more = ends[Outcome.OOM], ends[Outcome.PREDICTED_OOM]
    if own.get("outcome") != Outcome.COMPLETE or not ran_out + more or any(ends[outcome] for outcome in RAN):
        return []
    are = "is" if more == 1 else "are"
    said = f"{ran_out or more} of {len(others)} other trials {'ran' if ran_out else f'{are} predicted to run'} out of memory"
    return [said + (f", {more} more {are} predicted to" if ran_out and more else "")]


def checks(point: Data) -> str:
    """What is said of a trial that may not be recommended: that a check has refused it, or that none was made."""
    return "checks not passed" if point.get("barred") else "not checked"


def ended(outcome: str) -> str:
    """How a trial ended, in words: `too_few_steps` is `too few steps`."""
    return Outcome(outcome).words


def counted(outcomes: Iterable[str] | Mapping[str, int]) -> str:
    """How many trials ended how, the most frequent outcome first: `12 complete, 3 too few steps`."""
    return ", ".join(f"{n} {ended(outcome)}" for outcome, n in Counter(outcomes).most_common())


def end_words(trial: Data) -> tuple[str, str]:
    """How a trial ended, and why it did not complete: `("oom", "over the memory limit (in the warm-up)")`."""
    outcome = trial["outcome"]
    timed = outcome in (Outcome.COMPLETE, Outcome.STOPPED_EARLY)
    place = "" if timed else PLACES.get(str(trial.get("phase")), "")
    limit = "breaks a constraint" if outcome == Outcome.COMPLETE and trial.get("feasible") is False else ""
    why = " ".join(part for part in (str(trial.get("reason") or ""), place and f"({place})") if part)
    return ended(outcome), "; ".join(part for part in (why, limit) if part)


def own(said: Mapping[int, Sequence[str]], known: Sequence[str]) -> list[str]:
    """What trials say that is not known of the target: each once, with the trials that say it; of written files the first.

    Args:
        said: The notes of the trials that are shown, by their number.
        known: The notes on the target.
    """
    seen, by_text = set(map(_matter, known)), dict[str, list[int]]()
    for number, texts in said.items():
        for text in dict.fromkeys(texts):
            if _matter(text) not in seen:
                by_text.setdefault(text, []).append(number)
        seen |= {WRITES_FILES} & set(map(_matter, texts))
    return [f"trial{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {text}" for text, of in by_text.items()]


def _matter(text: str) -> str:
    """What notes on one matter have in common: their words, and where these are names of files their begin."""
    return WRITES_FILES if text.startswith(WRITES_FILES) else without_numbers(text)


def without_numbers(text: str) -> str:
    """What notes that differ in their numbers alone have in common."""
    return re.sub(r"[0-9.]+", "", text)


def _failures(trials: Sequence[Data]) -> list[str]:
    """The trials that ended badly, those that ended alike together, each with a reason."""
    alike: dict[tuple[str, str], list[Data]] = {}
    for trial in trials:
        if trial.get("outcome") in FAILURES and trial["trial"] != 0:
            words = without_numbers(trial.get("reason") or "")
            alike.setdefault((trial["outcome"], words), []).append(trial)
    found = []
    for (outcome, _), group in alike.items():
        numbers = ", ".join(str(trial["trial"]) for trial in group)
        reason = _shortened(group[0].get("reason") or "")
        # Alike but for their numbers: these are the first one's.
        whose = f", as trial {group[0]['trial']}" if len({trial.get("reason") for trial in group}) > 1 else ""
        found.append(f"trial{'s' * (len(group) > 1)} {numbers} ended with {ended(outcome)}{whose}: {reason}")
    return found


def _failures_again(trials: Sequence[Data]) -> list[str]:
    """The trials that ended badly when they were measured again, each with the reason."""
    return [
        f"trial {trial['trial']} ended badly when it was measured again: {_shortened(trial['failed_again'])}"
        for trial in trials
        if trial.get("failed_again")
    ]


def _slowed(trials: Sequence[Data]) -> list[str]:
    """The trials that were given up as slower while other processes slowed them down, by how much was not counted."""
    found = [
        str(trial["trial"])
        for trial in trials
        if trial.get("outcome") == Outcome.STOPPED_EARLY
        and not trial.get("log_slowdown")
        and any(text.startswith(MACHINE_BUSY) for text in trial.get("caveats") or ())
    ]
    if not found:
        return []
    were = f"trials {', '.join(found)} were" if len(found) > 1 else f"trial {found[0]} was"
    return [
        f"{were} stopped early as slower while the machine was busy, which may be the reason: `--fresh` measures all anew,"
        " best when nothing else runs"
    ]


def _shortened(reason: str) -> str:
    """A reason in one line; of a long one its begin and its end, in whole words."""
    words = " ".join(printable(reason).split())
    if len(words) <= FIRST + LAST:
        return words
    return f"{textwrap.shorten(words, FIRST, placeholder='')} ... {words[-LAST:].partition(' ')[2]}"


def _set_apart(trials: Sequence[Data]) -> list[str]:
    """The complete trials that cannot be recommended whatever they measured, those of one reason together."""
    own = {text for trial in trials if trial["trial"] == 0 for text in trial.get("unreproducible") or ()}
    by_reason: dict[str, list[str]] = {}
    for trial in trials:
        alone = [text for text in trial.get("unreproducible") or () if text not in own]
        why = set_apart(trial.get("unwitnessed") or (), alone) if trial.get("outcome") == "complete" else ""
        by_reason.setdefault(why, []).append(str(trial["trial"]))
    return [f"trial{'s' * (len(of) > 1)} {', '.join(of)}: {why}" for why, of in by_reason.items() if why]
