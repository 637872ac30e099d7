"""The search without a study: takes candidates, a prior and measurements; gives the next candidate and the best one.

It needs no workload, no DeepSpeed and no Optuna, so it can be tried on any table of candidates; `docs/develop/sampler.md` shows
how, and how to use the same search as an Optuna sampler. What trials teach is in `model.py`; here is what follows
from it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.forecast.features import FeatureTable, Prior, knobs_of
from autotune.scoring import pareto, posterior
from autotune.scoring.measured import Foretold
from autotune.scoring.objective import Bound
from autotune.search import acquisition, pool
from autotune.search.model import MEMORY, Beliefs, CostModel, Rows, learn, timed
from autotune.search.observation import Observation
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.trial.profile import Floats
from autotune.trial.result import Outcome

FIRST_FITS, TINY = 0.9, 1e-12
# Lowest chance to fit that is worth a trial when all remaining candidates may run out of memory; `chance_needed` is always more.
LAST_RESORT = 0.3
# Accepted chance to run out of memory: 0.6 at first, multiplied by 0.35 after each trial that did.
RISK, LESS_RISK = 0.6, 0.35
# Before the model may end a study: at least 8 completed trials, 75 % of them inside the 90 % interval foretold from the
# others.
ENOUGH_TRIALS, ENOUGH_COVERED = 8, 0.75
# Before a quick study may end: the baseline and a candidate.
QUICK_TRIALS = 2
# The loss of stopping: drawn so often, over this many candidates.
DRAWS, MOST_DRAWN = 256, 250
# A turn of the goal that promises less than 5 %, or one of an objective that promises less than 1 %, goes to what the model does not
# know, while there is such a candidate.
EXPLORE_BELOW_GOAL, EXPLORE_BELOW = 0.05, 0.01
# What is surely (by `pool.OPTIMISM`) this many times behind on every objective of time is tried once in a study, and no
# more.
HOPELESS = 3.0
# A trial must be expected to gain this share of what stopping may lose, or it is not worth its time.
WORTH_A_TRIAL = 0.1


@dataclass(frozen=True, kw_only=True)
class RemainingCandidates:
    """What there is still to propose.

    Attributes:
        n_open: Candidates that no trial has had.
        n_fit: Of these, those that may fit the memory.
        least_memory_bytes: The least that one of them is expected to need.
    """

    n_open: int
    n_fit: int
    least_memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The gain that remains to be expected, and how well the model has foretold trials so far.

    Attributes:
        loss: Expected loss of stopping now, as a share of the goal: how much better the best of all candidates is than
            the best of those measured, the best few of which are measured again.
        next_gain: The same for the one candidate that promises most: what one more trial may gain.
        n_left: Candidates that were looked at and may be run.
        explored: Whether each level of a knob that may be good was tried, and each candidate that may be the best is known.
        n_ran: Trials that told a step time: that completed, or were stopped early.
        covered: Share of the step times that lie in their 90 % interval, each foretold from the other trials.
        quick: Few trials are wanted: each has to be worth its time by itself, and none explores.
        drop_in_open: What trains as the reference does, and may be better, was not tried.
    """

    loss: float
    next_gain: float
    n_left: int
    explored: bool
    n_ran: int
    covered: float
    quick: bool = False
    drop_in_open: bool = False

    def settled(self, below: float) -> bool:
        """Whether stopping loses less than `below`, or no trial is worth its time, by a model that has foretold well so far."""
        if self.drop_in_open:
            return False
        if self.quick:
            return self.n_ran >= QUICK_TRIALS and self.next_gain < below
        trusted = self.n_ran >= ENOUGH_TRIALS and self.covered >= ENOUGH_COVERED
        little = self.loss < below or self.next_gain < WORTH_A_TRIAL * below
        return trusted and self.explored and self.n_left > 0 and little


class CandidateOptimizer:
    """Proposes the next of a set of candidates.

    Args:
        candidates: What may be proposed, all of it legal; `add` takes more.
        prior: Predicts step time and memory.
        metrics: The objectives, as in `objective.METRICS`, in order; a mapping holds their weights in the goal, which is
            the weighted mean of their logarithms (without one all weigh alike).
        memory_limit_bytes: What a rank may use; None if that is not known.
        bounds: Bounds on metrics that a solution must keep (metric, which end, amount).
        reference: The candidate whose batch is the origin; by default the first.
        knobs: The values of each knob, where `candidates` does not hold all that will be added.

    Attributes:
        cautious: Whether what surely does not fit the memory is passed by; else it is only less likely to be proposed.
        goal_only: Whether candidates are proposed for the goal alone, not for the front: few trials then find its best.
        quick: Whether after the reference the best expected by the goal is next, then what may gain most, until no
            single trial is worth its time.
        drops_in: Whether a candidate trains as the reference does, so that it needs no check; None if that is not known.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        prior: Prior,
        metrics: Sequence[str] | Mapping[str, float],
        *,
        world_size: int = 1,
        memory_limit_bytes: float | None = None,
        bounds: Iterable[Bound] = (),
        reference: Candidate | None = None,
        knobs: Mapping[str, Sequence[Scalar]] | None = None,
    ) -> None:
        self.metrics, self.world_size, self.bounds = list(metrics), world_size, list(bounds)
        self.cautious, self.goal_only, self.quick = True, False, False
        self.drops_in: Callable[[Candidate], bool] | None = None
        shares = np.array(
            list(metrics.values()) if isinstance(metrics, Mapping) else np.ones(len(metrics)), dtype=float
        )
        self.shares: Floats = shares / shares.sum()
        self.limit = math.log(memory_limit_bytes) if memory_limit_bytes else None
        reference = reference or (candidates[0] if candidates else Candidate(micro_batch_size=1))
        self.catalogue = FeatureTable(knobs if knobs is not None else knobs_of(candidates), reference, prior)
        self._offered = np.zeros(0, dtype=bool)
        self._note([reference, *candidates])
        self.add(candidates)
        self._learned: list[
            tuple[list[Observation], CostModel]
        ] = []  # the last two: `stopping.settled` leaves out a trial

    def add(self, candidates: Sequence[Candidate]) -> None:
        """More candidates to choose from; those that are there stay."""
        self._note(candidates)
        self._offered[[self.catalogue.row[c] for c in candidates]] = True

    def suggest(self, told: Sequence[Observation], busy: Sequence[Candidate] = ()) -> Candidate | None:
        """The next candidate: new, and likely to fit; None if there is none.

        Args:
            told: Every trial so far, in order.
            busy: Candidates under trial now, or not to be proposed for another reason.
        """
        state = self._learn(told)
        open_rows = self._open(state, busy)
        if not open_rows.any():
            return None
        untried = pool.untried_drop_ins(state, open_rows, told, self.drops_in)
        if untried is not None:
            # One is tried however far it is behind: it is the answer where what is ahead fails its checks.
            open_rows = untried
        rng = np.random.default_rng(len(told))
        rows = pool.pool(state, open_rows, rng)
        rows = rows if untried is not None else _hopeful(state, rows)
        fits, least = state.fits(rows), chance_needed(told) if state.sized and self.cautious else 0.0
        if not (fits >= least).any():
            # The pool is a choice by means; nothing of it fits, so look at everything once.
            rows = np.flatnonzero(open_rows)
            rows = rows if untried is not None else _hopeful(state, rows)
            fits = state.fits(rows)
        if not (fits >= least).any():
            least = LAST_RESORT
        rows, fits = rows[fits >= least], np.maximum(fits[fits >= least], TINY)
        if not len(rows):
            return None
        # A crash tells nothing besides, so a level that crashed has to promise more than its chance makes up for.
        allowed = fits * state.held(rows) * state.completes(rows) ** 2
        if not len(state.rows):  # the first must run, or nothing is learned
            allowed = np.where(allowed >= min(FIRST_FITS, float(allowed.max())), allowed, 0.0)
        scores = self._worth(state, rows, allowed, len(told)) * allowed
        # Where nothing promises an improvement, what is most likely to fit and fast is next.
        best = int(np.argmax(scores)) if scores.max() > 0 else int(np.argmax(allowed - 1e-3 * _regret(state, rows)))
        chosen: Candidate = self.catalogue.candidates[int(rows[best])]
        return chosen

    def left(self, told: Sequence[Observation], busy: Sequence[Candidate] = ()) -> RemainingCandidates:
        """What there is still to propose, and how much of it may fit."""
        state = self._learn(told)
        rows = np.flatnonzero(self._open(state, busy))
        if not len(rows) or state.limit is None:
            return RemainingCandidates(n_open=len(rows), n_fit=len(rows))
        n_fit, least = int((state.fits(rows) >= LAST_RESORT).sum()), float(state.log(rows, MEMORY)[0].min())
        return RemainingCandidates(n_open=len(rows), n_fit=n_fit, least_memory_bytes=math.exp(least))

    def beliefs(self, told: Sequence[Observation], candidates: Sequence[Candidate]) -> Beliefs:
        """What the trials so far let one expect of candidates."""
        self._note(candidates)
        state = self._learn(told)
        rows = np.array([self.catalogue.row[c] for c in candidates], dtype=np.intp)
        return Beliefs(state, rows)

    def foretold(self, told: Sequence[Observation]) -> list[Foretold | None]:
        """What the calibrated model foretells of each trial's log step time, but for what it read; None where it read none."""
        groups, mean, covariance = self._learn(told).time.joint()
        by_group = {
            int(group): Foretold(float(m), tuple(row))
            for group, m, row in zip(groups, mean, posterior.root(covariance).tolist(), strict=True)
        }
        found = {id(t): by_group.get(n) for n, t in enumerate(timed(told, self.world_size))}
        return [found.get(id(t)) for t in told]

    def best(self, told: Sequence[Observation]) -> dict[str, Candidate]:
        """For each objective the measured candidate with the best posterior mean, the best by the goal first.

        One lucky measurement does not decide.
        """
        state = self._learn(told)
        if not len(state.rows):
            return {}
        mean, _ = state.costs(state.rows)
        least, goal = mean.argmin(axis=0), mean @ self.shares
        return {self.metrics[n]: self.catalogue.candidates[state.rows[least[n]]] for n in np.argsort(goal[least])}

    def outlook(self, told: Sequence[Observation], busy: Sequence[Candidate] = ()) -> Outlook:
        """What stopping now is expected to lose.

        Candidates are drawn jointly from the posterior: what all of them have in common, as the scale of the step time,
        is no reason to go on.
        """
        state = self._learn(told)
        open_rows, held = self._open(state, busy), _held_rows(state)
        untried = pool.untried_drop_ins(state, open_rows, told, self.drops_in)
        found = Outlook(
            loss=0.0, next_gain=0.0, n_left=int(open_rows.sum()), explored=True, n_ran=state.n_ran, covered=state.time.covered,
            quick=self.quick, drop_in_open=untried is not None,
        )  # fmt: skip
        if not len(held):
            return replace(found, loss=math.inf, next_gain=math.inf)
        rng = np.random.default_rng(len(told))
        # What is never proposed keeps no study from ending.
        rows = _hopeful(state, pool.pool(state, open_rows, rng))
        if not len(rows):
            return found
        fits = state.fits(rows)
        allowed = fits * state.held(rows) * state.completes(rows)
        seen, unseen, hopeful = _draw(state, rows, held, rng, priced=self.quick)
        loss, next_gain = acquisition.loss_of_stopping(seen, unseen, allowed[hopeful], rng)
        explored = not pool.needed(state, rows, allowed, held).any()
        return replace(
            found, loss=loss, next_gain=next_gain, n_left=int((fits >= LAST_RESORT).sum()), explored=explored
        )

    # Learning

    def _learn(self, told: Sequence[Observation]) -> CostModel:
        for known, learned in self._learned:
            if known == list(told):
                return learned
        self._note(t.candidate for t in told)
        learned = learn(self.catalogue, self.metrics, self.shares, self.world_size, self.limit, self.bounds, told)
        self._learned = [(list(told), learned), *self._learned[:1]]
        return learned

    def _note(self, candidates: Iterable[Candidate]) -> None:
        """Candidates that are looked at and not proposed."""
        self.catalogue.add(list(candidates))
        self._offered = np.pad(self._offered, (0, len(self.catalogue.candidates) - len(self._offered)))

    def _open(self, state: CostModel, busy: Iterable[Candidate]) -> NDArray[np.bool_]:
        taken = state.known | {self.catalogue.row[c] for c in busy if c in self.catalogue.row}
        open_rows = self._offered.copy()
        open_rows[list(taken)] = False
        return open_rows

    # Choosing

    def _worth(self, state: CostModel, rows: Rows, allowed: Floats, n_told: int) -> Floats:
        """The acquisition whose turn it is: the hypervolume every second time, else in turns the goal and an objective.

        That objective is the one which a trial is expected to improve most. A quick study looks at the goal alone.
        """
        if not len(state.rows):
            return np.exp(-_regret(state, rows))
        held = _held_rows(state)
        if not len(held):
            return state.held(rows)
        mean, seen = state.costs(rows)[0], state.costs(held)[0]
        if self.quick and n_told >= QUICK_TRIALS:
            # A study that goes on because of one candidate tries that one.
            drawn, unseen, hopeful = _draw(state, rows, held, np.random.default_rng(n_told), priced=True)
            promised = np.zeros(len(rows))
            promised[hopeful] = acquisition.gains(drawn, unseen).mean(axis=0)
            return promised
        if self.quick or (self.goal_only and n_told % 2):
            # What is expected to be best is next: first in a quick study, every second time where only the goal counts.
            expected = mean @ self.shares + (pool.price(self.catalogue.candidates, rows) if self.quick else 0.0)
            return np.asarray(np.exp(expected.min() - expected), dtype=float)
        if self.goal_only:
            return np.asarray(_gains(state, rows, mean, held, seen)[-1], dtype=float)
        if len(self.metrics) > 1 and n_told % 2:
            front = pareto.front(-seen)
            nearest = state.sd_apart(rows, held[front]).min(axis=1)
            gain = acquisition.hypervolume_improvement(mean, nearest, seen[front], np.random.default_rng(n_told))
            if gain.max() > 0:
                return gain
        gains = _gains(state, rows, mean, held, seen)
        promise = (gains * allowed).max(axis=1)
        for_goal = n_told % 4 == 0
        which = -1 if for_goal else int(np.argmax(promise[:-1]))
        # The first trials are for what the forecast holds to be best; what they show tells which levels may be as good.
        if n_told > 2 * len(self.metrics) and promise[which] < (EXPLORE_BELOW_GOAL if for_goal else EXPLORE_BELOW):
            needed = pool.needed(state, rows, allowed, held)
            if needed.any():
                return needed
        return np.asarray(gains[which], dtype=float)


def chance_needed(told: Sequence[Observation]) -> float:
    """The lowest probability of fitting at which a candidate is run; it rises with each trial that ran out of memory."""
    return float(1.0 - RISK * LESS_RISK ** sum(t.outcome is Outcome.OOM for t in told))


def _held_rows(state: CostModel) -> Rows:
    """What completed and seems to keep the bounds."""
    return state.rows[state.held(state.rows) > 0.5] if len(state.rows) else state.rows


def _regret(state: CostModel, rows: Rows) -> Floats:
    """How far each row is expected to be from the best, on the objective that it serves best."""
    mean, _ = state.costs(rows)
    return np.asarray((mean - mean.min(axis=0)).min(axis=1), dtype=float)


def _draw(
    state: CostModel, rows: Rows, held: Rows, rng: np.random.Generator, *, priced: bool
) -> tuple[Floats, Floats, NDArray[np.intp]]:
    """Joint draws of the goal, a row each.

    Args:
        rows: Candidates that may be run.
        held: The measured ones that keep the bounds.
        priced: Whether a candidate's price counts, as in a quick study.

    Returns:
        Draws of the measured ones, the best first; of the most hopeful of `rows`; and which of `rows` these are.
    """
    typical = replace(state, time=state.time.typical())
    mean, sd = typical.goal(rows)
    hopeful = np.argsort(mean - 2 * sd)[:MOST_DRAWN]
    measured = np.array(sorted(set(held)), dtype=np.intp)
    measured = measured[np.argsort(typical.goal(measured)[0])][:MOST_DRAWN]
    both = np.concatenate([measured, rows[hopeful]])
    drawn = typical.draw_goal(both, rng, DRAWS)
    if priced:
        drawn = drawn + pool.price(state.catalogue.candidates, both)
    return drawn[:, : len(measured)], drawn[:, len(measured) :], hopeful


def _gains(state: CostModel, rows: Rows, mean: Floats, held: Rows, seen: Floats) -> Floats:
    """Expected improvement of each objective and, last, of the goal (summed over its objectives); one row for each.

    Each candidate is compared with the best measured one by how far the two may be apart: an error that both share, as in
    the scale of the step time, makes neither the better one.

    Args:
        mean: Their expected costs.
        held: The measured ones that keep the bounds.
        seen: Expected costs of these.
    """
    weightings = [*np.eye(len(state.shares)), state.shares]
    best = [int(np.argmin(seen @ weights)) for weights in weightings]
    apart = state.sd_apart(rows, held[best])
    gains = [
        acquisition.expected_improvement(mean @ weights, apart[:, n] @ weights, float(seen[best[n]] @ weights))
        * (weights > 0).sum()
        for n, weights in enumerate(weightings)
    ]
    return np.array(gains)


def _hopeful(state: CostModel, rows: Rows) -> Rows:
    """The rows without those surely far behind the best measured on every objective of time, once one such was tried."""
    timed = [n for n, metric in enumerate(state.metrics) if metric != MEMORY]
    if not timed or not len(state.rows) or not len(rows):
        return rows
    seen = state.costs(state.rows)[0][:, timed]
    best = seen.min(axis=0)
    if not ((seen - best).min(axis=1) > math.log(HOPELESS)).any():
        return rows
    mean, sd = state.costs(rows)
    near = ((mean - pool.OPTIMISM * sd)[:, timed] - best).min(axis=1) <= math.log(HOPELESS)
    return np.asarray(rows[near], dtype=np.intp)
