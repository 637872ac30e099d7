"""The report in a browser: it draws without a complaint or a request, sorts, filters, turns, and fits every screen."""

from dataclasses import replace

import pytest
from test_report import EVIL, study_report

from autotune.report import html, takeaway

pytestmark = pytest.mark.slow
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def report():
    return study_report()


@pytest.fixture(scope="module")
def opened(page, report, tmp_path_factory):
    """The page of a study whose name is an attack, drawn."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    html.write(replace(report, study={**report.study, "name": EVIL}), path)
    page.view(1440, 900)
    page.open(path.as_uri())
    page.until("document.documentElement.dataset.drawn === 'yes'")
    return page


def painted(page, canvas):
    """How many different colours a canvas shows."""
    return page.run(
        f"(() => {{ const c = document.getElementById('{canvas}'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
        " return seen.size; })()"
    )


def test_every_plot_is_drawn_without_a_complaint_or_a_request(opened):
    assert opened.run("document.querySelectorAll('.main-svg').length") >= 10  # two for each of five plots
    assert painted(opened, "solid") > 5 and painted(opened, "parallel") > 5
    assert opened.complaints == [] and all(address.startswith("file:") for address in opened.requests)
    assert opened.run("document.title").startswith("<img")


@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_of_the_screen(opened, width, dark):
    opened.view(width, 900, dark=dark)
    opened.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.run("document.documentElement.scrollWidth") <= width
    assert (opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 19, 22)") is dark
    assert opened.complaints == []
    opened.view(1440, 900)


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_the_order(opened):
    column = "[...document.querySelectorAll('#trials tbody tr')].map((row) => row.cells[4].dataset.v).filter(Boolean).map(Number)"
    opened.run("document.querySelectorAll('#trials thead button')[4].click()")
    up = opened.run(column)
    opened.run("document.querySelectorAll('#trials thead button')[4].click()")
    assert up == sorted(up) and opened.run(column) == up[::-1] and len(up) > 10


def test_the_filter_leaves_the_rows_that_hold_every_word(opened, report):
    opened.run("(() => { const f = document.getElementById('filter'); f.value = 'oom'; f.dispatchEvent(new Event('input')); })()")
    shown = opened.run("[...document.querySelectorAll('#trials tbody tr')].filter((row) => !row.hidden).length")
    assert shown == sum(trial["outcome"] == "oom" for trial in report.trials) > 0
    opened.run("(() => { const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input')); })()")


def test_the_arrow_keys_turn_the_front(opened):
    before = opened.run("document.getElementById('solid').toDataURL()")
    opened.run("document.getElementById('solid').focus()")
    for kind in ("keyDown", "keyUp"):
        opened.send("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    assert opened.run("document.activeElement.id") == "solid" and opened.run("document.getElementById('solid').toDataURL()") != before


def test_other_axes_draw_another_front(opened):
    before = opened.run("document.getElementById('solid').toDataURL()")
    opened.run("(() => { const a = document.getElementById('solid-z'); a.value = '3'; a.dispatchEvent(new Event('change')); })()")
    assert opened.run("document.getElementById('solid').toDataURL()") != before


def test_the_steps_of_the_trials_that_were_typed_are_drawn(opened):
    opened.run(
        "(() => { const t = document.getElementById('steps-trials'); t.value = '0, 4 999'; t.dispatchEvent(new Event('input')); })()"
    )
    assert opened.run("document.getElementById('steps-plot').data.length") == 6  # band, warm-up and line of two trials
    assert "trial 999" in opened.run("document.getElementById('steps-said').textContent")


def test_the_plots_are_drawn_as_png(report, page, tmp_path):
    assert page is not None
    html.write(report, tmp_path / "report.html")
    written = takeaway.draw(tmp_path / "report.html", tmp_path / "png")
    assert {path.stem for path in written} == set(takeaway.PLOTS)
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in written)
