"""The report in a browser: it draws without a complaint or a request, sorts, filters, turns, and fits every screen."""

import json
from dataclasses import replace

import pytest
from support.study_report import EVIL, study_report

from autotune.report import files
from autotune.report.page import render

pytestmark = pytest.mark.system
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def report():
    return study_report()


@pytest.fixture(scope="module")
def opened(page, report, tmp_path_factory):
    """The page of a study whose name is an attack, drawn."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    render.write(replace(report, study={**report.study, "name": EVIL}), path)
    page.view(1440, 900)
    page.open(path.as_uri())
    page.drawn()
    return page


@pytest.mark.smoke
def test_every_plot_is_drawn_without_a_complaint_or_a_request(opened):
    assert opened.run("[...document.querySelectorAll('[data-plot]')].every((plot) => plot.querySelector('.main-svg'))")
    assert opened.run("document.querySelectorAll('[data-plot]').length") == 6
    assert opened.complaints == [] and all(address.startswith("file:") for address in opened.requests)
    assert opened.run("document.title").startswith("<img")


def one_trial(report):
    return replace(report, trials=report.trials[:1], front=[], recommended={**report.recommended, "picks": {}})


def only_failures(report):
    return replace(
        report, trials=[t for t in report.trials if t["outcome"] in ("oom", "crashed")], front=[], recommended={}
    )


def no_baseline(report):
    plain = [{**trial, "speedup": None, "gains": {}} for trial in report.trials]
    return replace(report, trials=plain, recommended={**report.recommended, "baseline": None})


@pytest.mark.smoke
@pytest.mark.parametrize("odd", [one_trial, only_failures, no_baseline])
def test_a_study_with_little_in_it_has_a_page_without_an_empty_plot(page, report, odd, tmp_path):
    render.write(odd(report), tmp_path / "report.html")
    page.complaints.clear()
    page.view(390, 900)
    page.open((tmp_path / "report.html").as_uri())
    page.drawn()
    assert page.complaints == [] and page.run("document.documentElement.scrollWidth") <= 390
    # Every plot has a point or a line that can be seen.
    blank = "!plot.querySelector('.scatterlayer .trace')"
    empty = f"[...document.querySelectorAll('[data-plot]')].filter((plot) => {blank}).map((plot) => plot.id)"
    assert page.run(empty) == []


@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_of_the_screen(opened, width, dark):
    opened.view(width, 900, dark=dark)
    assert opened.run("document.documentElement.scrollWidth") <= width
    assert (opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 19, 22)") is dark
    assert opened.complaints == []
    opened.view(1440, 900)


@pytest.mark.parametrize("width", [390, 800, 1001])
def test_the_batch_in_the_json_of_the_answer_is_seen_without_scrolling(opened, width):
    """Of a column of 230 pixels the numbers behind `train_micro_batch_size_per_gpu` were hidden."""
    opened.view(width, 900)
    hidden = "(() => { const pre = document.querySelector('.answer pre'); return pre.scrollWidth - pre.clientWidth })()"
    assert opened.run(hidden) <= 0
    opened.view(1440, 900)


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_the_order(opened):
    column = "[...document.querySelectorAll('#trials tbody tr')].map((row) => row.cells[4].dataset.v).filter(Boolean).map(Number)"
    opened.run("document.querySelectorAll('#trials thead button')[4].click()")
    up = opened.run(column)
    opened.run("document.querySelectorAll('#trials thead button')[4].click()")
    assert up == sorted(up) and opened.run(column) == up[::-1] and len(up) > 10


@pytest.mark.parametrize("width", [390, 1440])
def test_every_row_has_the_columns_of_the_head(opened, width):
    opened.view(width, 900)
    # Where they are seen: what `offsetLeft` is relative to depends on whether a row has been laid out yet.
    begins = opened.run(
        "[...document.querySelectorAll('#trials tr')].map((row) => [...row.cells].filter((cell) => cell.offsetWidth)"
        ".map((cell) => cell.getBoundingClientRect().left))"
    )
    head, *rows = begins
    whole = [row for row in rows if len(row) == len(head)]
    assert len(whole) > 10 and all(row == head for row in whole)
    # Of a trial that measured nothing the reason stands in place of the figures.
    bare = [row for row in rows if len(row) < len(head)]
    assert bare and all(row == [*head[:4], head[-1]] for row in bare)
    opened.view(1440, 900)


def test_rows_out_of_sight_are_found_and_printed(opened, report):
    opened.run("document.querySelector('.scroll').scrollTo(0, 0)")
    below = next(trial for trial in report.trials if trial["outcome"] == "diverged")
    assert opened.run(f"getSelection().removeAllRanges(), find({json.dumps(below['reason'])})")
    opened.tab.emulate_media(media="print")
    styles = opened.run(
        "[...document.querySelectorAll('#trials tbody tr')].map((row) => getComputedStyle(row)).map((s) => s.display + s.contentVisibility)"
    )
    assert set(styles) == {"table-rowvisible"}
    opened.tab.emulate_media(media="screen")


def test_the_filter_leaves_the_rows_that_hold_every_word(opened, report):
    opened.tab_from("#progress-legend button:last-child")
    assert opened.run("document.activeElement.id") == "filter"
    opened.tab.keyboard.type("oom")
    opened.frame()
    shown = opened.run("[...document.querySelectorAll('#trials tbody tr')].filter((row) => !row.hidden).length")
    assert shown == sum(trial["outcome"] == "oom" for trial in report.trials) > 0
    opened.run(
        "(() => { const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input')); })()"
    )


def test_other_metrics_draw_another_front_and_an_axis_may_be_linear(opened):
    title = "document.getElementById('front-plot').layout.yaxis.title.text"
    before = opened.run(title)
    opened.tab.select_option("#front-metrics", "peak_memory_bytes|cpu_s_per_step")
    assert opened.run(title) != before and "CPU" in opened.run(title)
    kind = "document.getElementById('front-plot').layout.xaxis.type"
    log = opened.run(kind)
    opened.tab.click("#front-log")
    assert {log, opened.run(kind)} == {"log", "linear"}
    opened.tab.click("#front-log")


def test_the_steps_of_the_trials_that_were_typed_are_drawn(opened):
    opened.run(
        "(() => { const t = document.getElementById('steps-trials'); t.value = '0, 4 999'; t.dispatchEvent(new Event('input')); })()"
    )
    opened.frame()
    assert opened.run("document.getElementById('steps-plot').data.length") == 6  # band, warm-up and line of two trials
    assert "trial 999" in opened.run("document.getElementById('steps-said').textContent")


def ticks_of(opened, plot, axis):
    texts = f"[...document.querySelectorAll('#{plot} .{axis}tick')].map((tick) => tick.textContent)"
    return [float(text.replace(",", "")) for text in opened.run(texts)]


@pytest.mark.parametrize("factor", [1.03, 1.5, 5.0, 400.0])
def test_the_ticks_of_a_logarithmic_axis_are_whole_numbers_within_its_range(page, report, factor, tmp_path):
    """plotly writes 2 at 20 and at 200; round numbers alone left the axis of values that are close together empty."""
    places = {trial["trial"]: factor ** (i / (len(report.trials) - 1)) for i, trial in enumerate(report.trials)}
    trials = [
        trial
        | {"metrics": dict.fromkeys(trial["metrics"], 11.0 * places[trial["trial"]]), "ci95": {}}
        | {"step_times_s": [0.011, *(0.011 * factor ** (i / 30) for i in range(31))], "n_warmup": 1}
        for trial in report.trials
    ]
    render.write(replace(report, trials=trials), tmp_path / "report.html")
    page.open((tmp_path / "report.html").as_uri())
    page.drawn()
    if not page.run("document.getElementById('steps-log').checked"):
        page.tab.click("#steps-log")
        page.frame()
    for plot, axis in (("front-plot", "x"), ("front-plot", "y"), ("steps-plot", "y")):
        ends = [10**end for end in page.run(f"document.getElementById('{plot}').layout.{axis}axis.range")]
        shown = ticks_of(page, plot, axis)
        assert len(shown) >= 2 and ends[0] <= min(shown) and max(shown) <= ends[1], (plot, axis, shown, ends)


def test_enter_on_a_heading_sorts_and_leaves_the_focus_there(opened):
    opened.tab_from(".scroll")
    opened.press("Enter")
    assert opened.run("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    numbers = opened.run("[...document.querySelectorAll('#trials tbody th')].map((cell) => Number(cell.textContent))")
    assert numbers == sorted(numbers)
    opened.press("Tab", "Enter")
    assert opened.run(
        "[...document.querySelectorAll('#trials thead th')].map((head) => head.getAttribute('aria-sort'))"
    )[:2] == [None, "ascending"]


def test_enter_on_the_legend_hides_what_it_names_and_shows_it_again(opened):
    opened.tab_from("#front-log")
    assert opened.run("document.activeElement.parentElement.id") == "front-legend"
    visible = "document.getElementById('front-plot').data.filter((trace) => trace.visible === false).length"
    opened.press("Enter")
    assert opened.run("document.activeElement.getAttribute('aria-pressed')") == "false" and opened.run(visible) == 1
    opened.press("Enter")
    assert opened.run("document.activeElement.getAttribute('aria-pressed')") == "true" and opened.run(visible) == 0


def test_values_of_the_parallel_axes_are_chosen_with_the_keyboard(opened):
    lines = "document.getElementById('parallel').data.flatMap((trace) => trace.y).filter((y) => y !== null).length"
    before = opened.run(lines)
    opened.tab_from("#parallel-plot")
    opened.press("Enter")
    assert opened.run("document.activeElement.parentElement.open")
    opened.press("Tab", "ArrowDown")
    left = opened.run("document.getElementById('parallel-said').textContent")
    assert opened.run("document.activeElement.id") == "axis-0" and left.endswith(" trials")
    assert 0 < int(left.split()[0]) < int(left.split()[2])
    assert 0 < opened.run(lines) < before
    opened.run(
        "(() => { const a = document.getElementById('axis-0'); a.value = ''; a.dispatchEvent(new Event('change')); })()"
    )
    opened.frame()
    assert opened.run("document.getElementById('parallel-said').textContent") == ""


def test_enter_on_copy_copies_the_json_of_the_pick(opened, report):
    opened.run("document.querySelector('[data-copy=json-recommended]').focus()")
    opened.press("Enter")
    opened.tab.wait_for_selector("[data-copy=json-recommended] >> text=Copied")
    assert json.loads(opened.run("navigator.clipboard.readText()")) == report.picks["recommended"]["ds_config"]


def test_a_page_that_is_printed_before_it_is_drawn_is_drawn_first(page, report, tmp_path):
    render.write(report, tmp_path / "report.html")
    page.open((tmp_path / "report.html").as_uri())
    page.tab.wait_for_selector("html[data-ready=yes]", state="attached")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert page.run("document.querySelectorAll('.plot .main-svg').length") >= 10
    widest_px = (
        "Math.max(...[...document.querySelectorAll('.main-svg')].map((svg) => svg.getBoundingClientRect().width))"
    )
    assert page.run(widest_px) <= 950, "what is wider than the paper is cut"
    page.run("window.dispatchEvent(new Event('afterprint'))")
    page.tab.wait_for_function(f"{widest_px} > 950")


def test_a_value_on_a_parallel_axis_is_chosen_with_a_click(opened):
    opened.tab.click("#parallel .annotation >> text=bf16")
    opened.frame()
    assert opened.run("document.getElementById('parallel-said').textContent").endswith(" trials")
    opened.tab.click("#parallel .annotation >> text=bf16")
    opened.frame()
    assert opened.run("document.getElementById('parallel-said').textContent") == ""


def test_the_figures_are_drawn_as_png(report, page, tmp_path):
    assert page is not None
    pytest.importorskip("kaleido", reason="kaleido is not installed: pip install -e '.[png]'")
    written = files.draw(report, tmp_path / "png")
    assert {"front-step_time_s-samples_per_s", "parallel", "what-mattered", "steps", "losses", "progress"} < {
        path.stem for path in written
    }
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in written)
