"""The live view of a study, in a pipe and in terminals of several widths."""

import io
import math
import random
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from support.instant import STEPS, Instant, Watcher, report, runner_of

from autotune.report import load
from autotune.report.progress import ProgressView
from autotune.space.candidate import Candidate
from autotune.study import tell
from autotune.study.events import Leader, Progress
from autotune.study.storage import records
from autotune.trial.result import Outcome

CANDIDATE = Candidate(micro_batch_size=8, zero_stage=1)


def ended(number, role="search", outcome=Outcome.COMPLETE, reason=""):
    metrics = {"step_time_s": 0.2, "samples_per_s": 40.0, "peak_memory_bytes": 2.0**30}
    return Progress(
        number=number, role=role, candidate=CANDIDATE, outcome=outcome, reason=reason, n_told=number + 1,
        metrics=metrics if outcome is Outcome.COMPLETE else {}, n_trials=30, best=Leader(0, CANDIDATE), best_gain=1.0, left_s=150,
    )  # fmt: skip


def shown(*happened, width=80, terminal=False):
    """What a view prints of the ends of trials; in a terminal its live lines too."""
    text = io.StringIO()
    console = Console(
        file=text, width=width, highlight=False, force_terminal=terminal, no_color=True, legacy_windows=False
    )
    with ProgressView(console) as view:
        view.opening("model.py")
        for each in happened:
            view.began(each.number, each.candidate, each.role)
            view.ended(each)
            drawn = Console(file=text, width=width, force_terminal=False)
            if terminal:
                drawn.print(view._drawn())
    return text.getvalue()


def test_a_trial_is_a_line_in_words():
    head, baseline, failed = shown(
        ended(0, "baseline"), ended(1, outcome=Outcome.OOM, reason="over 4 GiB")
    ).splitlines()
    assert head.split() == ["trial", "step", "time", "samples/s", "memory", "configuration"]
    assert baseline == "    0     200 ms       40.0  1.00 GiB  micro-batch 8 x 1, fp32, ZeRO 1 (baseline)"
    assert failed.split()[1] == "oom" and failed.endswith("micro-batch 8 x 1, fp32, ZeRO 1: over 4 GiB")
    assert baseline.index("micro") == failed.index("micro") == head.index("configuration")


def test_a_long_reason_is_cut_between_words_and_shows_that_it_was():
    reason = f"AssertionError: The parameter\n        {'was already reduced ' * 20}"
    line = shown(ended(1, outcome=Outcome.CRASHED, reason=reason), width=400).splitlines()[-1]
    assert "AssertionError: The parameter was already reduced was" in line and line.endswith(" ...")
    path = f"/{'long/' * 50}"  # of which nothing was left
    assert "ZeRO 1: /long/long" in shown(ended(1, outcome=Outcome.CRASHED, reason=path), width=400)


def test_a_trial_that_can_be_no_pick_says_so_where_it_ends(tmp_path):
    """The fastest trial of a study was passed by, and neither its line nor the study's notes had a word of it."""

    def machine(candidate):
        whole = report(candidate, step_times_s=[0.01 if candidate.zero_stage == 1 else 0.02] * STEPS)
        unseen = ("zero_optimization.contiguous_gradients",) if candidate.zero_stage == 1 else ()
        alone = ["a check is off"] if candidate.zero_stage == 2 else []
        return replace(whole, observed=replace(whole.observed, unwitnessed=unseen), unreproducible=alone)

    runner = runner_of(
        tmp_path,
        Instant(machine),
        watcher=(watcher := Watcher()),
        space=[{"zero_stage": [0, 1, 2]}],
        sampler="grid",
        trials=3,
    )
    runner.run()
    notes = load.read(runner.study, tmp_path / "s", series=False).caveats()
    for stage, why in ((1, "no pick, since nothing shows whether zero_optimization.contiguous_gradients acted"),
                       (2, "ranked apart, since only a trial can run it: a check is off")):  # fmt: skip
        end = next(e for e in watcher.ended_with if e.candidate.zero_stage == stage and e.role == "search")
        assert end.reason == why and f"trial {end.number}: {why}" in notes
        assert shown(end).splitlines()[-1].endswith(why)
    assert not any(end.reason for end in watcher.ended_with if end.number == 0 or end.role == "repeat")


def test_trials_that_are_measured_again_share_a_line():
    again = [ended(number, "repeat") for number in (3, 0, 3, 0, 3)]
    lines = shown(ended(3), *again, ended(6)).splitlines()
    assert [line for line in lines if "again" in line] == ["- measured again: trial 0 2 x, trial 3 3 x"]
    assert lines[-1].split()[0] == "6" and "again: trial 3 1 x" in shown(ended(3, "repeat"))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_time_left_and_no_line_is_too_long(width):
    said = shown(ended(0, "baseline"), ended(1), width=width, terminal=True)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", said).splitlines()
    assert max(map(len, lines)) <= width
    assert ("configuration" in said) == (width >= 80)  # the head of a column that a narrow one has not
    if width >= 80:
        assert (
            "2 of at most 30 trials, up to 2 min 30 s left" in said
            and "best so far: trial 0, micro-batch 8 x 1" in said
        )


def test_the_last_live_line_has_room_for_the_ctrl_c_that_a_terminal_shows_in_it():
    """It began another line, and what was drawn stayed on the screen above the answer."""
    view = ProgressView(Console(file=io.StringIO(), width=80, force_terminal=True))
    view.opening("a_model_with_a_very_long_name" * 5)
    assert len(view._drawn().renderables[-1]) == 80 - len("^C") - 1


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_a_terminal_of_few_columns_ends_no_study(width):
    assert shown(ended(0, "baseline"), ended(1, "repeat"), width=width, terminal=True)


def test_a_pipe_gets_no_control_characters():
    assert "\x1b" not in shown(ended(0, "baseline"), ended(1)) and "\r" not in shown(ended(0))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "variable", "value"),
    [(io.StringIO, "FORCE_COLOR", "1"), (io.StringIO, "TTY_COMPATIBLE", "1"), (Terminal, "TERM", "dumb")],
)
def test_a_log_and_a_terminal_that_cannot_redraw_get_a_line_for_what_is_done_and_no_live_lines(
    monkeypatch, stream, variable, value
):
    """CI sets FORCE_COLOR, and its log held four live lines a second; a dumb terminal said nothing of what is done."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "stderr", stream())
    with ProgressView() as view:
        view.opening("model.py")
        view.doing("profiling the model")
        view.tick()
    assert sys.stderr.getvalue() == "- profiling the model\n"


def test_the_time_left_is_a_bound_while_the_search_may_end_by_itself():
    searching, again = ended(1), ended(3, "repeat")
    assert searching.left_words(90.0) == "up to 1 min 30 s left"
    assert again.left_words(90.0) == "about 1 min 30 s left"


@pytest.mark.parametrize(("width", "said"), [(40, "(unchecked, with"), (120, "(unchecked, within noise), 1.05x the")])
def test_the_best_so_far_says_first_what_keeps_it_from_being_the_answer(width, said):
    open_end = replace(ended(5), best=Leader(5, CANDIDATE), best_gain=1.05, best_open="unchecked, within noise")
    assert f"best so far: trial 5 {said}" in shown(open_end, width=width, terminal=True)


@pytest.mark.system
def test_among_equal_trials_the_best_so_far_is_not_yet_shown_to_be_better(tmp_path, monkeypatch):
    """The live line said `1.05x the baseline` up to an answer that nothing is measurably better."""
    monkeypatch.setattr(tell, "CHEAP_S", math.inf)  # after each trial, as where trials take seconds
    n_ran, watcher = Counter(), Watcher()

    def machine(candidate):
        n_ran[candidate] += 1
        noise = random.Random(f"{candidate.key}{n_ran[candidate]}")
        return report(candidate, step_times_s=[0.02 * math.exp(0.04 * noise.gauss(0, 1))] * STEPS)

    space = [{"checkpoint_every": [0, 1, 2, 4], "zero_stage": [0, 1, 2]}]
    given = {"trials": 9, "finalists": 2, "repeats": 1, "objectives": ["throughput"], "space": space}
    runner_of(tmp_path, Instant(machine), watcher=watcher, **given).run()
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s").picks["recommended"]
    words = [each.best_words() for each in watcher.ended_with if each.best is not None and each.best.trial]
    assert found["trial"] == 0 and words and all("(within noise), 1." in said for said in words)


def test_the_best_so_far_of_those_that_hold_a_constraint_may_be_worse_than_the_baseline_beyond_noise(
    tmp_path, monkeypatch
):
    """It was said to be within noise, at `0.66x the baseline`."""
    monkeypatch.setattr(tell, "CHEAP_S", math.inf)

    def machine(candidate):
        step_s, peak = (0.03, 10**8) if candidate.checkpoint_every else (0.02, 10**9)
        return report(candidate, step_times_s=[step_s] * STEPS, peak_memory_bytes={"steady": peak})

    watcher, space = Watcher(), [{"checkpoint_every": [0, 1]}]
    given = {
        "trials": 2,
        "finalists": 0,
        "objectives": ["throughput"],
        "constraints": {"peak_memory_bytes": {"max": "256MiB"}},
    }
    runner_of(tmp_path, Instant(machine), watcher=watcher, space=space, **given).run()
    assert "best so far: trial 1, 0.6" in watcher.ended_with[-1].best_words()


def test_the_best_so_far_is_unchecked_until_its_numerics_are_checked(tmp_path, monkeypatch):
    """And the line of a trial, of which the best so far is one, states the figures of the answer's tables; it stated its own reading."""
    monkeypatch.setattr(tell, "CHEAP_S", math.inf)

    def machine(candidate):
        step_s = (0.01 if candidate.precision == "bf16" else 0.02) * random.Random(candidate.key).uniform(0.9, 1.1)
        return report(candidate, step_times_s=[step_s] * STEPS)

    watcher, space = Watcher(), [{"precision": ["fp32", "bf16"]}]
    given = {"trials": 2, "finalists": 0, "objectives": ["throughput"], "space": space}
    runner_of(tmp_path, Instant(machine), watcher=watcher, **given).run()
    assert "trial 1 (unchecked" in watcher.ended_with[-1].best_words()
    row = load.load("s", records.default_url(tmp_path), tmp_path / "s").trials[-1]
    assert watcher.ended_with[-1].metrics == row["metrics"] and row["metrics"]["step_time_s"] != row["readings_s"][0]
