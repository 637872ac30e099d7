"""What the number of micro-batches does to a script's training by itself: to its gradient, its schedule and its other models."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from autotune.trial.result import TrialResult
from autotune.trial.workload import Probed

# The loss of a step grew with its micro-batches if the logarithms of both factors differ by less than this share.
SAME_GROWTH = 0.2
# Two schedules go at one pace if what they change from a step to the next differs by less than this factor.
SAME_PACE = 1.25
# A rate that grows by less than this factor from the first step to the second does not warm up from zero.
RISING = 1.1
ADDS_UP = (
    "the script adds up the losses of its micro-batches instead of averaging them (in transformers the loss of some models):"
    " its gradient grows with the accumulation, so that each other accumulation is checked, and none is drop-in. Losses are"
    " shown per micro-batch"
)
DIVIDES = (
    "the script divides the loss by the accumulation, as Lightning does, and DeepSpeed does so again: its gradient falls with the"
    " accumulation, so that each other accumulation is checked, and none is drop-in. Leave the division out where it is yours;"
    " losses are shown without it"
)
PACED = (
    "the script moves its learning rate with each micro-batch, as a scheduler does whose step() is called in each: with another"
    " accumulation its schedule goes at another pace, in trials, too, unless it is called once for each optimizer step"
    " (`if engine.is_gradient_accumulation_boundary():`)"
)
# How a trial says that the script's code has the accumulation, by which its loop may count, too: a trial changes the JSON alone.
IN_CODE = "Accumulation: the script's configuration has it from"
COUNTED = (
    "; where the loop counts its micro-batches by what the accumulation is set to in the code, setting that is enough"
)
LENGTHENED = (
    "the more micro-batches the script makes of a batch, the more slowly its learning rate moves, as with a schedule that moves once"
    " for each optimizer step, and whose lengths count batches of the loader: with another accumulation it goes at another pace, in"
    " trials, too, unless its lengths count optimizer steps (`len(loader) // accumulation`)"
)
SIZED = (
    "the script sets its learning rate by the micro-batch as it trains: another micro-batch trains at another rate, in trials, too,"
    " unless the rate is set by the samples of an optimizer step (`micro_batch * accumulation`)"
)
PACED_BESIDE = (
    "the script trains another model by another optimizer, which steps with each micro-batch: with another accumulation that"
    " model takes more steps or fewer, of other batches, in trials, too, unless it steps once for each optimizer step"
    " (`if engine.is_gradient_accumulation_boundary():`)"
)


def growth(first: TrialResult | None, moved: TrialResult, off: float = SAME_GROWTH) -> int | None:
    """Returns 1 if the loss of each step grew as the number of its micro-batches did, -1 if it fell so, else 0.

    One alone may do so by chance. None where the losses cannot tell.

    Args:
        off: Share by which the logarithms of both factors may differ; up to a half it is no loss that stays.
    """
    if first is None or first.observed is None or moved.observed is None:
        return None
    steps = [seen.gradient_accumulation_steps or 0 for seen in (first.observed, moved.observed)]
    pairs = [(one or 0.0, other or 0.0) for one, other in zip(first.losses, moved.losses, strict=False)]
    if not pairs or min(map(min, pairs)) <= 0 or min(steps) <= 0 or steps[0] == steps[1]:
        return None
    more = math.log(steps[1] / steps[0])
    grown = {
        next((way for way in (1, -1) if abs(math.log(other / one) - way * more) < off * abs(more)), 0)
        for one, other in pairs
    }
    return grown.pop() if len(grown) == 1 else 0


def with_findings(
    probed: Probed, growth: int | None, first: TrialResult | None, moved: TrialResult
) -> tuple[Probed, list[str]]:
    """Returns a script with what the number of its micro-batches does, and notes on what follows that.

    Args:
        growth: As the function of that name has it.
        first: The script as it is.
        moved: The script with another accumulation.
    """
    # A script that counts micro-batches itself has to divide the loss: DeepSpeed divides it by a number that stays.
    adds_up = growth == 1 or (growth == 0 and probed.counts_itself)
    paced, beside = _pace(first, moved), _growth_of(_of_steps(first, moved, "beside", lambda pair: pair[1])) > 0
    probed = replace(probed, adds_up=adds_up, divides=probed.divides or growth == -1, paced=paced, paced_beside=beside)
    notes = {
        ADDS_UP: adds_up,
        DIVIDES: probed.divides_again and not adds_up,
        f"{PACED}{_counted(moved.side_changes)}": paced == "number",
        LENGTHENED: paced == "loader",
        SIZED: paced == "size",
        PACED_BESIDE: beside,
    }
    return probed, [note for note, holds in notes.items() if holds]


def changes(probed: Probed, times: float) -> list[str]:
    """Returns what a step of other micro-batches, `times` as many, changes in training, as side changes."""
    if times == 1:
        return []
    found = []
    if probed.adds_up or probed.divides_again:
        grown, what = (times, "adds up") if probed.adds_up else (1 / times, "divides")
        found.append(
            f"Gradient: it is {grown:.3g} times as large, since the script {what} its micro-batches' losses: multiply the norm"
            f" that gradients are clipped at by {grown:.3g}, and unless the optimizer is an Adam divide the learning rate by it."
        )
    if probed.paced == "size":
        found.append(
            "Schedule: the script sets the learning rate by the micro-batch as it trains, as it did in the trial: where the samples of"
            f" an optimizer step stay, set it as for {probed.micro_batch_size} samples."
        )
    if probed.paced == "number":
        found.append(
            f"Schedule: it moves with each micro-batch, {times:.3g} times as often in each step: have it move once in each optimizer"
            f" step, or multiply its lengths (warm-up, total) by {times:.3g}{_counted(probed.moved_by)}."
        )
    if probed.paced == "loader":
        found.append(
            f"Schedule: its lengths count micro-batches, {times:.3g} times as many, though it moves once in each optimizer step: have"
            f" them count optimizer steps, or multiply them (warm-up, total) by {1 / times:.3g}."
        )
    if probed.paced_beside:
        found.append(
            f"Other optimizer: it steps with each micro-batch, {times:.3g} times as often in each step: have it step once in each"
            " optimizer step, with the gradients of all micro-batches."
        )
    return found


def _counted(side_changes: Iterable[str]) -> str:
    """Returns what holds of a schedule if the loop counts by what the code has; empty where a trial changed that, too."""
    return COUNTED if any(text.startswith(IN_CODE) for text in side_changes) else ""


def _of_steps(
    first: TrialResult | None, moved: TrialResult, what: str, of: Callable[[tuple[float, float]], float]
) -> float:
    """Returns by what a value of the first two steps is larger with more micro-batches in one global batch; 1 where nothing tells.

    Args:
        what: The learning rates of these steps, `rates`, or the steps of other optimizers in them, `beside`.
        of: Returns the value for both steps.
    """
    if first is None or first.observed is None or moved.observed is None:
        return 1.0
    one, other = first.observed, moved.observed
    steps = [seen.gradient_accumulation_steps or 0 for seen in (one, other)]
    pairs = [getattr(seen, what) for seen in (one, other)]
    if one.samples_per_step != other.samples_per_step or steps[0] == steps[1] or any(len(pair) < 2 for pair in pairs):
        return 1.0
    values = [of(pair) for pair in pairs]
    if 0 in values:
        return 1.0
    return values[1] / values[0] if steps[1] > steps[0] else values[0] / values[1]


def _growth_of(times: float) -> int:
    """Returns 1 for a factor that is clearly above 1, -1 for one below, else 0."""
    return 0 if 1 / SAME_PACE < times < SAME_PACE else 1 if times > 1 else -1


def _pace(first: TrialResult | None, moved: TrialResult) -> str:
    """Returns what a learning rate follows, as `Probed.paced`: two runs of one global batch tell."""
    level = _of_steps(first, moved, "rates", lambda pair: pair[0])
    # A warm-up from zero at another pace has another first rate, too, but rises by much from there.
    if _growth_of(level) and moved.observed is not None and moved.observed.rates[1] < RISING * moved.observed.rates[0]:
        return "size"
    changed = _of_steps(first, moved, "rates", lambda pair: pair[1] - pair[0])
    return {1: "number", 0: "", -1: "loader"}[_growth_of(changed)]
