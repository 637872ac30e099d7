"""How a configuration scales over ranks: speed-up, efficiency, and what stands in the way."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from autotune.errors import UserError
from autotune.scoring import step_times
from autotune.scoring.estimates import WIDEST
from autotune.scoring.quantiles import t95
from autotune.space.candidate import Candidate

Mode = Literal["strong", "weak"]
Interval: TypeAlias = tuple[float, float]

LONG = "long steps"


class ScalingError(UserError):
    """Rank counts that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run.

    Attributes:
        round: Which time round; a round measures every rank count once, in turn.
        step_s: Mean step time, as the throughput has it.
        samples_per_step: Samples of an optimizer step over all ranks.
        communication: Share of the step that collectives took; None if not known.
        parts_s: The step by its parts, as `bottleneck.diagnose` names them, and `long steps`, by which the mean exceeds the
            median; empty if it was not taken apart.
        busy_s: Time in which each rank computed or waited for data, not for other ranks; empty if not known.
    """

    world_size: int
    round: int
    samples_per_s: float
    step_s: float
    samples_per_step: int
    communication: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    busy_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What can stand in the way of more ranks.

    Attributes:
        parts: The parts of a step that the loss takes, as `bottleneck.diagnose` names them.
        remedy: What helps against it.
    """

    parts: tuple[str, ...]
    remedy: str


# A step's time beyond the ideal one, by what takes it. `launch` is what lies between the parts that were timed; no part of the
# typical step is what long ones take.
LOSSES = {
    "communication": Loss(
        parts=("communication",),
        remedy="accumulate more micro-batches, use a lower ZeRO stage or larger buckets, or put ranks on a faster link",
    ),
    "waiting for the slowest rank": Loss(
        parts=("stragglers",),
        remedy="give ranks equal work (lengths of samples, cores, devices), and look for other processes beside the slowest",
    ),
    "data": Loss(parts=("input pipeline",), remedy="load in the background (num_workers), or nearer to the ranks"),
    "the script itself": Loss(
        parts=("the script itself",),
        remedy="look at what it does between the calls of its engine and its loader, and divide that among the ranks",
    ),
    "update": Loss(
        parts=("optimizer",), remedy="each rank updates all parameters: shard that (zero_stage 1), or accumulate more",
    ),
    "memory bandwidth": Loss(
        parts=("compute", "recomputation"),
        remedy="forward and backward of the same samples take longer beside other ranks, which share memory, caches or"
        " power: use fewer ranks for each machine, pin them to cores, or compute in 16 bits",
    ),
    LONG: Loss(
        parts=(),
        remedy="look at what some steps do that others do not, such as an evaluation or a checkpoint, and do that more rarely",
    ),
    "launch": Loss(parts=(), remedy="use larger micro-batches, so that fewer operations are started for each sample"),
}  # fmt: skip
# Shares of a step from which on a loss is named with its remedy.
NAMED_FROM = 0.05
# A rank is named whose computing exceeds the mean by this share.
IMBALANCED_FROM = 0.05


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What one rank count gives. Intervals are 95 % ones, from how the rounds scatter; None with one round.

    Attributes:
        step_s: Step time, the geometric mean over the rounds.
        samples_per_s_ci95: Its interval; wider than that of the speed-up where the machine drifts from round to round.
        samples_per_step: Samples of an optimizer step over all ranks.
        speedup: Throughput over that of the fewest ranks.
        efficiency: Speed-up over the ideal one.
        serial_share: Karp-Flatt metric: the share of the work that would have to be serial to explain the speed-up, at
            most 1, where more ranks are no faster. Where it grows with the ranks, communication is to blame; where it
            stays, work that is not divided.
        communication: Share of the step that collectives took.
        epoch_s: Time to train on every sample once; None without a data set of known size.
        losses: Share of the step that each of `LOSSES` takes beyond the ideal step; together what the efficiency lacks,
            negative where something is quicker. Empty for the fewest ranks and where steps were not taken apart.
        slowest_rank: The rank that computes longest; None if not known.
        imbalance: How much longer than the mean of the ranks it does.
        same_loss: Time to the same loss over that of the fewest ranks; None if the batches differ and the noise scale is
            not known.
    """

    world_size: int
    step_s: float
    step_ci95: Interval | None
    samples_per_s: float
    samples_per_s_ci95: Interval | None
    samples_per_step: int
    speedup: float
    speedup_ci95: Interval | None
    efficiency: float
    efficiency_ci95: Interval | None
    serial_share: float | None
    communication: float | None
    communication_ci95: Interval | None
    epoch_s: float | None
    epoch_ci95: Interval | None
    n_rounds: int
    losses: Mapping[str, float] = field(default_factory=dict)
    slowest_rank: int | None = None
    imbalance: float | None = None
    same_loss: float | None = None

    @property
    def vague(self) -> bool:
        """Whether the interval of the speed-up is so wide that it says nothing."""
        return self.speedup_ci95 is not None and self.speedup_ci95[1] > WIDEST * self.speedup_ci95[0]


def candidates(base: Candidate, ranks: Sequence[int], mode: Mode) -> dict[int, Candidate]:
    """The configuration for each rank count.

    Weak: every rank does what it did, so the global batch grows with the ranks. Strong: the global batch is the same for all, that
    of the most ranks; fewer ranks accumulate more micro-batches, so that a rank's memory stays the same.

    Args:
        base: The configuration of the most ranks.

    Raises:
        ScalingError: The micro-batches of a step on the largest rank count cannot be shared out over another one.
    """
    most = max(ranks)
    if mode == "weak":
        return dict.fromkeys(sorted(ranks), base)
    steps = base.gradient_accumulation_steps
    odd = [n for n in ranks if steps * most % n]
    if odd:
        named = f"{', '.join(map(str, odd))} {'does' if len(odd) == 1 else 'do'}"
        raise ScalingError(
            f"strong scaling keeps the global batch by accumulating more on fewer ranks; {named} not divide the"
            f" {steps * most} micro-batches of a step; choose other rank counts, or --weak"
        )
    return {n: Candidate.of({**base.values(), "gradient_accumulation_steps": steps * most // n}) for n in sorted(ranks)}


def scaling(runs: Sequence[Run], n_samples: int | None, noise_samples: float | None = None) -> list[Scale]:
    """Compares the rank counts, each round with itself, so that a machine that drifts drifts for all.

    Args:
        n_samples: Samples in the data set; None if it has no end.
        noise_samples: The gradient noise scale, which says what samples of a larger batch are worth; None if unknown.
    """
    by_rank: dict[int, dict[int, Run]] = {}
    for run in runs:
        by_rank.setdefault(run.world_size, {})[run.round] = run
    if not by_rank:
        return []
    fewest = min(by_rank)
    found = []
    for world_size, rounds in sorted(by_rank.items()):
        speedup, speedup_ci95 = _speedup(rounds, by_rank[fewest]) if world_size != fewest else (1.0, None)
        ideal = world_size / fewest
        step_s, step_ci95 = _typical([run.step_s for run in rounds.values()])
        rate, rate_ci95 = _typical([run.samples_per_s for run in rounds.values()])
        epochs = [n_samples / run.samples_per_s for run in rounds.values()] if n_samples else []
        epoch_s, epoch_ci95 = _typical(epochs) if epochs else (None, None)
        shares = [run.communication for run in rounds.values() if run.communication is not None]
        found.append(
            Scale(
                world_size=world_size,
                step_s=step_s,
                step_ci95=step_ci95,
                samples_per_s=rate,
                samples_per_s_ci95=rate_ci95,
                samples_per_step=next(iter(rounds.values())).samples_per_step,
                speedup=speedup,
                speedup_ci95=speedup_ci95,
                efficiency=speedup / ideal,
                efficiency_ci95=(speedup_ci95[0] / ideal, speedup_ci95[1] / ideal) if speedup_ci95 else None,
                serial_share=min(1.0, (1 / speedup - 1 / ideal) / (1 - 1 / ideal)) if ideal > 1 else None,
                communication=statistics.fmean(shares) if shares else None,
                communication_ci95=_share_ci95(shares),
                epoch_s=epoch_s,
                epoch_ci95=epoch_ci95,
                n_rounds=len(rounds),
                losses=_losses(rounds.values(), by_rank[fewest].values()) if world_size != fewest else {},
                **_balance(rounds.values()),
                same_loss=_same_loss(rounds.values(), by_rank[fewest].values(), noise_samples),
            )
        )
    return found


def advice(found: Sequence[Scale]) -> list[str]:
    """What is not settled, and the losses and the imbalance that count, each with its remedy, for people."""
    said = [
        f"the speed-up on {scale.world_size} ranks is not settled: the {scale.n_rounds} rounds differ too much; run more"
        " of them (--rounds), while nothing else runs"
        for scale in found
        if scale.vague
    ]
    for name, loss in LOSSES.items():
        worst = max(found, key=lambda scale: scale.losses.get(name, 0.0))
        if (share := worst.losses.get(name, 0.0)) >= NAMED_FROM:
            said.append(f"{name} takes {share:.0%} of a step on {worst.world_size} ranks: {loss.remedy}")
    uneven = [(scale, scale.imbalance) for scale in found if (scale.imbalance or 0.0) >= IMBALANCED_FROM]
    said += [
        f"on {scale.world_size} ranks, rank {scale.slowest_rank} computes {imbalance:.0%} longer than the mean: the others"
        " wait for it"
        for scale, imbalance in uneven
    ]
    return said


def _means(runs: Iterable[Run]) -> dict[str, float]:
    """Seconds of a step's losses, means over the runs; together the step. Empty where it was not taken apart."""
    apart = [run for run in runs if sum(run.parts_s.values()) > run.parts_s.get(LONG, 0.0)]
    if not apart:
        return {}
    seconds = dict.fromkeys(LOSSES, 0.0)
    for run in apart:
        long_s = run.parts_s.get(LONG, 0.0)
        whole, typical_s = sum(run.parts_s.values()) - long_s, run.step_s - long_s
        # The step that was taken apart waits for its parts, so that it may take longer than the typical one.
        scale = min(1.0, typical_s / whole) / len(apart)
        for name, loss in LOSSES.items():
            seconds[name] += scale * sum(run.parts_s.get(part, 0.0) for part in loss.parts)
        seconds["launch"] += max(0.0, typical_s - whole) / len(apart)
        seconds[LONG] += long_s / len(apart)
    return seconds


def _losses(own: Iterable[Run], reference: Iterable[Run]) -> dict[str, float]:
    own, reference = list(own), list(reference)
    spent, before = _means(own), _means(reference)
    if not spent or not before:
        return {}
    # What each rank does of a step, beside what each did on the fewest ranks: its part in strong scaling, all in weak.
    work = own[0].samples_per_step / own[0].world_size * reference[0].world_size / reference[0].samples_per_step
    whole = sum(spent.values())
    return {name: (spent[name] - before[name] * work) / whole for name in LOSSES}


def _balance(runs: Iterable[Run]) -> dict[str, Any]:
    """The rank that computes longest, and by how much; of all rounds together, so that one slow moment names nobody."""
    known = [run.busy_s for run in runs if len(run.busy_s) > 1]
    if not known:
        return {}
    totals = {rank: sum(busy.get(rank, 0.0) for busy in known) for rank in known[0]}
    slowest, mean = max(totals, key=lambda rank: totals[rank]), statistics.fmean(totals.values())
    return {"slowest_rank": slowest, "imbalance": totals[slowest] / mean - 1 if mean > 0 else None}


def _same_loss(own: Iterable[Run], reference: Iterable[Run], noise_samples: float | None) -> float | None:
    """Steps to a loss grow as 1 + noise scale / batch (McCandlish et al. 2018)."""
    (step_s, batch), (first_s, first_batch) = (
        (_typical([run.step_s for run in runs])[0], runs[0].samples_per_step) for runs in (list(own), list(reference))
    )
    if batch == first_batch:
        return step_s / first_s
    if noise_samples is None:
        return None
    return step_s / first_s * (1 + noise_samples / batch) / (1 + noise_samples / first_batch)


def _speedup(own: Mapping[int, Run], reference: Mapping[int, Run]) -> tuple[float, Interval | None]:
    both = own.keys() & reference.keys()  # the first round at least: what failed in it was not tried again
    return _typical([own[n].samples_per_s / reference[n].samples_per_s for n in both])


def _typical(values: Sequence[float]) -> tuple[float, Interval | None]:
    """Geometric mean with its interval."""
    if len(values) == 1:
        return values[0], None
    return step_times.ratio_ci95([math.log(value) for value in values])


def _share_ci95(shares: Sequence[float]) -> Interval | None:
    """Of a share, which may be zero: around the mean, and no less than nothing."""
    if len(shares) < 2:
        return None
    mean, reach = (statistics.fmean(shares), t95(len(shares) - 1) * statistics.stdev(shares) / math.sqrt(len(shares)))
    return max(0.0, mean - reach), min(1.0, mean + reach)
