"""Targets, read from their syntax trees and never run."""

import pytest

from autotune.errors import SpecError
from autotune.trial.target import inspect_target

MODEL = "import torch\n\ndef model():\n    return torch.nn.Linear(2, 2)\n\ndef data():\n    return []\n"


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "tiny" / "model.py"
    path.parent.mkdir()
    path.write_text(MODEL)
    return path


def test_a_target_is_read_not_run(target):
    target.write_text(MODEL + "raise SystemExit\n")
    found = inspect_target(target)
    assert (found.kind, found.defines, found.imports) == ("model", frozenset(), ("torch",))


def test_the_optional_parts_of_a_target_are_found(target):
    target.write_text(
        "from mylib import model, optimizer\nblocks = 'Block'\nloss = lambda model, batch: 0\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\ndef batch(n): ...\nclass Unrelated:\n    def collate(self): ...\n"
    )
    found = inspect_target(target)
    assert found.defines == {"optimizer", "blocks", "loss"}


def test_imports_are_listed_without_what_lies_beside_the_target(target):
    (target.parent / "helpers.py").write_text("")
    target.write_text(
        "from __future__ import annotations\nimport helpers, torch.nn.functional as F\n"
        "from transformers.models import gpt2\nfrom . import sibling\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import heavy\nif __name__ == '__main__':\n    import script\n"
        + MODEL
    )
    wanted = ("torch.nn.functional", "transformers.models:gpt2", "typing:TYPE_CHECKING", "torch")
    assert inspect_target(target).imports == wanted


def test_imports_leave_out_the_package_that_a_target_is_part_of_and_what_lies_beside_a_links_goal(target):
    """They were imported before the ranks were started, and so without RANK and LOCAL_RANK."""
    package = target.parent / "pkg"
    package.mkdir()
    for name in ("pkg/__init__.py", "beside.py"):
        (target.parent / name).write_text("")
    (package / "train.py").write_text("import torch, beside\nfrom pkg import data\n" + MODEL)
    (link := target.parent.with_name("train.py")).symlink_to(package / "train.py")
    for path in (package / "train.py", link):
        assert inspect_target(path).imports == ("torch",)


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["HF_HOME"] = "/data"', 'environ.setdefault("HF_HUB_OFFLINE", "1")', 'os.environ |= {"HF_HOME": home}',
        'os.environ.update(TRANSFORMERS_OFFLINE="1")', "load_dotenv()", "def main():\n    os.environ['HF_ENDPOINT'] = url",
    ],
)  # fmt: skip
def test_nothing_is_imported_ahead_of_a_target_that_sets_what_libraries_read_as_they_are_imported(target, line):
    target.write_text(f"{MODEL}import helper\n")
    (target.parent / "helper.py").write_text(f"{line}\n")
    assert inspect_target(target).imports == ()


@pytest.mark.parametrize(
    ("line", "item"),
    [
        ('os.environ["HF_HOME"] = "/data=1"', "HF_HOME=/data=1"),
        ('os.environ.setdefault("HF_HUB_OFFLINE", "1")', "HF_HUB_OFFLINE?=1"),
    ],
)
def test_what_a_target_plainly_sets_before_it_imports_libraries_is_set_ahead_of_them(target, line, item):
    """Nothing was imported ahead of it, so that each of its trials imported all libraries."""
    target.write_text(f"import os\n{line}\n{MODEL}")
    assert inspect_target(target).imports == (item, "os", "torch")
    target.write_text(f"import os\nfrom . import helper\n{line}\n{MODEL}")
    assert inspect_target(target).imports == ()


def test_other_variables_of_a_target_are_no_matter(target):
    (target.parent / "helper.py").write_text(
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'\nos.environ['HF_TOKEN'] = 'hf_1'\n"
        "token = os.environ['HF_TOKEN']\nos.environ.get('HF_HOME', 'HF_')\n"
        "names['HF_HOME'] = 1\nnames.update(HF_HOME=1)\n"
    )
    target.write_text(f"{MODEL}import helper\n")
    assert inspect_target(target).imports == ("torch",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def model(:", "line 1: not Python"),
        ("x = 1", "defines no model()"),
        ("def modle(): ...", "there is 'modle'"),
        ("from net import *", "defines no model() by name (`import *` is not followed)"),
        ("import torch\nmodel = torch.nn.Linear(2, 2)\ndef data(): ...", "line 2: model is a value"),
        ("def model(): ...", "neither data() -> Dataset nor batch(n)"),
        ("def model(size): ...\ndef data(): ...", "line 1: model must be callable as model()"),
        ("def model(): ...\ndef data(split): ...", "line 2: data must be callable as data()"),
        ("def model(): ...\ndef batch(): ...", "batch must be callable as batch(n)"),
        ("def model(): ...\ndef batch(n, *, seed): ...", "batch(n)"),
        ("def model(): ...\ndef data(): ...\ndef loss(batch): ...", "loss(model, batch)"),
        ("import torch\nloss.backward()", "does not import deepspeed"),
        ("from transformers import AutoModel\nmodel = build()\nloss.backward()", "does not import deepspeed"),
        ("import lightning as L\nfabric = L.Fabric()\nfabric.backward(loss)", "Lightning Fabric cannot be tuned yet"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_tuned_is_refused_in_one_sentence(target, text, said):
    target.write_text(text)
    with pytest.raises(SpecError) as error:
        inspect_target(target)
    assert said in str(error.value) and str(error.value).startswith(str(target)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("script", "import deepspeed, torch\nmodel = build()\nengine, *_ = deepspeed.initialize(model=model)\n"),
        ("script", "import lightning as L\nL.Trainer(strategy='deepspeed_stage_2').fit(build())"),
        ("script", "from pytorch_lightning.cli import LightningCLI\nLightningCLI()"),
        ("script", "import deepspeed\nfrom deepspeed.pipe import PipelineModule\ndeepspeed.initialize(model=PipelineModule([]))"),
        ("script", "from transformers import Trainer\nmodel = build()\nTrainer(model).train()"),
        ("script", "import deepspeed\nfrom package import model, data\ndeepspeed.initialize(model=model.build())"),
        ("model", "from package import model, data"),
        ("script", "import trl\ntrl.SFTTrainer(model=None).train()"),
        ("script", "import transformers\nclass Mine(transformers.Trainer): ...\nMyTrainer(model=None).train()"),
        ("script", "from accelerate import Accelerator\na = Accelerator()\na.backward(0)"),
        ("model", "def model(size=3): ...\ndef batch(n, seed=0): ..."),
        ("model", "def model(*args): ...\ndef batch(*args): ..."),
        ("model", "from functools import partial\nmodel = partial(int, 3)\ndef data(): ..."),
        ("model", "class model: ...\ndef data(): ..."),
        ("model", "if True:\n    def model(): ...\nelse:\n    def model(): ...\ndef data(): ..."),
        ("model", "def build(): ...\nmodel = build\ndata: object = lambda: []"),
    ],
)  # fmt: skip
def test_models_and_scripts_of_frameworks_are_told_from_the_text(target, kind, text):
    target.write_text(text)
    assert inspect_target(target).kind == kind


def test_the_training_may_be_in_a_module_that_a_script_imports(target):
    (target.parent / "training").mkdir()
    (target.parent / "training" / "__init__.py").write_text("from .loop import run\n")
    loop = "import deepspeed\nimport wandb\ndef run(): deepspeed.initialize()\n"
    (target.parent / "training" / "loop.py").write_text(loop)
    target.write_text("BATCH: int = 2 * 4\nif True:\n    STEPS = 3\nfrom training import run\nrun()\n")
    found = inspect_target(target)
    assert (found.kind, found.constants) == ("script", ("BATCH", "STEPS"))
    assert set(found.imports) == {"deepspeed", "wandb"}


def test_files_of_other_kinds_are_told_by_their_suffix_or_refused(target):
    target.with_name("model.ipynb").write_text("{}")
    study = target.parent / "studies" / "mine" / "study.yaml"
    study.parent.mkdir(parents=True)
    study.touch()
    for path, said in (
        (target.with_name("mine"), r"no file .*tiny/mine; the study of that name is .*/mine/study\.yaml"),
        (target.with_name("modle.py"), r"Did you mean 'model\.py'"),
        (target.parent, r"is a folder; .*tiny/model\.py"),
        (target.with_name("model.ipynb"), r"a model\.py or a study\.yaml"),
    ):
        with pytest.raises(SpecError, match=said):
            inspect_target(path)
    target.with_name("study.yaml").write_text("target: model.py\n")
    assert inspect_target(target.with_name("study.yaml")).kind == "study"
