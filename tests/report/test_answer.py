"""The answer in the terminal and in the study's README, and values in words."""

import re
from dataclasses import replace
from html import unescape

import pytest
from rich.console import Console
from support.instant import Instant, failed, runner_of
from support.instant import report as instant_report
from support.study_report import EVIL, MIB, OBJECTIVES, study_report, with_picks

from autotune.report import load
from autotune.report.answer import Answer
from autotune.report.data import StudyReport, metric_scale, title
from autotune.report.gains import change, leading_metric, pick_words
from autotune.report.next_steps import next_steps
from autotune.report.page import render as report_page
from autotune.report.readme import render
from autotune.space.candidate import Candidate
from autotune.space.space import EXHAUSTED
from autotune.study.events import UNFINISHED
from autotune.study.storage import records
from autotune.trial.result import WRITES_FILES, Outcome


@pytest.fixture(scope="module")
def report() -> StudyReport:
    return study_report()


def printed(report: StudyReport, width: int, written=()) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(Answer(report, written), crop=False)
    return capture.get()


def failed_study() -> StudyReport:
    report = study_report(3)
    lost = {
        "outcome": "crashed",
        "reason": "ImportError: no module named 'flash'",
        "metrics": {},
        "ci95": {},
        "losses": [],
    }
    trials = [trial | lost for trial in report.trials]
    return replace(report, trials=trials, front=[], recommended={"picks": {}, "baseline": None})


def test_a_study_in_which_nothing_completed_says_why():
    report = failed_study()
    page = report_page.render(report)
    assert all(
        text in page for text in ("Nothing to recommend: no configuration completed.", "3 crashed", "no module named")
    )
    assert "Nothing to recommend" in printed(report, 80) and "Nothing to recommend" in render(report)
    page = render(report)
    assert "## The picks" not in page and "## Using it" not in page and f"- {next_steps(report)[0]}" in page
    # It said "No configuration completed", also where all that did break a constraint.
    assert "## The front" not in page
    assert "\n\n\n" not in printed(report, 80)  # no gap for a table without rows


def test_where_the_longest_samples_fit_nowhere_that_is_said_with_what_to_do():
    failed = failed_study()
    trials = [trial | {"outcome": "oom", "phase": "tail"} for trial in failed.trials]
    workload = {**failed.workload, "data": {"table": [[12.0, 499], [4096.0, 1]], "n_seen": 500, "n_samples": 500}}
    said = replace(failed, trials=trials, workload=workload).why_nothing
    assert said.startswith("the longest samples (4,096) fit the device memory in no configuration")
    drawn = replace(failed, trials=[trial | {"phase": "measure"} for trial in trials], workload=workload).why_nothing
    assert drawn.startswith("no configuration fits") and "4,096, 203.1 times the average: cut them" in drawn
    assert all(way in said for way in ("data.max_length", "checkpoint_every", "sequence_parallel_size", "more memory"))


def test_without_a_baseline_no_speedup_is_stated():
    report = study_report()
    bare = {
        name: pick | {"speedup": None, "speedup_ci95": None, "gains": {}, "reasons": []}
        for name, pick in report.picks.items()
    }
    trials = [
        report.trials[0]
        | {"outcome": "oom", "reason": "over the memory limit", "metrics": {}, "gains": {}, "speedup": None},
        *(trial | {"gains": {}, "speedup": None} for trial in report.trials[1:]),
    ]
    front = [point | {"gains": {}, "speedup": None} for point in report.front]
    report = replace(report, recommended={"picks": bare, "baseline": None}, trials=trials, front=front)
    for text in (report_page.render(report).partition("<script")[0], render(report), printed(report, 80)):
        assert "the baseline did not complete (oom: over the memory limit)" in " ".join(text.split())
        assert not re.search(r"\d[×x] better|\d\.\d\d[×x]", text)


def test_a_baseline_that_nothing_beats_is_kept():
    report = study_report()
    base = {**report.baseline, "speedup": 1.0, "speedup_ci95": [1.0, 1.0]}
    report = replace(report, recommended={"picks": {"recommended": base, "drop_in": base}, "baseline": base})
    assert "Keep your configuration" in report_page.render(report)
    assert "the baseline itself" in render(report) and "the baseline itself" in printed(report, 80)


def test_one_objective_is_enough_for_a_report():
    report = study_report()

    def cut(point):
        return point | {"metrics": {name: value for name, value in point["metrics"].items() if name == "samples_per_s"}}

    picks = {name: cut(pick) for name, pick in report.picks.items()}
    recommended = {"picks": picks, "baseline": report.baseline}
    study = {**report.study, "objectives": ["samples_per_s"]}
    given = {"study": study, "trials": list(map(cut, report.trials)), "recommended": recommended}
    report = replace(report, front=[picks["highest_throughput"]], **given)
    assert all("samples/s" in text for text in (report_page.render(report), render(report), printed(report, 80)))


def test_the_readme_names_machine_front_picks_and_the_way_back_and_no_path_of_this_machine(report):
    text = render(report)
    assert all(words in text for words in ("AMD EPYC 9654", "2 ranks", "30 trials in 3 min 42 s"))
    assert "autotune run studies/code-gpt/study.yaml" in text
    dated = render(replace(report, study=report.study | {"measured_on": ["2026-11-22", "2026-11-23"]}))
    assert "Measured from 2026-11-22 to 2026-11-23 with python 3.11.9" in dated
    assert all(f"| {point['trial']} |" in text for point in report.front)
    assert all(change in text for pick in report.picks.values() for change in pick["script_side_changes"])
    assert all(f"{pick['speedup']:.2f}x" in text for pick in report.picks.values())
    assert "/home" not in text and "/tmp" not in text and len(text) < 10_000


def test_the_readme_table_has_one_cell_a_column(report):
    rows = [line for line in render(report).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1 and len(rows) == 2 + len(report.table())


def test_a_readme_of_a_study_with_html_in_its_name_is_inert(report):
    text = render(replace(report, study={**report.study, "name": EVIL}))
    assert "\\<img" in text.splitlines()[0] and "<script>" not in text.replace("\\<script", "").split("```")[0]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_the_answer_cuts_no_number_at_any_width(report, width):
    lines = printed(report, width).splitlines()
    assert max(len(line) for line in lines if "`" not in line) <= width  # a command is not cut either
    shown = " ".join(lines)
    for name in OBJECTIVES:
        scale = metric_scale(name, [point["metrics"][name] for point in report.table()])
        assert all(scale.number(point["metrics"][name]) in shown for point in report.table())


def test_the_answer_shows_picks_speedup_interval_and_what_was_written_in_plain_ascii(report):
    text = printed(report, 80, ["studies/code-gpt/ds_config.json"])
    assert "\x1b" not in text and text.isascii()
    text, pick = " ".join(text.split()), report.picks["highest_throughput"]
    low, high = pick["speedup_ci95"]
    assert f"{pick['speedup']:.2f}x ({low:.2f} to {high:.2f}) the baseline's throughput" in text
    assert all(words in text for words in ("<- baseline", "30 trials in 3 min 42 s", "studies/code-gpt/ds_config.json"))
    named = [
        pick["trial"] for names, pick in report.picks_by_trial() if f"{', '.join(map(title, names))}: trial" in text
    ]
    assert named == [pick["trial"] for _, pick in report.picks_by_trial()]  # as the table marks them
    assert all(f"next: {step}" in text for step in next_steps(report)) and next_steps(report)


def test_a_search_that_its_time_budget_ended_goes_on_with_more_time():
    base = study_report().baseline
    study = {
        "trials_wanted": 50,
        "time_budget_s": 120.0,
        "ended": "the time budget of 120 s has no room",
        "wall_s": 200.0,
    }
    report = replace(study_report(), recommended={"picks": {"recommended": base}, "baseline": base})
    assert "--trials 60` looks further" in next_steps(report)[0]
    stopped = report.study | study | {"ended": "stopped after 30 of 40 trials: no further trial is expected to"}
    assert "--stop-below 0 --time-budget 7m` looks further" in next_steps(replace(report, study=stopped))[0]
    early = stopped | {"wall_s": 50.0}  # the budget has room for as much again
    assert "--stop-below 0` looks further" in next_steps(replace(report, study=early))[0]
    over = replace(report, study=stopped | {"ended": "every candidate that can run here has been measured"})
    assert next_steps(over)[0] == "Keep your configuration: nothing is left to try in this search space."
    for ended, said in (
        ("all that was not run (4 candidates) is expected to be over", "is left in this search space is worth a trial."),
        ("no remaining candidate fits the device memory of 16.0 GiB: of 11", "is expected to fit the memory (`autotune run "),
        (f"{EXHAUSTED}, or is predicted not to fit the device memory (3)", "study.yaml --no-filter` tries it)."),
    ):  # fmt: skip
        step = next_steps(replace(report, study=stopped | {"ended": ended}))[0]
        assert said in step and "looks further" not in step
    over_bounds = [trial | {"feasible": False} for trial in report.trials]
    unfit = replace(over, recommended={"picks": {}, "baseline": base}, trials=over_bounds)
    assert next_steps(unfit)[0].startswith("Nothing is left to try in this search space: loosen the constraints")
    last = stopped | {"trials_wanted": 30}
    assert "--stop-below 0 --trials 60 --time-budget 7m` looks further" in next_steps(replace(report, study=last))[0]
    assert "--time-budget 7m` looks further" in next_steps(replace(report, study=report.study | study))[0]
    both = report.study | study | {"trials_wanted": 30, "ended": ""}  # more trials alone would have no time
    assert "--trials 60 --time-budget 7m` looks further" in next_steps(replace(report, study=both))[0]


def test_trials_that_were_predicted_not_to_fit_do_not_use_up_the_budget_in_the_advised_command():
    """They are free: with more trials in place of more time the search would not go on."""
    report = study_report()
    unfit = [{"trial": n, "outcome": "predicted_oom", "candidate": report.baseline["candidate"]} for n in (30, 31, 32)]
    study = {
        "trials_wanted": 32,
        "time_budget_s": 120.0,
        "ended": "the time budget of 120 s has no room",
        "wall_s": 60.0,
    }
    base = {"picks": {"recommended": report.baseline}, "baseline": report.baseline}
    ended = replace(report, study=report.study | study, recommended=base, trials=[*report.trials, *unfit])
    assert "--time-budget 4m` looks further" in next_steps(ended)[0]
    spent = replace(ended, study=ended.study | {"trials_wanted": 30, "time_budget_s": None})
    assert "--trials 60` looks further" in next_steps(spent)[0]


@pytest.mark.parametrize(("time_budget_s", "wall_s", "budget"), [(None, 60.0, "10m"), (120.0, 600.0, "20m")])
def test_what_was_left_unchecked_is_checked_by_a_command_with_time_for_it(time_budget_s, wall_s, budget):
    base = study_report().baseline
    study = {"trials_wanted": 30, "time_budget_s": time_budget_s, "ended": "", "wall_s": wall_s, "unchecked_s": 200.0}
    report = replace(study_report(), recommended={"picks": {"recommended": base}, "baseline": base})
    report = replace(report, study=report.study | study, front=[{"trial": 3, "doubt": "was not checked"}])
    said = next_steps(report)[0]
    assert said.startswith("Keep your configuration until what reads better is checked: `")
    assert f"--trials 30 --time-budget {budget}` does so" in said
    sound = next_steps(replace(report, front=[{"trial": 3}]))[0]
    assert sound.startswith("Keep your configuration. `")


def test_failures_that_differ_in_their_numbers_say_whose_these_are():
    report, reasons = (
        study_report(),
        {1: "its loss is 0.69 above", 2: "its loss is 0.02 above", 3: "broken", 4: "broken"},
    )
    trials = [
        trial
        | (
            {"outcome": "diverged", "reason": reasons[trial["trial"]]}
            if trial["trial"] in reasons
            else {"outcome": "complete"}
        )
        for trial in report.trials
    ]
    said = replace(report, trials=trials).caveats()
    assert "trials 1, 2 ended with diverged, as trial 1: its loss is 0.69 above" in said
    assert "trials 3, 4 ended with diverged: broken" in said


def test_a_long_reason_keeps_its_end_which_says_what_to_do():
    report, remedy = study_report(), "Shorten the sequences, or leave zero_stage 3 out of the space."
    trials = [
        dict(report.trials[1]) | {"outcome": "crashed", "reason": f"RuntimeError: {'many words ' * 60}. {remedy}"}
    ]
    (said,) = [note for note in replace(report, trials=trials).caveats() if "ended with crashed" in note]
    assert "RuntimeError: many words" in said and said.endswith(remedy) and " ... " in said and len(said) < 360


def test_a_note_on_the_target_is_not_repeated_for_each_trial_that_differs_in_a_number():
    report = study_report()
    note = "the script itself writes files, as in every trial: /out/{}/train.log"
    trials = [trial | {"caveats": [note.format(trial["trial"]), "busy"]} for trial in report.trials]
    said = replace(report, workload=dict(report.workload) | {"caveats": [note.format(99)]}, trials=trials).caveats()
    assert [text for text in said if "itself writes" in text] == [note.format(99)]
    assert any(text.endswith("busy") for text in said)


def test_a_note_on_files_that_the_script_writes_comes_once_though_each_run_writes_others():
    """Trials that wrote more files than the probe, or fewer, had a note each, beside the study's."""
    report, note = study_report(), f"{WRITES_FILES}out/{{}}.log"
    trials = [trial | {"caveats": [note.format("abcdefgh"[trial["trial"] % 8])]} for trial in report.trials]
    for known in ([f"{WRITES_FILES}out/a.log and 3 more"], []):
        said = replace(report, workload=dict(report.workload) | {"caveats": known}, trials=trials).caveats()
        assert len([text for text in said if WRITES_FILES in text]) == 1


def test_trials_that_were_given_up_on_a_busy_machine_are_named():
    """All trials but the baseline were stopped under the load of another job, and the answer was the baseline without a word."""
    report, busy = study_report(), ["the machine was busy: other processes used 1.6 cores while steps were timed"]
    ends = {1: ("stopped_early", busy), 2: ("stopped_early", []), 3: ("stopped_early", busy), 4: ("complete", busy)}
    trials = [
        trial | dict(zip(("outcome", "caveats"), ends.get(trial["trial"], ("complete", [])), strict=True))
        for trial in report.trials
    ]
    (said,) = [note for note in replace(report, trials=trials).caveats() if "stopped early" in note]
    assert said.startswith("trials 1, 3 were stopped early as slower while the machine was busy")
    counted = [trial | {"log_slowdown": 0.4} for trial in trials]  # the trial was not stopped for that
    assert not [note for note in replace(report, trials=counted).caveats() if "stopped early" in note]


def test_a_search_that_was_stopped_has_one_way_to_go_on():
    base = study_report().baseline
    report = replace(study_report(), recommended={"picks": {"recommended": base}, "baseline": base})
    left = replace(report, study=report.study | {"trials_wanted": 41, "ended": "", "time_budget_s": None})
    first = next_steps(left)[0]
    assert (
        first.startswith("Go on: the search was stopped with 11 trials left; `") and "study.yaml --trials 41`" in first
    )
    assert next_steps(left)[1] == "Until then keep your configuration."
    over = replace(left, study=left.study | {"trials_wanted": 30, "ended": UNFINISHED})
    assert "were not all checked and measured again" in next_steps(over)[0]
    assert next_steps(over)[1] == "Until then keep your configuration."


def test_a_target_that_always_failed_is_mended_and_begun_anew_not_gone_on_with():
    """To go on was the first step, and ended at once with the same error."""
    report = study_report()
    trials = [trial | {"outcome": "crashed", "reason": "no such file"} for trial in report.trials[:4]]
    study = report.study | {"trials_wanted": 41, "ended": "the first 4 trials, the baseline among them, all failed"}
    first, *_ = next_steps(replace(report, study=study, trials=trials, recommended={"picks": {}}))
    assert first.startswith("Mend the target: ") and "study.yaml --fresh` starts over" in first


def test_other_constraints_are_advised_with_what_lets_the_study_begin_anew(report):
    """The study refused to go on with them."""
    trials = [trial | {"feasible": False} for trial in report.trials]
    said = " ".join(next_steps(replace(report, recommended={"picks": {}}, front=[], trials=trials)))
    assert "loosen the constraints and begin anew with --fresh" in said


def test_why_nothing_is_recommended_names_constraints_only_where_one_is_broken(report):
    """Nine trials that ran out of memory when they were measured again were told to loosen constraints that there were none of."""
    complete = [trial for trial in report.trials if trial["outcome"] == "complete"][:3]
    doubt = "it ran out of memory when it was measured again"
    over, doubtful = [{"feasible": False}], [{"feasible": True, "doubt": doubt}]
    for changes, why in (
        (over * 3, "3 configurations completed, but none keeps every constraint"),
        (doubtful * 3, f"3 configurations completed, but none passed its checks (trial 0: {doubt})"),
        (
            over * 2 + doubtful,
            "3 configurations completed, but none that keeps every constraint passed its checks (trial",
        ),
        (over, "1 configuration completed, but none keeps every constraint"),
    ):
        trials = [trial | change for trial, change in zip(complete, changes, strict=False)]
        empty = replace(report, recommended={"picks": {}}, front=[], trials=trials)
        assert empty.why_nothing.startswith(why)
        assert ("loosen" in " ".join(next_steps(empty))) is ("constraint" in why)


def test_a_study_that_another_process_runs_is_not_said_to_be_stopped():
    """Status and dashboard told to run it again, which that process would not have allowed."""
    report = study_report()
    running = replace(report, study=report.study | {"trials_wanted": 41, "ended": "", "under_way": True})
    (step,) = next_steps(running)
    assert step.startswith("Wait: ") and f"`autotune status {report.name}` follows it" in step


def test_an_answer_that_is_being_retuned_stands_meanwhile():
    """It was called the answer so far of a study that runs."""
    report = study_report()
    first, second, *_ = next_steps(replace(report, study=report.study | {"under_way": True, "retuned": True}))
    assert "this answer stands until it ends" in first and second.startswith("Train with it: ")


@pytest.mark.parametrize("state", [{"stored_as": "code-gpt.retune-1"}, {"edited": True}])
def test_an_answer_of_a_retuning_or_of_another_text_goes_on_with_another_retuning(state):
    """`autotune run` was advised with twice the re-tuning's trials, fewer than the study has; for an edited target it is refused."""
    report = study_report()
    study = {**report.study, **state, "trials_wanted": 99, "unchecked_s": 9.0}
    kept = {**report.recommended, "picks": {"recommended": report.baseline}}
    for recommended in (report.recommended, kept):
        assert not any(
            "autotune run" in step for step in next_steps(replace(report, study=study, recommended=recommended))
        )
    assert "autotune retune code-gpt --force" in " ".join(next_steps(replace(report, study=study, recommended=kept)))
    if "edited" in state:
        (step,) = next_steps(replace(report, study=study, recommended={"picks": {}}, front=[]))
        assert step.endswith("study.yaml --fresh` begins anew with it.")


def test_what_reads_better_than_the_answer_has_a_command_that_checks_it():
    """Beside a recommendation of another trial it had none."""
    report = study_report()
    better = {"trial": 3, "doubt": "was not checked"}
    report = replace(report, study=report.study | {"unchecked_s": 60.0}, front=[*report.front, better])
    (step,) = (step for step in next_steps(report) if step.startswith("What reads better is not checked so far: `"))
    assert "--trials 30 --time-budget" in step


def test_a_trial_of_the_front_that_did_not_pass_its_checks_is_marked(report):
    one = next(point for point in report.front if point["trial"] not in report.marks)
    for refused, said in ((True, "checks not passed"), (False, "not checked")):
        doubted = replace(
            report, front=[*report.front[1:], one | {"doubt": "its branch ended early", "barred": refused}]
        )
        assert f"<- {said}" in printed(doubted, 160) and said in render(doubted)
        assert said not in printed(report, 160)


def test_a_pick_leads_with_its_own_metric_and_says_the_price(report):
    pick = next(p for p in report.front if not report.is_baseline(p))
    own, base = pick["metrics"], report.baseline["metrics"]
    ratio = own["peak_memory_bytes"] / base["peak_memory_bytes"]
    words = pick_words(report, ["lowest_memory"], pick)
    assert words.startswith(f"{ratio:.2f}x the baseline's peak memory, at ") and " the throughput" in words
    weighted = replace(report, study={**report.study, "weights": {"step_time_s": 1.0}})
    assert leading_metric(weighted, ["recommended"], pick) == "step_time_s"


def test_a_price_within_noise_is_said_to_be_so_and_one_that_says_nothing_is_not_stated(report):
    """`at 0.91x the throughput` stood for an interval from 0.75 to 1.10, and for one from 0.2 to 4."""
    lean = next(point for point in report.front if not report.is_baseline(point))
    plain, memory = replace(report, study=report.study | {"objectives": ["peak_memory_bytes"]}), [1.25, 1.25, 1.25]

    def said(gain):
        vague = gain[2] > 4 * gain[1]
        gains = {"peak_memory_bytes": memory, "samples_per_s": gain}
        pick = lean | {"gains": gains, "luck": [], "speedup": None if vague else gain[0], "measurements": 3}
        pick["speedup_ci95"] = None if vague else gain[1:]
        goal = replace(plain, study=plain.study | {"weights": {"peak_memory_bytes": 1.0}})
        shown = with_picks(goal, recommended=pick)
        words = pick_words(shown, ["recommended"], pick)
        page, price = unescape(report_page.render(shown)), words.partition(", ")[2]
        assert all(words in text for text in (render(shown), printed(shown, 200)))
        assert (
            f'<p class="big">0.80× <small>the baseline’s peak memory</small></p>\n<p class="price">{price}</p>' in page
        )
        return words.removeprefix("0.80x the baseline's peak memory, at ")

    assert said([0.91, 0.89, 0.93]) == "0.91x the throughput"
    assert said([0.91, 0.75, 1.10]) == "0.91x the throughput (within noise)"
    assert said([0.91, 0.20, 4.00]) == "an unknown throughput"
    assert said([1.0, 1.0, 1.0]) == "1.00x the throughput"  # of memory on a device it said "(within noise)"


def test_a_gain_that_the_luckiest_of_equal_trials_would_read_is_within_noise_everywhere(report):
    """`highest throughput: 1.04x (1.01 to 1.06)` stood beside a recommended baseline, than which nothing was shown to be faster."""
    pick = next(point for point in report.front if not report.is_baseline(point))
    pick = pick | {
        "gains": {"samples_per_s": [1.04, 1.01, 1.06]},
        "speedup": 1.04,
        "speedup_ci95": [1.01, 1.06],
        "luck": [],
    }
    lucky = pick | {"luck": ["samples_per_s"]}
    shown = replace(report, recommended=report.recommended | {"picks": {"highest_throughput": lucky}})
    said = "1.04x (1.01 to 1.06) the baseline's throughput"
    untold = f"{said}, within noise (the best of several trials reads better than it is)"
    assert "within noise" not in pick_words(report, ["highest_throughput"], pick)
    assert pick_words(shown, ["highest_throughput"], lucky).startswith(untold)
    assert untold in printed(shown, 200)
    assert change(lucky, "samples_per_s").words() == "1.04x better, within noise"


def test_what_gains_nothing_by_the_metric_of_the_goal_leads_with_what_it_gains(report):
    """It read `recommended: 1.01x the baseline's peak memory, at 1.95x the throughput`."""
    goal = report.study | {"goal": "memory", "weights": {"peak_memory_bytes": 1.0, "samples_per_s": 0.5}}
    pick = report.picks["recommended"] | {"speedup": 1.95, "speedup_ci95": [1.9, 2.0]}
    pick["gains"] = {"samples_per_s": [1.95, 1.9, 2.0], "peak_memory_bytes": [0.995, 0.995, 0.995]}
    said = pick_words(replace(report, study=goal), ["recommended"], pick)
    assert said.startswith("1.95x (1.90 to 2.00) the baseline's throughput, at 1.01x the peak memory")
    pick["gains"]["peak_memory_bytes"] = [1.25, 1.25, 1.25]
    assert pick_words(replace(report, study=goal), ["recommended"], pick).startswith("0.80x the baseline's peak memory")


def test_of_equal_objectives_it_leads_with_one_that_it_gains_by(report):
    """It read `0.70x the baseline's throughput`, without a word of a step time that was 2.8 times shorter."""
    goal = replace(report, study=report.study | {"weights": dict.fromkeys(report.objectives, 1.0)})
    pick = report.picks["recommended"] | {"luck": [], "speedup": 0.7, "speedup_ci95": [0.6, 0.8]}

    def said(gains):
        return pick_words(goal, ["recommended"], pick | {"gains": gains})

    shorter = {"step_time_s": [2.8, 2.4, 3.3]}
    first = "0.36x (0.30 to 0.42) the baseline's step time"
    assert said(shorter | {"samples_per_s": [0.7, 0.6, 0.8]}).startswith(f"{first}, at 0.70x the throughput")
    # Nor with what cannot be told from nothing.
    assert said(shorter | {"samples_per_s": [1.16, 0.99, 1.37]}).startswith(
        f"{first}, at 1.16x the throughput (within noise)"
    )
    assert (
        leading_metric(goal, ["recommended"], pick | {"gains": shorter | {"samples_per_s": [1.5, 1.4, 1.6]}})
        == "samples_per_s"
    )


def test_goodput_at_an_equal_global_batch_is_not_said_to_come_at_the_same_throughput(report):
    """It read `2.80x (1.54 to 5.10) the baseline's goodput, at 2.80x the throughput`."""
    gain = [2.8, 1.54, 5.1]
    pick = report.picks["recommended"] | {"gains": {"samples_per_s": gain, "goodput_samples_per_s": gain}}
    study = report.study | {"objectives": ["goodput_samples_per_s"], "weights": {"goodput_samples_per_s": 1.0}}
    said = pick_words(replace(report, study=study), ["recommended"], pick)
    assert said.startswith("2.80x (1.54 to 5.10) the baseline's goodput") and "throughput" not in said


def test_without_a_baseline_picks_are_still_said_to_be_measured_once_and_unchecked(tmp_path):
    """With no speed-up to state the terminal said nothing of either."""
    own = Candidate(micro_batch_size=8)
    kinds = [{"precision": ["fp32", "bf16"], "micro_batch_size": [4, 16], "gradient_accumulation_steps": [2]}]
    engine = Instant(lambda c: failed(Outcome.OOM, "out of memory") if c == own else instant_report(c))
    runner_of(tmp_path, engine, trials=5, sampler="grid", space=kinds, objectives=["latency", "throughput"]).run()
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s")
    assert found.baseline is None
    said, text = (
        {names[0]: pick_words(found, names, pick) for names, pick in found.picks_by_trial()},
        printed(found, 160),
    )
    assert all(words.startswith("no speed-up to state") and words in text for words in said.values())
    assert any(words.endswith("measured once, not checked") for words in said.values())
    markdown, page = render(found), report_page.render(found)
    assert all(words in markdown and words in page for words in list(said.values())[1:])
    # Nor did the headline of README and page.
    headline = f"The baseline did not complete, so there is {said['recommended'].replace(', ', '; ')}."
    assert "; not checked." in headline and headline in markdown and headline in page


def test_a_pick_whose_own_gain_says_nothing_is_stated_by_its_throughput(report):
    """The time to a loss may be known within a factor of ten only."""
    pick = report.picks["recommended"]
    wide = pick | {"gains": pick["gains"] | {"time_to_loss_s": [2.0, 0.5, 8.0]}}
    recommended = report.recommended | {"picks": {"recommended": wide}}
    unsure = replace(report, recommended=recommended, study=report.study | {"weights": {"time_to_loss_s": 1.0}})
    assert leading_metric(unsure, ["recommended"], wide) == "time_to_loss_s"
    said = f"{pick['speedup']:.2f}x ("
    assert pick_words(unsure, ["recommended"], wide).startswith(said) and said in render(unsure)
    assert f"{pick['speedup']:.2f}× <small>the baseline’s throughput" in report_page.render(unsure)


def test_a_path_longer_than_the_line_goes_on_in_the_next(report):
    path = "/very" + "/long" * 30 + "/ds_config.json"
    assert path in printed(report, 80, [path]).replace("\n", "")


def test_a_path_below_the_working_directory_is_printed_relative(report, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "\n  studies/x/README.md" in printed(report, 80, [str(tmp_path / "studies/x/README.md")])


def test_a_name_with_rich_markup_is_printed_as_it_is(report):
    assert "[red]x[/red]" in printed(replace(report, study={**report.study, "name": "[red]x[/red]"}), 80)


@pytest.mark.parametrize(
    ("metric", "values", "shown"),
    [
        ("step_time_s", [0.0482, 0.131], ["48.2 ms", "131.0 ms"]),
        ("step_time_s", [2.5], ["2.50 s"]),
        ("time_to_loss_s", [0.761, 3.66], ["0.761 s", "3.660 s"]),
        ("step_time_s", [0.9, 31.0], ["0.900 s", "31.000 s"]),
        ("peak_memory_bytes", [326 * MIB, 700 * MIB], ["326 MiB", "700 MiB"]),
        ("peak_memory_bytes", [1.5 * 2**30, 70 * 2**30], ["1.50 GiB", "70.00 GiB"]),
        ("samples_per_s", [12.34, 436.5], ["12.3 samples/s", "436.5 samples/s"]),
        ("tokens_per_s", [27_936.0], ["27,936 tokens/s"]),
        ("time_to_loss_s", [0.0], ["0.00 s"]),
    ],
)
def test_values_that_are_compared_share_unit_and_decimals(metric, values, shown):
    scale = metric_scale(metric, values)
    assert [scale.quantity(value) for value in values] == shown
