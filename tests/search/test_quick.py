"""What a quick study tries: first what is worth most with the fewest changes, and soon something that needs no check."""

from dataclasses import replace

from autotune.forecast.predictor import AnalyticPrior
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.space.candidate import Candidate
from autotune.trial.profile import Machine, Profile

PRIOR = AnalyticPrior(Profile.guess(10**8, 10**8, 4), Machine.guess("cuda", 2))
OWN = Candidate(micro_batch_size=4, gradient_accumulation_steps=2)


def told_of(candidate, slower=1.0):
    """What it reads on a machine that is as foretold, but for a factor."""
    seconds = slower * float(PRIOR([candidate]).time_terms.sum())
    return Observation(
        candidate=candidate, metrics={"step_time_s": seconds, "samples_per_s": candidate.global_batch_size(2) / seconds}
    )


def guide_of(candidates, *, quick=True):
    guide = CandidateOptimizer(candidates, PRIOR, ["samples_per_s"], world_size=2, reference=OWN)
    guide.quick, guide.drops_in = quick, lambda candidate: candidate.precision == "fp32"
    return guide


def test_what_the_baseline_reads_beyond_its_forecast_recommends_no_change_of_a_setting_that_does_not_help():
    """The machine is slower as a whole; that is no reason to recompute blocks."""
    faster = replace(OWN, micro_batch_size=8, gradient_accumulation_steps=1)
    guide = guide_of([OWN, faster, *(replace(faster, checkpoint_every=n) for n in (1, 2, 4))])
    assert guide.suggest([told_of(OWN, slower=20.0)]) == faster


def test_after_a_trial_that_needs_a_check_one_follows_that_needs_none():
    checked, unchecked = (
        replace(OWN, micro_batch_size=8, gradient_accumulation_steps=1, precision=name) for name in ("bf16", "fp32")
    )
    others = [replace(OWN, micro_batch_size=n, precision="bf16", gradient_accumulation_steps=8 // n) for n in (1, 2)]
    for quick in (True, False):
        guide = guide_of([OWN, checked, unchecked, *others], quick=quick)
        told = [told_of(OWN), told_of(checked)]
        assert guide.outlook(told).drop_in_open and not guide.outlook(told).settled(1.0)
        assert guide.suggest(told) == unchecked
        told.append(told_of(unchecked))
        assert not guide.outlook(told).drop_in_open


def test_one_that_needs_no_check_is_tried_however_far_it_is_behind_and_the_search_goes_on():
    """A large batch may be far ahead of all that train as the baseline does; the search ended there, and said that all else was slower."""
    own = replace(OWN, micro_batch_size=1, gradient_accumulation_steps=4)
    unchecked = replace(own, micro_batch_size=2, gradient_accumulation_steps=2)
    large, larger = (replace(own, micro_batch_size=n, gradient_accumulation_steps=16) for n in (16, 32))
    guide = CandidateOptimizer([own, unchecked, large, larger], PRIOR, ["samples_per_s"], world_size=2, reference=own)
    guide.drops_in = lambda candidate: candidate.global_batch_size(2) == own.global_batch_size(2)
    told = [told_of(own, slower=20.0), told_of(large)]
    assert guide.suggest(told) == unchecked
    assert guide.suggest([*told, told_of(unchecked, slower=20.0)]) == larger
    last = CandidateOptimizer([own, unchecked, large], PRIOR, ["samples_per_s"], world_size=2, reference=own)
    last.quick, last.drops_in = True, guide.drops_in
    surely = [*told, told_of(replace(own, gradient_accumulation_steps=2), slower=20.0)]
    assert last.suggest(surely) == unchecked and not last.outlook(surely).settled(0.01)
    narrow = CandidateOptimizer(
        [own, unchecked, large, larger], PRIOR, ["samples_per_s"], world_size=2, reference=own, memory_limit_bytes=1e6
    )
    narrow.drops_in = guide.drops_in
    assert not narrow.outlook(told).drop_in_open  # none fits


def test_nothing_is_tried_for_needing_no_check_alone():
    """A smaller micro-batch is slower than the baseline."""
    checked = replace(OWN, micro_batch_size=8, gradient_accumulation_steps=1, precision="bf16")
    guide = guide_of([OWN, checked, replace(OWN, micro_batch_size=1, gradient_accumulation_steps=8)])
    assert not guide.outlook([told_of(OWN), told_of(checked)]).drop_in_open


def test_a_study_that_goes_on_because_of_one_candidate_tries_that_one():
    """The expected best is near one that was tried, and known too well to be much better than that."""
    large, small = (replace(OWN, micro_batch_size=n, gradient_accumulation_steps=8 // n) for n in (8, 4))
    near, apart = replace(small, zero_stage=1), replace(large, zero_stage=3)
    guide = guide_of([OWN, large, replace(large, zero_stage=1), near, apart])
    told = [told_of(OWN), told_of(large), told_of(replace(large, zero_stage=1), slower=0.55)]
    known, unknown = guide.beliefs(told, [near, apart]).log_step_time[0]
    assert known < unknown - 0.02
    assert guide.suggest(told) == apart
