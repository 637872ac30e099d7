"""Times the report and the dashboard of a study of 1,000 trials, and how smoothly the report's page moves.

python benchmarks/views.py [TRIALS]
"""

import io
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from wsgiref.util import setup_testing_defaults

from common import write
from optuna.storages import RDBStorage
from optuna_dashboard import wsgi
from playwright.sync_api import Page, sync_playwright
from support import instant

from autotune.report.dashboard.server import Application
from autotune.report.dashboard.storage import DashboardStorage
from autotune.space.candidate import Candidate
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.trial.result import Outcome, RankReport

SPACE = ["batch", "zero", "buckets", "precision", "checkpointing"]
ROUNDS, WARM_PAIRS = 5, 3
WIDTHS = (390, 1440)
STUDY_PAGE = "/api/studies/1"
# Notes when each frame begins, in milliseconds: a page that is busy, or still drawing the last frame, begins the next
# one late.
WATCH = """window.watch = () => {
  const frames = [];
  let watching = true;
  const note = (at) => { frames.push(at); if (watching) requestAnimationFrame(note); };
  requestAnimationFrame(note);
  return () => { watching = false; return frames; };
}"""
# The page from top to end, then all rows of the table, as fast as an impatient reader turns the wheel.
SCROLL = """(async () => {
  const frame = () => new Promise(requestAnimationFrame), stop = watch(), box = document.querySelector(".scroll");
  for (let y = 0; y < document.documentElement.scrollHeight; y += 100) { scrollTo(0, y); await frame(); }
  document.getElementById("all").scrollIntoView();
  for (let y = 0; y < box.scrollHeight; y += 200) { box.scrollTo(0, y); await frame(); }
  return stop();
})()"""
PAUSE = "new Promise((done) => setTimeout(done, 80))"


def behaviour(candidate: Candidate) -> RankReport:
    """A trial as real ones are: 60 steps and more with noise and outliers; one in ten fails."""
    rng = random.Random(candidate.key)
    if rng.random() < 0.06:
        return instant.failed(Outcome.OOM, f"rank 0 ran out of memory: {rng.uniform(15.1, 16):.2f} of 16.00 GiB in use")
    if rng.random() < 0.04:
        return instant.failed(Outcome.CRASHED, "RuntimeError: mat1 and mat2 must have the same dtype")
    whole, n_steps = instant.report(candidate), rng.randrange(60, 91)
    knobs = 1 + 0.05 * candidate.zero_stage + 0.01 * len(candidate.config)
    step_s = whole.step_times_s[0] * knobs
    times = [step_s * rng.lognormvariate(0, 0.03) * (4 if rng.random() < 0.01 else 1) for _ in range(n_steps)]
    batch = candidate.global_batch_size(1)
    losses = [1 + 2 / (1 + i * batch / 100) + rng.gauss(0, 0.1 / math.sqrt(batch)) for i in range(n_steps)]
    peak = int(whole.peak_memory_bytes["steady"] * (1 - 0.1 * candidate.zero_stage) * rng.uniform(0.98, 1.02))
    return replace(whole, step_times_s=times, cpu_times_s=times, losses=losses, peak_memory_bytes={"steady": peak})


def searched(studies: Path, n_trials: int) -> str:
    """A study of that many trials, all of them different; returns its database."""
    plain = {"sampler": "random", "stop_trials": False, "memory_filter": False}
    instant.runner_of(studies, instant.Instant(behaviour), trials=n_trials, space=SPACE, **plain).run()
    return records.default_url(studies)


def command_s(folder: Path) -> float:
    """Seconds that `autotune report` takes, from its start to its end: the page, JSON and CSV."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "autotune", "report", "s", "-o", "out"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def intervals(frames: list[float]) -> dict[str, float]:
    """How evenly frames followed one another."""
    found = sorted(after - before for before, after in pairwise(frames))
    return {"p95_ms": found[int(0.95 * (len(found) - 1))], "longest_ms": found[-1], "frames": len(found)}


def watched(tab: Page, actions: list[partial]) -> dict[str, float]:
    """The intervals of frames while a user does something again and again."""
    tab.evaluate("window.stop = watch(); 0")
    for act in actions:
        act()
        tab.evaluate(PAUSE)
    return intervals(tab.evaluate("stop()"))


def page_figures(page: Path) -> dict[str, dict]:
    """How soon the page is there and how evenly it moves, by width of the window."""
    found = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            start = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn=yes]", state="attached")
            drawn_s = time.perf_counter() - start
            seen_s = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
            tab.evaluate(f"{WATCH}; document.fonts.ready.then(() => 0)")
            scroll = intervals(tab.evaluate(SCROLL))
            tab.evaluate("document.getElementById('filter').focus()")
            typing = watched(tab, [partial(tab.keyboard.type, letter) for letter in "z1 bf16 complete"])
            tab.fill("#filter", "")
            heads = [f"document.querySelectorAll('#trials thead button')[{column}].click()" for column in (4, 4, 1, 0)]
            sorting = watched(tab, [partial(tab.evaluate, head) for head in heads])
            found[str(width)] = {
                "seen_s": seen_s,
                "drawn_s": drawn_s,
                "scroll": scroll,
                "filter": typing,
                "sort": sorting,
            }
        browser.close()
    return found


def asked_s(app, path: str = STUDY_PAGE) -> float:
    """Seconds until an application has answered."""
    environ = {"PATH_INFO": path, "HTTP_HOST": "localhost", "QUERY_STRING": "after=0", "wsgi.input": io.BytesIO()}
    setup_testing_defaults(environ)
    start = time.perf_counter()
    content = b"".join(app(environ, lambda *_: None))
    assert json.loads(content)["trials"]
    return time.perf_counter() - start


def dashboard_figures(studies: Path, url: str) -> dict[str, list[dict[str, float]]]:
    """Seconds of the study's page, ours and plain: asked for the first time, and again.

    The first in a round is ours and plain in turns: the second finds the files in the machine's memory.
    """

    def opened() -> dict:
        folder_of = partial(records.study_folder, studies=studies, url=url)
        return {
            "own": Application(DashboardStorage(open_storage(url), folder_of), "127.0.0.1", None),
            "plain": wsgi(RDBStorage(url)),
        }

    def pair(apps: dict, *, turned: int = 0) -> dict[str, float]:
        return {name: asked_s(apps[name]) for name in (("plain", "own") if turned % 2 else ("own", "plain"))}

    pair(opened())  # imports
    cold, warm = [], []
    for n in range(ROUNDS):
        apps = opened()
        cold.append(pair(apps, turned=n))
        pair(apps)  # what was first above may have forgotten its answer by now
        warm += [pair(apps, turned=n + m) for m in range(WARM_PAIRS)]
    return {"cold_s": cold, "warm_s": warm}


def main() -> None:
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        url = searched(folder / "studies", n_trials)
        print(f"searched {n_trials} trials in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        times = [command_s(folder) for _ in range(ROUNDS)]
        page = folder / "out" / "report.html"
        figures = {"n_trials": n_trials, "report_s": statistics.median(times), "report_times_s": times}
        figures |= {"report_bytes": page.stat().st_size, "page": page_figures(page)}
        write("views", {**figures, "dashboard": dashboard_figures(folder / "studies", url)})


if __name__ == "__main__":
    main()
