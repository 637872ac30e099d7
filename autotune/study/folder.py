"""The folder of a study: where the files of its trials, checks and re-tunings lie."""

import re
from pathlib import Path

from autotune.study.storage.generations import generation_of

RECORD_FILE = "record.json"


def trial_path(folder: Path, number: int) -> Path:
    """The folder of a trial."""
    return folder / "trials" / f"{number:04d}"


def repeat_path(folder: Path, number: int, n: int) -> Path:
    """The folder of a trial's n-th re-measurement."""
    return trial_path(folder, number) / f"repeat-{n}"


def repeat_paths(folder: Path, number: int) -> dict[int, Path]:
    """The folders of a trial's re-measurements by round."""
    found = {path.name.removeprefix("repeat-"): path for path in trial_path(folder, number).glob("repeat-*")}
    return dict(sorted((int(n), path) for n, path in found.items() if n.isdigit()))


def gate_path(folder: Path, number: int) -> Path:
    """File of the quality gate's verdict on a trial."""
    return trial_path(folder, number) / "verdict.json"


def branch_path(folder: Path, number: int) -> Path:
    """File of a branch's result."""
    return trial_path(folder, number) / "branch.json"


def warm_path(folder: Path) -> Path:
    """File of the weights that branches start from."""
    return folder / "trials" / "warm.pt"


def reference_path(folder: Path, batch: int) -> Path:
    """Folder of the trials that train the baseline's numerics at a global batch."""
    return folder / "trials" / f"reference-{batch}"


def check_paths(folder: Path) -> list[Path]:
    """The folders of the runs of the quality gate and of branches."""
    found = folder.glob("trials/*/*")
    return [
        p for p in found if p.name == "gate" or p.name.startswith("branch-") or p.parent.name.startswith("reference-")
    ]


def retuning_path(folder: Path, generation: int) -> Path:
    """The folder of a study's re-tuning of that number."""
    return folder / "retunes" / f"{generation:04d}"


def retuning_of(path: Path) -> int:
    """The number of the re-tuning whose folder that is; 0 where it is none's."""
    return int(path.name) if re.fullmatch("[0-9]{1,9}", path.name) else 0


def studies_of(name: str, folder: Path) -> Path:
    """The folder of all studies, given that of a study or of a re-tuning."""
    return folder.parents[2] if generation_of(name)[1] else folder.parent
