"""The JSON schema of `study.yaml`: it takes what `StudySpec` takes, and has every key."""

import pytest
import yaml
from support.instant import spec_of
from support.paths import ROOT

from autotune.study.spec.schema import study_schema
from autotune.study.spec.settings import SETTINGS

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed; it comes with ray")


@pytest.fixture(scope="module")
def check():
    schema = study_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_key_has_its_meaning():
    properties = study_schema()["properties"]
    assert set(properties) == set(SETTINGS) and all(each["description"] for each in properties.values())
    assert properties["trials"]["default"] == 30 and properties["executor"]["enum"] == ["local", "slurm", "ray"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("studies/*/study.yaml")), ids=lambda path: path.parent.name)
def test_committed_studies_are_valid(check, path):
    assert list(check.iter_errors(yaml.safe_load(path.read_text()))) == []


def test_a_study_that_was_written_is_valid(check, tmp_path):
    written = spec_of(objectives=["latency", "memory"], constraints={"peak_memory_bytes": {"max": "4GiB"}}).to_yaml(
        tmp_path
    )
    assert list(check.iter_errors(yaml.safe_load(written))) == []


@pytest.mark.parametrize(
    "given",
    [{"time_budget_s": "10m"}, {"global_batch": "8..64"}, {"space": "batch"}, {"space": [{"zero_stage": [0, 1]}, "batch"]},
     {"device_memory_bytes": "4GiB"}, {"stop_below": "3%"}, {"goal": "throughput"}, {"objectives": [{"metric": "step_time_s"}]}],
)  # fmt: skip
def test_texts_with_units_and_presets_are_valid(check, given):
    assert list(check.iter_errors({"target": "model.py"} | given)) == []


@pytest.mark.parametrize(
    "given",
    [{"trails": 5}, {"trials": "many"}, {"goal": "speed"}, {"executor": "kubernetes"}, {"global_batch": "8-64"}],
)
def test_what_cannot_be_used_is_not_valid(check, given):
    assert list(check.iter_errors({"target": "model.py"} | given))
