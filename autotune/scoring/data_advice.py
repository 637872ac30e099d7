"""What the data costs a step: waiting for it, padding, and what workers, packing and grouping would bring."""

import math

from autotune.scoring.step_parts import Evidence
from autotune.space import data
from autotune.trial import lengths, token_budget

# Parts of a step whose time grows with the tokens of the batches.
BY_TOKENS = ("compute", "recomputation", "memory bandwidth")
# Shares from which on waiting and padding are mentioned.
WAITING_FROM, PADDING_FROM = 0.05, 0.1
# Factor from which on a change is mentioned.
WORTH_FROM = 1.02


def data_notes(evidence: Evidence, waiting: float, computing: float) -> list[str]:
    """Returns notes on the data of a trial.

    Args:
        waiting: Share of the step in which the trial's ranks load batches.
        computing: Share of the step whose time grows with the number of tokens.
    """
    return [*_waiting(evidence, waiting), *_padding(evidence, computing)]


def _waiting(evidence: Evidence, share: float) -> list[str]:
    """A note on the time in which ranks wait for data, and what workers would bring."""
    if share < WAITING_FROM:
        return []
    said = f"{share:.0%} of a step is waiting for data"
    if why := evidence.data_cannot.get("num_workers"):
        return [f"{said}; workers cannot load it in the background: {why}"]
    own = int(evidence.seen.candidate.get("data.num_workers", evidence.loader.get("num_workers")) or 0)
    hidden = 1 / (1 - min(share, 0.99))
    if own:  # all of them load all the time, and the step waits for them
        n = max(own + 1, math.ceil(own * hidden))
        load = f"{own} workers load" if own > 1 else "a worker loads"
        return [
            f"{said}, although {load} it: with {n} or more, as far as there are cores, or samples that are prepared"
            f" beforehand, steps would be up to {hidden:.2f}x as fast (data.num_workers)"
        ]
    # A worker loads while the device computes: as many as loading takes longer than the rest of the step hide it all.
    n = max(1, round(share / (1 - min(share, 0.99)) + 0.5))
    return [
        f"{said}; loaded in the background by {n} or more workers, steps would be up to {hidden:.2f}x as fast"
        " (data.num_workers)"
    ]


def _padding(evidence: Evidence, computing: float) -> list[str]:
    """A note on the compute that is padding, and what packing and grouping would bring that the trial did not do already."""
    padding, own = evidence.padding, data.changes(evidence.seen.candidate)
    if padding is None or padding < PADDING_FROM:
        return []
    faster = 1 / (1 - padding * min(1.0, computing))
    packing = evidence.data_cannot.get("packing")
    notes = [
        f"{padding:.0%} of the tokens are padding: without it steps would be up to {faster:.2f}x as fast"
        + (f", but samples cannot be packed: {packing}" if packing else " (data.packing)")
    ]
    known = token_budget.padded(evidence.lengths, own)
    if not known or "token_budget" in own:
        return notes
    micro = int(evidence.seen.candidate.get("micro_batch_size") or 1)
    n_grouped = int(evidence.seen.candidate.get("gradient_accumulation_steps") or 1) * evidence.steps_grouped
    plain, grouped = (lengths.mean_width(known, micro, n) for n in (1, n_grouped))
    plain = grouped if "group_by_length" in own else plain
    if "token_budget" not in evidence.data_cannot and micro > 1:
        notes += _budgeted(known, micro, plain, min(1.0, computing), of_script=bool(evidence.loader))
    factor = 1 / (1 - computing * (1 - grouped / plain))
    if factor > WORTH_FROM and "group_by_length" not in evidence.data_cannot:
        steps = f"{evidence.steps_grouped} steps" if evidence.steps_grouped > 1 else "a step"
        notes.append(
            f"sorted by length within {steps}, samples would be padded to {grouped:,.0f}"
            f" tokens on average instead of {plain:,.0f}: up to {factor:.2f}x as fast (data.group_by_length)"
        )
    return notes


def _budgeted(known: lengths.Table, micro: int, plain: float, computing: float, *, of_script: bool) -> list[str]:
    """A note on batches of a number of tokens: of samples of similar length, or rows that a script's trainer packs."""
    if of_script:
        filled = lengths.expected(known)
        fewest = math.ceil(lengths.longest(known) / filled)
        how = "packed into rows of a number of tokens by the script's trainer"
        knob = "data.token_budget" + (f", from a micro-batch of {fewest} on" if fewest > micro else "")
    else:
        batch = token_budget.filled(known, token_budget.tokens_for(known, micro), micro)
        filled, how = batch.tokens / batch.samples, f"with batches of a number of tokens in place of {micro} samples"
        knob = "data.token_budget"
    factor = 1 / (1 - computing * (1 - filled / plain))
    if factor <= WORTH_FROM:
        return []
    return [
        f"{how}, a sample would take {filled:,.0f} tokens on average instead of {plain:,.0f}:"
        f" up to {factor:.2f}x as fast ({knob})"
    ]
