"""The constants that are shipped are those that `benchmarks/published.py` fits, and forecasts of published runs hold."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from autotune.advise.constants import CONSTANTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("published", BENCHMARKS / "published.py")
        module = sys.modules["published"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("published", None)


@pytest.mark.system
def test_the_shipped_constants_are_what_the_script_fits(published):
    fitted = published.fit(published.cases())
    for name in ("context_bytes", "nccl_bytes", "logit_bytes", "activation_factor", "attention_factor"):
        assert getattr(CONSTANTS, name) == pytest.approx(getattr(fitted, name), rel=0.02), name
    for name, share in fitted.efficiency.items():
        assert CONSTANTS.efficiency[name] == pytest.approx(share, rel=0.02)


def test_the_shipped_spread_is_that_of_rows_that_were_left_out():
    result = json.loads((BENCHMARKS / "results" / "published.json").read_text())
    assert result["constants"]["memory_log_sd"] == CONSTANTS.memory_log_sd
    assert result["constants"]["time_log_sd"] == CONSTANTS.time_log_sd
