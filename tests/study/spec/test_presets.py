"""Presets that ship with the package, and YAML files in their place."""

import pytest
from support.paths import ROOT

from autotune.errors import SpecError
from autotune.space.candidate import Candidate
from autotune.study.spec import presets as presets_module
from autotune.study.spec.presets import find_preset, load_preset, preset_folder, preset_summary, presets
from autotune.study.spec.yaml_file import read_yaml


@pytest.mark.parametrize("name", presets("objectives"))
def test_every_objective_preset_loads_and_says_first_what_it_is(study, name):
    (objective,) = study(f"objectives: {name}").objectives
    assert objective.name == name and objective.description
    assert 20 < len(preset_summary(presets("objectives")[name])) < 200


@pytest.mark.parametrize("name", presets("search_spaces"))
def test_every_space_preset_can_be_named_alone_and_says_first_what_it_is(study, name):
    assert study(f"space: {name}").space.size(Candidate(micro_batch_size=1)) >= 1
    assert 20 < len(preset_summary(presets("search_spaces")[name])) < 200


def test_a_preset_that_is_copied_and_changed_is_used_as_a_file(study, target):
    text = presets("search_spaces")["zero"].read_text()
    (target.parent / "zero.yaml").write_text(text.replace("[0, 1, 2, 3]", "[0, 1]"))
    assert study("space: zero.yaml").space["zero_stage"].choices == (0, 1)


@pytest.mark.parametrize("file", ["mine.yaml", "search_spaces/mine.yaml"])
def test_a_file_that_is_named_as_a_preset_is_named_by_its_path(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("zero_stage: [0, 1]\n")
    with pytest.raises(SpecError, match=f"--space: 'mine' is no preset; name your file by its path, {file}"):
        find_preset("search_spaces", "mine", tmp_path, "--space")


def test_what_ends_in_yaml_or_has_a_separator_is_a_path(tmp_path):
    assert find_preset("search_spaces", "zero.yml", tmp_path, "x") == tmp_path / "zero.yml"
    assert find_preset("search_spaces", "a/zero", tmp_path, "x") == tmp_path / "a" / "zero"


@pytest.mark.parametrize("name", ["..", ".", "", "zero\0", "*", "ZERO"])
def test_the_name_of_a_preset_stays_in_its_folder(tmp_path, name):
    with pytest.raises(SpecError, match="Known: batch"):
        load_preset("search_spaces", name, tmp_path, "--space")


def test_where_no_preset_lies_beside_the_package_that_is_said_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(presets_module, "preset_folder", lambda kind: tmp_path / kind)
    with pytest.raises(SpecError) as error:
        find_preset("search_spaces", "zero", tmp_path, "--space")
    said = str(error.value)
    assert f"no presets lie in {tmp_path / 'search_spaces'}; give the path of a .yaml file" in said
    assert "Known:" not in said


def test_installed_presets_go_before_those_of_the_checkout(tmp_path, monkeypatch):
    assert preset_folder("objectives") == ROOT / "objectives"
    packaged = tmp_path / "_presets" / "objectives"
    packaged.mkdir(parents=True)
    (packaged / "mine.yaml").write_text("metric: step_time_s\n")
    monkeypatch.setattr(presets_module, "__file__", str(tmp_path / "presets.py"))
    assert list(presets("objectives")) == ["mine"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a: !!python/object/apply:os.system [ls]", "only plain texts"),
        (b"a: *b", "undefined alias"),
        (b"{[1]: 2, [1]: 3}", "unhashable"),
        (b"a: \x00", "not YAML"),
        (b"a:\n  b: 1\n  b: 2\n", "line 3: key 'b' is there twice"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_file_that_is_not_plain_data_is_refused(tmp_path, data, said):
    (tmp_path / "x.yaml").write_bytes(data)
    with pytest.raises(SpecError, match=said) as error:
        read_yaml(tmp_path / "x.yaml")
    assert "x.yaml" in str(error.value)


def test_a_name_that_can_be_no_file_is_no_preset(tmp_path):
    with pytest.raises(SpecError, match="--space"):
        find_preset("search_spaces", "a" * 5000, tmp_path, "--space")
