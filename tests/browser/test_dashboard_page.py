"""The dashboard in a browser: the answer is there, its JSON arrives, and nothing asks another machine."""

import json
import threading
import time

import pytest
from instant import Instant, runner_of

from autotune import store
from autotune.report import dashboard

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Heartbeat")]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A dashboard of a small study, which asks for a token."""
    folder = tmp_path_factory.mktemp("studies")
    runner_of(folder, Instant(), trials=6).run()
    server = dashboard.make_server(store.default_url(folder), folder, "127.0.0.1", 0, "the-token")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_printed_address_leads_to_the_answer_and_its_json(page, served, tmp_path):
    folder, address = served
    page.view(1440, 900)
    page.requests.clear()
    page.complaints.clear()
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.open(f"{address}/dashboard/studies/1/note?token=the-token")
    page.until("document.body.textContent.includes('Recommended: trial')")
    assert "token" not in page.run("location.href")
    page.run("[...document.querySelectorAll('a')].find((a) => a.textContent === 'recommended').click()")
    arrived = tmp_path / "s-recommended.json"
    deadline = time.monotonic() + 30
    while not (arrived.exists() and arrived.stat().st_size):  # an empty file holds its place while it arrives
        assert time.monotonic() < deadline, "the download did not arrive"
        page.run("1")
    wanted = json.loads((folder / "s" / "recommended.json").read_text()) if (folder / "s" / "recommended.json").exists() else None
    config = json.loads(arrived.read_text())
    assert config["zero_optimization"]["stage"] == 0 and (wanted is None or config == wanted["picks"]["recommended"]["ds_config"])
    assert all(each.startswith((address, "data:", "blob:")) for each in page.requests) and page.complaints == []


def test_our_front_is_drawn_on_the_studys_page(page, served):
    _, address = served
    page.open(f"{address}/dashboard/studies/1?token=the-token")
    page.until("document.body.textContent.includes('Front: ')")
    assert not [said for said in page.complaints if "WebGL" not in said and "Canvas2D" not in said]
