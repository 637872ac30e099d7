"""Notes on single trials: how one ended, in words."""

import pytest

from autotune.report.trial_notes import end_words


@pytest.mark.parametrize(
    ("outcome", "phase", "words"),
    [
        ("crashed", "build", ("crashed", "why (in build)")),
        ("oom", "measure", ("oom", "why (in the timed steps)")),
        ("oom", "tail", ("oom", "why")),
        ("stopped_early", "measure", ("stopped early", "why")),
        ("complete", "done", ("complete", "why")),
    ],
)
def test_a_trial_that_failed_says_where_in_words_and_one_that_was_timed_does_not(outcome, phase, words):
    """A trial that was stopped early said "worse than trial 0 on every objective (in measure)"."""
    assert end_words({"outcome": outcome, "phase": phase, "reason": "why"}) == words
