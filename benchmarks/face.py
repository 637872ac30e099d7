"""Shows the example study's last answer in the README: its output block, and `docs/report.png`, the top of its report.

`make demo face`. The picture takes an installed Chromium; `python benchmarks/face.py` works from `studies/code-gpt`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from common import ROOT
from rich.console import Console

from autotune.report import answer
from autotune.report.data import StudyReport
from autotune.report.page import render
from autotune.session import open_study

STUDY, README, PICTURE = "code-gpt", ROOT / "README.md", ROOT / "docs" / "report.png"
BLOCK = re.compile(r"(ends like this:\n\n```\n)(.*?)(```\n)", re.DOTALL)
COLUMNS, WIDTH_PX, MARGIN_PX = 80, 1000, 24


def output(report: StudyReport) -> str:
    """What the terminal says: the table, and the recommendation without its reasons."""
    console = Console(width=COLUMNS, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(answer.Answer(report))
    table = capture.get().split("\n\n", 1)[1]
    head, _, _ = table.partition("\n  - ")
    return head.rstrip() + "\n"


def picture(report: StudyReport, path: Path) -> None:
    """The page's top, down to the end of the answer, as PNG."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        render.write(report, Path(folder) / "report.html")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH_PX, "height": 800})
        page.goto((Path(folder) / "report.html").as_uri())
        end = page.evaluate("document.getElementById('answer').getBoundingClientRect().bottom")
        clip = {"x": 0, "y": 0, "width": WIDTH_PX, "height": end + MARGIN_PX}
        page.screenshot(path=path, full_page=True, clip=clip)
        browser.close()


def main() -> None:
    report = open_study(STUDY, studies=ROOT / "studies").report
    text, n = BLOCK.subn(lambda found: found[1] + output(report) + found[3], README.read_text())
    assert n == 1, "README.md has no block after `ends like this:`"
    README.write_text(text)
    picture(report, PICTURE)


if __name__ == "__main__":
    main()
