"""The committed studies: each can be read, and its model learns."""

import importlib.util
import os
import shutil
import subprocess

import pytest
import torch
from support.paths import ROOT

from autotune.study.spec.spec import StudySpec

STUDIES = ROOT / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*/study.yaml")), ids=lambda path: path.parent.name)
def test_a_committed_study_is_read_without_a_complaint(path):
    assert StudySpec.of(path).name == path.parent.name


@pytest.mark.process
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("given", "on_cpu"), [([], True), (["STUDY=own.yaml"], False)])
def test_the_demo_takes_the_cpu_whatever_devices_there_are_and_a_users_own_study_does_not(given, on_cpu):
    """Its two ranks cannot share one GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "STUDY"}
    command = ["make", "--dry-run", "--directory", str(ROOT), "demo", *given]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ran = next(line for line in said.splitlines() if "autotune run" in line)
    assert ran.startswith("DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} ") is on_cpu


@pytest.mark.system
@pytest.mark.smoke
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
