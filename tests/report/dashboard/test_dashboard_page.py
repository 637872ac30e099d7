"""The dashboard in a browser: the answer, its JSON, no request to another machine, and inert foreign text."""

import json
import threading

import optuna
import pytest
from support.commands import read_by_deepspeed
from support.dashboard import stop
from support.instant import Instant, runner_of

from autotune.report import load
from autotune.report.dashboard.server import make_server
from autotune.report.data import title
from autotune.space.candidate import Candidate
from autotune.study.storage import records

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore:Heartbeat")]

TOKEN = "the-token-of-this-test"
EVIL = "<img src=struck onerror=\"document.title='struck'\"><script>document.title='struck'</script>"
# Each page, and what is to be read on it.
PAGES = {
    "/dashboard": "s",
    "/dashboard/studies/1": "Front: throughput against goodput",
    "/dashboard/studies/1/note": "Recommended: trial",
    "/dashboard/studies/1/trials?numbers=0": "Download its ds_config.json",
    "/dashboard/studies/1/analytics": "EDF for throughput",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The dashboard of a small study, and of one that somebody else put into its database; it asks for a token."""
    folder = tmp_path_factory.mktemp("studies")
    runner_of(folder, Instant(), trials=6).run()
    url = records.default_url(folder)
    foreign = optuna.create_study(study_name=EVIL, storage=url)
    foreign.set_user_attr(EVIL, EVIL)
    foreign.optimize(lambda trial: trial.suggest_categorical(EVIL, [EVIL, "b"]) == "b", n_trials=3)
    server = make_server(url, folder, "127.0.0.1", 0, TOKEN)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}", load.load("s", url, folder / "s")
    stop(server)
    thread.join(30)


@pytest.fixture
def inside(page, served):
    """The page let in."""
    address, _ = served
    page.view(1440, 900)
    page.open(f"{address}/dashboard?token={TOKEN}")
    page.requests.clear()
    page.complaints.clear()
    yield page
    assert all(each.startswith((address, "data:", "blob:")) for each in page.requests) and page.complaints == []


def shows(page, words):
    page.tab.wait_for_function("(words) => document.body.textContent.includes(words)", arg=words)


def arrived(page, link, path):
    """The JSON that a click on a link downloads."""
    with page.tab.expect_download() as download:
        page.run(link + ".click()")
    assert download.value.suggested_filename == path.name
    download.value.save_as(path)
    return json.loads(path.read_text())


@pytest.mark.smoke
def test_the_printed_address_leads_to_the_answer_and_every_json_arrives_and_loads_in_deepspeed(
    inside, served, zoo, tmp_path
):
    address, answer = served
    inside.open(f"{address}/dashboard/studies/1/note?token={TOKEN}")
    shows(inside, f"Recommended: trial {answer.picks['recommended']['trial']}")
    assert "token" not in inside.run("location.href")
    assert len(answer.picks) > 2
    for name, pick in answer.picks.items():
        link = f"[...document.querySelectorAll('a')].find((a) => a.textContent === {json.dumps(title(name))})"
        assert arrived(inside, link, tmp_path / f"s-{name}.json") == pick["ds_config"]
    sizes = read_by_deepspeed(zoo, [tmp_path / f"s-{name}.json" for name in answer.picks])
    assert sizes == [Candidate.of(pick["candidate"]).global_batch_size(1) for pick in answer.picks.values()]


def test_a_trials_json_arrives_by_its_note_and_as_its_artifact(inside, served, tmp_path):
    address, answer = served
    inside.open(f"{address}/dashboard/studies/1/trials?numbers=0")
    shows(inside, "Download its ds_config.json")
    note = "[...document.querySelectorAll('a')].find((a) => a.textContent === 'Download its ds_config.json')"
    assert arrived(inside, note, tmp_path / "s-trial-0.json") == answer.baseline["ds_config"]
    artifact = "document.querySelector('a[href*=\"/artifacts/1/\"]')"
    assert arrived(inside, artifact, tmp_path / "ds_config.json") == answer.baseline["ds_config"]


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("path", PAGES)
def test_every_page_fits_and_asks_no_other_machine(inside, served, path, width):
    address, _ = served
    inside.view(width, 900)
    inside.open(address + path)
    shows(inside, PAGES[path])
    least = 7 if path.endswith("/1") else 0  # figures are drawn one after another
    inside.tab.wait_for_function(f"document.querySelectorAll('.js-plotly-plot').length >= {least}")
    assert inside.run("document.documentElement.scrollWidth") <= width
    edges = inside.run(
        "[...document.querySelectorAll('.js-plotly-plot')].map((plot) => plot.getBoundingClientRect().right)"
    )
    assert all(edge <= width for edge in edges)


def test_a_table_of_the_note_scrolls_by_itself_on_a_phone(inside, served):
    address, _ = served
    inside.view(390, 900)
    inside.open(f"{address}/dashboard/studies/1/note")
    shows(inside, "Recommended: trial")
    assert inside.run(
        "[...document.querySelectorAll('main p, main li')].every((each) => each.getBoundingClientRect().right <= 390)"
    )
    card = "document.querySelector('main table').closest('.MuiCard-root')"
    assert inside.run(f"{card}.scrollWidth > {card}.clientWidth && getComputedStyle({card}).overflowX === 'scroll'")


@pytest.mark.parametrize(
    "path",
    ["/dashboard", "/dashboard/studies/2", "/dashboard/studies/2/trials?numbers=0", "/dashboard/studies/2/analytics"],
)
def test_a_name_with_html_in_it_does_nothing(inside, served, path):
    address, _ = served
    inside.open(address + path)
    shows(inside, EVIL)
    if "studies" in path:
        shows(inside, "(id=2)")
    assert inside.run("document.title") == "Optuna Dashboard"
    assert not inside.run(
        "document.querySelectorAll('img[src=struck]').length + document.querySelectorAll('body script').length"
    )


def test_what_is_refused_is_not_offered(inside, served):
    address, _ = served
    labels = ("rename study", "delete study", "delete artifact")
    sought = [f'[aria-label="{label}"]' for label in labels] + [
        '[data-testid="AddBoxIcon"]',
        '[data-testid="UploadFileIcon"]',
    ]
    for path, words in (("/dashboard", "Search study"), ("/dashboard/studies/1", "Study Artifacts")):
        inside.open(address + path)
        inside.tab.wait_for_selector(f"text={words}" if "/studies" in path else f"[placeholder='{words}']")
        there = [inside.run(f"document.querySelectorAll({json.dumps(each)}).length") for each in sought]
        seen = inside.run(
            f"[...document.querySelectorAll({json.dumps(','.join(sought))})].filter((each) => each.getClientRects().length).length"
        )
        assert sum(there) >= 2 and seen == 0


@pytest.mark.smoke
def test_the_page_that_opens_holds_the_answer_and_fits_a_phone(inside, served):
    address, answer = served
    inside.view(390, 900)
    inside.open(address)
    text = inside.run("document.body.innerText")
    assert f"trial {answer.picks['recommended']['trial']}, " in text and EVIL in text
    assert inside.run("document.documentElement.scrollWidth") <= 390
    inside.tab.click("text=Report")
    inside.drawn()
    assert inside.run("document.querySelector('.answer').innerText").startswith("Recommended")
