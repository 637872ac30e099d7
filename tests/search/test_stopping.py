"""When a study ends, and what a running trial must be able to beat."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.made_up import measured

from autotune.forecast.predictor import AnalyticPrior
from autotune.scoring.metrics import of_kind
from autotune.search.optimizer import CandidateOptimizer, Outlook, RemainingCandidates
from autotune.search.stopping import bounds_to_beat, nothing_left, settled
from autotune.space.candidate import Candidate
from autotune.trial.profile import Machine, Profile


def test_a_gain_just_below_the_limit_does_not_read_as_the_limit():
    left = Outlook(loss=0.0299996, next_gain=0.02, n_left=5, explored=True, n_ran=9, covered=0.9, quick=True)
    guide = SimpleNamespace(outlook=lambda told, busy: left, quick=True)
    assert "by 2.99%, less than 3%" in settled(guide, [], [], below=0.03)


def test_what_does_not_fit_is_not_said_to_be_slow():
    some, none = (nothing_left(RemainingCandidates(n_open=9, n_fit=n), 20.0) for n in (4, 9))
    assert some == f"{none}, or not to fit the device memory" and none.endswith("3 times slower than the best")


@pytest.mark.parametrize(
    ("within", "noise_sd", "factor"),
    [(1.01, 0.0, 1.05), (1.2, 0.0, 1.2), (4.0, 0.0, 1.5), (1.01, 0.1, 1.319), (1.2, 0.01, 1.2), (1.01, math.inf, 1.5)],
)
@pytest.mark.parametrize("metric", sorted(of_kind("rate")))
def test_a_rival_counts_no_better_than_its_own_reading_is_known(within, noise_sd, factor, metric):
    """A lucky reading had stopped trials that were as good: one of three steps, or one where whole trials differ by 10 %."""
    guide = CandidateOptimizer(
        [Candidate(micro_batch_size=8)],
        AnalyticPrior(Profile.guess(10**8, 10**8, 4), Machine.guess("cpu", 1)),
        [metric],
    )
    rival = measured(1, 0.1)
    rival = replace(rival, metrics={metric: 7.0} | rival.metrics)
    rate = rival.metrics["samples_per_s"]
    rival = replace(rival, ci95=rival.ci95 | {"samples_per_s": (rate / within, rate * within)})
    found = bounds_to_beat(
        guide,
        [],
        Candidate(micro_batch_size=8, zero_stage=1),
        [rival],
        Candidate(micro_batch_size=8),
        noise_sd,
        drops_in=True,
    )
    assert [each.step_time_s for each in found] == [pytest.approx(0.1 * factor, rel=1e-3)]
