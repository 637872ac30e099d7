"""The commands that keep an answer right, as a user types them, on a study whose trials took no time."""

import errno
import json
import shutil
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy
from support.instant import Instant, Watcher, answered, plan_of, spec_of
from support.paths import MODELS

from autotune import session
from autotune.cli.history import delete
from autotune.cli.history import history as list_history
from autotune.cli.retune import changes, retune
from autotune.cli.schedule import schedule_add, schedule_export, schedule_list, schedule_remove, schedule_run
from autotune.cli.status import status
from autotune.errors import Unavailable, UserError
from autotune.report import load
from autotune.report.next_steps import reproduce
from autotune.retune import schedule
from autotune.retune.decision import Decision, RetuneVerdict
from autotune.retune.retuning import ASKED, CommandError, RetuneRequest
from autotune.study import fingerprint
from autotune.study.events import Broadcast
from autotune.study.folder import retuning_path
from autotune.study.lock import study_lock
from autotune.study.runner import Runner
from autotune.study.setup import engine
from autotune.study.setup.request import StudyRequest
from autotune.study.spec import yaml_file
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import History
from autotune.study.storage.tables import MIGRATIONS
from autotune.trial.command import Invocation
from autotune.trial.folder import write_record

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return answered(tmp_path_factory.mktemp("finished"), trials=4, objectives=["throughput"])


@pytest.fixture(autouse=True)
def studies(finished, tmp_path, monkeypatch):
    """A working directory with that study."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(finished, tmp_path / "studies")


def known(studies):
    return History(open_storage(records.default_url(studies)).engine)


# Schedules.


def test_a_schedule_is_added_listed_and_removed(studies, capsys):
    schedule_add("s", "7d", on="environment-change")
    assert "schedule 1: study s every 7 d, if the environment has changed; first at " in capsys.readouterr().out
    schedule_add("s", "1w", on="environment-change")
    assert capsys.readouterr().out.startswith("schedule 1 is there already: study s every 7 d, if the environment")
    schedule_list(as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["study"] == "s" and row["every_s"] == 7 * 86400 and 0 < row["next_run_at"] - time.time() <= 7 * 86400
    schedule_remove(1)
    with pytest.raises(UserError, match="there is no schedule 1"):
        schedule_remove(1)


def test_schedules_in_the_database_that_a_study_states_are_run_without_naming_it(
    studies, tmp_path, capsys, monkeypatch
):
    """`schedule run` looked beside the studies alone: there was no database there, or one without the schedule."""
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    for path in studies.glob("autotune.db*"):
        path.rename(tmp_path / path.name)
    url = f"sqlite:///{tmp_path}/autotune.db"
    (studies / "s" / "study.yaml").write_text(f"target: {MODELS / 'ok.py'}\nname: s\nstorage: {url}\n")
    served = []
    monkeypatch.setattr(schedule.Daemon, "run", lambda daemon: served.extend(daemon.history.schedules()))
    schedule_add("s", "7d")
    assert "`autotune schedule run` keeps it" in capsys.readouterr().err
    schedule_run()
    assert [row["study"] for row in served] == ["s"]
    open_storage(records.default_url(studies))  # of other studies
    schedule_add("s", "8d")
    assert "`autotune schedule run --storage URL` keeps it" in capsys.readouterr().err
    monkeypatch.setenv("AUTOTUNE_STORAGE", url)
    schedule_add("s", "9d")
    assert "`autotune schedule run` keeps it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: schedule_add("s", "7d", on="sundays"), "only environment-change"),
        (lambda: schedule_add("other", "7d"), "no study 'other'.*Known: s"),
        (lambda: schedule_export(cron=True), "there is no schedule to export"),
        (lambda: schedule_export("other", cron=True), "no study 'other'.*Known: s"),
        (lambda: schedule_export(cron=True, k8s=True), "give one of --cron"),
        (lambda: retune("s", if_due=True), "has no schedule, so it is never due"),
        (lambda: retune("s", if_due=True, force=True), "one of --if-due"),
        (lambda: retune("other"), "no study 'other'"),
        (lambda: retune("s"), "study.yaml is missing"),
        (lambda: retune("s", checkpoint=Path("none")), "there is no such folder"),
        (lambda: list_history("s", "weather"), "unknown 'weather'"),
        (lambda: delete("s"), "autotune delete s --yes"),
    ],
)
def test_what_the_user_got_wrong_is_said_in_a_sentence(call, said):
    with pytest.raises(UserError, match=said):
        call()


def test_more_ranks_than_the_machine_holds_are_a_mistake_and_no_decision(studies, monkeypatch):
    """A failed re-tuning was kept in the history, and the exit status was that of one."""
    monkeypatch.setattr(session.OpenStudy, "spec", lambda *_: SimpleNamespace(runs_elsewhere=False))
    with pytest.raises(UserError, match="--ranks: 999 ranks are more than this machine can hold"):
        retune("s", ranks=999)
    assert known(studies).decisions() == []


def test_what_is_not_due_is_over_at_once(studies, capsys):
    schedule_add("s", "7d")
    assert retune("s", if_due=True) == 0
    assert "is not due; next: " in capsys.readouterr().err
    assert known(studies).decisions() == []


def test_a_study_that_cannot_be_read_stays_due(studies):
    """Its schedule went on to the next period, so that a model.py that was broken for an hour cost a week."""
    schedule_add("s", "7d")
    known(studies).update_schedule(1, next_run_at=0.0)
    with pytest.raises(UserError, match=r"study\.yaml is missing"):
        retune("s", if_due=True)
    assert known(studies).schedules()[0]["next_run_at"] == 0.0 and known(studies).decisions("s") == []


def test_what_is_due_on_a_change_waits_for_one_and_is_due_again_a_period_later(studies, capsys, monkeypatch):
    schedule_add("s", "7d", on="environment-change")
    known(studies).update_schedule(1, next_run_at=0.0)
    kept = records.record(records.load_study(open_storage(records.default_url(studies)), "s"))
    monkeypatch.setattr(fingerprint, "here", lambda *_: fingerprint.Fingerprint.of(kept))
    assert retune("s", if_due=True) == 0
    assert "nothing has changed since" in capsys.readouterr().err
    assert time.time() < known(studies).schedules()[0]["next_run_at"] <= time.time() + 7 * 86400


def test_the_decision_can_be_read_where_the_users_command_has_failed(studies, capsys, monkeypatch):
    """Nothing was printed but that it had failed: a program that reads `--json` found no decision."""

    def retuned(*_):
        decision = Decision(verdict=RetuneVerdict.IMPROVED, reason="is better", generation=1, folder=studies)
        raise CommandError("--on-change ended with status 3", decision)

    monkeypatch.setattr("autotune.cli.retune._retuned", retuned)
    assert retune("s", as_json=True) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "improved" and "status 3" in printed.err


def test_status_asks_no_more_about_a_change_that_a_retuning_has_looked_at(studies, capsys, monkeypatch):
    """It asked whether the answer is still right, after `retune` had said that it is."""
    kept = records.record(records.load_study(open_storage(records.default_url(studies)), "s"))
    now = fingerprint.Fingerprint(values={**fingerprint.Fingerprint.of(kept).values, "target": "edited"})
    monkeypatch.setattr(fingerprint, "here", lambda *_: now)
    status("s", once=True)
    said = capsys.readouterr().out
    assert "text of the target has changed" in said and "autotune run" not in said
    history = known(studies)
    history.decide("s", history.begin("s", "asked"), verdict="unchanged", evidence={"looked_at": now.values})
    status("s", once=True)
    said = capsys.readouterr().out
    assert "changed since" not in said and "autotune run" not in said


def test_a_study_that_is_being_run_is_left_to_whoever_runs_it(studies, capsys):
    schedule_add("s", "7d")
    known(studies).update_schedule(1, next_run_at=0.0)
    with study_lock(studies / "s"):
        assert retune("s", if_due=True) == 0
        assert "is being run by process" in capsys.readouterr().err
        with pytest.raises(UserError, match="is being run by process"):
            retune("s")
    assert known(studies).schedules()[0]["next_run_at"] == 0.0  # still due


# Changes, history, the end.


def test_what_changed_is_told_without_loading_the_model(studies, capsys):
    changes("s", quick=True)
    said = capsys.readouterr().out
    assert "device: stub, now " in said


def test_the_history_lists_every_trial_with_its_environment(studies, capsys):
    list_history(what="measurements", limit=100, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["role"] for row in rows} == {"baseline", "search"} and [row["trial"] for row in rows] == [3, 2, 1, 0]
    assert all(row["environment"]["device_name"] == "stub" and row["study"] == "s" for row in rows)
    list_history("s", "recommendations")
    assert "the baseline's throughput" in capsys.readouterr().out


def test_a_study_that_was_never_retuned_has_a_history(studies, capsys):
    list_history("s")
    assert "s recommends trial" in capsys.readouterr().out
    known(studies).begin("s", "due")
    list_history()
    newest, before = capsys.readouterr().out.splitlines()
    assert "due: under way" in newest and "s recommends trial" in before
    list_history("s", as_json=True)
    assert [row["cause"] for row in json.loads(capsys.readouterr().out)] == ["due"]


def test_a_retuning_reads_the_users_own_file_and_its_options(studies, tmp_path):
    """An edited file, the options of the run, also where they are the defaults, and those of the re-tuning; an edited copy goes first."""
    own, folder = tmp_path / "mine.yaml", studies / "s"
    own.write_text(f"target: {MODELS / 'ok.py'}\nname: s\ntrials: 5\nranks: 2\nexecutor: slurm\n")
    given = {"trials": 7, "storage": None, "executor": "local"}
    session._keep_spec(
        StudyRequest(spec=StudySpec.of(own, given), target=own, overrides=given, folder=folder, executor=Instant())
    )
    own.write_text(own.read_text() + "repeats: 4\nspace: [{zero_stage: [0, 3]}]\n")
    spec = session.open_study("s").spec({"ranks": 3, "from_checkpoint": None})
    assert (spec.trials, spec.repeats, spec.ranks, spec.name, spec.executor) == (7, 4, 3, "s", "local")
    assert [each.name for each in spec.space.parameters] == ["zero_stage"]
    copy = folder / "study.yaml"
    copy.write_text(copy.read_text().replace("repeats: ", "repeats: 1"))
    assert session.open_study("s").spec().repeats not in (4, StudySpec.of(own, given).repeats)
    own.unlink()
    assert session.open_study("s").spec().trials == 7


def test_a_retuning_runs_a_command_with_the_arguments_that_were_appended_to_it(studies, tmp_path):
    """It ran the command of the user's own file without them, which is another training."""
    own, folder, script = tmp_path / "mine.yaml", studies / "s", MODELS / "scripts" / "dict_config.py"
    own.write_text("command: python raw.py\nname: s\n")
    start = Invocation(
        script=str(script), working_dir=str(script.parent), arguments=("--lr", "1"), command="python raw.py --lr 1"
    )
    spec, given = StudySpec.of_command(start, {"command": start.command}, own), {"script_args": ("--lr", "1")}
    session._keep_spec(StudyRequest(spec=spec, target=own, overrides=given, folder=folder, executor=Instant()))
    assert session._stated_in(folder) == (folder / "study.yaml", {})
    assert f"command: {start.command}" in (folder / "study.yaml").read_text()


@pytest.mark.cells(1)
@pytest.mark.parametrize("linked", ["before it was tuned", "later"])
def test_a_studys_files_are_found_where_a_link_leads_to_its_folder(studies, tmp_path, linked):
    """`..` was followed from where the link leads: an edited model was unchanged, and the user's own study.yaml not read."""
    project, elsewhere = tmp_path / "project", tmp_path / "disk" / "of" / "studies"
    (project if linked == "later" else elsewhere).mkdir(parents=True)
    if linked == "before it was tuned":
        project.mkdir()
        (project / "studies").symlink_to(elsewhere)
    own, target = project / "mine.yaml", project / "model.py"
    shutil.copy(MODELS / "ok.py", target)
    own.write_text("target: model.py\nname: own\ntrials: 2\nfinalists: 0\n")
    spec, folder = StudySpec.of(own, {}), project / "studies" / "own"
    Runner(plan_of(spec), Instant(), folder, records.default_url(folder.parent), Watcher()).run()
    session._keep_spec(StudyRequest(spec=spec, target=own, overrides={}, folder=folder, executor=Instant()))
    own.write_text(own.read_text() + "repeats: 4\n")
    around = folder.parent
    if linked == "later":
        around = tmp_path / "link"
        around.symlink_to(folder.parent)
    opened = session.open_study("own", studies=around)
    assert opened.target == target and opened.spec().repeats == 4


def test_a_retuning_takes_the_options_of_a_run_of_the_studys_own_file(studies):
    """They were lost, and the re-tuning spoke of other lengths; edits of the file still count."""
    folder, file = studies / "s", studies / "s" / "study.yaml"
    file.write_text(f"target: {MODELS / 'ok.py'}\nname: s\ntrials: 5\n")

    def ran(file=file, **given):
        spec = StudySpec.of(file, given)
        session._keep_spec(StudyRequest(spec=spec, target=file, overrides=given, folder=folder, executor=Instant()))

    ran(max_length=64, executor="slurm")
    file.write_text(file.read_text() + "repeats: 4\n")
    spec = session.open_study("s").spec()
    assert (spec.max_length, spec.trials, spec.repeats) == (64, 5, 4)
    assert yaml_file.elsewhere(folder) == "on slurm"
    again = reproduce(load.load("s", records.default_url(studies), folder))  # what the answer says to go on with
    assert again == "autotune run studies/s/as-run.yaml"
    ran(folder / "as-run.yaml", trials=9)
    spec = session.open_study("s").spec()
    assert (spec.max_length, spec.trials, spec.repeats) == (64, 9, 4) and "trials: 5" in file.read_text()
    as_run = folder / "as-run.yaml"
    as_run.write_text(as_run.read_text().replace("max_length: 64", "max_length: 32"))
    for given in ({"trials": 8}, {"ranks": 1}):
        ran(as_run, **given)
        spec = session.open_study("s").spec()
        assert (spec.max_length, spec.trials) == (32, 8), "it was edited"
    ran()
    assert session.open_study("s").spec().max_length is None and not yaml_file.elsewhere(folder)


def test_retune_takes_the_ranks_to_tune_for(studies, monkeypatch, capsys):
    asked = []

    def spec(opened, overrides):
        assert opened.storage.patience_s, "a server that restarts ended it, where a run waits"
        asked.append(overrides)
        raise UserError("far enough")

    monkeypatch.setattr(session.OpenStudy, "spec", spec)
    with pytest.raises(UserError, match="far enough"):
        retune("s", ranks=3)
    known(studies).begin("s", "asked")
    write_record(retuning_path(studies / "s", 1) / ASKED, RetuneRequest(ranks=4))
    with pytest.raises(UserError, match="far enough"):
        retune("s")  # which takes that one up
    assert asked == [{"ranks": ranks, "from_checkpoint": None} for ranks in (3, 4)]
    # Each later one, of a schedule, too, ended with "there is no such folder".
    write_record(retuning_path(studies / "s", 1) / ASKED, RetuneRequest(checkpoint="/checkpoint-500"))
    assert retune("s") == 1 and "/checkpoint-500, with which it was begun, is gone" in capsys.readouterr().out
    assert known(studies).interrupted("s") is None


def test_one_that_the_user_stops_goes_on_with_the_same_options_however_often(studies, monkeypatch, capsys):
    """It was to go on without --force, which then searched nothing; and the fourth attempt failed as if it had been killed."""

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.OpenStudy, "spec", lambda *_: None)
    monkeypatch.setattr(engine, "executor_for", stopped)
    monkeypatch.setattr("sys.argv", ["autotune", "retune", "s", "--force", "--trials", "3"])
    for n in range(9):
        monkeypatch.setattr(Broadcast, "doing", stopped if n < 4 else Broadcast.say)  # while it imports, too
        assert retune("s", force=True, trials=3) == 130
        assert "goes on where it was with: autotune retune s --force --trials 3\n" in capsys.readouterr().err
    assert len(known(studies).decisions("s")) == 1 and known(studies).interrupted("s") is not None


@pytest.mark.parametrize(
    "error", [Unavailable("Slurm does not answer"), OSError(errno.ENOSPC, "No space left on device", "studies/s")]
)
def test_one_whose_engine_is_away_or_whose_disk_is_full_goes_on_however_often(studies, monkeypatch, capsys, error):
    """After three times it had failed, as if it had been killed, and what it had measured was lost."""

    def away(_, __, waits):
        waits("the queue is long")
        raise error

    monkeypatch.setattr(session.OpenStudy, "spec", lambda *_: None)
    monkeypatch.setattr(engine, "executor_for", away)
    for _ in range(5):
        with pytest.raises(UserError, match=r"does not answer|No space left on device.*Run the same command again"):
            retune("s")
    assert known(studies).interrupted("s") is not None and capsys.readouterr().err.count("the queue is long") == 5


@pytest.mark.system
def test_one_whose_database_goes_away_goes_on_however_often(studies, monkeypatch):
    """The fourth attempt failed, as if it had been killed three times."""

    def away(*_, **__):
        raise sqlalchemy.exc.OperationalError("SELECT 1", {}, Exception("server closed the connection unexpectedly"))

    monkeypatch.setattr(session.OpenStudy, "spec", lambda *_: None)
    monkeypatch.setattr(engine, "executor_for", away)
    for _ in range(5):
        with pytest.raises(UserError, match="Run the same command again"):
            retune("s")
    assert known(studies).interrupted("s") is not None and len(known(studies).decisions("s")) == 1


def test_a_look_at_what_changed_that_is_stopped_leaves_nothing(studies, monkeypatch, capsys):
    def stopped(_, folder, waits):
        folder.mkdir(parents=True)
        waits("the queue is long")
        raise KeyboardInterrupt

    monkeypatch.setattr(session.OpenStudy, "spec", lambda _: spec_of())
    monkeypatch.setattr(engine, "executor_for", stopped)
    with pytest.raises(KeyboardInterrupt):
        changes("s")
    assert not (studies / "s" / "retunes" / "look").exists() and "the queue is long" in capsys.readouterr().err


def test_a_study_whose_database_is_lost_is_told_how_its_trials_are_taken_up_again(studies):
    (studies / "autotune.db").unlink()
    with pytest.raises(UserError, match=r"no database .*`autotune run studies/s/study.yaml` takes them up again"):
        _ = session.open_study("s").study


def test_a_deletion_that_is_stopped_is_ended_by_the_same_command(studies, monkeypatch):
    """Its rows went first, so that the same command found no study, and the next run took up the trials of its folder."""

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "delete_study", stopped)
        with pytest.raises(KeyboardInterrupt):
            delete("s", yes=True)
    assert records.kept_in(studies / "s") is None
    delete("s", yes=True)
    assert records.study_names(open_storage(records.default_url(studies))) == []


def test_a_study_whose_scaling_is_measured_now_is_not_deleted(studies):
    with study_lock(studies / "s" / "scaling"), pytest.raises(UserError, match="is being run by process"):
        delete("s", yes=True)
    assert (studies / "s" / "trials").exists()


def test_a_deleted_study_leaves_no_row_and_keeps_its_small_files(studies, capsys):
    schedule_add("s", "7d")
    (studies / "s" / "scaling").symlink_to(studies)  # as to a larger disk; it stayed without a word
    (studies / "s" / "scaling.html").touch()
    delete("s", yes=True)
    assert f"leads to {studies}, which stays" in capsys.readouterr().err
    with sqlite3.connect(studies / "autotune.db") as database:
        ours = "select name from sqlite_master where type = 'table' and name like 'autotune_%'"
        tables = [name for (name,) in database.execute(ours)]
        counts = {name: database.execute(f"select count(*) from {name}").fetchone()[0] for name in tables}
        assert database.execute("select count(*) from studies").fetchone() == (0,)
    assert {name for name, count in counts.items() if count} == {"autotune_migration"}
    assert (studies / "s" / "ds_config.json").exists()
    assert not [name for name in ("trials", "scaling.html") if (studies / "s" / name).exists()]


def test_rows_of_a_study_that_another_program_deleted_go_with_the_next_look(studies, capsys):
    with sqlite3.connect(studies / "autotune.db") as database:
        database.execute("delete from studies")
    list_history(what="recommendations", as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_migrations_are_applied_once_by_however_many_at_once(tmp_path):
    url = records.default_url(tmp_path / "new")
    engines = [open_storage(url).engine for _ in range(4)]
    threads = [threading.Thread(target=History, args=(engine,)) for engine in engines]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    with sqlite3.connect(tmp_path / "new" / "autotune.db") as database:
        applied = [name for (name,) in database.execute("select name from autotune_migration order by name")]
    assert applied == sorted(MIGRATIONS)
    assert History(engines[0]).schedules() == []


def test_a_database_that_is_locked_for_a_moment_is_waited_for(studies):
    history = known(studies)
    lock = sqlite3.connect(studies / "autotune.db", isolation_level=None, check_same_thread=False)
    lock.execute("begin immediate")
    threading.Timer(1.0, lambda: lock.execute("commit")).start()
    history.begin("s", "due")
    assert history.interrupted("s")["cause"] == "due"
