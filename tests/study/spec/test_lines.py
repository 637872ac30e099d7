"""An error about a `study.yaml` names the line of the key that it is about."""

import pytest

from autotune.errors import UserError
from autotune.study.spec.spec import StudySpec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target: m.py\n\ntrails: 5\n", "line 3: unknown key 'trails'"),
        ("target: m.py\ntrials: many\n", "line 2: trials: should be a valid integer"),
        (
            "target: m.py\nspace:\n  micro_batch_size: [1]\n  zero_stoge: [1]\n",
            "line 4: space: zero_stoge: unknown knob",
        ),
        ("target: m.py\nconstraints:\n  peak_memory_bytes: {mox: 3}\n", "line 2: constraints: unknown key 'mox'"),
        ("target: m.py\nspace: [bath]\n", "line 2: space: unknown"),
        ("target: m.py\ntrials: [\n", "line 3: not YAML"),
    ],
)
def test_the_line_of_the_key_is_named(tmp_path, text, said):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        StudySpec.load(path)
    assert str(error.value).startswith(f"{path}: {said}"), error.value


def test_an_error_about_a_flag_names_no_line(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("target: m.py\ntrials: 5\n")
    with pytest.raises(UserError, match=r"^--trials"):
        StudySpec.load(path, {"trials": 0})
