"""The same trial has the same figures wherever they are shown."""

import csv
import json
import math
import random
import re
from html import unescape

import pytest
from support.instant import STEPS, Instant, report, runner_of

from autotune.cli.presets import answer_words
from autotune.report import load, readme
from autotune.report.dashboard.overlay import _trial_attrs, _values
from autotune.report.data import measured, times
from autotune.report.files import write_answer, write_report
from autotune.report.gains import pick_words, stated
from autotune.report.notebook import headline, lead
from autotune.report.page.render import studies
from autotune.report.readme import store_notes
from autotune.report.results import StudyResult
from autotune.report.tables import compared, overview
from autotune.study.storage import database, records
from autotune.study.storage.history import History
from autotune.study.storage.optuna_tables import note_of

RATE = "samples_per_s"


def noisy(candidate):
    """A trial on a machine whose trials scatter by 5 %."""
    whole = report(candidate)
    factor = math.exp(noise.gauss(0, 0.05))
    return report(candidate, step_times_s=[factor * step_s for step_s in whole.step_times_s])


noise = random.Random(5)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study with rounds, its report and its folder."""
    studies = tmp_path_factory.mktemp("studies")
    given = {"trials": 10, "finalists": 3, "repeats": 2, "objectives": ["latency", "throughput", "memory"]}
    runner_of(studies, Instant(noisy), **given).run()
    found = load.load("s", records.default_url(studies), studies / "s")
    list(write_answer(found, studies / "s"))
    write_report(found, studies / "s", single_file=False)
    return found, studies / "s"


def test_files_and_library_hold_the_same_numbers(study):
    found, folder = study
    front = {point["trial"]: point for point in json.loads((folder / "front.json").read_text())}
    recommended = json.loads((folder / "recommended.json").read_text())
    data = {row["trial"]: row for row in json.loads((folder / "report.json").read_text())["trials"]}
    lines = {int(row["trial"]): row for row in csv.DictReader((folder / "trials.csv").read_text().splitlines())}
    library = StudyResult(found)
    shown = [*front.values(), *recommended["picks"].values(), recommended["baseline"]]
    assert len({point["trial"] for point in shown}) > 2 and any(point["measurements"] > 2 for point in shown)
    for point in shown:
        row, line = data[point["trial"]], lines[point["trial"]]
        for name in ("metrics", "ci95", "gains", "luck", "speedup", "speedup_ci95"):
            assert point[name] == row[name]
        assert float(line[RATE]) == point["metrics"][RATE] and float(line["speedup"]) == point["speedup"]
        assert [float(line[f"{RATE}_{end}"]) for end in ("low", "high")] == point["ci95"][RATE]
        assert len(row["readings_s"]) == point["measurements"]
    for name, pick in library.picks.items():
        own = recommended["picks"][name]
        assert pick.scores[RATE].value == own["metrics"][RATE] and pick.speedup.value == own["speedup"]


def test_pages_and_notes_print_that_number(study):
    found, folder = study
    terminal, page = str(StudyResult(found)), (folder / "report.html").read_text()
    markdown, note = (folder / "README.md").read_text(), readme.study_note(found, None)
    for name, pick in found.picks.items():
        said = pick_words(found, [name], pick)
        assert said in note, name
        names = next(names for names, _ in found.picks_by_trial() if name in names)
        said = pick_words(found, names, pick)
        assert said in markdown and said in " ".join(terminal.split()), name
        assert said in page or times(pick["speedup"], "×") in page, name
    for point in found.table():
        row = next(row for row in found.trials if row["trial"] == point["trial"])
        rate = next(each for each in compared(found, row, [RATE]))
        cell = rate.scale.quantity(rate.value)
        assert cell in readme.trial_note(found, row, "")
        attrs = _trial_attrs(found, row)
        assert attrs["speed-up"] == round(point["speedup"], 3)
        assert attrs["step time (ms)"] == pytest.approx(1e3 * measured(row)["step_time_s"], rel=5e-3)
        line = next(line for line in terminal.splitlines() if re.match(rf"\s*{point['trial']}\s", line))
        assert times(point["speedup"]) in line


def test_plain_optuna_dashboard_and_the_first_page_say_the_same_sentence(study):
    found, folder = study
    url = records.default_url(folder.parent)
    opened = records.load_study(database.open_storage(url), "s")
    store_notes(opened, found)
    plain = note_of(records.storage_of(opened).get_study_system_attrs(records.study_id(opened))).text
    first = studies([{"name": "s", "optuna": "", "report": "", "headline": headline(found), "lead": lead(found)}])
    names = next(names for names, _ in found.picks_by_trial() if "recommended" in names)
    said = pick_words(found, names, found.picks["recommended"])
    assert said in plain and said in unescape(first)
    table = StudyResult(found).trials_dataframe()
    for point in found.table():
        assert table.loc[point["trial"], RATE] == point["metrics"][RATE]
    answer = unescape(StudyResult(found)._repr_html_())
    assert said in answer
    for row in overview(found)[1]:
        assert all(f">{cell}</td>" in answer for cell in row.line(overview(found)[0], "")[1:])


def test_speedup_interval_and_baseline_are_the_same_in_all_six_places(study):
    """Terminal, report, dashboard (study note), notebook, files and history; the interval too, and the baseline's values."""
    found, folder = study
    pick, base = found.picks["recommended"], found.baseline
    assert not found.is_baseline(pick)
    parts = stated(found, ["recommended"], pick)
    said = f"{times(parts.ratio)} ({parts.span})"
    row = kept(found, folder.parent)
    page = unescape((folder / "report.html").read_text())
    assert times(parts.ratio, "×") in page and parts.span in page
    places = {
        "terminal": " ".join(str(StudyResult(found)).split()),
        "note": readme.study_note(found, None),
        "files": (folder / "README.md").read_text(),
        "notebook": unescape(StudyResult(found)._repr_html_()),
        "first page": unescape(
            studies([{"name": "s", "optuna": "", "report": "", "headline": headline(found), "lead": ""}])
        ),
        "history": answer_words(row),
    }
    assert [place for place, text in places.items() if said not in text] == []
    cell = next(each for each in compared(found, base, [RATE])).scale.number(base["metrics"][RATE])
    own = overview(found)[1][-1]
    assert own.trial == base["trial"] and own.cells[RATE] == overview(found)[0][RATE].number(base["metrics"][RATE])
    places |= {"report": page}
    assert [place for place in ("terminal", "files", "notebook") if own.cells[RATE] not in places[place]] == []
    assert [place for place in ("report", "note") if cell not in places[place]] == []
    assert json.loads((folder / "recommended.json").read_text())["baseline"]["metrics"] == base["metrics"]


def kept(found, studies):
    """The study's recommendation as the history holds it, after two runs that found the same."""
    history = History(database.open_storage(records.default_url(studies)).engine)
    for words in ("", *[readme.recommended_words(found)] * 2):
        history.recommended("s", 0, found.picks.get("recommended"), words)
    [row] = history.recommendations("s")
    return row


def test_history_and_repr_tell_the_gain_of_a_goal_and_its_doubt(tmp_path):
    """Of the goal `memory` they told the loss of throughput alone, and not that it was measured once."""

    def machine(candidate):
        step_s, size = (0.021, 6) if candidate.checkpoint_every else (0.02, 10)
        times = [step_s * (1 + 0.003 * math.sin(7 * i)) for i in range(STEPS)]
        return report(candidate, step_times_s=times, peak_memory_bytes={"steady": size * 2**30})

    space = [{"checkpoint_every": [0, 1]}]
    runner_of(tmp_path, Instant(machine), trials=4, repeats=0, goal="memory", space=space).run()
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s")
    said = pick_words(found, ["recommended"], found.picks["recommended"])
    assert said.startswith("0.60x the baseline's peak memory, at 0.9") and said.endswith("measured once")
    assert answer_words(kept(found, tmp_path)).endswith(f": {said}") and said in repr(StudyResult(found))


def test_the_dashboard_lists_the_same_values(study):
    found, _ = study
    for number in found.compared:
        assert _values(found, number) == [found.points[number]["metrics"][name] for name in found.objectives]


def test_the_ratio_of_two_printed_values_is_the_printed_gain(study):
    found, _ = study
    base = found.baseline["metrics"]
    assert found.trials[0]["metrics"] == base
    for row in found.points.values():
        assert row["speedup"] == pytest.approx(row["metrics"][RATE] / base[RATE])
        low, high = row["speedup_ci95"]
        assert low <= row["speedup"] <= high
