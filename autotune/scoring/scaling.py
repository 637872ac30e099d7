"""How a configuration scales over ranks: speed-up, efficiency, and what stands in the way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autotune.errors import UserError
from autotune.scoring import step_times
from autotune.space.candidate import Candidate

Mode = Literal["strong", "weak"]
Interval: TypeAlias = tuple[float, float]


class ScalingError(UserError):
    """Rank counts that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run.

    Attributes:
        world_size: Ranks.
        round: Which time round; a round measures every rank count once, in turn.
        samples_per_s: Throughput.
        step_s: Median step time.
        samples_per_step: Samples of an optimizer step over all ranks.
        communication: Share of the step that collectives took; None if not known.
    """

    world_size: int
    round: int
    samples_per_s: float
    step_s: float
    samples_per_step: int
    communication: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What one rank count gives. Intervals are 95 % ones, from how the rounds scatter; None with one round.

    Attributes:
        world_size: Ranks.
        step_s: Step time, the geometric mean over the rounds.
        step_ci95: Its interval.
        samples_per_s: Throughput.
        samples_per_s_ci95: Its interval; wider than that of the speed-up where the machine drifts from round to round.
        samples_per_step: Samples of an optimizer step over all ranks.
        speedup: Throughput over that of the fewest ranks.
        speedup_ci95: Its interval.
        efficiency: Speed-up over the ideal one.
        efficiency_ci95: Its interval.
        serial_share: Karp-Flatt metric: the share of the work that would have to be serial to explain the speed-up.
            Where it grows with the ranks, communication is to blame; where it stays, work that is not divided.
        communication: Share of the step that collectives took.
        communication_ci95: Its interval.
        epoch_s: Time to train on every sample once; None without a data set of known size.
        epoch_ci95: Its interval.
        n_rounds: Rounds.
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


def candidates(base: Candidate, ranks: Sequence[int], mode: Mode) -> dict[int, Candidate]:
    """The configuration for each rank count.

    Weak: every rank does what it did, so the global batch grows with the ranks. Strong: the global batch is the same
        for all,
    that of the most ranks; fewer ranks accumulate more micro-batches, so that a rank's memory stays the same.

    Args:
        base: The configuration of the most ranks.
        ranks: Rank counts.
        mode: Which of the two.

    Raises:
        ScalingError: A rank count does not divide the largest one.
    """
    most = max(ranks)
    if mode == "weak":
        return dict.fromkeys(sorted(ranks), base)
    odd = [n for n in ranks if most % n]
    if odd:
        raise ScalingError(
            f"strong scaling keeps the global batch by accumulating more on fewer ranks; {', '.join(map(str, odd))}"
            f" {'does' if len(odd) == 1 else 'do'} not divide {most}; choose other rank counts, or --weak"
        )
    steps = base.gradient_accumulation_steps
    return {n: Candidate.of({**base.values(), "gradient_accumulation_steps": steps * most // n}) for n in sorted(ranks)}


def scaling(runs: Sequence[Run], n_samples: int | None) -> list[Scale]:
    """Compares the rank counts, each round with itself, so that a machine that drifts drifts for all.

    Args:
        runs: What was measured.
        n_samples: Samples in the data set; None if it has no end.
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
                serial_share=(1 / speedup - 1 / ideal) / (1 - 1 / ideal) if ideal > 1 else None,
                communication=statistics.fmean(shares) if shares else None,
                communication_ci95=_share_ci95(shares),
                epoch_s=epoch_s,
                epoch_ci95=epoch_ci95,
                n_rounds=len(rounds),
            )
        )
    return found


def _speedup(own: Mapping[int, Run], reference: Mapping[int, Run]) -> tuple[float, Interval | None]:
    both = own.keys() & reference.keys()
    if not both:  # never measured in one round: what is typical of each has to do
        rates = [_typical([run.samples_per_s for run in runs.values()])[0] for runs in (own, reference)]
        return rates[0] / rates[1], None
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
    mean, reach = (
        statistics.fmean(shares),
        step_times.t95(len(shares) - 1) * statistics.stdev(shares) / math.sqrt(len(shares)),
    )
    return max(0.0, mean - reach), min(1.0, mean + reach)
