"""The report: one HTML page, the study's README, the answer in the terminal."""

import json
import random
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from rich.console import Console

from autotune.analysis import recommend
from autotune.candidate import Candidate
from autotune.objective import Objective
from autotune.report import StudyReport, html, plots, speedup, units
from autotune.report.console import render_answer
from autotune.report.export import script_side_changes
from autotune.report.readme import render
from autotune.trial import Outcome

MIB = 2**20
OBJECTIVES = ["step_time_s", "samples_per_s", "time_to_loss_s", "peak_memory_bytes"]
ENVIRONMENT = {
    "accelerator": "cpu", "device_name": "AMD EPYC 9654 96-Core Processor", "n_devices": 1, "device_memory_bytes": 16 * 2**30, "bf16": True,
    "fp16": False, "n_cores": 2, "versions": {"python": "3.11.9", "torch": "2.13.0+cpu", "deepspeed": "0.19.8"},
}  # fmt: skip
WORKLOAD = {
    "n_parameters": 3_240_448, "n_trainable": 3_240_448, "n_samples": 181_204, "n_blocks": 4, "block_class": "Block", "block_share": 0.974,
    "client_optimizer": True, "environment": ENVIRONMENT, "caveats": ["rank 0 and rank 1 share 2 cores"],
}  # fmt: skip
STUDY = {"name": "code-gpt", "target": "/home/ann/models/studies/code-gpt/model.py", "ranks": 2, "objectives": OBJECTIVES, "n_trials": 30,
         "wall_s": 222.4, "sampler": "tpe", "seed": 0}  # fmt: skip


def measured(values: dict, rng: random.Random) -> dict:
    """What a trial of this candidate could have read on two cores."""
    candidate = Candidate.of(values)
    batch = candidate.global_batch_size(2)
    speed = {"fp32": 1.0, "bf16": 0.48, "torch_autocast": 0.7}[candidate.precision]
    recompute = 1 + 0.25 / candidate.checkpoint_every if candidate.checkpoint_every else 1.0
    step = (0.028 + 0.0042 * batch * speed * recompute + 0.012 * candidate.zero_stage) * rng.uniform(0.97, 1.03)
    memory = (
        118
        + 31 * speed
        + candidate.micro_batch_size * 6.1 * speed * (0.45 if candidate.checkpoint_every else 1.0)
        + 18 * (candidate.zero_stage == 3)
    ) * MIB
    to_loss = step * (260 + 2900 / batch) * rng.uniform(0.94, 1.06)
    return {"step_time_s": step, "samples_per_s": batch / step, "tokens_per_s": 64 * batch / step, "peak_memory_bytes": round(memory),
            "time_to_loss_s": to_loss, "cpu_s_per_step": 1.8 * step}  # fmt: skip


def study_report(n_trials: int = 30, **changes) -> StudyReport:
    """A study such as `studies/code-gpt` leaves behind."""
    rng = random.Random(7)
    baseline = {"micro_batch_size": 8, "gradient_accumulation_steps": 1, "zero_stage": 0, "precision": "fp32"}
    trials = []
    for number in range(n_trials):
        drawn = {
            "micro_batch_size": rng.choice([2, 4, 8, 16, 32]), "gradient_accumulation_steps": rng.choice([1, 2, 4]),
            "zero_stage": rng.choice([0, 1, 2, 3]), "precision": rng.choice(["fp32", "bf16", "bf16", "torch_autocast"]),
            "checkpoint_every": rng.choice([0, 0, 1, 2]),
        }  # fmt: skip
        trials.append(one_trial(number, baseline if number == 0 else drawn, rng))
    found = [as_measured(trial, trials[0]) for trial in trials]
    answer = recommend.recommend(
        found, found[0], [Objective(name=name, metric=name) for name in OBJECTIVES], world_size=2
    )
    recommended = {
        "picks": {name: pick.to_data() for name, pick in answer.picks.items()},
        "baseline": answer.baseline and answer.baseline.to_data(),
    }
    given = {
        "study": STUDY | {"n_trials": n_trials}, "recommended": recommended, "trials": trials,
        "front": [recommend.point(m) for m in answer.front], "environment": ENVIRONMENT, "workload": WORKLOAD,
    }  # fmt: skip
    return StudyReport(**(given | changes))


def as_measured(trial: dict, baseline: dict) -> recommend.Measured:
    candidate = Candidate.of(trial["candidate"])
    return recommend.Measured(
        trial=trial["trial"], candidate=candidate, ds_config=candidate.to_deepspeed({"gradient_clipping": 1.0}),
        outcome=Outcome(trial["outcome"]), metrics=trial["metrics"], ci95={name: tuple(ends) for name, ends in trial["ci95"].items()},
        script_side_changes=script_side_changes(candidate, Candidate.of(baseline["candidate"]), "Block"),
    )  # fmt: skip


def one_trial(number: int, values: dict, rng: random.Random) -> dict:
    candidate = Candidate.of(values).values()
    trial = {"trial": number, "role": "search" if number else "baseline", "outcome": "complete", "reason": "", "phase": "done",
             "candidate": candidate, "metrics": {}, "ci95": {}, "wall_s": rng.uniform(3.4, 5.2), "caveats": [], "censored": [],
             "feasible": True}  # fmt: skip
    if number and number % 11 == 5:
        return trial | {"outcome": "oom", "reason": "over the memory limit", "phase": "warmup", "wall_s": 1.1}
    if number and number % 13 == 6:
        reason = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
        return trial | {"outcome": "crashed", "reason": reason, "phase": "initialize", "wall_s": 0.8}
    if number == 17:
        return trial | {
            "outcome": "diverged",
            "reason": "the loss was not finite at step 12",
            "phase": "measure",
            "wall_s": 1.9,
        }
    metrics = measured(values, rng)
    half = {"step_time_s": 0.014, "samples_per_s": 0.014, "tokens_per_s": 0.014, "time_to_loss_s": 0.08}
    ci95 = {name: [value * (1 - half.get(name, 0)), value * (1 + half.get(name, 0))] for name, value in metrics.items()}
    n = max(12, int(3 / metrics["step_time_s"]))
    batch = Candidate.of(values).global_batch_size(2)
    losses = [1.9 + 3.7 / (1 + i * batch / 320) + rng.gauss(0, 0.35 / batch**0.5) for i in range(n)]
    times = [metrics["step_time_s"] * rng.uniform(0.98, 1.03) for _ in range(n)]
    busy = (
        ["the machine was busy: other processes used 0.7 cores while this trial was timed"] if number in (0, 9) else []
    )
    censored = ["time_to_loss_s"] if number % 7 == 3 else []
    expected = {
        name: metrics[name] * (0.9 + 0.2 * (number * 0.618 % 1)) for name in ("peak_memory_bytes", "step_time_s")
    }
    forecast = {name: [value, 0.9 * value, 1.12 * value] for name, value in expected.items()}
    return trial | {"metrics": metrics, "ci95": ci95, "losses": losses, "step_times_s": times, "caveats": busy, "censored": censored,
                    "forecast": forecast}  # fmt: skip


EVIL = '<img src=x onerror=alert(1)></script><script>document.title="owned"</script>'


@pytest.fixture(scope="module")
def report() -> StudyReport:
    return study_report()


@pytest.fixture(scope="module")
def page(report) -> str:
    return html.render(report)


class Tags(HTMLParser):
    """Every element with its attributes, and the texts by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "wbr"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, "elements are closed in order"

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


def printed(report: StudyReport, width: int, written=()) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(render_answer(report, written))
    return capture.get()


def with_picks(report: StudyReport, **picks) -> StudyReport:
    return replace(report, recommended={**report.recommended, "picks": {**report.picks, **picks}})


def failed_study() -> StudyReport:
    report = study_report(3)
    trials = [
        t
        | {
            "outcome": "crashed",
            "reason": "ImportError: no module named 'flash'",
            "metrics": {},
            "ci95": {},
            "losses": [],
        }
        for t in report.trials
    ]
    return replace(report, trials=trials, front=[], recommended={"picks": {}, "baseline": None})


def test_the_page_loads_nothing_from_anywhere(page):
    addresses = [
        value
        for _, attributes in Tags(page).found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset")
    ]
    assert addresses and all(address.startswith("#") for address in addresses)


def test_the_page_forbids_every_request_and_foreign_script(page):
    policy = next(
        attributes["content"]
        for tag, attributes in Tags(page).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-")
        and "unsafe-inline" not in policy.split("style-src")[0]
    )


def test_a_study_name_with_html_in_it_is_inert(report):
    trials = [dict(report.trials[0]) | {"caveats": [EVIL]}, *(t | {"reason": EVIL} for t in report.trials[1:])]
    pick = {
        **report.picks["recommended"],
        "reasons": [EVIL],
        "script_side_changes": [f"`{EVIL}`"],
        "ds_config": {EVIL: EVIL},
    }
    values = {
        "study": {**report.study, "name": EVIL, "target": EVIL},
        "workload": {**report.workload, "block_class": EVIL},
        "trials": trials,
    }
    tags = Tags(
        html.render(
            replace(with_picks(report, recommended=pick), **values, environment={**ENVIRONMENT, "device_name": EVIL})
        )
    )
    assert [tag for tag, _ in tags.found].count("script") == 4 and "img" not in [tag for tag, _ in tags.found]
    assert EVIL in tags.texts["h1"]
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)


def test_the_answer_comes_first_with_its_interval_and_json(page, report):
    pick = report.picks["recommended"]
    answer = page[page.index('id="answer"') : page.index('id="front"')]
    low, high = pick["speedup_ci95"]
    assert f"{pick['speedup']:.2f}×" in answer and f"{low:.2f}× to {high:.2f}×" in answer
    shown = re.search(r'<pre id="json-recommended"[^>]*>(.*?)</pre>', answer, re.DOTALL)
    assert json.loads(unescape(shown[1])) == pick["ds_config"]


def test_every_pick_has_its_json_to_copy_and_its_changes(page, report):
    targets = {attributes["data-copy"] for _, attributes in Tags(page).found if "data-copy" in attributes}
    ids = {attributes["id"] for _, attributes in Tags(page).found if "id" in attributes}
    others = {pick["trial"] for pick in report.picks.values()} - {report.picks["recommended"]["trial"]}
    assert targets == {"json-recommended", "again", *(f"json-{number}" for number in others)} and targets <= ids


def test_the_table_holds_every_trial_with_outcome_and_reason(page, report):
    rows = re.findall(r'<tr class="(?:complete|failed)">.*?</tr>', page)
    assert len(rows) == len(report.trials)
    crashed = next(t for t in report.trials if t["outcome"] == "crashed")
    assert "must have the same dtype" in rows[crashed["trial"]] and "(in initialize)" in rows[crashed["trial"]]


def test_values_that_are_missing_sort_last_because_they_are_empty(page, report):
    rows = re.findall(r'<tr class="failed">.*?</tr>', page)
    assert rows and all('class="n" data-v=""' in row for row in rows)


def test_extrapolated_values_are_marked(page, report):
    censored = [t for t in report.trials if t["censored"] and t["metrics"]]
    assert censored and page.count('title="extrapolated">~') == len(censored)


def test_the_plots_get_the_values_that_the_recommendation_rests_on(report):
    again = {
        **report.picks["recommended"],
        "metrics": {**report.picks["recommended"]["metrics"], "samples_per_s": 123.0},
    }
    front = [again if point["trial"] == again["trial"] else point for point in report.front]
    data = data_of(html.render(replace(with_picks(report, recommended=again, lowest_latency=again), front=front)))
    point = next(p for p in data["points"] if p["trial"] == again["trial"])
    assert point["m"]["samples_per_s"][0] == 123.0 and "recommended" in point["marks"]


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_a_trial_is_compared_with_the_baseline_as_it_was_measured_then():
    report = study_report()
    # Measured again at the end, when the machine ran twice as fast; only the recommended trial was measured again with it.
    faster = {
        name: value * (2 if name.endswith("per_s") else 0.5) for name, value in report.baseline["metrics"].items()
    }
    again = {
        **report.picks["recommended"],
        "metrics": {**report.picks["recommended"]["metrics"], "samples_per_s": 700.0},
    }
    recommended = {"picks": {**report.picks, "recommended": again}, "baseline": {**report.baseline, "metrics": faster}}
    report = replace(report, recommended=recommended)
    alone, own = report.picks["highest_throughput"], report.trials[0]["metrics"]["samples_per_s"]
    unsaid = {name: value for name, value in alone.items() if name != "speedup"}
    assert report.comparable(alone)["metrics"]["samples_per_s"] == own
    assert report.comparable(again)["metrics"]["samples_per_s"] == 2 * own
    assert (
        speedup(replace(report, recommended={**recommended, "picks": {}}), unsaid)
        == alone["metrics"]["samples_per_s"] / own
    )


def test_loss_curves_are_averaged_into_few_points_on_three_axes(page):
    curves = data_of(page)["losses"]
    assert curves[0]["marks"] and all(
        len(c["loss"]) == len(c["samples"]) == len(c["seconds"]) == len(c["steps"]) <= plots.PIECES for c in curves
    )
    assert all(a < b for c in curves for a, b in pairwise(c["seconds"]))


def test_a_loss_that_was_not_finite_leaves_a_gap():
    report = study_report()
    report.trials[0]["losses"][:2] = [None, None]
    report.trials[0]["losses"][2:] = [2.0] * (len(report.trials[0]["losses"]) - 2)
    curve = next(c for c in data_of(html.render(report))["losses"] if c["trial"] == 0)
    assert set(curve["loss"]) <= {None, 2.0}


def test_a_study_in_which_nothing_completed_says_why():
    report = failed_study()
    page = html.render(report)
    assert (
        "Nothing to recommend: no configuration completed." in page
        and "3 crashed" in page
        and "no module named" in page
    )
    assert "Nothing to recommend" in printed(report, 80) and "Nothing to recommend" in render(report)


def test_without_a_baseline_no_speedup_is_stated():
    report = study_report()
    bare = {name: pick | {"speedup": None, "speedup_ci95": None, "reasons": []} for name, pick in report.picks.items()}
    trials = [
        report.trials[0] | {"outcome": "oom", "reason": "over the memory limit", "metrics": {}},
        *report.trials[1:],
    ]
    report = replace(report, recommended={"picks": bare, "baseline": None}, trials=trials)
    for text in (html.render(report).partition("<script")[0], render(report), printed(report, 80)):
        assert "the baseline did not complete (oom: over the memory limit)" in " ".join(text.split())
        assert not re.search(r"\d[×x] better|\d\.\d\d[×x]", text)


def test_a_baseline_that_nothing_beats_is_kept():
    report = study_report()
    base = {**report.baseline, "speedup": 1.0, "speedup_ci95": [1.0, 1.0]}
    report = replace(report, recommended={"picks": {"recommended": base, "drop_in": base}, "baseline": base})
    assert "Keep your configuration" in html.render(report)
    assert "the baseline itself" in render(report) and "the baseline itself" in printed(report, 80)


def test_one_objective_is_enough_for_a_report():
    report = study_report()
    keep = {"samples_per_s"}
    trials = [t | {"metrics": {k: v for k, v in t["metrics"].items() if k in keep}} for t in report.trials]
    cut = {
        name: p | {"metrics": {k: v for k, v in p["metrics"].items() if k in keep}} for name, p in report.picks.items()
    }
    report = replace(report, study={**report.study, "objectives": ["samples_per_s"]}, trials=trials, front=[cut["highest_throughput"]],
                     recommended={"picks": cut, "baseline": report.baseline})  # fmt: skip
    assert "samples/s" in html.render(report) and "samples/s" in render(report) and "samples/s" in printed(report, 80)


def test_the_page_of_a_thousand_trials_is_below_ten_megabytes(tmp_path):
    html.write(study_report(1000), tmp_path / "report.html")  # how long it takes: benchmarks/views.py
    assert (tmp_path / "report.html").stat().st_size < 10e6


def test_the_readme_names_machine_front_picks_and_the_way_back(report):
    text = render(report)
    assert "AMD EPYC 9654" in text and "2 ranks" in text and "30 trials in 3 min 42 s" in text
    assert "autotune run studies/code-gpt/study.yaml" in text
    assert all(f"| {point['trial']} |" in text for point in report.front)
    assert all(change in text for pick in report.picks.values() for change in pick["script_side_changes"])
    assert all(f"{pick['speedup']:.2f}x" in text for pick in report.picks.values())


def test_the_readme_holds_no_path_of_this_machine_and_is_small(report):
    text = render(report)
    assert "/home" not in text and "/tmp" not in text and len(text) < 10_000


def test_the_readme_table_has_one_cell_a_column(report):
    rows = [line for line in render(report).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1 and len(rows) == 2 + len(report.table())


def test_a_readme_of_a_study_with_html_in_its_name_is_inert(report):
    text = render(replace(report, study={**report.study, "name": EVIL}))
    assert "\\<img" in text.splitlines()[0] and "<script>" not in text.replace("\\<script", "").split("```")[0]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_answer_cuts_no_number_at_any_width(report, width):
    lines = printed(report, width).splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(lines)
    for name in OBJECTIVES:
        scale = units.scale(name, [point["metrics"][name] for point in report.table()])
        assert all(scale.number(point["metrics"][name]) in shown for point in report.table())


def test_the_answer_reads_without_colour_and_in_ascii(report):
    text = printed(report, 80)
    assert "\x1b" not in text and text.isascii()


def test_the_answer_shows_picks_speedup_interval_and_what_was_written(report):
    text = " ".join(printed(report, 80, ["studies/code-gpt/ds_config.json"]).split())
    pick = report.picks["highest_throughput"]
    assert (
        f"{pick['speedup']:.2f}x ({pick['speedup_ci95'][0]:.2f} to {pick['speedup_ci95'][1]:.2f}) the baseline's throughput"
        in text
    )
    assert "<- baseline" in text and "recommended" in text and "studies/code-gpt/ds_config.json" in text


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
    scale = units.scale(metric, values)
    assert [scale.quantity(value) for value in values] == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(8.42, "8.4 s"), (59.97, "1 min 0 s"), (222.4, "3 min 42 s"), (7500, "2 h 5 min")]
)
def test_a_wall_time_is_said_in_two_units(seconds, shown):
    assert units.duration(seconds) == shown


def test_the_page_shows_the_curves_of_what_the_quality_gate_refused_beside_the_reference(report):
    chosen = [trial for trial in report.trials if trial.get("losses")][:2]
    curve = [4.0 - 0.1 * i for i in range(12)]
    refused = {"passed": False, "reason": f"trains worse {EVIL}", "excess": 0.3, "limit": 0.05, "n_steps": 12, "losses": curve,
               "replicates": [curve, curve], "batch": 16}  # fmt: skip
    passed = refused | {"passed": True, "reason": "", "excess": -0.001}
    trials = [
        trial | {"gate": refused if trial is chosen[1] else passed if trial is chosen[0] else None}
        for trial in report.trials
    ]
    tags = Tags(html.render(replace(report, trials=trials)))
    titles = [text for text in tags.texts["h3"] if "train" in text or "refused" in text]
    assert titles == [f"trial {chosen[1]['trial']}: refused: diverged", f"trial {chosen[0]['trial']}: trains alike"]
    assert [tag for tag, _ in tags.found].count("polyline") == 2 * 4
    assert not [attributes for tag, attributes in tags.found if tag == "img"]
    assert "quality" not in html.render(report).split('id="picks"')[0]
