"""How a configuration scales: the figures, the configurations compared, and the command on real ranks."""

import io
import json
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from html import unescape

import plotly.graph_objects as go
import pytest
from rich.console import Console
from support.commands import called, one_sentence
from support.instant import Instant, Watcher, plan_of, report, spec_of

from autotune.cli.app import imported
from autotune.cli.scale import _advice, configurations, equal_threads, measure, rank_counts, until_stopped
from autotune.errors import UserError
from autotune.report.page import scaling as page
from autotune.report.progress import ProgressView
from autotune.scoring.scaling import LOSSES, Run, ScalingError, advice, candidates, scaling
from autotune.space.candidate import Candidate
from autotune.study.setup import engine, plan
from autotune.study.spec.spec import StudySpec

BASE = Candidate(micro_batch_size=4, gradient_accumulation_steps=2)


def run(world_size, rate, round_=0, **more):
    return Run(world_size=world_size, round=round_, samples_per_s=rate, step_s=16 / rate, samples_per_step=16, **more)


def in_rounds(*rates):
    """Runs on 1 and 2 ranks, given the throughputs of each round."""
    return [
        run(n, rate, r, communication=0.1 * (n - 1)) for r, pair in enumerate(rates) for n, rate in enumerate(pair, 1)
    ]


def test_strong_scaling_keeps_the_global_batch_and_the_memory_of_a_rank():
    found = candidates(BASE, [1, 2, 4], "strong")
    assert {c.global_batch_size(n) for n, c in found.items()} == {32}
    assert {c.micro_batch_size for c in found.values()} == {4} and found[4] == BASE


def test_weak_scaling_keeps_what_a_rank_does():
    assert set(candidates(BASE, [4, 1], "weak").values()) == {BASE}


def test_rank_counts_that_cannot_keep_the_global_batch_are_refused_with_the_remedy():
    with pytest.raises(ScalingError, match=r"3 does not divide the \d+ micro-batches.*--weak"):
        candidates(BASE, [1, 3, 4], "strong")


def test_speedup_and_efficiency_are_those_of_the_throughputs():
    one, two, four = scaling([run(1, 10.0), run(2, 18.0), run(4, 25.0)], 1000)
    assert (one.speedup, one.efficiency, one.serial_share) == (1.0, 1.0, None)
    assert (
        two.speedup == pytest.approx(1.8)
        and two.efficiency == pytest.approx(0.9)
        and four.efficiency == pytest.approx(0.625)
    )
    assert four.epoch_s == pytest.approx(40.0) and four.speedup_ci95 is None


def test_a_serial_tenth_is_found_at_every_number_of_ranks():
    found = scaling([run(n, 10 / (0.1 + 0.9 / n)) for n in (1, 2, 4, 8)], None)
    assert [scale.serial_share for scale in found[1:]] == pytest.approx([0.1] * 3)
    assert found[0].epoch_s is None


def test_a_machine_that_slows_down_between_rounds_changes_no_speedup():
    steady = [run(n, 10.0 * n * 0.9 / (2 if r else 1), r) for r in (0, 1, 2) for n in (1, 2)]
    found = scaling(steady, None)[1]
    assert found.speedup == pytest.approx(2.0) and found.speedup_ci95 == pytest.approx((2.0, 2.0))


def test_rounds_that_scatter_widen_the_interval():
    found = scaling(in_rounds((10, 19), (10, 16), (10, 18)), None)
    low, high = found[1].speedup_ci95
    assert low < 1.6 < found[1].speedup < 1.9 < high


def test_a_speedup_whose_interval_says_nothing_is_no_result():
    """It read 1.05x (0.10 to 11.60) on a busy machine."""
    found = scaling(in_rounds((10, 19), (10, 6), (10, 12)), None)
    header, _, cells = page.rows(found)
    row = dict(zip(header, cells, strict=True))
    assert found[1].vague and (row["speed-up"], row["95 % interval"], row["efficiency"]) == ("not settled", "-", "-")
    assert any("--rounds" in text for text in advice(found))
    assert not scaling(in_rounds((10, 19), (10, 16), (10, 18)), None)[1].vague


def test_what_ran_before_an_interrupt_is_kept():
    def measured():
        yield (1, BASE), run(1, 100)
        yield (2, BASE), "2 ranks did not run"
        raise KeyboardInterrupt

    runs, failures, stopped = until_stopped(measured())
    assert [each.samples_per_s for each in runs[1, BASE]] == [100] and failures == ["2 ranks did not run"]
    assert isinstance(stopped, KeyboardInterrupt)


def test_a_count_that_never_ran_is_left_out():
    assert [scale.world_size for scale in scaling([run(1, 10.0), run(4, 30.0)], None)] == [1, 4]
    assert scaling([], None) == []


# Seconds of a step's parts on one rank; a step of strong scaling has half of them on two ranks, and what is lost besides.
ONE = {"compute": 0.8, "optimizer": 0.1, "input pipeline": 0.06, "communication": 0.0, "stragglers": 0.0}


def apart(world_size, samples, step_s, parts, **more):
    rate = samples / step_s
    return Run(
        world_size=world_size,
        round=0,
        samples_per_s=rate,
        step_s=step_s,
        samples_per_step=samples,
        parts_s=parts,
        **more,
    )


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("communication", "communication"), ("stragglers", "waiting for the slowest rank"), ("input pipeline", "data"),
        ("optimizer", "update"), ("compute", "memory bandwidth"), ("", "launch"),
    ],
)  # fmt: skip
def test_each_loss_has_its_name_and_its_remedy_and_together_they_are_what_the_efficiency_lacks(mode, part, name):
    share = 0.5 if mode == "strong" else 1.0
    parts = {key: value * share + 0.2 * (key == part) for key, value in ONE.items()}
    two = apart(2, 16 if mode == "strong" else 32, 0.96 * share + 0.2, parts)
    found = scaling([apart(1, 16, 0.96, ONE), two], None)[1]
    assert found.losses[name] == pytest.approx(0.2 / two.step_s)
    assert sum(found.losses.values()) == pytest.approx(1 - found.efficiency)
    assert max(found.losses.values()) < 1
    (said,) = advice([found])
    assert said.startswith(f"{name} takes") and said.endswith(LOSSES[name].remedy)


def test_what_is_said_of_one_way_of_scaling_names_it():
    """Two notes gave one loss two shares of a step."""
    ways = {}
    for mode, share in (("strong", 0.5), ("weak", 1.0)):
        parts = {key: value * share + 0.2 * (key == "communication") for key, value in ONE.items()}
        two = apart(2, 16 if mode == "strong" else 32, 0.96 * share + 0.2, parts)
        ways[mode] = scaling([apart(1, 16, 0.96, ONE), two], None)
    assert [text.partition(" takes")[0] for text in _advice(ways)] == [
        "strong scaling: communication",
        "weak scaling: communication",
    ]
    assert _advice({"weak": ways["weak"], "strong": ways["weak"]}) == advice(ways["weak"])


def test_more_ranks_that_are_slower_have_no_share_above_one():
    found = scaling([run(1, 10.0), run(2, 6.0)], None)[1]
    assert found.serial_share == 1.0 and found.losses == {} and found.efficiency == pytest.approx(0.3)


def test_a_rank_that_computes_longer_is_named():
    uneven = apart(2, 16, 1.0, ONE, busy_s={0: 0.5, 1: 0.75})
    found = scaling([apart(1, 16, 1.5, ONE), uneven], None)
    assert (found[0].slowest_rank, found[1].slowest_rank, found[1].imbalance) == (None, 1, pytest.approx(0.2))
    assert "on 2 ranks, rank 1 computes 20% longer than the mean" in advice(found)[-1]


def test_a_larger_batch_is_worth_what_the_noise_scale_says():
    strong = scaling([run(1, 10.0), run(2, 18.0)], None)[1]
    assert strong.same_loss == pytest.approx(1 / strong.speedup)
    runs = [apart(1, 16, 1.0, {}), apart(2, 32, 1.0, {})]
    assert scaling(runs, None)[1].same_loss is None
    assert scaling(runs, None, noise_samples=32.0)[1].same_loss == pytest.approx(2 / 3)  # 1 + 32/32 over 1 + 32/16
    assert scaling(runs, None, noise_samples=0.0)[1].same_loss == 1.0


def test_rank_counts_that_do_not_divide_are_scaled_weakly_and_it_is_said():
    ways, note = configurations(BASE, [1, 3, 4], None)
    assert list(ways) == ["weak"] and "3 does not divide the" in note
    assert list(configurations(BASE, [1, 2], None)[0]) == ["strong", "weak"]


@pytest.mark.parametrize("text", ["", "2", "a,b", "0,2", "2,2", "-1,4"])
def test_rank_counts_that_are_none_are_refused_with_an_example(text):
    with pytest.raises(UserError, match="--ranks 1,2,4"):
        rank_counts(text)


def test_rank_counts_come_in_order():
    assert rank_counts("4, 1,2") == [1, 2, 4]


def test_the_threads_of_a_rank_are_the_same_for_all_and_put_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with equal_threads(10**6) as said:
        assert os.environ["OMP_NUM_THREADS"] == "1" and "OMP_NUM_THREADS=1 " in said
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with equal_threads(2) as said:
        assert os.environ["OMP_NUM_THREADS"] == "3" and "=3 " in said
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_the_page_is_inert_and_asks_for_nothing(tmp_path):
    found = scaling([run(1, 10.0, communication=0.0), run(2, 18.0, communication=0.1)], 1000)
    page.write(
        {"strong": found, "weak": found}, "<script>alert(1)</script>", ["a <b>note</b>"], tmp_path / "scaling.html"
    )
    text = (tmp_path / "scaling.html").read_text()
    shown = text.split('<script type="application/zlib"')[0]
    assert "<script" not in shown and "<b>note" not in shown and "default-src 'none'" in unescape(shown)
    assert shown.count('class="panel"') == 12 and "1.80x" in shown and not re.search(r"(src|href)=", shown)


def test_every_quantity_has_a_panel_with_its_intervals_and_what_is_ideal():
    found = scaling(in_rounds((10, 19), (10, 16), (10, 18)), 1000)
    strong, weak = ({panel.title: panel for panel in page.panels(found, mode)} for mode in ("strong", "weak"))
    assert list(strong) == list(weak) and len(strong) == 6
    for panel in strong.values():
        (_, _, _), (two, value, ends) = panel.values
        assert two == 2 and ends[0] <= value <= ends[1], panel.title
    ideals = {title: panel.ideal(2) / panel.values[0][1] for title, panel in strong.items() if panel.ideal}
    assert ideals == pytest.approx({
        "Training time: one epoch": 0.5, "Time of an optimizer step": 0.5, "Throughput": 2, "Speed-up": 2, "Parallel efficiency": 1,
    })  # fmt: skip
    assert weak["Time of an optimizer step"].ideal(2) == found[0].step_s  # twice the batch in the same time


def test_what_is_not_known_has_no_panel():
    titles = [panel.title for panel in page.panels(scaling([run(1, 10.0), run(2, 18.0)], None), "strong")]
    assert len(titles) == 4 and not any("epoch" in title or "Communication" in title for title in titles)


def test_an_interval_without_end_does_not_make_everything_else_flat():
    wild = scaling(in_rounds((10, 19), (10, 2)), None)
    assert wild[1].speedup_ci95[1] > 100
    panel = next(panel for panel in page.panels(wild, "strong") if panel.title == "Speed-up")
    assert page.figure(panel)["layout"]["yaxis"]["range"][1] < 4


def test_the_picture_holds_every_panel_on_axes_of_its_own():
    drawn = page.panels(scaling([run(1, 10.0), run(2, 18.0)], 1000), "strong")
    picture = go.Figure(page.grid(drawn))
    assert {trace.xaxis for trace in picture.data} == {f"x{n + 1}" if n else "x" for n in range(len(drawn))}
    assert [note.text for note in picture.layout.annotations] == [f"{panel.title} ({panel.unit})" for panel in drawn]


@pytest.mark.parametrize(("flags", "weak"), [((), None), (("--strong",), False), (("--weak",), True)])
def test_both_ways_of_scaling_are_meant_unless_one_is_asked_for(flags, weak):
    assert imported("scale").make_context("scale", ["model.py", *flags]).params["weak"] is weak


def test_rare_long_steps_count_in_the_throughput_and_are_a_loss_by_name(tmp_path):
    """A checkpoint each tenth step vanished: the median step was divided into its samples."""

    def long(candidate):
        found = report(candidate)
        times = [0.02 * (1 if n % 10 else 11) for n in range(1, 61)]
        phases = {"forward": 0.005, "backward": 0.01, "step": 0.004, "data": 0.001}
        return replace(found, step_times_s=times, losses=[1.0] * 60, taken_in={"samples": [8]}, phase_times_s=phases)

    found = plan_of(spec_of(), baseline=BASE)
    asked = [{1: BASE}]
    ((_, measured),) = measure(found, Instant(long), tmp_path, asked, 1, Watcher())
    assert measured.samples_per_step == 8 and measured.samples_per_s == pytest.approx(8 / 0.04, rel=0.1)
    assert measured.parts_s["long steps"] == pytest.approx(0.02, rel=0.1)


def test_long_steps_take_what_they_take_where_the_step_taken_apart_was_a_slow_one():
    """Its parts waited for each other; they alone are made to fit the typical step."""
    one = apart(1, 8, 1.0, {"compute": 1.5})
    two = apart(2, 16, 1.6, {"compute": 1.5, "communication": 0.5, "long steps": 0.4})
    losses = scaling([one, two], None)[1].losses
    assert losses["long steps"] == pytest.approx(0.4 / 1.6) and losses["communication"] == pytest.approx(0.3 / 1.6)
    assert sum(losses.values()) == pytest.approx(1 - 1 / 1.6)


@pytest.mark.process
def test_the_command_measures_real_ranks_and_leaves_a_table_and_a_page(executor, monkeypatch, tmp_path, models):
    """Weakly: two ranks do twice the samples in a step, each what one did."""
    monkeypatch.setattr(engine, "executor_for", lambda *_: nullcontext(executor))
    text = (models / "ok.py").read_text()
    (tmp_path / "ok.py").write_text(text.replace("for _ in range(4)", "for _ in range(1)"))  # nothing repeats: a note
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 8}')
    (tmp_path / "study.yaml").write_text("{target: ok.py, name: ok, base_config: ds.json, trial_budget_s: 0.3}")
    done = called("scale", "study.yaml", *"--ranks 1,2 --weak --rounds 1 --json".split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["scaling"]) == ["weak"]
    assert any("no repeated block" in note for note in found["notes"])
    assert len(found["notes"]) == len(set(found["notes"]))
    one, two = found["scaling"]["weak"]
    assert [(each["world_size"], each["samples_per_step"]) for each in (one, two)] == [(1, 8), (2, 16)]
    assert all(each["step_s"] > 0 and each["speedup"] > 0 and each["communication"] is not None for each in (one, two))
    assert sum(two["losses"].values()) == pytest.approx(1 - two["efficiency"], abs=0.02) and two["slowest_rank"] in (
        0,
        1,
    )
    assert "Weak scaling" in (tmp_path / "studies" / "ok" / "scaling.html").read_text()


@pytest.mark.process
def test_of_strong_scaling_real_ranks_do_the_same_batch_in_turns(executor, tmp_path, models):
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 8}')
    overrides = {"ranks": 2, "base_config": str(tmp_path / "ds.json"), "trial_budget_s": 0.1}
    found = plan.plan(StudySpec.of(models / "ok.py", overrides), executor, tmp_path)
    said = Console(file=io.StringIO())
    ways, _ = configurations(found.baseline, [1, 2], None)
    measured = measure(found, executor, tmp_path, list(ways.values()), 2, ProgressView(said))
    by_asked, failures, _ = until_stopped(measured)
    assert len(by_asked) == 3  # the most ranks are the same in both
    runs = sorted((run for each in ways["strong"].items() for run in by_asked[each]), key=lambda run: run.round)
    assert failures == [] and [(each.round, each.world_size, each.samples_per_step) for each in runs] == [
        (0, 1, 16), (0, 2, 16), (1, 1, 16), (1, 2, 16),
    ]  # fmt: skip
    one, two = scaling(runs, found.workload.n_samples)
    assert one.communication == 0 and two.communication > 0 and two.speedup_ci95 is not None
    assert "round 2 of 2: 2 ranks" in said.file.getvalue()


@pytest.mark.process
def test_a_wrong_list_of_ranks_ends_as_one_sentence(tmp_path, models):
    shutil.copyfile(models / "ok.py", tmp_path / "ok.py")
    assert "--ranks 1,2,4" in one_sentence(called("scale", "ok.py", "--ranks", "two", cwd=tmp_path))
