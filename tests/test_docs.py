"""What the documents quote is what the program says."""

import re
from pathlib import Path

import pytest

from autotune.trial import Outcome

ROOT = Path(__file__).parent.parent
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in (ROOT / "autotune").rglob("*.py"))


def rows(heading: str) -> list[str]:
    """First cells of the table under a heading."""
    section = TROUBLES.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.split("|")[1].strip() for line in lines[2:]]


@pytest.mark.parametrize("heading", ["Nothing runs", "A study does not go on"])
def test_messages_are_quoted_as_they_are_said(heading):
    quoted = [found[1] for cell in rows(heading) if (found := re.fullmatch(r"`(.+)`", cell))]
    assert len(quoted) >= 2
    # A message may be put together: `cannot be {how}`.
    missing = [text for text in quoted if text not in SOURCES and text.rsplit(" run as it is", 1)[0] + " {how}" not in SOURCES]
    assert not missing


def test_every_outcome_that_is_not_plain_is_explained():
    assert {cell.strip("`") for cell in rows("Trials fail")} == {str(o) for o in Outcome} - {"complete", "illegal"}
