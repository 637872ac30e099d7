"""What the documents quote is what the program says, and what they show runs."""

import itertools
import re
import shlex
import shutil
import tomllib

import pytest
import typer.main
import yaml
from support.instant import finished
from support.paths import MODELS, ROOT

from autotune.cli.app import COMMANDS, app, imported
from autotune.report.data import StudyReport, title
from autotune.report.page.content import PICK_NOTES
from autotune.space.candidate import Candidate
from autotune.study.spec.spec import StudySpec
from autotune.trial.result import Outcome

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in (ROOT / "autotune").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
# Commands whose lines in the documents are run as they stand, on studies that are made for them.
CHEAP = (
    "init", "ls", "cp", "status", "explain", "export", "report", "diagnose", "history", "schedule add", "schedule list",
    "schedule export",
)  # fmt: skip
COMMAND = typer.main.get_command(app)


def rows(heading: str) -> list[str]:
    """First cells of the table under a heading."""
    section = TROUBLES.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.split("|")[1].strip() for line in lines[2:]]


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in some languages."""
    return [
        body
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        if language in languages
    ]


def lines() -> list[tuple[str, tuple[str, ...]]]:
    """Every command line of ours that a block shows, with its page, split as a shell does."""
    found = []
    for page, text in TEXTS.items():
        for block in blocks(text, "", "sh", "bash", "console"):
            shown = [line.strip().removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
            found += [
                (page, tuple(shlex.split(line, comments=True)[1:])) for line in shown if line.startswith("autotune ")
            ]
    return list(dict.fromkeys(found))


def command(words: tuple[str, ...]):
    """The command that a line calls, its name, and its arguments."""
    if words and words[0].startswith("-"):
        return COMMAND, "", list(words)
    path = next((path for path in (" ".join(words[:2]), words[0]) if path in COMMANDS), None)
    assert path is not None, f"autotune {' '.join(words)}: no such command"
    return imported(path), path, list(words[len(path.split()) :])


def flags(name: str) -> set[str]:
    """The flags of a command, or of all below it."""
    paths = [path for path in COMMANDS if path.split()[0] == name]
    found = [each for path in paths for each in imported(path).params] or COMMAND.params
    return {"--help", "-h"}.union(*([*option.opts, *option.secondary_opts] for option in found))


@pytest.mark.parametrize("heading", ["Nothing runs", "A study does not go on"])
def test_messages_are_quoted_as_they_are_said(heading):
    quoted = [found[1] for cell in rows(heading) if (found := re.fullmatch(r"`(.+)`", cell))]
    assert len(quoted) >= 2
    # A message may be put together: `cannot be {how}`.
    missing = [
        text for text in quoted if text not in SOURCES and text.rsplit(" run as it is", 1)[0] + " {how}" not in SOURCES
    ]
    assert not missing


def test_every_outcome_that_is_not_plain_is_explained():
    assert {cell.strip("`") for cell in rows("Trials fail")} == {str(o) for o in Outcome} - {"complete"}


@pytest.mark.parametrize(
    ("page", "words"), lines(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else value
)
def test_every_command_line_is_understood(page, words):
    found, name, arguments = command(words)
    with found.make_context(name, arguments):
        pass


def test_every_command_that_a_sentence_names_has_the_flags_that_it_is_named_with():
    seen, wrong = 0, []
    for page, text in TEXTS.items():
        plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for shown in re.findall(r"`autotune ([^`]+)`", plain):
            seen += 1
            # What stands after `--` and in quotation marks is the script's.
            ours = re.sub(r'"[^"]*"', "", shown.split(" -- ")[0])
            name = ours.split()[0]
            known = name.startswith("-") or any(path.split()[0] == name for path in COMMANDS)
            if not known or not set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", ours)) <= flags(name):
                wrong.append(f"{page}: autotune {shown}")
    assert seen > 30 and wrong == []


def test_the_reference_has_every_command_and_the_readme_leads_there():
    text = TEXTS["docs/reference.md"]
    assert [path for path in COMMANDS if f"`autotune {path}" not in text] == []
    assert "(docs/reference.md)" in TEXTS["README.md"]


def test_the_cheap_ones_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    chosen = [words for _, words in lines() if command(words)[1] in CHEAP]
    assert len(chosen) >= 12
    about = ("init", "ls", "cp")
    for study in {command(words)[2][0] for words in chosen if command(words)[1] not in about and command(words)[2]}:
        finished(tmp_path / "studies", study, trials=3)
    for words in chosen:
        status = COMMAND.main(args=list(words), prog_name="autotune", standalone_mode=False)
        assert not status, words
        said = capsys.readouterr()
        assert said.out or said.err, words


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if blocks(text, "python")])
def test_python_is_python(page):
    for block in blocks(TEXTS[page], "python"):
        compile(block, page, "exec")


def test_files_are_read_as_they_are_shown(tmp_path):
    shutil.copyfile(MODELS / "ok.py", tmp_path / "model.py")
    seen = []
    for block in blocks(TEXTS["docs/guide.md"], "yaml"):
        name = block.removeprefix("# ").split("\n")[0]
        path = tmp_path / name
        path.write_text(block)
        seen.append(name)
        if name == "study.yaml":
            stated = yaml.safe_load(block)
            assert {"target"} < set(stated) and StudySpec.of(path).space.parameters
        else:
            key = "objectives" if "metric:" in block else "space"
            StudySpec.of(tmp_path / "model.py", {key: str(path)})
    assert len(seen) == 4 and seen.count("study.yaml") == 2


def test_fields_and_metrics_that_the_pages_list_are_all_there_are():
    from autotune.scoring.metrics import METRICS
    from autotune.space.candidate import FIELDS
    from autotune.study.spec.presets import presets

    assert [name for name in FIELDS if f"`{name}`" not in TEXTS["docs/guide.md"]] == []
    assert [name for name in (*METRICS, *presets("objectives")) if f"`{name}`" not in TEXTS["docs/guide.md"]] == []
    assert [name for name in presets("search_spaces") if name not in TEXTS["docs/guide.md"]] == []


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    targets = [
        target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", target)
    ]
    assert [target for target in targets if target and not (ROOT / page).parent.joinpath(target).exists()] == []


def test_modules_that_pages_name_by_their_folder_are_there():
    files = [path.as_posix() for name in ("autotune", "benchmarks", "tests") for path in (ROOT / name).rglob("*.py")]
    named = {(page, path) for page, text in TEXTS.items() for path in re.findall(r"[ `](\w+/[\w/]+\.py)\b", text)}
    gone = {(page, path) for page, path in named if not any(file.endswith(f"/{path}") for file in files)}
    assert len(named) > 30 and gone == {
        ("docs/tutorial.md", "beginner/model.py")
    }  # which `autotune init beginner` writes


ROW = re.compile(r" +(\d+) +([\d.,]+) +([\d.]+)x  (.+)")


def shown_study(block: str) -> StudyReport:
    """The study that a terminal's answer speaks of: its table's trials, and the recommended one's interval."""
    space = StudySpec.of(ROOT / "studies" / "code-gpt" / "study.yaml").space
    knobs = [[(p.name, value) for value in p.choices] for p in space.parameters]
    by_words = {each.describe(): each for each in (Candidate.of(dict(found)) for found in itertools.product(*knobs))}
    table = re.sub(r"\n {20,}", " ", block.partition("\n\n")[0])
    low, high = map(float, re.search(r"\(([\d.]+)\s+to\s+([\d.]+)\)", block).groups())
    points, picks = [], {}
    for number, rate, factor, text in ROW.findall(table):
        configuration, _, marks = text.partition("  <- ")
        gain = [float(factor), low, high]
        point = {
            "trial": int(number),
            "candidate": by_words[configuration].values(),
            "speedup": gain[0],
            "measurements": 3,
        }
        point |= {"reasons": ["why"]} | {
            "metrics": {"samples_per_s": float(rate)},
            "gains": {"samples_per_s": gain},
            "speedup_ci95": gain[1:],
        }
        points.append(point)
        picks |= {name: point for name in PICK_NOTES if title(name) in marks.split(", ")}
    study = {"name": "code-gpt", "objectives": ["samples_per_s"], "weights": {"samples_per_s": 1.0}}
    recommended = {
        "picks": dict(sorted(picks.items(), key=lambda each: [*PICK_NOTES].index(each[0]))),
        "baseline": points[-1],
    }
    return StudyReport(study=study, recommended=recommended, front=points, trials=points)


def test_the_output_in_the_readme_is_what_the_program_prints():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import face
    block = face.BLOCK.search(TEXTS["README.md"])[2]
    found = shown_study(block)
    assert len(found.table()) > 1 and len(found.picks) > 1
    assert face.output(found) == block


def test_every_page_is_found_from_the_readme():
    index = TEXTS["docs/decisions/README.md"]
    found = [page for page in TEXTS if f"({page})" in TEXTS["README.md"] or f"({page.rpartition('/')[2]})" in index]
    assert set(TEXTS) - set(found) == {"README.md"}


def test_decisions_are_numbered_without_gaps():
    numbers = [int(page[len("docs/decisions/") :][:4]) for page in sorted(TEXTS) if page.startswith("docs/decisions/0")]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_word_of_the_terminal_is_in_the_glossary():
    text = TEXTS["docs/glossary.md"]
    words = "baseline drop-in front pick finalist goodput headroom branch gate noise-scale within-noise gain measured-once MFU"
    words += " warm-server incumbent micro-batch"
    missing = [word for word in words.split() if word.replace("-", " ") not in text and word not in text]
    titles = [title(name) for name in PICK_NOTES]
    ends = [str(end).replace("_", " ") for end in Outcome]
    assert missing + [name for name in (*titles, *ends) if name not in text] == []


def named_packages(text: str) -> set[str]:
    """What a text tells to install by name from a package index: the first word that is no option and no path."""
    found = set()
    for said in re.findall(r"pip install ([^`\n#]+)", text.replace("--progress-bar off", "")):
        word = next((word for word in said.split() if not word.startswith("-")), "")
        plain = re.match(r"[\"']?([A-Za-z][\w-]*)", word)
        found |= {plain[1].lower()} if plain else set()
    return found


def test_no_text_installs_a_package_of_strangers():
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*own["dependencies"], *(each for extra in own["optional-dependencies"].values() for each in extra)]
    known = {re.match(r"[\w.-]+", each)[0].lower() for each in declared} | {
        "safetensors",
        "tabulate",
        "atheris",
        "pip-audit",
        "kubernetes",
        own["name"],
    }
    files = [*PAGES, ROOT / "Makefile", ROOT / "CHANGELOG.md", *(ROOT / "autotune").rglob("*.py")]
    files += [path for folder in ("tests", "benchmarks", "studies") for path in (ROOT / folder).rglob("*.py")]
    found = {name: path.name for path in files for name in named_packages(path.read_text())}
    assert not {name: path for name, path in found.items() if name not in known}
    assert own["name"] != "autotune"  # of somebody else
    assert named_packages("pip " + "install 'autotune[ray]'") == {"autotune"}
