"""The commands `init` (write a first study), `ls` (list presets, samplers, ...) and `cp` (copy a preset)."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import AsJson, Storage, check_free
from autotune.errors import UserError, nearest
from autotune.system import files


def init(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the files.")] = Path()) -> None:
    """Write the two files of a first study."""
    templates = Path(__file__).parent / "_templates"
    names = ("model.py", "study.yaml")
    for name in names:
        if (folder / name).exists():
            raise UserError(f"{folder / name} exists; name another folder: autotune init FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        files.write_text(folder / name, (templates / name).read_text())
        print(f"wrote {folder / name}")
    study = shlex.quote(str(folder / "study.yaml"))
    print(f"Next: autotune check {study}, then autotune run {study}")


def ls(
    what: Annotated[
        str, typer.Argument(metavar="spaces|goals|objectives|samplers|metrics|studies", help="What to list.")
    ] = "studies",
    storage: Storage = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the presets, goals, samplers, metrics or studies."""
    from autotune.scoring.metrics import METRICS
    from autotune.search import SAMPLERS
    from autotune.study.spec import presets

    rows: list[tuple[str, str]]
    match what:
        case "spaces" | "objectives":
            kind: presets.Kind = "search_spaces" if what == "spaces" else "objectives"
            rows = [(name, presets.preset_summary(path)) for name, path in presets.presets(kind).items()]
        case "goals":
            rows = [(name, f"{each.means} ({', '.join(each.weights)})") for name, each in presets.GOALS.items()]
        case "samplers":
            rows = list(SAMPLERS.items())
        case "metrics":
            rows = [(name, f"{each.label}, {each.unit}, {each.direction}") for name, each in METRICS.items()]
        case "studies":
            rows = _studies(storage)
        case _:
            known = ("spaces", "goals", "objectives", "samplers", "metrics", "studies")
            raise UserError(f"ls: unknown {what!r}.{nearest(what, known)} Known: {', '.join(known)}")
    if as_json:
        print(json.dumps([dict(zip(("name", "description"), row, strict=True)) for row in rows], indent=1))
        return
    if not rows:
        print("autotune: no study yet; `autotune run TARGET` begins one", file=sys.stderr)
    width = max((len(name) for name, _ in rows), default=0)
    for name, said in rows:
        print(f"{name:<{width}}  {said}")


def _studies(storage: str | None) -> list[tuple[str, str]]:
    """Each study with its answer: what is recommended, what that gains, and since when."""
    from autotune.cli.status import running_studies
    from autotune.retune.schedule import moment
    from autotune.session import STUDIES, default_storage, open_history
    from autotune.study.storage import database, records
    from autotune.study.storage.generations import generation_of

    url = storage or default_storage()
    opened = database.open_storage(url, create=False)
    found = {row["study"]: row for row in reversed(open_history(url, opened).recommendations())}
    running, rows = running_studies(STUDIES), list[tuple[str, str]]()
    begun = () if storage else running  # until its first trial has a row, a study is not in the database
    own = {
        name for name in records.study_names(opened) if not generation_of(name)[1]
    }  # a re-tuning's answer is its study's
    for name in sorted({*own, *begun}):
        row = found.get(name)
        unsaid = f"no answer yet; `autotune status {name}` says what was found so far"  # its run ended, or goes on
        answer = unsaid if row is None else f"{answer_words(row)}; {moment(row['at'])}"
        rows.append((name, f"{answer}; process {running[name]} runs it now" if name in running else answer))
    return rows


def answer_words(row: Mapping[str, Any]) -> str:
    """A recommendation of the history in words: the configuration, and what it gains as the answer said it."""
    from autotune.report.data import words

    return f"{words(json.loads(row['candidate']))}: {row['words']}"


def cp(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Name of a search space or objective.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
) -> None:
    """Copy a preset to a file of the user's."""
    from autotune.study.spec import presets

    every = {**presets.presets("search_spaces"), **presets.presets("objectives")}
    if preset not in every:
        raise UserError(f"cp: unknown preset {preset!r}.{nearest(preset, every)} Known: {', '.join(every)}")
    if file.is_dir():
        file = file / f"{preset}.yaml"
    check_free("cp", file)
    files.write_text(file, every[preset].read_text(), named=True)
    flag = "--space" if preset in presets.presets("search_spaces") else "--objective"
    print(f"wrote {file}; use it with {flag} {shlex.quote(str(file))}")


def schema() -> None:
    """Print the JSON schema of `study.yaml`."""
    from autotune.study.spec.schema import study_schema

    print(json.dumps(study_schema(), indent=1))
