"""The page of `autotune scale` in a browser: readable on a phone and on a wide screen, and without a request."""

import pytest

from autotune.report.page import scaling as scaling_page
from autotune.scoring.scaling import Run, scaling

pytestmark = pytest.mark.system
PNG = b"\x89PNG"
RATES = [(1, 980.0, 0.0), (2, 1810.0, 0.06), (4, 3105.0, 0.13), (8, 4890.0, 0.24)]
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def found():
    """Three rounds that scatter."""
    runs = [
        Run(
            world_size=n,
            round=r,
            samples_per_s=rate * scatter,
            step_s=64 / rate / scatter,
            samples_per_step=64,
            communication=share,
        )
        for r, scatter in enumerate((1.0, 1.03, 0.98))
        for n, rate, share in RATES
    ]
    return {"strong": scaling(runs, 1797)}


@pytest.fixture(scope="module")
def path(found, tmp_path_factory):
    """The page, with a title that is an attack."""
    path = tmp_path_factory.mktemp("scale") / "scaling.html"
    scaling_page.write(found, EVIL, ["OMP_NUM_THREADS=1 for every rank"], path)
    return path


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_it_opens_without_a_request_or_a_complaint_and_nothing_sticks_out(page, path, width, dark):
    page.view(width, 900, dark=dark)
    page.requests.clear()
    page.complaints.clear()
    page.open(path.as_uri())
    page.drawn()
    assert page.requests == [path.as_uri()] and page.complaints == []
    assert page.run("document.title").startswith("<img") and page.run("document.images.length") == 0
    assert page.run("document.documentElement.scrollWidth") <= width
    assert (page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 19, 22)") is dark


@pytest.mark.parametrize(("width", "beside"), [(390, 1), (1440, 3)])
def test_all_six_panels_are_large_enough_to_read_and_hold_what_they_draw(page, path, width, beside):
    page.view(width, 900)
    page.open(path.as_uri())
    tops = page.run("[...document.querySelectorAll('.panels .card')].map((each) => each.getBoundingClientRect().top)")
    assert len(tops) == 6 and tops.count(tops[0]) == beside
    page.drawn()
    texts = page.run(
        "[...document.querySelectorAll('.panel')].flatMap((panel) => { const whole = panel.getBoundingClientRect();"
        " return [...panel.querySelectorAll('text')].map((text) => { const box = text.getBoundingClientRect();"
        " return [box.height, box.left >= whole.left && box.right <= whole.right && box.bottom <= whole.bottom]; }); })"
    )
    assert all(height > 10 and inside for height, inside in texts) and len(texts) > 40
    assert page.run("[...document.querySelectorAll('.panel .point')].length") == 6 * len(RATES)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.smoke
def test_the_figures_stand_in_rows_and_columns(page, path, width):
    page.view(width, 900)
    page.open(path.as_uri())
    places = page.run(
        "[...document.querySelectorAll('table tr')].map((row) => [...row.cells]"
        ".map((cell) => cell.getBoundingClientRect()).map((box) => [box.left, box.bottom]))"
    )
    assert len(places) == 1 + len(RATES)
    for row in places:
        assert len({bottom for _, bottom in row}) == 1
        assert [left for left, _ in row] == [left for left, _ in places[0]] == sorted({left for left, _ in row})


def test_the_panels_are_drawn_as_one_picture(page, found, tmp_path):
    assert page is not None
    pytest.importorskip("kaleido", reason="kaleido is not installed: pip install -e '.[png]'")
    scaling_page.draw(found, tmp_path / "scaling.png")
    picture = (tmp_path / "scaling.png").read_bytes()
    assert picture.startswith(PNG) and len(picture) > 20_000
