"""Notes on single trials: how one ended, in words."""

import pytest

from autotune.report.trial_notes import end_words, of


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


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (["oom", "oom", "crashed"], "2 of 3 other trials ran out of memory"),
        (["oom", "predicted_oom"], "1 of 2 other trials ran out of memory, 1 more is predicted to"),
        (["predicted_oom"], "1 of 1 other trials is predicted to run out of memory"),
        (["oom", "complete"], None),
        (["oom", "stopped_early"], None),
    ],
)
def test_where_the_baseline_is_all_that_was_measured_the_answer_says_that_others_ran_out_of_memory(ends, said):
    """It said "nothing else was measured", and nowhere why."""
    ends = [*ends, "too_few_steps"] if said is None else ends
    found = of([{"trial": n, "outcome": outcome, "reason": ""} for n, outcome in enumerate(["complete", *ends])])
    assert any("ended with too few steps" in text for text in found) == (said is None)  # as the page says it
    assert (said in found) if said else not any("memory" in text for text in found)
