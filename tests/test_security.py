"""What docs/security.md promises: nothing is executed but the user's own target, and names, pages and databases lead nowhere else."""

import ast
import functools
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.study_report import EVIL, Tags, data_of, study_report, with_picks

import autotune
from autotune import session
from autotune.errors import UserError
from autotune.executors.local import LocalExecutor
from autotune.executors.ssh import read_hostfile
from autotune.report import readme
from autotune.report.dashboard.server import LEAST_TOKEN, Application, is_strong, make_server, new_token
from autotune.report.page import render
from autotune.retune.schedule import Daemon, Schedule
from autotune.study.spec import spec
from autotune.study.spec.presets import find_preset
from autotune.study.spec.spec import StudySpec, check_name
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import History
from autotune.study.storage.tables import SCHEDULE
from autotune.system.machine import lock_path

ROOT = Path(autotune.__file__).parent
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
# In each name below that is refused, or allowed in some files alone; most files have none, and parsing them takes seconds.
LOOKED_FOR = (
    rf"\b({'|'.join(UNPICKLERS)})\b|\b(torch\.load|yaml\.|os\.system|os\.popen|shell=)|(?<!\.)\b(exec|eval|compile)\b"
)


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of each file of the package that has a word which is looked for."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    return {file: ast.parse(text) for file, text in texts.items() if re.search(LOOKED_FOR, text)}


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """File and node, of every node of these trees."""
    return [(file, node) for file, tree in sources().items() for node in ast.walk(tree)]


def dotted(node: ast.AST) -> str:
    """A name as it is written; what is no name, a question mark. `ast.unparse` takes 5 s for all calls."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@functools.cache
def calls():
    """File, function as it is written, and its constant keywords, of every call in the package."""
    return [
        (
            file,
            dotted(node.func),
            {k.arg: repr(k.value.value) for k in node.keywords if isinstance(k.value, ast.Constant)},
        )
        for file, node in nodes()
        if isinstance(node, ast.Call)
    ]


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [each.name for each in names]
        case ast.ImportFrom(module=str(module)):
            return [module]
    return []


def test_nothing_is_unpickled():
    imports = {(file, name.partition(".")[0]) for file, node in nodes() for name in imported(node)}
    assert not {found for found in imports if found[1] in UNPICKLERS}
    loads = [(file, keywords.get("weights_only")) for file, name, keywords in calls() if name == "torch.load"]
    # A DeepSpeed checkpoint is a pickle of DeepSpeed's own, which the user names with --from-checkpoint, or which the user's
    # script loads itself; docs/security.md says so.
    assert sorted(loads, key=str) == [
        ("worker/model/weights.py", "False"), ("worker/model/weights.py", "True"),
        ("worker/script/isolation.py", "False"), ("worker/script/isolation.py", "True"), ("worker/script/isolation.py", "True"),
    ]  # fmt: skip


def test_yaml_is_read_in_one_place_and_as_plain_data():
    users = {file for file, name, _ in calls() if re.fullmatch(r"yaml\.(safe_|full_|unsafe_)?load(_all)?", name)}
    assert users == set()
    attributes = ((file, node) for file, node in nodes() if isinstance(node, ast.Attribute))
    loaders = {file for file, node in attributes if re.fullmatch(r"yaml\.\w*Loader", dotted(node))}
    assert loaders == {"study/spec/yaml_file.py"}


def test_nothing_but_the_users_own_target_and_commands_is_executed():
    executes = {
        (file, name) for file, name, _ in calls() if name in ("exec", "eval", "compile", "os.system", "os.popen")
    }
    assert executes == {("worker/script/execute.py", "exec"), ("worker/script/execute.py", "compile")}
    assert {file for file, _, keywords in calls() if keywords.get("shell") == "True"} == {
        "retune/retuning.py"
    }  # --on-change COMMAND


# Names.

NAMES = [
    "..", ".", "../x", "/etc", "a/b", "a\\b/..", "a\0b", ".hidden", "-rf", "--help", "", " ", "a b", "x" * 201, "a\n", "~", "~root",
    "$HOME", "a;b", "é", "a/../b", "COM1:", "{a}", "*",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_study_s_name_leads_to_no_other_folder(tmp_path, name):
    with pytest.raises(ValueError, match="name a study"):
        check_name(name)
    with pytest.raises(UserError):
        session.open_study(name)
    with pytest.raises(UserError):
        records.study_folder(name, tmp_path, "sqlite:///x.db")


@given(st.text())
def test_what_names_a_study_is_a_folder_right_below_the_studies(name):
    try:
        check_name(name)
    except ValueError:
        return
    assert (Path("/studies") / name).resolve().parent == Path("/studies") and not name.startswith((".", "-"))


@pytest.mark.parametrize("name", ["autotune.db", "x.db-wal", "small.retune-1", "X.DB"])
def test_a_name_that_means_something_else_is_refused_where_a_study_is_made(tmp_path, name):
    (tmp_path / "model.py").write_text("def model(): ...\ndef data(): ...\n")
    with pytest.raises(UserError, match="choose one with another ending"):
        StudySpec.of(tmp_path / "model.py", {"name": name})


@pytest.mark.parametrize("file", ["-x.py", "...py", "日本.py", "autotune .py", "a" * 240 + ".py"])
def test_a_study_that_is_named_for_its_file_has_a_name_that_can_be(tmp_path, file):
    (tmp_path / file).write_text("def model(): ...\ndef data(): ...\n")
    check_name(StudySpec.of_target(tmp_path / file).name)


@pytest.mark.parametrize("name", ["../zero", "..", "/etc/passwd", "zero/../../x", "zero\0"])
def test_a_preset_s_name_leads_to_no_preset_elsewhere(tmp_path, name):
    try:
        found = find_preset("search_spaces", name, tmp_path, "--space")
    except UserError:
        return
    assert "/" in name and found == Path(
        os.path.abspath(tmp_path / name)
    )  # a path that the user wrote, not one of our presets


def test_a_host_that_is_an_option_of_ssh_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("-oProxyCommand=touch${IFS}pwned slots=1\n")
    with pytest.raises(UserError, match=r"hosts:1: `HOST slots=N` is needed"):
        read_hostfile(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("ann@node-1.cluster slots=1\n10.0.0.7\n[::1]\nfe80::1%eth0\n")
    assert len(read_hostfile(tmp_path / "hosts")) == 4


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_lock_lies_in_a_folder_that_only_the_user_can_write_to(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    with LocalExecutor([], tmp_path / "log").turn(pytest.fail):
        folder = lock_path().parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        os.chmod(folder, mode)
    with pytest.raises(UserError, match="only you can write to"), LocalExecutor([], tmp_path / "log").turn(pytest.fail):
        pass


def test_a_lock_is_not_taken_through_a_link_to_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    (tmp_path / "precious").mkdir()
    (tmp_path / f"locks-{os.getuid()}").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="only you can write to"), LocalExecutor([], tmp_path / "log").turn(pytest.fail):
        pass
    assert not os.listdir(tmp_path / "precious")


def test_a_cache_that_cannot_be_written_ends_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file" / "cache"))
    with (
        pytest.raises(UserError, match="Set AUTOTUNE_CACHE to a folder"),
        LocalExecutor([], tmp_path / "log").turn(pytest.fail),
    ):
        pass


# What a database holds may have been written by somebody else.


def in_database(tmp_path, study: str) -> History:
    """A database with a schedule that no command of ours would have made."""
    history = History(open_storage(records.default_url(tmp_path / "studies")).engine)
    with history.engine.begin() as connection:
        connection.execute(
            SCHEDULE.insert().values(study=study, every_s=60.0, on_change=False, created_at=0.0, next_run_at=0.0)
        )
    return history


@pytest.mark.parametrize("study", ["--on-change=touch pwned", "x\n* * * * * touch pwned", "../x", "$(touch pwned)"])
def test_a_schedule_that_another_program_wrote_runs_and_exports_nothing(tmp_path, study):
    history, said = in_database(tmp_path, study), []
    daemon = Daemon(
        records.default_url(tmp_path / "studies"), tmp_path / "studies", said.append, ["touch", str(tmp_path / "pwned")]
    )
    daemon.look()
    assert daemon.leads and "skipped: schedule 1" in said[-1] and not (tmp_path / "pwned").exists()
    with pytest.raises(UserError, match="schedule remove 1"):
        [Schedule.of(row) for row in history.schedules()]


# Pages.


def evil_report():
    """A report whose every text, name and parameter tries to be more than that."""
    report = study_report(12)
    evil = f"{EVIL}{{{{7*7}}}}`"
    knob = f"optimizer.params.{EVIL}"
    trials = [
        t | {"candidate": {**t["candidate"], knob: evil}, "reason": evil, "caveats": [evil], "phase": evil}
        for t in report.trials
    ]
    front = [point | {"candidate": {**point["candidate"], knob: evil}} for point in report.front]
    picks = {
        name: pick
        | {
            "candidate": {**pick["candidate"], knob: evil},
            "reasons": [evil],
            "script_side_changes": [evil, f"`{evil}`"],
        }
        for name, pick in report.picks.items()
    }
    return replace(
        with_picks(report, **picks), trials=trials, front=front, study={**report.study, "name": EVIL, "target": evil, "ended": evil},
        environment={**report.environment, "device_name": evil, "versions": {evil: evil}},
    )  # fmt: skip


def test_no_text_name_or_parameter_gets_out_of_its_place_in_the_page():
    page = render.render(evil_report())
    tags = Tags(page)
    assert [tag for tag, _ in tags.found].count("script") == 3 and "img" not in [tag for tag, _ in tags.found]
    assert not any(
        name.startswith("on") or str(value).startswith("javascript:")
        for _, found in tags.found
        for name, value in found.items()
    )
    assert data_of(page)["figures"]["front-plot"] and "{{7*7}}" in page  # nothing fills templates in


def test_nothing_in_the_readme_and_the_notes_is_html():
    report = evil_report()
    for text in (
        readme.render(report),
        readme.study_note(report, lambda name: f"/{name}"),
        readme.trial_note(report, report.trials[0], "/x"),
    ):
        outside = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        assert not re.findall(r"(?<!\\)<(?:img|script|/script)", outside)


def test_what_reasons_have_in_backticks_is_code_in_the_readme_as_in_the_page():
    report = study_report(3)
    said = {name: pick | {"reasons": ["put `a<b` for *c*"]} for name, pick in report.picks.items()}
    assert "- put `a<b` for \\*c\\*" in readme.render(with_picks(report, **said))


def test_scripts_write_no_text_as_html():
    for path in (ROOT / "report").glob("*.js"):
        writes = re.findall(
            r"(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b.*", path.read_text()
        )
        assert all("${swatch}</svg>" in line for line in writes), writes  # drawn by ourselves, of no text


# The dashboard.


@pytest.mark.parametrize(
    "host",
    [
        "[",
        "[::1",
        "]",
        "a" * 5000,
        "127.0.0.1@evil.example",
        "evil.example#127.0.0.1",
        "\x00",
        "127.0.0.1.evil.example",
    ],
)
def test_a_host_that_is_none_is_not_ours(host):
    application = Application.__new__(Application)
    application._names, application._local = {"localhost", "127.0.0.1"}, True
    assert not application._knows(host)
    assert application._knows("127.0.0.1:8080") and application._knows("[::1]:1")


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "é" * 70, "\udcff", "::zz"], ids=ascii)
def test_an_address_that_is_none_is_refused_in_a_sentence(tmp_path, host):
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install -e '.[dashboard]'")
    url = records.default_url(tmp_path)
    open_storage(url)
    with pytest.raises(UserError, match="no address of this machine"):
        make_server(url, tmp_path, host, 0, "a-token-of-sixteen")


@pytest.mark.parametrize(
    "token", ["", "short", "x" * (LEAST_TOKEN - 1), "sixteen letters;", "sixteen-letters\n", "a" * 15 + "é"]
)
def test_a_token_that_is_quickly_guessed_or_breaks_a_cookie_is_refused(token):
    assert not is_strong(token)
    assert is_strong(new_token()) and new_token() != new_token()


def test_the_page_states_what_is_masked_and_where_it_is_not():
    page = (ROOT.parent / "docs" / "security.md").read_text()
    for promise in (
        "environment.json",
        "request.json",
        "rank-N.log",
        "--from-checkpoint",
        "AUTOTUNE_DASHBOARD_TOKEN",
        "make audit",
        "--on-change",
    ):
        assert promise in page, promise
    assert spec.NO_SECRET.split(",")[0] in page
