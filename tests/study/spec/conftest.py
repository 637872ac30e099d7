"""A model to tune, and studies of it."""

import pytest

from autotune.study.spec.spec import StudySpec

MODEL = "import torch\n\ndef model():\n    return torch.nn.Linear(2, 2)\n\ndef data():\n    return []\n"


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "tiny" / "model.py"
    path.parent.mkdir()
    path.write_text(MODEL)
    return path


@pytest.fixture
def study(target):
    """Writes a study.yaml beside the target and loads it."""

    def load(text="", overrides=None):
        path = target.parent / "study.yaml"
        path.write_text("target: model.py\n" + text)
        return StudySpec.load(path, overrides)

    return load
