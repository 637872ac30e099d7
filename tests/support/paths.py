"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MODELS = ROOT / "tests" / "models"
SCRIPTS = MODELS / "scripts"
