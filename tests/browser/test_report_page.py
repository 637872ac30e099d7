"""The report in a browser: it draws without a complaint or a request, sorts, filters, turns, and fits every screen."""

import json
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


KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowLeft": (37, ""), "ArrowDown": (40, "")}


def press(page, *keys):
    """Presses keys one after another, and waits until what they did is drawn."""
    for key in keys:
        code, text = KEYS[key]
        page.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, text=text)
        page.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)
    drawn(page)


def drawn(page):
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


def tab_from(page, selector):
    """Goes on with Tab from an element; what has the focus then is seen to have it."""
    page.run(f"document.querySelector({json.dumps(selector)}).focus()")
    press(page, "Tab")
    assert page.run("getComputedStyle(document.activeElement).outline").endswith("solid 2px")


def typed(page, text):
    page.send("Input.insertText", text=text)
    drawn(page)


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


@pytest.mark.parametrize("width", [390, 1440])
def test_every_row_has_the_columns_of_the_head(opened, width):
    opened.view(width, 900)
    # Where they are seen: what `offsetLeft` is relative to depends on whether a row has been laid out yet.
    begins = opened.run(
        "[...document.querySelectorAll('#trials tr')].map((row) => [...row.cells].map((cell) => cell.getBoundingClientRect().left).join())"
    )
    assert len(begins) > 10 and len(set(begins)) == 1
    opened.view(1440, 900)


def test_rows_out_of_sight_are_found_and_printed(opened, report):
    opened.run("document.querySelector('.scroll').scrollTo(0, 0)")
    below = next(trial for trial in report.trials if trial["outcome"] == "diverged")
    assert opened.run(f"getSelection().removeAllRanges(), find({json.dumps(below['reason'])})")
    opened.send("Emulation.setEmulatedMedia", media="print")
    styles = opened.run(
        "[...document.querySelectorAll('#trials tbody tr')].map((row) => getComputedStyle(row)).map((s) => s.display + s.contentVisibility)"
    )
    assert set(styles) == {"table-rowvisible"}
    opened.send("Emulation.setEmulatedMedia", media="")


def test_the_filter_leaves_the_rows_that_hold_every_word(opened, report):
    tab_from(opened, "#progress-x")
    assert opened.run("document.activeElement.id") == "filter"
    typed(opened, "oom")
    shown = opened.run("[...document.querySelectorAll('#trials tbody tr')].filter((row) => !row.hidden).length")
    assert shown == sum(trial["outcome"] == "oom" for trial in report.trials) > 0
    opened.run(
        "(() => { const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input')); })()"
    )


def test_the_arrow_keys_turn_the_front(opened):
    before = opened.run("document.getElementById('solid').toDataURL()")
    tab_from(opened, "#solid-z")
    press(opened, "ArrowLeft")
    assert (
        opened.run("document.activeElement.id") == "solid"
        and opened.run("document.getElementById('solid').toDataURL()") != before
    )


def test_other_axes_draw_another_front(opened):
    before = opened.run("document.getElementById('solid').toDataURL()")
    opened.run(
        "(() => { const a = document.getElementById('solid-z'); a.value = '3'; a.dispatchEvent(new Event('change')); })()"
    )
    assert opened.run("document.getElementById('solid').toDataURL()") != before


def test_the_steps_of_the_trials_that_were_typed_are_drawn(opened):
    opened.run(
        "(() => { const t = document.getElementById('steps-trials'); t.value = '0, 4 999'; t.dispatchEvent(new Event('input')); })()"
    )
    drawn(opened)
    assert opened.run("document.getElementById('steps-plot').data.length") == 6  # band, warm-up and line of two trials
    assert "trial 999" in opened.run("document.getElementById('steps-said').textContent")


def test_enter_on_a_heading_sorts_and_leaves_the_focus_there(opened):
    tab_from(opened, ".scroll")
    press(opened, "Enter")
    assert opened.run("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    numbers = opened.run("[...document.querySelectorAll('#trials tbody th')].map((cell) => Number(cell.textContent))")
    assert numbers == sorted(numbers)
    press(opened, "Tab", "Enter")
    assert opened.run(
        "[...document.querySelectorAll('#trials thead th')].map((head) => head.getAttribute('aria-sort'))"
    )[:2] == [
        None,
        "ascending",
    ]


def test_enter_on_the_legend_hides_what_it_names_and_shows_it_again(opened):
    tab_from(opened, "#front-log")
    assert opened.run("document.activeElement.parentElement.id") == "front-legend"
    visible = "document.getElementById('front-plot').data.filter((trace) => trace.visible === false).length"
    press(opened, "Enter")
    assert opened.run("document.activeElement.getAttribute('aria-pressed')") == "false" and opened.run(visible) == 1
    press(opened, "Enter")
    assert opened.run("document.activeElement.getAttribute('aria-pressed')") == "true" and opened.run(visible) == 0


def test_values_of_the_parallel_axes_are_chosen_with_the_keyboard(opened):
    before = opened.run("document.getElementById('parallel').toDataURL()")
    tab_from(opened, "#parallel-plot")
    press(opened, "Enter")
    assert opened.run("document.activeElement.parentElement.open")
    press(opened, "Tab", "ArrowDown")
    left = opened.run("document.getElementById('parallel-said').textContent")
    assert opened.run("document.activeElement.id") == "axis-0" and left.endswith(" trials")
    assert 0 < int(left.split()[0]) < int(left.split()[2])
    assert opened.run("document.getElementById('parallel').toDataURL()") != before
    opened.run(
        "(() => { const a = document.getElementById('axis-0'); a.value = ''; a.dispatchEvent(new Event('change')); })()"
    )
    drawn(opened)
    assert opened.run("document.getElementById('parallel-said').textContent") == ""


def test_enter_on_copy_copies_the_json_of_the_pick(opened, report):
    opened.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    opened.run("document.querySelector('[data-copy=json-recommended]').focus()")
    press(opened, "Enter")
    opened.until("document.querySelector('[data-copy=json-recommended]').textContent === 'Copied'")
    assert json.loads(opened.run("navigator.clipboard.readText()")) == report.picks["recommended"]["ds_config"]


def test_a_page_that_is_printed_before_it_is_drawn_is_drawn_first(page, report, tmp_path):
    html.write(report, tmp_path / "report.html")
    page.open((tmp_path / "report.html").as_uri())
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert page.run("document.querySelectorAll('.plot .main-svg').length") >= 10


def test_the_plots_are_drawn_as_png(report, page, tmp_path):
    assert page is not None
    html.write(report, tmp_path / "report.html")
    written = takeaway.draw(tmp_path / "report.html", tmp_path / "png")
    assert {path.stem for path in written} == set(takeaway.PLOTS)
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in written)
