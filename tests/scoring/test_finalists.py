"""Which trials are measured again, and when a further round is not worth it."""

import math
from dataclasses import replace

from support.made_up import LATENCY, MEMORY, PASSED, THROUGHPUT, measured

from autotune.scoring import recommend
from autotune.scoring.convergence.branch import Branch
from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.estimates import estimate
from autotune.scoring.measured import Foretold
from autotune.scoring.racing import Rounds, next_round, race

# Of a quick study.
UNSTATED = Rounds(least=0, most=2, below=math.inf)


def finalists(found, objectives, n):
    return recommend.finalists(estimate(found), objectives, n, 1)


def trials(found):
    return [m.trial for m in found]


def test_the_finalists_are_the_best_compromise_the_best_of_the_same_batch_and_the_fastest():
    base, best = measured(0, 0.1, 100e6), measured(1, 0.02, 100e6, micro=4)
    same, fastest = measured(2, 0.09, 100e6, zero_stage=1), measured(3, 0.5, 400e6, micro=128)
    fill = [measured(n, 0.04 + n / 1000, 100e6, micro=4, zero_stage=1) for n in range(4, 9)]
    found = [base, *fill, same, fastest, best]
    assert trials(finalists(found, [LATENCY, THROUGHPUT, MEMORY], 3)) == [1, 2, 3]
    assert trials(finalists(found, [LATENCY, THROUGHPUT, MEMORY], 4)) == [1, 2, 3, 4]


def test_the_baseline_is_no_finalist_and_no_more_come_than_asked_for():
    base = measured(0, 0.01)
    found = [base, *(measured(n, 0.1 + n / 100) for n in range(1, 6))]
    assert trials(finalists(found, [LATENCY], 2)) == [1, 2]
    assert finalists(found, [LATENCY], 0) == finalists([base], [LATENCY], 3) == []
    assert trials(finalists(found[1:], [LATENCY], 2)) == [1, 2]


def test_where_the_best_must_not_be_recommended_the_best_that_may_is_measured_again_too():
    base, slow = measured(0, 0.1), measured(4, 0.099)
    open_ = [replace(measured(n, 0.01 * n, precision="bf16"), numerics_kept=False) for n in (1, 2, 3)]
    assert trials(finalists([base, *open_, slow], [LATENCY], 2)) == [1, 4]
    assert trials(finalists([*open_, slow], [LATENCY], 2)) == [1, 4]  # also where it keeps to no baseline
    wider = replace(measured(5, 0.005, micro=4), branch_wanted=True)
    assert trials(finalists([base, *open_, slow, wider], [LATENCY], 3)) == [5, 1, 4]
    undecided = replace(open_[0], verdict=GateVerdict(passed=None, reason="too few steps"))
    assert trials(finalists([base, undecided, *open_[1:], slow], [LATENCY], 2)) == [2, 4]


def test_what_failed_a_check_is_neither_the_fastest_nor_the_best_of_the_same_batch_among_the_finalists():
    base, best = measured(0, 0.1), measured(1, 0.02, zero_stage=1)
    refuted = replace(measured(2, 0.03, micro=64), branch_wanted=True, branch=Branch(confirmed=False, reason="refuted"))
    silent = replace(measured(3, 0.01), unwitnessed=["zero_optimization.overlap_comm"])
    fill = [measured(n, 0.04 + n / 1000, zero_stage=1) for n in (4, 5)]
    assert trials(finalists([base, best, refuted, silent, *fill], [LATENCY], 3)) == [1, 4, 5]


def turn(*found, objectives=(LATENCY,), finalists=(1, 2, 3), n=3, least=1):
    tried = {m.trial: len(m.repeats) for m in found}
    return trials(
        next_round(estimate(found), objectives, finalists, 1, n, tried=tried, rounds=Rounds(least=least, most=8))
    )


def test_no_round_is_run_that_could_not_show_the_leader_to_be_better():
    """Two rounds may tell 8 %, and not 1 %."""
    near, base = measured(1, 0.099), measured(0, 0.1)
    ahead = measured(1, 0.092)
    for found, wanted in ((near, []), (ahead, [1])):
        turn = next_round(estimate([base, found]), [LATENCY], (1,), 1, 1, tried={}, rounds=UNSTATED)
        assert trials(turn) == wanted


def test_rounds_that_also_tell_the_noise_are_run_for_a_leader_that_they_may_show_to_be_better():
    """As many degrees of freedom as there are now were counted for the bar after six more rounds, so a gain of 7 % was given up."""
    base, rest = measured(0, 0.1, rounds=[0.102, 0.098]), [measured(n, 0.2) for n in range(2, 9)]
    leader = measured(1, 0.1 / 1.07, rounds=[0.098 / 1.07, 0.102 / 1.07])
    found = estimate([base, leader, *rest])
    runners = [m for m in found.measured if m.trial == 1]
    assert not race(runners, found, [THROUGHPUT], more=6).settled
    assert race(runners, found, [THROUGHPUT], more=0).settled  # none is left that could show it


def test_a_gain_that_more_noise_than_is_known_may_read_is_measured_again_once():
    """Where readings differ by 10 %, equal trials read 1.25x; what reads 1.67x is no luck."""
    base, ahead = measured(0, 0.1, rounds=[0.1]), measured(1, 0.08, rounds=[0.08])
    for found, wanted in (
        ([measured(0, 0.1), measured(1, 0.08)], [1]),
        ([measured(0, 0.1), measured(1, 0.06)], []),
        ([base, ahead], []),
        ([base, ahead, measured(2, 0.075, zero_stage=1)], [2]),
    ):
        tried = {m.trial: len(m.repeats) for m in found}
        turn = next_round(estimate(found), [LATENCY], (1,), 1, 1, tried=tried, rounds=UNSTATED)
        assert trials(turn) == wanted


def test_a_gain_whose_interval_says_nothing_is_measured_again_until_it_says_something():
    """The answer recommended a trial with `no speed-up to state`: it is not shown to be better."""
    for n_rounds, wanted in ((0, [1]), (1, [1]), (2, [])):
        again = [measured(0, 0.1, rounds=[0.1] * n_rounds), measured(1, 0.01, rounds=[0.01] * n_rounds)]
        found = [
            replace(m, ci95={"step_time_s": (m.metrics["step_time_s"] / 2, m.metrics["step_time_s"] * 2)})
            for m in again
        ]
        estimates, tried = estimate(found), dict.fromkeys((0, 1), n_rounds)
        base, leader = estimates.measured
        assert recommend.shown_better(leader, estimates, [LATENCY]) == (not wanted)
        assert not wanted or recommend.goal_gain(leader, base, estimates, [LATENCY]) is None
        assert trials(next_round(estimates, [LATENCY], (1,), 1, 1, tried=tried, rounds=UNSTATED)) == wanted


def test_a_gain_is_measured_again_twice_where_the_search_was_not_settled_by_its_last_trial():
    """Of 60 studies of equal trials, whose readings differ by 10 %, 11 claimed a gain after one round or none."""
    for steps, n_rounds, wanted in ((0.08, 0, [1]), (0.08, 1, [1]), (0.08, 2, []), (0.06, 0, [1]), (0.04, 0, [])):
        found = [measured(0, 0.1, rounds=[0.1] * n_rounds), measured(1, steps, rounds=[steps] * n_rounds)]
        rounds, tried = replace(UNSTATED, unforeseen=True), dict.fromkeys((0, 1), n_rounds)
        assert trials(next_round(estimate(found), [LATENCY], (1,), 1, 1, tried=tried, rounds=rounds)) == wanted


def foretold(struck, read_s, again):
    """Trials that all read to 2 % what is foretold, but for the first reading of one of them, and how often some were measured again."""
    expected = [0.1, 0.1, 0.12, 0.13, 0.15, 0.11, 0.085]
    found = []
    for n, step_s in enumerate(expected):
        read = read_s if n == struck else step_s * (1 + 0.02 * (-1) ** n)
        each = measured(n, read, rounds=[step_s] * again.get(n, 0), zero_stage=n % 4)
        found.append(replace(each, forecast=Foretold(math.log(step_s), tuple(0.1 * (n == m) for m in range(7)))))
    return found


def test_a_large_gain_is_measured_again_where_it_rests_on_one_reading_that_all_others_contradict():
    """Of a reading that is twice too good a quick study made its answer: 2.2x where 1.1x is true."""
    for struck, read_s, again, wanted in (
        (1, 0.04, {}, [1]),
        (0, 0.2, {}, [6]),  # the baseline's, which read too slow
        (1, 0.04, {0: 1, 1: 1}, [1]),  # either reading may be right
        (1, 0.04, {0: 2, 1: 2}, [6]),  # which leads now
        (1, 0.04, {0: 4, 1: 2, 6: 2}, []),
    ):
        found = foretold(struck, read_s, again)
        tried = {m.trial: len(m.repeats) for m in found}
        turn = next_round(estimate(found), [LATENCY], (struck or 6,), 1, 1, tried=tried, rounds=UNSTATED)
        assert trials(turn) == wanted
    fast = replace(measured(7, 0.04), forecast=Foretold(math.log(0.04), (0.1,) * 7))  # as foretold
    assert not next_round(estimate([*foretold(-1, 0.0, {}), fast]), [LATENCY], (7,), 1, 1, tried={}, rounds=UNSTATED)


def test_after_the_last_round_none_is_run_however_the_sums_are_rounded():
    tried = {0: 2, 1: 2}
    for n in range(200):
        found = [measured(0, 0.1), measured(1, 0.094 + 2e-5 * n)]
        assert not next_round(estimate(found), [LATENCY], (1,), 1, 1, tried=tried, rounds=UNSTATED)


def test_each_finalist_is_measured_again_once_and_then_those_that_may_be_best():
    base, best, near = measured(0, 0.1), measured(1, 0.05), measured(2, 0.0505, zero_stage=1)
    far = measured(3, 0.09, checkpoint_every=1)
    assert sorted(turn(base, best, near, far)) == [1, 2, 3]
    once = [replace(m, repeats={1: dict(m.metrics)}) for m in (base, best, near, far)]
    assert sorted(turn(*once, least=2)) == [1, 2]


def test_the_race_goes_on_while_the_rounds_disagree_and_ends_where_one_is_clearly_best():
    base = measured(0, 0.1, rounds=[0.1, 0.12])
    torn = [measured(1, 0.05, rounds=[0.05, 0.06]), measured(2, 0.05, rounds=[0.06, 0.05], zero_stage=1)]
    assert sorted(turn(base, *torn)) == [1, 2]
    steady = [measured(1, 0.05, rounds=[0.05, 0.06]), measured(2, 0.06, rounds=[0.06, 0.072], zero_stage=1)]
    assert turn(base, *steady) == []


def test_the_race_goes_on_while_the_leader_may_well_be_more_than_a_hundredth_behind():
    """A leader that is 1 % ahead by readings of 2 % is expected to lose little, and loses over 1 % every tenth time."""
    base = measured(0, 0.1, rounds=[0.1, 0.1])
    first = measured(1, 0.05, rounds=[0.0495, 0.0515])
    second = measured(2, 0.0505, rounds=[0.0515, 0.0505], zero_stage=1)
    found = estimate([base, first, second])
    assert not race(found.measured[1:], found, [LATENCY]).settled
    assert race(found.measured[1:], found, [LATENCY], below=0.1).settled


def test_one_that_was_not_measured_again_joins_the_race_where_it_may_be_the_best():
    base, best = measured(0, 0.1, rounds=[0.1, 0.1]), measured(1, 0.04, rounds=[0.05, 0.05])
    late, hopeless = measured(5, 0.042, zero_stage=1), measured(6, 0.09, zero_stage=2)
    found = estimate([base, best, late, hopeless])
    stand = race(found.measured[1:], found, [LATENCY])
    assert trials(stand.runners)[:2] in ([1, 5], [5, 1]) and 6 not in trials(stand.runners)


def test_whether_the_leader_beats_the_baseline_is_settled_too():
    base = measured(0, 0.1, rounds=[0.1, 0.11])
    found = estimate([base, measured(1, 0.095, rounds=[0.1, 0.098], zero_stage=1)])
    assert not race(found.measured[1:], found, [LATENCY]).settled


def test_the_best_drop_in_and_the_fastest_stay_though_others_are_better_compromises():
    base = measured(0, 0.1, rounds=[0.1])
    best = replace(measured(1, 0.02, rounds=[0.02], precision="bf16"), numerics_kept=False, verdict=PASSED)
    same, worse = measured(2, 0.09, rounds=[0.09]), measured(3, 0.12, rounds=[0.12], zero_stage=1)
    fastest = measured(4, 0.2, rounds=[0.2], micro=128)
    assert sorted(turn(base, best, same, worse, fastest, finalists=(1, 2, 3, 4), least=2)) == [1, 2, 4]
