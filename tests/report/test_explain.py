"""Why this configuration and not another: every answer rests on trials or on a prediction, and says which."""

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
from support.instant import STEPS, Instant, Watcher, failed, report, runner_of
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.errors import UserError
from autotune.report import load
from autotune.report.expectations import Expectations
from autotune.report.explain import Evidence
from autotune.space.candidate import Candidate
from autotune.study.spec.yaml_file import read_setting
from autotune.study.storage import database, records
from autotune.trial.result import Outcome

SPACE = [
    {
        "micro_batch_size": [2, 4, 8, 16, 512],
        "gradient_accumulation_steps": [1, 2],
        "precision": ["fp32", "bf16"],
        "checkpoint_every": [0, 1],
        "zero_stage": [0, 1, 2],
    }
]
OBJECTIVES = ["latency", "throughput", "memory"]
LIMIT = 10**10


def machine(candidate):
    """Memory by micro-batch; bf16 is slow, and stage 2 crashes."""
    if candidate.zero_stage == 2:
        return failed(Outcome.CRASHED, "RuntimeError: no stage 2 here")
    size = 10**8 * (1 + candidate.micro_batch_size)
    seconds = [s * (2.0 if candidate.precision == "bf16" else 1.0) for s in report(candidate).step_times_s]
    if size > LIMIT:
        return failed(Outcome.OOM, "over")
    observed = replace(report(candidate).observed, zero_stage=candidate.zero_stage)
    return report(candidate, step_times_s=seconds, peak_memory_bytes={"steady": size}, observed=observed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished study, in the layout that commands expect."""
    root = tmp_path_factory.mktemp("explained")
    given = {
        "sampler": "physics",
        "space": SPACE,
        "trials": 16,
        "finalists": 1,
        "objectives": OBJECTIVES,
        "stop_below": 0.0,
    }
    runner = runner_of(root / "studies", Instant(machine), watcher=Watcher(), device_memory_bytes=LIMIT, **given)
    runner.run()
    return root


@pytest.fixture(scope="module")
def evidence(folder):
    url = records.default_url(folder / "studies")
    study = records.load_study(database.open_storage(url), "s")
    return Evidence(study, load.load("s", url, folder / "studies" / "s"))


def test_the_choice_is_explained_knob_by_knob(evidence):
    said = evidence.choice()
    assert "recommended?" in said.question and "the best compromise" in said.answer
    assert said.candidate == evidence.recommended.values()
    changed = [name for name, value in evidence.expected.baseline.values().items() if said.candidate.get(name) != value]
    assert changed and all(any(reason.startswith(name) for reason in said.reasons) for name in changed)
    measured = next(m for m in said.measured if not m["differs"])
    assert (
        said.predicted["step_time_s"]["low"]
        <= measured["metrics"]["step_time_s"]
        <= said.predicted["step_time_s"]["high"]
    )
    assert any("configurations were tried: " in reason for reason in said.reasons)


def test_what_cannot_run_is_refused_with_the_rule(evidence):
    said = evidence.what_if({"precision": "fp16"})
    assert said.answer.startswith("It cannot run here: ") and "fp16" in said.answer
    assert evidence.why_not("precision", "fp16").answer.startswith("It cannot run here: ")


def test_the_default_of_a_field_is_one_of_its_values(evidence):
    """The space was said not to hold it, beside the trials that had it."""
    asked = [evidence.why_not("precision", each) for each in (None, "fp32")]
    assert asked[0].question == "Why not precision = the default?" and asked[0].answer == asked[1].answer
    assert "The space of this study does not hold it" not in evidence.why_not("zero_stage", None).answer


def test_what_does_not_fit_is_said_with_bytes(evidence):
    said = evidence.what_if({"micro_batch_size": 512})
    assert "would not fit: predicted to need" in said.answer and "a rank has 9.31 GiB" in said.answer
    why = evidence.why_not("micro_batch_size", 512).answer
    assert why.startswith("No candidate with it fits: the smallest is predicted to need")


def test_a_worse_value_is_said_to_be_worse_with_its_interval_and_its_trials(evidence):
    other = "fp32" if evidence.recommended.precision == "bf16" else "bf16"
    said = evidence.what_if({"precision": other})
    step = said.predicted["step_time_s"]
    assert step["low"] < step["value"] < step["high"] and step["ratio"] > 1
    factor = float(said.answer.split("x the recommended one")[0].rsplit(" ", 1)[1])
    assert factor < 1 and "worse step time" in said.answer
    assert said.measured and all(m["differs"] is not None for m in said.measured)
    why = evidence.why_not("precision", other)
    assert "of the" in why.reasons[0] and "trials had it" in why.reasons[0]


def test_the_prediction_of_what_was_not_run_is_near_the_truth(evidence):
    tried = {json.dumps(t["candidate"], sort_keys=True) for t in evidence.trials}
    pool = [
        c for c in evidence.expected.candidates if c.key not in tried and c.zero_stage < 2 and c.micro_batch_size <= 16
    ]
    errors = []
    for candidate in pool:
        truth = machine(candidate).step_times_s[2]
        errors.append(abs(math.log(evidence.expected.predicted(candidate, {})["step_time_s"]["value"] / truth)))
    assert sorted(errors)[len(errors) // 2] < 0.15


def test_a_value_whose_every_trial_failed_is_said_to_have_failed(evidence):
    crashed = [t for t in evidence.trials if t["outcome"] == Outcome.CRASHED]
    assert crashed
    said = evidence.what_if({"zero_stage": 2})
    assert "crashed" in said.answer or any(m["outcome"] == Outcome.CRASHED for m in said.measured)


def test_the_recommended_value_is_recommended(evidence):
    stage = evidence.recommended.zero_stage
    assert evidence.why_not("zero_stage", stage).answer.startswith("It is recommended: ")
    assert evidence.what_if({"zero_stage": stage}).answer.startswith("It is: ")


def test_what_the_run_left_out_is_said_of_what_it_did_not_try(evidence, monkeypatch):
    said = "global batches above 63 are not tried"
    monkeypatch.setattr(
        evidence, "report", replace(evidence.report, study={**evidence.report.study, "left_out": [said]})
    )
    assert all(said in evidence.why_not("micro_batch_size", size).reasons for size in (7, 16))
    assert any("better" in text and "leaves out counts here" in text for text in evidence._scope())


def test_the_gain_that_is_still_expected_is_the_one_with_which_the_search_ended(evidence, monkeypatch):
    """Its model knows neither what the run left out nor the study that it started from: 142 % stood beside 1.5 %."""
    ended = "stopped after 2 of 4 trials: no further trial is expected to improve the answer by more than 1.50%"
    monkeypatch.setattr(evidence, "report", replace(evidence.report, study={**evidence.report.study, "ended": ended}))
    assert evidence._scope()[-1] == ended


def test_what_the_space_does_not_hold_is_judged_all_the_same(evidence):
    said = evidence.why_not("micro_batch_size", 6)
    assert (
        said.answer.startswith("The space of this study does not hold it. ")
        and said.predicted["step_time_s"]["value"] > 0
    )


def of_study(folder, machine, **given):
    """The evidence of a finished study of four recomputations or two precisions."""
    runner = runner_of(folder, Instant(machine), watcher=Watcher(), **{"trials": 4, "repeats": 1} | given)
    runner.run()
    return Evidence(runner.study, load.load("s", records.default_url(folder), folder / "s"))


def recomputing(seconds, sizes=(6, 6, 6, 6), **more):
    """A machine whose step time and memory follow from `checkpoint_every`: 0, 1, 2, 4."""

    def run(candidate):
        n = [0, 1, 2, 4].index(candidate.checkpoint_every or 0)
        times = [seconds[n] * (1 + 0.003 * math.sin(7 * i)) for i in range(STEPS)]
        return report(candidate, step_times_s=times, peak_memory_bytes={"steady": sizes[n] * 2**30}, **more)

    return run


RECOMPUTED = [{"checkpoint_every": [0, 1, 2, 4]}]


@pytest.mark.system
def test_a_trial_that_breaks_a_constraint_is_said_to(tmp_path):
    goals = {"objectives": ["memory", "latency"], "constraints": [{"metric": "peak_memory_bytes", "max": "8GiB"}]}
    machine = recomputing([0.04, 0.03, 0.01, 0.033], [6, 6, 9, 6])
    evidence = of_study(tmp_path, machine, space=RECOMPUTED, **goals)
    said = evidence.why_not("checkpoint_every", 2)
    over = "it breaks a constraint (peak memory 9.00 GiB, at most 8.00 GiB is allowed); 1."
    assert f"but it cannot be recommended: {over}" in said.answer
    assert any("complete (it breaks a constraint)" in line for line in said.lines())
    assert said.measured[0]["feasible"] is False


def test_a_change_without_which_a_constraint_breaks_is_said_to_be_needed_for_it(tmp_path):
    """Without it the answer was "predicted to be 1.65x as good", as if the recommendation were wrong."""
    goals = {"objectives": ["throughput"], "constraints": [{"metric": "peak_memory_bytes", "max": "8GiB"}]}
    machine = recomputing([0.03, 0.04, 0.05, 0.06], [9, 6, 9, 9])
    evidence = of_study(tmp_path, machine, space=RECOMPUTED, **goals)
    assert evidence.recommended.checkpoint_every == 1
    without = next(reason for reason in evidence.choice().reasons if reason.startswith("checkpoint_every"))
    assert "x as good" in without and ", but trial 0 of it cannot be recommended: it breaks a constraint; " in without
    evidence.trials = [trial for trial in evidence.trials if trial["trial"]]
    without = next(reason for reason in evidence.choice().reasons if reason.startswith("checkpoint_every"))
    assert ", but to break a constraint (peak memory " in without and "at most 8.00 GiB is allowed); " in without
    # Nor is a change said to be worth what cannot be told from nothing.
    for tied, said in ((True, "x as good, within noise (step"), (False, "x as good (step")):
        evidence.trials = [
            {**trial, "tied": tied, "feasible": True} for trial in evidence.report.trials if trial["metrics"]
        ]
        without = next(reason for reason in evidence.choice().reasons if reason.startswith("checkpoint_every"))
        assert f"it was measured in trial 0 to be 1.33{said}" in without


def test_one_trial_is_not_said_to_be_foretold_by_the_others(tmp_path):
    evidence = of_study(tmp_path, recomputing([0.03] * 4), space=RECOMPUTED, trials=1, objectives=["throughput"])
    assert not any("that the other trials predict" in reason for reason in evidence.choice().reasons)


def test_a_better_trial_is_said_to_lack_its_check(tmp_path):
    def machine(candidate):
        return report(candidate, step_times_s=[0.01 if candidate.precision == "bf16" else 0.02] * STEPS)

    space = [{"precision": ["fp32", "bf16"]}]
    evidence = of_study(tmp_path, machine, finalists=0, objectives=["throughput"], space=space)
    why = evidence.why_not("precision", "bf16").answer
    assert "cannot be recommended: how it trains with other numerics than the baseline's was not checked; 1.9" in why
    assert any("trial 1 reads better, but how it trains" in reason for reason in evidence.choice().reasons)


def test_what_the_answer_cannot_tell_apart_is_said_to_be_within_noise(tmp_path):
    machine = recomputing([0.0200, 0.0198, 0.0203, 0.0201])
    evidence = of_study(tmp_path, machine, finalists=3, objectives=["throughput"], space=RECOMPUTED)
    assert "; within noise of trial" in evidence.choice().answer
    every = [1, 2, 4] if evidence.recommended.checkpoint_every == 0 else [0]
    assert all(", within noise (" in evidence.what_if({"checkpoint_every": n}).answer for n in every)
    own = evidence.recommended
    without = [evidence._without(own, "checkpoint_every", n, own.checkpoint_every) for n in every]
    assert all("as good, within noise" in said for said in without)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("metric", "label"),
    [
        ("tokens_per_s", "tokens per second"),
        ("padded_tokens_per_s", "tokens per second, padding included"),
        ("cpu_s_per_step", "CPU time per step"),
    ],
)
def test_every_objective_is_predicted(tmp_path, metric, label):
    slow = recomputing([0.02, 0.026, 0.023, 0.022])

    def machine(candidate):
        found = slow(candidate)
        cpu = [2 * step_s for step_s in found.step_times_s]
        return replace(found, cpu_times_s=cpu, observed=replace(found.observed, tokens_per_step=800))

    space = [{"checkpoint_every": [0, 1, 2, 4]}, {"zero_stage": [0, 1, 2]}]
    evidence = of_study(
        tmp_path,
        machine,
        baseline=Candidate(micro_batch_size=8, checkpoint_every=1),
        objectives=[{"name": "t", "metric": metric}],
        space=space,
    )
    assert evidence.recommended.checkpoint_every != 1
    assert any("with 1 it was measured in trial 0 to be 0." in reason for reason in evidence.choice().reasons)
    evidence.trials = []
    without = next(reason for reason in evidence.choice().reasons if reason.startswith("checkpoint_every"))
    assert "predicted to be 0." in without and f"{label} " in without
    slower = evidence.expected.changed(evidence.expected.baseline, {"zero_stage": 2})
    faster = evidence.expected.changed(slower, {"checkpoint_every": evidence.recommended.checkpoint_every})
    assert evidence.expected.most_promising([slower, faster]) == faster


def test_an_objective_that_no_trial_told_is_said_not_to_be_predicted(evidence):
    said = evidence._verdict({"step_time_s": 1.0, "samples_per_s": 1.0}, "predicted")
    assert said.endswith("(all about equal, peak memory not predicted)")
    assert evidence._verdict({}, "predicted").endswith("not predicted, so it cannot be compared")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zero_stage=3", ("zero_stage", 3)), ("precision=bf16", ("precision", "bf16")),
        ("zero_optimization.overlap_comm=true", ("zero_optimization.overlap_comm", True)),
        ("zero_optimization.overlap_comm=default", ("zero_optimization.overlap_comm", None)),
    ],
)  # fmt: skip
def test_a_setting_is_read(text, expected):
    assert read_setting(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("zero_stage", "KEY=VALUE is needed"), ("zero_stag=3", "Did you mean 'zero_stage'"), ("zero_stage=9", "zero_stage"),
        ("zero_optimization.overlap_com=1", "overlap_com"), ("micro_batch_size=[1]", "a plain value"),
        ("zero_stage=default", "zero_stage needs a value"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_in_a_sentence(text, why):
    with pytest.raises(UserError, match=why):
        read_setting(text)


@pytest.mark.system
def test_a_prediction_is_compared_with_a_prediction(tmp_path):
    """The machine was slower when the best were measured again, and all that was not run was predicted to be better."""
    n_ran = Counter()

    def machine(candidate):
        n_ran[candidate] += 1
        step = 0.01 * (1 + candidate.zero_stage) * (1.5 if n_ran[candidate] > 1 else 1.0)
        return report(candidate, step_times_s=[step * (1 + 0.003 * math.sin(7 * i)) for i in range(STEPS)])

    given = {
        "space": [{"zero_stage": [0, 1, 2], "checkpoint_every": [0, 1, 2]}],
        "objectives": ["latency"],
        "trials": 4,
    }
    runner = runner_of(
        tmp_path, Instant(machine), sampler="grid", baseline=Candidate(micro_batch_size=8, zero_stage=2), **given
    )
    runner.run()
    evidence = Evidence(runner.study, load.read(runner.study, runner.state.folder, series=False))
    found = {row["trial"]: row["metrics"]["step_time_s"] for row in evidence.report.trials}
    assert found[0] > 1.1 * 0.03  # the report's trials are on the machine as it was on average
    assert evidence.predicted_best["step_time_s"] == pytest.approx(evidence.best["step_time_s"], rel=0.1)
    for value in (1, 2):
        ratio = evidence.why_not("checkpoint_every", value).predicted["step_time_s"]["ratio"]
        assert ratio > 0.95


def test_a_quick_study_is_explained_by_what_ended_it(tmp_path):
    """It ended since 2.9 % were to be gained, and the explanation said 2.3: it left out what a change has to be worth there."""
    watcher, lost = Watcher(), failed(Outcome.CRASHED, "boom")
    given = {"sampler": "physics", "goal": "balanced", "quick": True, "trials": 8, "stop_below": 0.03}
    behaviour = Instant(lambda c: lost if c == Candidate(micro_batch_size=8) else report(c))
    runner = runner_of(tmp_path, behaviour, watcher=watcher, **given)
    runner.run()
    (ended,) = [text for text in watcher.said if text.startswith("stopped after")]
    evidence = Evidence(runner.study, load.read(runner.study, runner.state.folder, series=False))
    outlook = evidence.expected.outlook
    more, said = re.search(r"improve the answer by (more than )?([\d.]+)%", ended).groups()
    assert float(said) / 100 == pytest.approx(outlook.next_gain if more else outlook.loss, abs=1e-4)
    assert outlook.loss > 0.01


def test_the_command_prints_words_or_json(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = CliRunner().invoke(app, ["explain", "s", "--why-not", "micro_batch_size=512"])
    assert shown.exit_code == 0 and "No candidate with it fits" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["explain", "s", "--what-if", "precision=fp32", "--json"]).stdout)
    assert {"question", "answer", "candidate", "predicted", "fits", "measured", "reasons", "reference"} == set(data)
    assert "compromise" in CliRunner().invoke(app, ["explain", "s"]).stdout
    several = ["explain", "s", "--what-if", "micro_batch_size=4", "--what-if", "precision=fp32", "--json"]
    data = json.loads(CliRunner().invoke(app, several).stdout)
    assert data["question"].startswith("What if micro_batch_size were 4 and precision were fp32 in the ")
    assert (data["candidate"]["micro_batch_size"], data["candidate"]["precision"]) == (4, "fp32")
    both = CliRunner().invoke(app, ["explain", "s", "--why-not", "zero_stage=1", "--what-if", "zero_stage=1"])
    assert isinstance(both.exception, UserError) and "not both" in str(both.exception)


def test_what_a_check_refused_is_not_what_further_trials_have_to_beat(tmp_path, monkeypatch):
    """The search knew it, and `explain` said that less was left to gain."""
    monkeypatch.setattr("autotune.study.budget.CHECK_SHARE", 1e9)  # no trial takes time here
    worse = lambda c: report(c, losses=[3.0 * (c.precision == "bf16") + x for x in report(c).losses])  # noqa: E731
    runner = runner_of(tmp_path, Instant(worse), space=[{"precision": ["fp32", "bf16"]}], trials=2)
    runner.run()
    expected, refused = Expectations(runner.study, runner.state.folder, {}), runner.proposer.refused()
    assert refused == {1} and [seen.eligible for seen in expected.told] == [True, False]
