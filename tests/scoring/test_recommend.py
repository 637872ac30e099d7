"""From measurements to a recommendation, on made-up measurements whose truth is known."""

import math
import random
from dataclasses import replace

import pytest
from support.made_up import CONVERGENCE, LATENCY, MEMORY, PASSED, THROUGHPUT, measured

from autotune.scoring import recommend as recommendation
from autotune.scoring.convergence.branch import Branch
from autotune.scoring.convergence.quality_gate import GateVerdict
from autotune.scoring.estimates import estimate
from autotune.scoring.measured import log_gain
from autotune.scoring.metrics import GOODPUT
from autotune.scoring.objective import Objective
from autotune.scoring.recommend import point
from autotune.trial.result import Outcome


def recommend(trials, objectives, world_size=1):
    return recommendation.recommend(estimate(trials), objectives, world_size)


def rank(trials, objectives):
    return recommendation.rank(estimate(trials), objectives)


def about(value):
    """Shrinkage moves an estimate a little."""
    return pytest.approx(value, rel=0.02)


def chosen(found, name="recommended"):
    return found.picks[name].measured.trial


def gained(found, name="recommended"):
    """Throughput over the baseline's, with its interval."""
    pick = found.picks[name]
    return pick.estimates.speedup(pick.measured)


def reasons(found, name="recommended"):
    return "\n".join(found.picks[name].reasons)


def test_the_recommended_one_has_the_best_geometric_mean_of_gains():
    base = measured(0, 0.1, rounds=[0.1, 0.1])
    faster = measured(1, 0.05, rounds=[0.05, 0.05], precision="bf16")  # twice both latency and throughput
    wider = measured(
        2, 0.2, rounds=[0.2, 0.2], micro=32
    )  # half the latency, twice the throughput: nothing gained on the whole
    found = recommend([base, faster, wider], [LATENCY, THROUGHPUT])
    assert chosen(found) == 1 and gained(found).factor == about(2.0)
    assert reasons(found).startswith(
        "the best compromise of step time and throughput (geometric mean of the gains: 2.00x)"
    )
    assert "against the baseline: step time 2.00x better, throughput 2.00x better" in reasons(found)
    found = recommend([base, faster], [LATENCY, THROUGHPUT, MEMORY])
    assert "the best compromise of step time, throughput and peak memory (" in reasons(found)


def test_weights_decide_between_time_and_memory():
    base, fast = measured(0, 0.1, 100e6), measured(1, 0.05, 200e6, precision="bf16")
    small, lean = measured(2, 0.1, 40e6, checkpoint_every=1), measured(3, 0.1, 50e6)
    for weight, best in ((0.1, 1), (10.0, 2)):
        weighed = Objective(name="memory", metric="peak_memory_bytes", weight=weight)
        assert chosen(recommend([base, fast, small], [LATENCY, weighed])) == best
    assert math.exp(log_gain(lean, base, [THROUGHPUT, MEMORY])) == pytest.approx(2 ** (0.5 / 1.5))


def test_the_front_holds_what_nothing_else_beats():
    base = measured(0, 0.1, 100e6)
    fast, small, bad = measured(1, 0.05, 200e6), measured(2, 0.2, 50e6), measured(3, 0.3, 300e6)
    found = recommend([base, small, fast, bad], [LATENCY, MEMORY])
    assert [m.trial for m in found.front] == [0, 1, 2]


def test_the_baseline_where_nothing_beats_it_needs_no_second_measurement():
    found = recommend([measured(0, 0.1), measured(1, 0.2, zero_stage=1)], [LATENCY])
    assert chosen(found) == 0 and "unconfirmed" not in reasons(found)


@pytest.mark.parametrize("objectives", [[LATENCY], [LATENCY, Objective(name="goodput", metric=GOODPUT)]])
def test_the_fastest_to_converge_is_picked_only_where_the_study_seeks_that(objectives):
    found = [measured(0, 0.1), measured(1, 0.05, zero_stage=1)]
    found = [replace(m, metrics=m.metrics | {GOODPUT: m.metrics["samples_per_s"] / 2}) for m in found]
    picks = recommend(found, objectives).picks
    assert ("fastest_convergence" in picks) == (len(objectives) > 1)


def test_of_the_fastest_that_cannot_be_told_apart_one_that_was_measured_again_is_picked():
    base, once = measured(0, 0.1, rounds=[0.1, 0.1]), measured(1, 0.05, precision="bf16")
    again, slower = (measured(n, s, rounds=[s, s], zero_stage=n) for n, s in ((2, 0.0505), (3, 0.08)))
    assert chosen(recommend([base, once, again, slower], [MEMORY]), "highest_throughput") == 2
    assert chosen(recommend([base, once, slower], [MEMORY]), "highest_throughput") == 1


def test_a_drop_in_that_was_measured_once_is_named_though_the_baseline_was_measured_again():
    """Met as "drop-in: the baseline itself" above a trial of the same numerics that was 2.6 times as fast."""
    base, again = measured(0, 0.1, rounds=[0.1, 0.1]), measured(1, 0.05, rounds=[0.05, 0.05], precision="bf16")
    found = recommend(
        [base, replace(again, numerics_kept=False, verdict=PASSED), measured(2, 0.045, zero_stage=1)], [LATENCY]
    )
    assert chosen(found) == 1 and "trial 2 reads better, but it was measured once" in reasons(found)
    assert chosen(found, "drop_in") == 2 and "unconfirmed: it was measured once" in reasons(found, "drop_in")


# A machine that slows down while the study runs.


@pytest.mark.parametrize(
    ("again", "said"), [(0.2, "2.10x slower at the end"), (0.05, "1.91x faster at the end"), (0.101, "")]
)
def test_a_machine_that_changed_its_speed_changes_no_speedup_and_that_is_said(again, said):
    base = measured(0, 0.1, rounds=[again, 1.1 * again])
    best = measured(1, 0.05, rounds=[again / 2, 1.1 * again / 2], precision="bf16")
    found = recommend([base, best], [LATENCY, THROUGHPUT])
    assert chosen(found) == 1 and gained(found).factor == about(2.0) and gained(found).low > 1.9
    assert said in reasons(found) and ("caution" in reasons(found)) == bool(said)


def test_one_that_was_not_measured_again_is_compared_with_the_baselines_own_trial():
    """Its trial and the baseline's were taken when the machine was fast; the re-measurements were not."""
    base = measured(0, 0.1, rounds=[0.2, 0.2])
    best = measured(1, 0.05, rounds=[0.1, 0.1], precision="bf16")
    other = measured(2, 0.08, checkpoint_every=1)
    found = recommend([base, best, other], [LATENCY, MEMORY])
    assert chosen(found, "lowest_latency") == 1
    assert rank([base, best, other], [LATENCY])[1].trial == 2


def test_a_pick_that_was_measured_once_has_an_interval_as_wide_as_the_machine_is_unsteady():
    """Met as 1.79x (1.68 to 1.90) on a machine that ran the baseline 1.87x faster an hour later."""

    def lowest_memory(scatter):
        base, small = measured(0, 0.1, rounds=[0.1] * 3), measured(9, 0.05, 50e6)
        others = [measured(n, 0.1, rounds=[0.1, 0.1 * scatter, 0.1 / scatter], micro=n) for n in (2, 4, 16)]
        return recommend([base, *others, small], [MEMORY])

    def width(found):
        return math.log(gained(found, "lowest_memory").high / gained(found, "lowest_memory").low)

    steady, unsteady = lowest_memory(1.0), lowest_memory(1.15)
    assert gained(steady, "lowest_memory").factor == about(2.0)
    assert 0.03 < width(steady) < 0.2 and width(unsteady) > 2 * width(steady)
    assert "unconfirmed: it was measured once" in reasons(steady, "lowest_memory")


def test_an_interval_that_says_nothing_is_no_result():
    """Met as 3.14x (0.02 to 450.94)."""
    base = measured(0, 0.1, rounds=[0.03, 0.3])
    once, again = measured(1, 0.05, 50e6, micro=16), measured(2, 0.08, rounds=[0.2, 0.02])
    other = measured(3, 0.05, rounds=[0.02, 0.25])
    found = recommend([base, once, again, other], [MEMORY, THROUGHPUT])
    memory = found.picks["lowest_memory"]
    assert memory.measured.trial == 1
    assert memory.to_data()["speedup"] is memory.to_data()["speedup_ci95"] is None
    assert any(reason.startswith("its throughput cannot be compared") for reason in memory.reasons)
    # Nor is it a gain in a reason, beside which it was said that it cannot be compared.
    assert any("throughput cannot be compared" in reason and "x better" in reason for reason in memory.reasons)
    estimates, objectives = memory.estimates, [MEMORY, THROUGHPUT]
    assert recommendation.goal_gain(memory.measured, estimates.baseline, estimates, objectives) is None
    # By speed, what cannot be told is no pick.
    assert not found.picks.keys() & {"highest_throughput", "lowest_latency"}


def test_a_baseline_that_is_behind_by_no_one_knows_how_much_is_no_best():
    """It was `highest throughput`; then the other was recommended, twice by luck: alone it was no faster than the baseline."""
    base, ahead = measured(0, 0.3, rounds=[0.6]), measured(1, 0.1, rounds=[0.02])
    found = recommend([base, ahead], [THROUGHPUT])
    assert chosen(found) == 0 and "whether trial 1 is better cannot be told" in reasons(found)
    assert not found.picks.keys() & {"highest_throughput", "lowest_latency"}
    slower = measured(2, 0.25, rounds=[0.45], zero_stage=1)
    found = recommend([base, ahead, slower], [THROUGHPUT])
    assert chosen(found, "highest_throughput") == 2
    assert reasons(found, "highest_throughput").startswith(
        "the best throughput of all that can be compared with the baseline\n"
    )


def test_the_values_of_the_rounds_go_before_those_of_the_first_trials():
    base = measured(0, 0.1, rounds=[0.1, 0.1])
    lucky = measured(1, 0.03, rounds=[0.09, 0.09], precision="bf16")
    honest = measured(2, 0.05, rounds=[0.05, 0.05], precision="torch_autocast")
    once = measured(3, 0.04, checkpoint_every=1)
    assert chosen(recommend([base, lucky, honest, once], [LATENCY, THROUGHPUT])) == 2
    assert chosen(recommend([lucky, honest, measured(4, 0.1)], [LATENCY])) == 2


def test_the_best_of_many_must_be_further_ahead_than_an_only_one():
    """Of thirty equal candidates the luckiest looks better than the baseline beyond its own interval in many a study."""
    base = measured(0, 0.1, rounds=[0.1, 0.103, 0.097, 0.101])
    ahead = measured(1, 0.1 / 1.04, rounds=[each / 1.04 for each in (0.1, 0.101, 0.099, 0.102)], checkpoint_every=1)
    noise = random.Random(1)
    others = [measured(n, 0.1 * math.exp(noise.gauss(0, 0.02)), checkpoint_every=n) for n in range(2, 32)]
    assert chosen(recommend([base, ahead], [THROUGHPUT])) == 1
    found = recommend([base, ahead, *others], [THROUGHPUT])
    assert chosen(found) == 0 and "within noise of trial 1" in reasons(found)
    # Nor is it said to be faster as the pick of the highest throughput, by its own interval.
    assert chosen(found, "highest_throughput") == 1 and gained(found, "highest_throughput").told
    assert "1.04x better (within noise: the best of 32 trials reads better than it is)" in reasons(
        found, "highest_throughput"
    )
    assert {"samples_per_s", "step_time_s"} <= set(found.picks["highest_throughput"].to_data()["luck"])
    assert not recommend([base, ahead], [THROUGHPUT]).picks["recommended"].to_data()["luck"]
    # Those that were stopped early for reading slower make the one that was not no less lucky.
    stopped = [replace(each, outcome=Outcome.STOPPED_EARLY) for each in others]
    assert chosen(recommend([base, ahead, *stopped], [THROUGHPUT])) == 0


def test_a_round_counts_only_where_both_were_measured_in_it():
    """A resumed study has other finalists: their rounds have other numbers, and the baseline is in all of them."""
    base = measured(0, 0.1, rounds={1: 0.1, 2: 0.1, 3: 0.2, 4: 0.2})
    late = measured(7, 0.05, rounds={3: 0.1, 4: 0.1}, precision="bf16")
    assert gained(recommend([base, late], [LATENCY])).factor == about(2.0)


# Ties.


def test_of_two_within_one_percent_the_one_that_changes_least_is_recommended_and_the_tie_is_named():
    base = measured(0, 0.1, rounds=[0.1, 0.102, 0.098])
    little = measured(1, 0.0502, rounds=[0.0502, 0.0512, 0.05], precision="bf16")
    much = measured(2, 0.05, rounds=[0.05, 0.051, 0.0499], precision="bf16", zero_stage=1, checkpoint_every=1)
    found = recommend([base, little, much], [LATENCY, THROUGHPUT])
    assert chosen(found) == 1 and "within noise of trial 2" in reasons(found)
    # Of two that change as much, the better one.
    alike = measured(3, 0.05, rounds=[0.05, 0.051, 0.0499], precision="torch_autocast")
    assert chosen(recommend([base, little, alike], [LATENCY, THROUGHPUT])) == 3
    # Before either one with the baseline's numerics, though it changes more.
    same = measured(4, 0.0501, rounds=[0.0501, 0.051, 0.0499], zero_stage=1, checkpoint_every=1)
    others = [replace(each, numerics_kept=False, verdict=PASSED) for each in (little, alike)]
    assert chosen(recommend([base, *others, same], [LATENCY, THROUGHPUT])) == 4


def test_a_finalist_that_lost_both_rounds_is_not_recommended_for_changing_less():
    """Met as a tie: the noise of the baseline, by which both were divided, hid a loss of 33 and 45 %."""
    base = measured(0, 0.1, rounds=[0.1, 0.14, 0.12])
    little = measured(1, 0.06, rounds=[0.08, 0.0725, 0.08], precision="bf16")
    much = measured(2, 0.06, rounds=[0.06, 0.05, 0.055], precision="bf16", zero_stage=1, checkpoint_every=1)
    assert chosen(recommend([base, little, much], [LATENCY, THROUGHPUT])) == 2


def test_one_that_left_the_race_as_beaten_is_no_tie_whatever_the_baseline_did_in_its_rounds():
    """The baseline was slow in the first round, in which the third was beaten: beside it alone all three read alike."""
    base = measured(0, 0.1, rounds=[0.14, 0.1, 0.1, 0.1])
    best = measured(1, 0.07, rounds=[0.07, 0.07, 0.07, 0.07], precision="bf16", zero_stage=1)
    beaten = measured(2, 0.1, rounds=[0.1], precision="bf16")
    found = recommend([base, best, beaten], [LATENCY, THROUGHPUT])
    assert chosen(found) == 1 and "within noise" not in found.picks["recommended"].reasons[0]


def test_what_is_clearly_better_is_no_tie():
    base, little = measured(0, 0.1, rounds=[0.1, 0.101]), measured(1, 0.07, rounds=[0.07, 0.071], precision="bf16")
    much = measured(2, 0.05, rounds=[0.05, 0.0505], precision="bf16", zero_stage=1)
    found = recommend([base, little, much], [LATENCY])
    assert chosen(found) == 2 and "within noise" not in found.picks["recommended"].reasons[0]


def test_the_baseline_is_recommended_where_nothing_is_measurably_better():
    base, same = measured(0, 0.1, rounds=[0.1, 0.104]), measured(1, 0.097, rounds=[0.099, 0.101], zero_stage=1)
    found = recommend([base, same], [LATENCY, THROUGHPUT])
    pick = found.picks["recommended"]
    assert chosen(found) == 0 and gained(found) == (1.0, 1.0, 1.0)
    why, *others = pick.reasons
    assert why.startswith("the baseline: no trial") and "within noise of trial 1" in why  # not "the best, 1.00x"
    assert "measurably better by the compromise of" in why  # a trial of 5x the throughput may stand beside it
    assert not any("is the baseline" in reason for reason in others)
    assert reasons(recommend([base], [LATENCY])) == "the baseline: nothing else was measured"


def test_what_is_shown_to_be_better_is_recommended_where_something_else_reads_as_good():
    """The baseline was, as "no trial that passed its checks is measurably better": trial 2, measured less often, read better."""
    trials = [
        measured(0, 0.1, rounds=[0.0992, 0.1043, 0.0963, 0.0956]),
        measured(1, 0.0875, rounds=[0.0896, 0.099, 0.0924, 0.0915], zero_stage=1, checkpoint_every=1),
        measured(2, 0.0919, rounds=[0.0885], zero_stage=1),
    ]
    estimates = estimate(trials)
    better = [recommendation.shown_better(m, estimates, [THROUGHPUT]) for m in estimates.measured[1:]]
    assert better == [True, False]
    assert chosen(recommend(trials, [THROUGHPUT])) == 1


def test_the_best_by_a_metric_is_no_worse_than_a_baseline_whose_turn_a_cut_round_left_out():
    """It was named `highest throughput: 0.99x`, for having been measured again."""
    trials = [measured(0, 0.1), measured(1, 0.101, rounds=[0.101, 0.102], zero_stage=1)]
    found = recommend(trials, [THROUGHPUT])
    assert chosen(found, "highest_throughput") == chosen(found, "lowest_latency") == 0
    best = [measured(2, 0.0995, zero_stage=2), *trials[1:]]
    assert chosen(recommend([trials[0], *best], [THROUGHPUT]), "highest_throughput") == 0


def test_a_baseline_that_is_only_another_pick_is_not_said_to_be_unbeaten():
    """Beside a recommended trial of 9.47x the throughput its drop-in said that no trial was measurably better."""
    found = recommend([measured(0, 0.1, 90e6), measured(1, 0.05, micro=16)], [THROUGHPUT])
    assert chosen(found) == 1 and chosen(found, "drop_in") == chosen(found, "lowest_memory") == 0
    assert all(reasons(found, name).endswith("this is the baseline") for name in ("drop_in", "lowest_memory"))


def test_of_equal_memory_the_baseline_has_the_least():
    """All trials needed the same, and the fastest of them was the pick of the lowest memory, at 1.00x the baseline's."""
    found = recommend([measured(0, 0.1), measured(1, 0.05, micro=16), measured(2, 0.2, zero_stage=1)], [THROUGHPUT])
    assert chosen(found) == 1 and chosen(found, "lowest_memory") == 0


def test_a_bit_less_memory_is_no_pick_that_costs_throughput():
    """It read `lowest memory: trial 1, 1.00x the baseline's peak memory, at 0.74x the throughput`."""
    base, slow = measured(0, 0.1, 100e6), measured(1, 0.13, 99.7e6, zero_stage=1)
    assert chosen(recommend([base, slow], [THROUGHPUT]), "lowest_memory") == 0
    small, quick = measured(2, 0.4, 50e6, zero_stage=2), measured(3, 0.08, 50.2e6, zero_stage=3)
    found = recommend([base, slow, small, quick], [THROUGHPUT])
    assert chosen(found, "lowest_memory") == 3
    assert reasons(found, "lowest_memory").startswith("the best peak memory within 1 % of all that ran")


def test_a_gain_that_reads_as_one_is_said_to_be_equal():
    """As the tables do; it was `1.00x better (within noise)`."""
    found = recommend([measured(0, 0.1), measured(1, 0.05, 100.1e6, micro=16)], [THROUGHPUT, MEMORY])
    assert chosen(found) == 1 and "peak memory equal" in reasons(found)


# The baseline is missing, or nothing is usable.


def test_a_baseline_whose_turn_a_cut_round_left_out_still_takes_part():
    """Its re-measurement comes last; without it a slower trial, the only one with two readings, was recommended."""
    trials = [measured(0, 0.1), measured(1, 0.125, rounds=[0.125], zero_stage=1), measured(2, 0.13, zero_stage=2)]
    assert chosen(recommend(trials, [LATENCY])) == 0
    faster = [measured(0, 0.1), measured(1, 0.05, rounds=[0.05, 0.05, 0.05], zero_stage=1)]
    assert chosen(recommend(faster, [LATENCY])) == 1


def test_a_pause_in_which_the_machine_became_faster_makes_no_speedup():
    """A study that went on after another's load had gone said that its new trials were 1.9 times as fast as the baseline."""

    def trial(number, step_s, sitting, **knobs):
        return replace(measured(number, step_s, zero_stage=number % 4, **knobs), sitting=sitting)

    before = [trial(n, 0.1 * (1 - 0.02 * n), 0) for n in range(5)]
    trials = [*before, *(trial(n, 0.055, 1, checkpoint_every=1) for n in range(5, 9))]
    found = estimate(trials)
    gain = found.gain(found.measured[6], found.measured[0], "samples_per_s")
    assert gain is not None and not gain.told and chosen(recommend(trials, [LATENCY])) == 0
    known = [replace(m, sitting=0) for m in trials]
    assert estimate(known).gain(known[6], known[0], "samples_per_s").told


def test_what_no_timing_narrows_is_noise_too():
    """Peaks that scatter by 2 % made equal configurations the answer of every second study of memory."""
    for seed in range(8):
        rng = random.Random(seed)

        def again(rng=rng):
            return {"step_time_s": 0.1, "samples_per_s": 80.0, "peak_memory_bytes": 1e8 * rng.lognormvariate(0, 0.02)}

        trials = [measured(n, memory=again()["peak_memory_bytes"], zero_stage=n % 4) for n in range(6)]
        trials = [replace(m, ci95={}, repeats={1: again(), 2: again(), 3: again()}) for m in trials]
        assert chosen(recommend(trials, [MEMORY])) == 0


def test_a_branch_replaces_what_the_noise_scale_foretold():
    """The gain of 1.48x stood beside a branch that had found none."""

    def trial(number, goodput, branch=None, **knobs):
        m = measured(number, rounds=[0.1, 0.1], **knobs)
        values = m.metrics | {GOODPUT: goodput}
        return replace(
            m, metrics=values, ci95=m.ci95 | {GOODPUT: (goodput, goodput)}, branch=branch, branch_wanted=number > 0
        )

    said = Branch(confirmed=True, reason="in a branch", time_ratio=1.0, samples_ratio=2.0, samples_sd=0.02)
    trials = [trial(0, 80.0), trial(1, 240.0, said, micro=16), trial(2, 230.0, micro=16, checkpoint_every=1)]
    objectives = [Objective(name="convergence", metric=GOODPUT)]
    found = estimate(trials)
    for m in found.measured[1:]:  # the other one has the same batch and numerics, so needs as many samples
        gain = found.gain(m, found.measured[0], GOODPUT)
        assert gain is not None and gain.factor == pytest.approx(1.0, abs=0.1) and not gain.told
    assert chosen(recommend(trials, objectives)) == 0


@pytest.mark.parametrize(("micro", "smaller"), [(4, True), (8, False), (16, False)])
def test_a_smaller_batch_is_said_to_pay_most_at_the_start_of_a_training(micro, smaller):
    trials = [measured(0), measured(1, 0.02, micro=micro)]
    trials = [replace(m, metrics=m.metrics | {GOODPUT: 10 * m.metrics["samples_per_s"]}) for m in trials]
    found = recommend(trials, [Objective(name="convergence", metric=GOODPUT)])
    assert chosen(found) == 1 and ("pays most at the start of a training" in reasons(found)) == smaller


@pytest.mark.parametrize("tried", [False, True])
def test_where_no_other_drop_in_was_tried_the_baseline_is_said_to_be_the_only_one(tried):
    trials = [measured(0), measured(1, 0.05, micro=16), *([measured(2, 0.2, zero_stage=1)] if tried else [])]
    said = recommend(trials, [LATENCY]).picks["drop_in"].reasons[0]
    assert said.startswith(
        "the best step time that" if tried else "no other one that keeps the baseline's global batch"
    )


def test_trials_share_a_branch_only_with_their_numerics():
    """Two kinds of bf16 are one precision: the branch of the one confirmed the other."""
    plain = measured(1, micro=16, precision="bf16")
    narrow = replace(plain, ds_config={**plain.ds_config, "bf16": {"enabled": True, "bf16_optimizer_states": True}})
    assert plain.training == replace(plain, trial=2).training and plain.training != narrow.training
    assert measured(3, micro=16).training == measured(4, micro=8, accumulation=2, zero_stage=2).training


def test_without_a_baseline_there_is_a_recommendation_but_no_speedup():
    found = recommend([measured(0, outcome=Outcome.OOM), measured(1, 0.1), measured(2, 0.05)], [LATENCY])
    assert chosen(found) == 2 and gained(found) is None and found.baseline is None
    assert "drop_in" not in found.picks and "no speed-up to state" in reasons(found)
    assert chosen(found, "lowest_latency") == 2 and "cannot be compared" not in reasons(found)
    assert chosen(recommend([measured(3, 0.1)], [LATENCY])) == 3


@pytest.mark.parametrize("fault", [{"unwitnessed": ["zero_stage"]}, {"unfit": "ran out of memory in evaluation"}])
def test_what_needs_no_baseline_to_be_refuted_is_not_picked_where_none_ran(fault):
    lost, other = measured(0, outcome=Outcome.CRASHED), measured(2, 0.07)
    found = recommend([lost, replace(measured(1, 0.06), **fault), other], [LATENCY])
    assert chosen(found) == chosen(found, "lowest_latency") == 2 and "trial 1 reads better" in reasons(found)
    estimates = found.picks["recommended"].estimates
    assert point(estimates.measured[1], estimates)["doubt"]
    assert not recommend([lost, replace(measured(1, 0.06), **fault)], [LATENCY]).picks


def test_a_bound_bars_a_trial_and_a_baseline_from_being_picked_but_not_from_being_compared_with():
    base, best = measured(0, 0.1), measured(1, 0.01, 10e6, feasible=False)
    found = recommend([base, best, measured(2, 0.09)], [LATENCY, MEMORY])
    assert {pick.measured.trial for pick in found.picks.values()} <= {0, 2} and best not in found.front
    base = measured(0, 0.1, 900e6, feasible=False)
    found = recommend([base, measured(1, 0.08)], [LATENCY])
    assert {pick.measured.trial for pick in found.picks.values()} == {1} and found.baseline is not None
    assert gained(found).factor == about(1.25)


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.COMPLETE])
def test_what_did_not_complete_is_never_picked(outcome):
    base = measured(0, 0.1)
    found = recommend([base, measured(1, outcome=outcome)], [LATENCY])
    assert {pick.measured.trial for pick in found.picks.values()} == {0}
    found = recommend([measured(0, outcome=outcome), measured(1, outcome=Outcome.OOM)], [LATENCY])
    assert (found.picks, found.front, found.baseline) == ({}, [], None)


def test_a_trial_without_one_of_the_objectives_is_not_ranked():
    base = measured(0, 0.1)
    assert rank([base, measured(1, 0.01)], [LATENCY, CONVERGENCE]) == []


# Which picks there are.


def test_drop_in_keeps_the_baselines_global_batch_and_numerics():
    base, kept = measured(0, 0.1), measured(2, 0.07, micro=4, accumulation=2)
    other = replace(measured(1, 0.05, precision="bf16"), numerics_kept=False, verdict=PASSED)
    wider = measured(3, 0.05, micro=32)
    found = recommend([base, other, kept, wider], [LATENCY, THROUGHPUT])
    assert chosen(found) == 3 and chosen(found, "drop_in") == 2
    assert "keeps the baseline's global batch of 8 and its numerics" in reasons(found, "drop_in")
    apart = recommend([base, other, kept, wider], [LATENCY, THROUGHPUT], world_size=4)
    assert "global batch of 32" in reasons(apart, "drop_in")


def test_each_extreme_is_picked():
    base, quick = measured(0, 0.1, 100e6), measured(1, 0.05, 120e6, micro=2)
    wide, small = measured(2, 0.4, 150e6, micro=64), measured(3, 0.2, 50e6, checkpoint_every=1)
    for objectives in ([LATENCY, THROUGHPUT, MEMORY], [THROUGHPUT]):
        found = recommend([base, quick, wide, small], objectives)
        assert [chosen(found, name) for name in ("lowest_latency", "highest_throughput", "lowest_memory")] == [1, 2, 3]
        assert "fastest_convergence" not in found.picks and not found.unchecked
    goodput = Objective(name="convergence", metric="goodput_samples_per_s")
    worth = [replace(m, metrics={**m.metrics, goodput.metric: m.trial + 1.0}) for m in (base, quick)]
    found = recommend(worth, [goodput])
    assert chosen(found, "fastest_convergence") == 1


def test_a_pick_stands_in_the_file_as_the_design_says():
    base = measured(0, 0.1, rounds=[0.1])
    found = recommend([base, measured(1, 0.05, rounds=[0.05], precision="bf16")], [LATENCY])
    data = found.picks["recommended"].to_data()
    low, high = data["speedup_ci95"]
    assert data["speedup"] == about(2.0) and 1.7 < low < data["speedup"] < high < 2.3
    assert data["gains"]["samples_per_s"] == [data["speedup"], low, high] and data["measurements"] == 2
    figures = ["trial", "candidate", "ds_config", "metrics", "ci95", "gains", "luck", "speedup", "speedup_ci95"]
    figures += ["measurements", "doubt", "barred"]
    assert list(data) == [*figures, "reasons", "script_side_changes", "unchecked"]
    assert list(point(found.front[0], found.picks["recommended"].estimates)) == figures


def test_ratios_of_the_values_in_the_files_are_the_gains():
    base, best = measured(0, 0.1, rounds=[0.13, 0.12]), measured(1, 0.05, 80e6, rounds=[0.07, 0.08], precision="bf16")
    found = recommend([base, best, measured(2, 0.07)], [LATENCY, MEMORY])
    data, own = found.picks["recommended"].to_data(), found.baseline.to_data()
    for name, gain in data["gains"].items():
        ratio = data["metrics"][name] / own["metrics"][name]
        assert gain[0] == pytest.approx(ratio if name == "samples_per_s" else 1 / ratio)
        low, high = data["ci95"][name]
        assert low <= data["metrics"][name] <= high
    assert own["speedup"] == 1.0 and own["speedup_ci95"] == [1.0, 1.0]


# The interval.


def test_the_interval_of_the_speedup_holds_the_truth_nineteen_times_in_twenty():
    rng = random.Random(0)
    truth, n, hits = 1.5, 100, 0
    for _ in range(n):
        noise = lambda: math.exp(rng.gauss(0, 0.02))  # noqa: E731
        drift = [math.exp(rng.gauss(0, 0.2)) for _ in range(3)]
        base = measured(0, 0.1, rounds=[0.1 * d * noise() for d in drift])
        others = [
            measured(k, 0.1 / truth, rounds=[0.1 / truth * d * noise() for d in drift], precision="bf16")
            for k in (1, 2, 3)
        ]
        _, low, high = gained(recommend([base, *others], [LATENCY]))
        hits += low <= truth <= high
    # The one that reads best of three equal ones is picked, which costs some of the 95 %.
    assert 0.85 < hits / n <= 0.99


def test_the_interval_covers_what_rounds_disagree_about():
    base = measured(0, 0.2, rounds=[0.2, 0.2, 0.2])
    noisy = measured(1, 0.1, rounds=[0.10, 0.12, 0.09], precision="bf16")
    _, low, high = gained(recommend([base, noisy], [THROUGHPUT]), "highest_throughput")
    assert low < 1.75 and high > 2.15


@pytest.mark.parametrize("metric", ["cpu_s_per_step", "joules_per_sample"])
def test_a_time_that_no_step_time_decides_is_as_noisy_as_the_step_time(metric):
    """And the energy that goes with it: of 60 studies in which all trials were equal 34 recommended a change for less of it."""
    base, slower, twice = measured(0, 0.1), measured(1, 0.1), measured(2, 0.1)
    read = {0: 1.0, 1: 1.03, 2: 2.0}
    found = estimate([replace(m, metrics={**m.metrics, metric: read[m.trial]}) for m in (base, slower, twice)])
    gains = [found.gains(m)[metric].told for m in found.measured]
    assert gains == [False, False, True] and not found.gains(found.measured[1])["peak_memory_bytes"].told


def test_a_pick_is_the_best_of_those_only_that_it_was_taken_from():
    """A trial that was measured again was "the best peak memory of all that ran" above one that needed less."""
    base, again = measured(0, 0.1, rounds=[0.1, 0.1]), measured(1, 0.09, rounds=[0.09, 0.09], zero_stage=1)
    once = measured(2, 0.08, zero_stage=2)

    def takes(m, peak):
        repeats = {n: {**values, "peak_memory_bytes": peak} for n, values in m.repeats.items()}
        ci95 = {**m.ci95, "peak_memory_bytes": (0.8 * peak, 1.2 * peak)}
        return replace(m, metrics={**m.metrics, "peak_memory_bytes": peak}, ci95=ci95, repeats=repeats)

    base, again, once = takes(base, 2.0e9), takes(again, 1.02e9), takes(once, 1.0e9)
    found = recommend([base, again, once], [LATENCY])
    assert chosen(found, "lowest_memory") == 1
    assert "the best peak memory of all that were measured again" in reasons(found, "lowest_memory")
    alone = recommend([base, again], [LATENCY])
    assert "the best peak memory of all that ran" in reasons(alone, "lowest_memory")


# Trials that the user cannot reproduce, and trials that did not pass their checks.


def test_what_the_user_cannot_reproduce_is_ranked_apart():
    base, own = measured(0, 0.1), measured(1, 0.07, precision="torch_autocast")
    apart = replace(measured(2, 0.01, precision="bf16"), unreproducible=["a check of the library is off"])
    found = recommend([base, own, apart], [LATENCY, THROUGHPUT])
    assert {chosen(found, name) for name in found.picks if name != "out_of_reach"} <= {0, 1} and chosen(found) == 1
    assert [m.trial for m in found.front] == [1] and [m.trial for m in rank([apart, base, own], [LATENCY])] == [1, 0, 2]
    assert chosen(found, "out_of_reach") == 2 and "a check of the library is off" in reasons(found, "out_of_reach")
    for other in (
        replace(apart, metrics=base.metrics),
        replace(apart, numerics_kept=False),
    ):  # no better, or not checked
        assert "out_of_reach" not in recommend([base, own, other], [LATENCY]).picks
    base = replace(base, unreproducible=["a check is off"])
    found = recommend([base, apart], [LATENCY])  # only a trial can run anything
    assert chosen(found) == chosen(found, "out_of_reach") == 2
    # What the user can run did not pass its checks.
    barred = [replace(own, numerics_kept=False), measured(0, 0.1, feasible=False)]
    found = recommend([*barred, apart], [LATENCY])
    assert chosen(found) == chosen(found, "out_of_reach") == 2 and "a check of the library is off" in reasons(
        found, "out_of_reach"
    )


def test_other_numerics_are_picked_only_once_the_gate_has_passed_them():
    base, kept = measured(0, 0.1), measured(2, 0.07, checkpoint_every=1)
    open_ = replace(measured(1, 0.05, precision="bf16"), numerics_kept=False)

    def found(m):
        return recommend([base, m, kept], [LATENCY, THROUGHPUT])

    better = "trial 1 reads better, but how it trains with other numerics than the baseline's was not checked"
    assert found(open_).front[0].trial == 1
    shown = point(found(open_).front[0], found(open_).picks["recommended"].estimates)
    assert shown["doubt"] and not shown["barred"]
    slow = measured(3, 0.2, precision="bf16", micro=32)
    by_one = recommend([base, replace(slow, numerics_kept=False), kept], [LATENCY])
    assert chosen(by_one) == 2 and "trial 3 reads better by throughput, but" in reasons(by_one)
    for name in ("recommended", "lowest_latency", "highest_throughput"):
        assert chosen(found(open_), name) == 2 and better in reasons(found(open_), name)
    assert {m.trial for m in found(open_).unchecked} == {1} and 1 in [m.trial for m in found(open_).front]
    failed = found(replace(open_, verdict=GateVerdict(passed=False, reason="trains worse")))
    assert chosen(failed, "lowest_latency") == 2 and "but trains worse" in reasons(failed) and not failed.unchecked
    assert point(failed.front[0], failed.picks["recommended"].estimates)["barred"]
    passed = found(replace(open_, verdict=PASSED))
    assert chosen(passed) == 1 and not passed.unchecked
    told = "over 40 steps the loss is 0.001 above the reference's; up to 0.02 either way could not have been told from chance"
    assert f"not seen to train worse than the baseline's numerics: {told}" in reasons(passed)
    alike = found(replace(open_, verdict=replace(PASSED, same_as=7)))
    assert "the loss of trial 7, whose numerics are the same, is 0.001 above" in reasons(alike)


def test_another_batch_is_picked_only_once_a_branch_has_confirmed_it():
    base, kept = measured(0, 0.1), measured(2, 0.07)
    wider = replace(measured(1, 0.09, micro=32), branch_wanted=True)
    said = Branch(confirmed=True, reason="a branch over 512 samples reaches it in 0.8x")
    refuted = replace(said, confirmed=False, reason="a branch over 512 samples refutes it")
    for open_ in (wider, replace(wider, branch=refuted)):
        found = recommend([base, open_, kept], [LATENCY, THROUGHPUT])
        assert chosen(found) == chosen(found, "highest_throughput") == 2
    found = recommend([base, replace(wider, branch=said), kept], [LATENCY, THROUGHPUT])
    assert chosen(found) == 1 and said.reason in found.picks["recommended"].reasons


def test_where_no_trial_passed_its_checks_nothing_is_picked():
    base = measured(0, 0.1, feasible=False)
    open_ = replace(measured(1, 0.05, precision="bf16"), numerics_kept=False)
    found = recommend([base, open_], [LATENCY])
    assert found.picks == {} and found.baseline is not None
    assert [m.trial for m in found.unchecked] == [m.trial for m in found.front] == [1]
    # Without a baseline there is nothing to check against.
    assert chosen(recommend([open_], [LATENCY])) == 1
