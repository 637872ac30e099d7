"""Which trials the next round of re-measurements needs to settle who is best, and whether it needs one at all."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.scoring import posterior
from autotune.scoring.estimates import Estimates, timed_share
from autotune.scoring.measured import Measured, log_gain
from autotune.scoring.objective import Objective
from autotune.scoring.recommend import TIE, drops_in, rank, shown_better

# The race is settled when naming the best now is expected to lose less than this share of the gain, 1 %, and loses more
# than that with a chance below `UNSURE`: an expectation below 1 % still lets every tenth answer be 5 % behind.
SETTLED, UNSURE = 0.01, 0.1
# A trial whose measurement is expected to gain less than this share takes no part: 0.1 %.
HOPELESS = 0.001
# Rounds are worth running for a chance of a quarter that they show the leader to be better: the normal quantile.
CHANCE_Z = 0.674
# A gain below this (a logarithm: 1.42x) is measured again before it counts as shown: where readings differ by 10 %, which a few
# trials do not show, the best of four equal ones reads more in 2 % of the cases.
LUCK = 0.35
# Where the search spent all of its trials and had still not come to an end, their readings may differ for no reason that a
# model could learn: a gain below twice that is measured again twice.
UNFORESEEN_LUCK, UNFORESEEN_ROUNDS = 2 * LUCK, 2
# What leads by a reading that is further than this from what all others foretell is measured again, and once more where the
# two contradict each other. A gain holds the luck of two readings, and this that of one.
UNFORETOLD, UNFORETOLD_ROUNDS = LUCK / math.sqrt(2), 2
# Trials that the expected loss is worked out over, and draws from their posterior.
MOST_RACING, DRAWS = 30, 2000
THROUGHPUT = Objective(name="throughput", metric="samples_per_s")


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often trials may be measured again, and until when.

    Attributes:
        least: Rounds that a leader must have been in. One whose gain may be luck must have been in one all the same, or in two.
        most: The most that the baseline may be in.
        below: The loss, as a share, below which the race is settled.
        unforeseen: The search spent all of its trials before it was settled.
    """

    least: int
    most: int
    below: float = SETTLED
    unforeseen: bool = False


@dataclass(frozen=True, kw_only=True)
class Race:
    """Where a contest stands.

    Attributes:
        settled: Whether naming the leader now is expected to lose little and hardly loses more, and it is known whether it beats
            the baseline, or cannot be shown any more.
        runners: The leader, then those that may beat it, the most hopeful first.
    """

    settled: bool
    runners: Sequence[Measured]


def race(
    trials: Sequence[Measured],
    estimates: Estimates,
    objectives: Sequence[Objective],
    below: float = SETTLED,
    more: int | None = None,
) -> Race:
    """Where the contest of some trials stands.

    Args:
        trials: The trials, without the baseline.
        below: The loss, as a share, below which it is settled.
        more: Rounds that may follow: whether the leader beats the baseline counts as settled where these cannot show it.
    """
    if not trials:
        return Race(settled=True, runners=())
    gains = {m.trial: log_gain(m, trials[0], objectives) for m in trials}
    leader, share = max(trials, key=lambda m: gains[m.trial]), timed_share(objectives)
    hopes = {m.trial: _hope(gains[m.trial] - gains[leader.trial], share * estimates.sd(m, leader)) for m in trials}
    others = sorted((m for m in trials if m is not leader), key=lambda m: -hopes[m.trial])
    hopeful = [m for m in others if hopes[m.trial] > HOPELESS]
    losses = _losses([leader, *hopeful[: MOST_RACING - 1]], gains, share, estimates)
    little = losses.mean() < below and (losses > below).mean() < UNSURE
    baseline = estimates.baseline
    open_ = (
        baseline is not None
        and log_gain(leader, baseline, objectives) > TIE
        and not shown_better(leader, estimates, objectives)
        and (more is None or _may_be_shown(leader, baseline, estimates, objectives, more))
    )
    return Race(settled=bool(little) and not open_, runners=[leader, *hopeful])


def _may_be_shown(
    leader: Measured, baseline: Measured, estimates: Estimates, objectives: Sequence[Objective], more: int
) -> bool:
    """Whether that many more rounds have a chance worth taking to show that the leader is better."""
    sd, share = estimates.sd(leader, baseline), timed_share(objectives)
    if not 0 < sd < math.inf:
        return True
    left = 1 / (1 + more * sd**2 / (2 * estimates.noise_sd**2))  # share of the variance after these rounds
    moves = share * sd * math.sqrt(1 - left)  # standard deviation of what the estimate will be
    least = estimates.reach(leader, baseline, objectives, more, left)
    return log_gain(leader, baseline, objectives) + CHANCE_Z * moves > least


def _may_be_luck(
    leader: Measured, baseline: Measured, estimates: Estimates, objectives: Sequence[Objective], luck: float
) -> bool:
    """Whether a leader is shown to be better by a gain below `luck`, in the share of the goal that step times decide."""
    small = log_gain(leader, baseline, objectives) < timed_share(objectives) * luck
    return small and shown_better(leader, estimates, objectives)


def _is_lucky(m: Measured, estimates: Estimates) -> bool:
    """Whether one reading of a trial is faster than all others foretell, by more than the luck of one reading."""
    return estimates.unforetold(m)[0] > UNFORETOLD


def _rests_on_one(leader: Measured, baseline: Measured, estimates: Estimates, objectives: Sequence[Objective]) -> bool:
    """Whether a leader is ahead by a reading, its own or the baseline's, that all others contradict."""
    if not timed_share(objectives) or log_gain(leader, baseline, objectives) <= TIE:
        return False
    return _is_lucky(leader, estimates) or estimates.unforetold(baseline)[1] > UNFORETOLD


def _doubtful_rounds(
    leaders: Sequence[Measured], estimates: Estimates, objectives: Sequence[Objective], *, unforeseen: bool
) -> int:
    """Rounds that leaders must have been in whose gain may be luck."""
    baseline = estimates.baseline
    if baseline is None:
        return 0
    if any(_rests_on_one(m, baseline, estimates, objectives) for m in leaders):
        return UNFORETOLD_ROUNDS
    luck, again = (UNFORESEEN_LUCK, UNFORESEEN_ROUNDS) if unforeseen else (LUCK, 1)
    return again if any(_may_be_luck(m, baseline, estimates, objectives, luck) for m in leaders) else 0


def _hope(ahead: float, sd: float) -> float:
    """Expected gain over the leader if a trial is better, else nothing (expected improvement)."""
    if not 0 < sd < math.inf:
        return max(0.0, ahead)
    z = ahead / sd
    density, below = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), 0.5 * (1 + math.erf(z / math.sqrt(2)))
    return ahead * below + sd * density


def _losses(trials: Sequence[Measured], gains: dict[int, float], share: float, estimates: Estimates) -> np.ndarray:
    """Draws of what is lost by naming the one that is expected to be best: the gain of the best less its own."""
    means = np.array([gains[m.trial] for m in trials])
    if len(trials) < 2 or not share:
        return np.zeros(1)
    drawn = np.random.default_rng(0).standard_normal((DRAWS, len(trials)))
    drawn = means + drawn @ posterior.root(share**2 * estimates.covariance(trials)).T
    return np.asarray(drawn.max(axis=1) - drawn[:, int(np.argmax(means))])


def rounds_done(estimates: Estimates, tried: Mapping[int, int]) -> int:
    """Returns how many rounds of re-measurement have been done.

    The baseline takes part in every round, so its rounds count; without a baseline, the largest number of any trial.

    Args:
        tried: Rounds that each trial took part in, by the trial's number.
    """
    return tried.get(estimates.baseline.trial, 0) if estimates.baseline else max(tried.values(), default=0)


def next_round(
    estimates: Estimates,
    objectives: Sequence[Objective],
    found: Collection[int],
    world_size: int,
    n: int,
    *,
    tried: Mapping[int, int],
    rounds: Rounds,
) -> list[Measured]:
    """The trials to measure in the next round beside the baseline; empty if the race is settled.

    The best compromise is sought among all trials, and among those without an open check. While their leaders have
    fewer rounds than they need at least, the finalists also race for the pick with the baseline's batch and numerics,
    and for throughput.

    Args:
        found: The finalists, by number; each is measured at least once.
        n: Trials in a round.
        tried: Rounds that a trial was in, by number, whether they completed or not.
    """
    baseline, least = estimates.baseline, rounds.least
    ranked = [m for m in rank(estimates, objectives) if baseline is None or m.trial != baseline.trial]
    ranked = [m for m in ranked if not m.unreproducible] or ranked
    hopeful = [m for m in ranked if not m.barred]
    # Where each leader is measured as often anyway, none is tested.
    tests = rounds.least < UNFORETOLD_ROUNDS and timed_share(objectives) > 0
    lucky = [m for m in hopeful if tests and _is_lucky(m, estimates)]
    # Rounds that test such a reading leave as many for the others.
    n_tests = max((min(tried.get(m.trial, 0), UNFORETOLD_ROUNDS) for m in lucky), default=0)
    more = max(0, rounds.most + n_tests - rounds_done(estimates, tried))
    races = [
        race(some, estimates, objectives, rounds.below, more) for some in (hopeful, [m for m in ranked if not m.doubt])
    ]
    leaders = [each.runners[0] for each in races if each.runners]
    if more:
        least = max(least, _doubtful_rounds(leaders, estimates, objectives, unforeseen=rounds.unforeseen))
    new = [m for m in ranked if least and m.trial in found and not tried.get(m.trial)]
    short = [m for m in leaders if tried.get(m.trial, 0) < least]
    # Of two readings that contradict each other nobody knows which is right, and how large the noise is.
    short += [m for m in lucky if m not in short and 0 < tried.get(m.trial, 0) < UNFORETOLD_ROUNDS]
    due = bool(new or short) or (baseline is not None and bool(ranked) and tried.get(baseline.trial, 0) < least)
    if not due and (not more or all(each.settled for each in races)):
        return []
    if due:
        finalists = [m for m in ranked if m.trial in found or m.confirmed]
        same = [m for m in finalists if baseline is not None and drops_in(m, baseline, world_size)]
        races += [race(same, estimates, objectives), race(finalists, estimates, [THROUGHPUT])]
    leaders = [each.runners[0] for each in races if each.runners]
    chasers = [m for each in races if due or not each.settled for m in each.runners[1:]]
    first = {m.trial: m for m in [*new, *short]}  # all of them, or a leader could wait for its rounds for ever
    wanted = first | {m.trial: m for m in [*leaders, *chasers]}
    return list(wanted.values())[: max(n, len(first))]
