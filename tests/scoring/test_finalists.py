"""Which trials are measured again, and when a further round is not worth it."""

from dataclasses import replace

from support.made_up import LATENCY, MEMORY, PASSED, THROUGHPUT, measured

from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.recommend import finalists, in_race


def trials(found):
    return [m.trial for m in found]


def test_the_finalists_are_the_best_compromise_the_best_of_the_same_batch_and_the_fastest():
    base, best = measured(0, 0.1, 100e6), measured(1, 0.02, 100e6, micro=4)
    same, fastest = measured(2, 0.09, 100e6, zero_stage=1), measured(3, 0.5, 400e6, micro=128)
    fill = [measured(n, 0.04 + n / 1000, 100e6, micro=4, zero_stage=1) for n in range(4, 9)]
    found = [base, *fill, same, fastest, best]
    assert trials(finalists(found, base, [LATENCY, THROUGHPUT, MEMORY], 3, 1)) == [1, 2, 3]
    assert trials(finalists(found, base, [LATENCY, THROUGHPUT, MEMORY], 4, 1)) == [1, 2, 3, 4]


def test_the_baseline_is_no_finalist_and_no_more_come_than_asked_for():
    base = measured(0, 0.01)
    found = [base, *(measured(n, 0.1 + n / 100) for n in range(1, 6))]
    assert trials(finalists(found, base, [LATENCY], 2, 1)) == [1, 2]
    assert finalists(found, base, [LATENCY], 0, 1) == finalists([base], base, [LATENCY], 3, 1) == []
    assert trials(finalists(found, None, [LATENCY], 2, 1)) == [0, 1]


def test_the_finalists_stay_the_same_once_they_were_measured_again():
    base, again = measured(0, 0.1), measured(0, 0.1, rounds=[0.1])
    before = [base, measured(1, 0.05), measured(2, 0.06), measured(3, 0.07)]
    after = [again, measured(1, 0.05, rounds=[0.2]), *before[2:]]
    first, second = (finalists(all_, own, [LATENCY], 2, 1) for all_, own in ((before, base), (after, again)))
    assert trials(first) == trials(second) == [1, 2]
    alone = [measured(1, 0.05, rounds=[0.2]), measured(2, 0.06, rounds=[0.06]), measured(3, 0.07, rounds=[0.07])]
    assert trials(finalists(alone, None, [LATENCY], 2, 1)) == [1, 2]


def test_where_the_best_must_not_be_recommended_the_best_that_may_is_measured_again_too():
    base, slow = measured(0, 0.1), measured(4, 0.099)
    open_ = [replace(measured(n, 0.01 * n, precision="bf16"), numerics_kept=False) for n in (1, 2, 3)]
    assert trials(finalists([base, *open_, slow], base, [LATENCY], 2, 1)) == [1, 4]
    wider = replace(measured(5, 0.005, micro=4), branch_wanted=True)
    assert trials(finalists([base, *open_, slow, wider], base, [LATENCY], 3, 1)) == [5, 1, 4]
    undecided = replace(open_[0], verdict=GateVerdict(passed=None, reason="too few steps"))
    assert trials(finalists([base, undecided, *open_[1:], slow], base, [LATENCY], 2, 1)) == [2, 4]


def race(base, *found, objectives=(LATENCY,), all_of=None):
    return trials(in_race(all_of or found, [base, *found], base, objectives, 1))


def test_who_is_clearly_beaten_leaves_the_race_and_who_is_within_twice_the_noise_stays():
    base = measured(0, 0.1, rounds=[0.1])
    best = measured(1, 0.05, rounds=[0.05])
    # One round of a quiet machine tells 1.96 * 0.028 = 5.5 % apart, so 11 % is the limit.
    near, far = measured(2, 0.05, rounds=[0.0555]), measured(3, 0.05, rounds=[0.0565])
    assert race(base, best, near, far) == [1, 2]
    assert race(base, best, near, far, objectives=(LATENCY, THROUGHPUT)) == [1, 2]


def test_a_finalist_that_was_not_measured_again_yet_stays_in_the_race():
    base, best, late = measured(0, 0.1, rounds=[0.1]), measured(1, 0.05, rounds=[0.05]), measured(2, 0.09)
    assert race(base, best, late) == [1, 2]
    assert race(measured(0, 0.1), measured(1, 0.05), late) == [1, 2]


def test_the_best_drop_in_and_the_fastest_stay_though_others_are_better_compromises():
    base = measured(0, 0.1, rounds=[0.1])
    best = replace(measured(1, 0.02, rounds=[0.02], precision="bf16"), numerics_kept=False, verdict=PASSED)
    same, worse = measured(2, 0.09, rounds=[0.09]), measured(3, 0.12, rounds=[0.12], zero_stage=1)
    fastest = measured(4, 0.2, rounds=[0.2], micro=128)
    assert race(base, best, same, worse, fastest) == [1, 2, 4]
