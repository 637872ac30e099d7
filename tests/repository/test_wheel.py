"""The wheel by itself: what it carries, and that commands and library work in a folder that is no checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.paths import MODELS, ROOT

import autotune

PAGE = ROOT / "docs" / "guide.md"

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built without a network."""
    pytest.importorskip(
        "hatchling", reason="hatchling, which builds the wheel, is not installed: pip install hatchling"
    )
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def outside(wheel, tmp_path_factory):
    """Runs a program of the installed wheel, beside what is installed here, in a folder of its own."""
    pytest.importorskip("pip", reason="pip, which installs the wheel, is not installed here")
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    flags = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *flags, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    environment = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_STORAGE"}
    environment["PYTHONPATH"] = str(site)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        if command[0] == "autotune":
            command = (sys.executable, str(site / "bin" / "autotune"), *command[1:])
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done

    run.folder, run.site = folder, site
    return run


def files(folder: Path) -> set[str]:
    """What lies below a folder, without what Python leaves there."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_it_carries_every_file_of_the_package_and_the_presets_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    expected = {f"autotune/{name}" for name in files(ROOT / "autotune")}
    for kind in ("search_spaces", "objectives"):
        expected |= {f"autotune/study/spec/_presets/{kind}/{name}" for name in files(ROOT / kind)}
    assert names == expected
    page = {
        f"report/page/{name}" for name in ("page.js", "page.css", "assets/plotly-basic.min.js", "templates/report.html")
    }
    assert {f"autotune/{name}" for name in {"py.typed", "cli/_templates/study.yaml", *page}} <= names


def test_its_commands_find_presets_and_templates(outside):
    assert outside("autotune", "--version").stdout.strip() == autotune.__version__
    assert Path(
        outside(sys.executable, "-c", "import autotune; print(autotune.__file__)").stdout.strip()
    ).is_relative_to(outside.site)
    for what, kind in (("spaces", "search_spaces"), ("objectives", "objectives")):
        listed = [line.split()[0] for line in outside("autotune", "ls", what).stdout.splitlines()]
        assert listed == sorted(path.stem for path in (ROOT / kind).glob("*.yaml"))
    outside("autotune", "init", "first")
    assert files(outside.folder / "first") == {"model.py", "study.yaml"}


@pytest.mark.system
def test_the_page_about_the_library_runs_as_it_stands_and_as_a_script_without_a_guard(outside):
    """Three short trials of a small model in real ranks."""
    library = PAGE.read_text().partition("\n## From Python\n")[2]
    found = re.findall(r"```python\n(.*?)```", library, flags=re.DOTALL)
    # Trackers are an extra.
    blocks = "\n".join(block for block in found if "optuna_integration" not in block)
    text, n = re.subn(r"trials=8,", "trials=3, trial_budget_s=0.3, finalists=0,", blocks)
    assert n == 1
    shutil.copyfile(MODELS / "ok.py", outside.folder / "model.py")
    (outside.folder / "notebook.py").write_text(text)
    done = outside(sys.executable, "notebook.py")
    said = done.stdout
    assert (
        re.search(r"^recommended.*: trial \d", said, flags=re.MULTILINE) and done.stderr == ""
    )  # the answer, and no progress
    assert re.search(r"^complete +[1-3]$", said, flags=re.MULTILINE)  # the table of outcomes
    assert "--per_device_train_batch_size" in said and "largest micro-batch" in said
    assert "unknown 'bath'" in said
    assert {"ds_config.json", "report.html"} <= {path.name for path in outside.folder.iterdir()}
    assert (outside.folder / "studies" / "mine" / "recommended.json").exists()
