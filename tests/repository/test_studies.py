"""The committed studies: each can be read, and its model learns."""

import importlib.util

import pytest
import torch
from support.paths import ROOT

from autotune.study.spec.spec import StudySpec

STUDIES = ROOT / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*/study.yaml")), ids=lambda path: path.parent.name)
def test_a_committed_study_is_read_without_a_complaint(path):
    assert StudySpec.of(path).name == path.parent.name


def test_the_classifier_of_digits_learns_them():
    pytest.importorskip(
        "sklearn", reason="scikit-learn, which carries the images, is not installed: pip install scikit-learn"
    )
    spec = importlib.util.spec_from_file_location("digits_cnn", STUDIES / "digits-cnn" / "model.py")
    target = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(target)
    torch.manual_seed(0)
    model, samples = target.model(), target.data()
    optimizer, losses = target.optimizer(model.parameters()), []
    for start in range(0, 640, 32):
        value = target.loss(
            model, [torch.stack(part) for part in zip(*(samples[i] for i in range(start, start + 32)), strict=True)]
        )
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
