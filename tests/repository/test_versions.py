"""What the page on versions says is what pyproject.toml asks for and the Makefile installs."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from support.paths import ROOT

import autotune

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "develop" / "versions.md").read_text()
ROWS = {
    cells[0]: cells[1:3]
    for line in PAGE.splitlines()
    if len(cells := [c.strip() for c in line.strip("|").split("|")]) == 4
}

spec = importlib.util.spec_from_file_location("floors", ROOT / ".ci" / "floors.py")
floors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(floors)


def test_the_page_names_every_floor():
    stated = {name: floor for name, (floor, _) in ROWS.items() if name not in ("package", "---", "Python")}
    assert stated == floors.floors((ROOT / "pyproject.toml").read_text())
    assert f">={ROWS['Python'][0]}" == PROJECT["requires-python"]


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("package", "---", "Python")])
def test_what_was_tested_keeps_to_what_is_asked_for(name):
    asked = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    assert Version(ROWS[name][1]) in asked.specifier


def test_the_tested_torch_is_the_one_that_make_installs():
    assert (
        f"torch=={ROWS['torch'][1]}"
        in re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    )


@pytest.mark.parametrize(
    ("bound", "old", "newer"), [("2.6", "2.6.3", "2.7.0"), ("5", "5.0.1", "5.1.0"), ("3.10.2", "3.10.9", "3.11.0")]
)
def test_a_floor_is_installed_with_its_fixes_and_nothing_newer(bound, old, newer):
    taken = SpecifierSet(f"=={floors.series(bound)}")
    assert old in taken and newer not in taken


def test_the_version_is_semantic_and_the_changelog_knows_it():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", autotune.__version__)
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages audited, 0 known vulnerabilities"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}],
            1,
            "a 1: PYSEC-1, mended in 2",
        ),
        ([{"name": "a", "skip_reason": "not found"}], 1, "not looked up: a"),
    ],
)
def test_an_audit_that_could_look_nothing_up_is_no_all_clear(packages: list, status: int, said: str) -> None:
    text = json.dumps({"dependencies": packages})
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audit.py"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == status and said in done.stdout
