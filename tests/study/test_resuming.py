"""A study that is run again: after its end, after an interruption, after its driver was killed."""

import contextlib
import os
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.instant import SPACE, WORKLOAD, Instant, Watcher, answered, failed, plan_of, report, runner_of, spec_of
from support.paths import MODELS
from support.studies import candidates, run, states

from autotune import session
from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import Status
from autotune.report import load
from autotune.space.candidate import Candidate
from autotune.study import parallel
from autotune.study import runner as runner_module
from autotune.study.events import SILENT, UNFINISHED, JournalReader
from autotune.study.folder import trial_path
from autotune.study.setup.request import StudyRequest
from autotune.study.storage import analysed, optuna_tables, records
from autotune.study.storage.database import StoreError, open_storage
from autotune.study.storage.generations import generation_name
from autotune.study.storage.leases import StudyLeases
from autotune.system.owner import Owner
from autotune.trial import result
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.trial.workload import DataShape, Probed


def test_a_resumed_study_runs_only_what_is_missing(tmp_path):
    before, _, _ = run(tmp_path, trials=4, finalists=0)
    first = [(m.candidate, dict(m.metrics)) for m in before.state.measured()]
    after, executor, watcher = run(tmp_path, trials=6, finalists=0)
    assert len(executor.ran) == 2
    assert [(m.candidate, dict(m.metrics)) for m in after.state.measured()][:4] == first
    assert len(set(candidates(after))) == 6
    assert "resuming: 4 of 6 trials are already there" in watcher.said
    _, _, watcher = run(tmp_path, trials=5, finalists=0)
    assert "resuming: 6 trials are already there, 5 were asked for" in watcher.said


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("first", "again", "n_told"),
    [
        ({"trials": 5}, {}, 5),
        ({"trials": 5, "finalists": 0}, {"trials": 2}, 5),
        ({"trials": 9, "finalists": 0, "space": [{"checkpoint_every": [0, 1, 2]}]}, {}, 3),
        ({"trials": 1}, {}, 1),
    ],
    ids=["finished", "fewer trials", "exhausted", "the baseline alone"],
)
def test_a_study_that_is_complete_runs_nothing_when_it_is_run_again(tmp_path, first, again, n_told):
    before, executor, _ = run(tmp_path, **first)
    assert candidates(before)[0] == executor.ran[0] == Candidate(micro_batch_size=8)
    assert len(executor.ran) == n_told or first.get("finalists") != 0
    runner, executor, _ = run(tmp_path, **first | again)
    assert executor.ran == [] and len(candidates(runner)) == n_told
    assert len(runner.state.trials()) == n_told  # each run of an exhausted study left an empty one that failed


@pytest.mark.system
def test_new_finalists_are_measured_with_the_baseline_and_not_compared_with_its_earlier_rounds(tmp_path):
    slow_at_first = Instant(lambda c: report(c, step_times_s=[9.0 + c.micro_batch_size] * 24))
    run(tmp_path, slow_at_first, trials=3, finalists=1, repeats=1)
    runner, executor, _ = run(tmp_path, trials=6, finalists=1, repeats=1)
    assert executor.ran[-1] == Candidate(micro_batch_size=8)
    base, *others = [m for m in runner.state.measured() if m.repeats]
    newest = max(others, key=lambda m: max(m.repeats))
    assert 1 not in newest.repeats
    assert set(newest.repeats) <= set(base.repeats)


def test_a_pause_between_trials_begins_another_sitting(tmp_path, monkeypatch):
    runner, _, _ = run(tmp_path, trials=3, finalists=0)
    assert [m.sitting for m in runner.state.measured()] == [0, 0, 0]
    monkeypatch.setattr(analysed, "PAUSE_S", -1e6)
    assert [m.sitting for m in runner.state.measured()] == [0, 1, 2]


def test_an_interrupted_round_is_measured_anew(tmp_path):
    """Half a round from yesterday and half from today would take a slower machine for a slower configuration."""
    executor = Instant()
    executor.stop_at = 5  # after four trials and the first of two re-measurements
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, executor, trials=4, finalists=1, repeats=1)
    storage = open_storage(records.default_url(tmp_path))
    # For whoever reads the study meanwhile: it was advised to try more configurations.
    assert records.load_study(storage, "s").user_attrs[records.ENDED_ATTR] == UNFINISHED
    runner, executor, _ = run(tmp_path, trials=4, finalists=1, repeats=1)
    assert runner.study.user_attrs[records.ENDED_ATTR] == ""
    assert len(executor.ran) == 2
    finalist, base = sorted((m for m in runner.state.measured() if m.repeats), key=lambda m: m.trial == 0)
    assert list(finalist.repeats) == [1, 2]
    assert list(base.repeats) == [2]


@pytest.mark.system
def test_where_the_folder_was_renamed_it_is_said_before_anything_is_measured_again(tmp_path):
    """The checks and repetitions lie there, and were made again without a word."""
    run(tmp_path, trials=3, finalists=1, repeats=1)
    (tmp_path / "s").rename(tmp_path / "renamed")
    _, executor, watcher = run(tmp_path, trials=3, finalists=1, repeats=1)
    assert "if that folder was renamed, stop and name it so again" in watcher.said[1] and executor.ran
    _, _, watcher = run(tmp_path, trials=3, finalists=1, repeats=1)
    assert not any("renamed" in text for text in watcher.said)


def test_another_study_of_that_name_is_refused_and_what_differs_is_named(tmp_path):
    run(tmp_path, trials=2, finalists=0)
    for change, named in (
        ({"space": [SPACE | {"zero_stage": [0, 1]}]}, "space"),
        ({"objectives": ["latency"]}, r"objectives \(latency instead of latency and throughput"),
        ({"objectives": None, "goal": "throughput"}, r"objectives \(.* instead of latency and throughput"),
        ({"seed": 1}, r"seed \(1 instead of 0\)"),
        ({"device_memory_bytes": "1GiB"}, "device_memory_bytes"),
        ({"max_length": 4096}, "max_length"),
        ({"with_eval": True}, "with_eval"),
        ({"with_save": True}, "with_save"),
        ({"global_batch": "8..64"}, "global_batch"),
        ({"base_config": {"bf16": {"enabled": True}}}, "base_config"),
    ):
        with pytest.raises(UserError, match=rf"study 's' exists, but differs in {named}.*--fresh$"):
            run(tmp_path, trials=3, finalists=0, **change)


def test_a_target_that_was_edited_while_the_baseline_ran_is_another_one_than_its(tmp_path):
    """The record of the study had the text as it was after the baseline, so that the study went on with it."""
    target = shutil.copy(MODELS / "ok.py", tmp_path / "model.py")
    planned = {"spec": spec_of(finalists=0, trials=2, objectives=["throughput"]).model_copy(update={"target": target})}

    def edits(candidate):
        target.write_text("def model(): ...\n")
        return report(candidate)

    with pytest.raises(UserError, match=r"model\.py was edited while the study ran"):
        run(tmp_path, Instant(edits), planned=planned)
    with pytest.raises(
        UserError, match=r"differs in the text of model\.py.*--fresh; or `autotune retune s` tells whether"
    ):
        run(tmp_path, planned=planned)


@pytest.mark.cells(1)
@pytest.mark.parametrize("when", [4, 2], ids=["while the best are measured again", "in the search"])
def test_a_target_that_is_edited_while_its_study_runs_ends_it_and_it_goes_on_with_the_earlier_text(tmp_path, when):
    """Further trials measured the new text, and one answer was made of both; a comment changes nothing."""
    target, executor = shutil.copy(MODELS / "ok.py", tmp_path / "model.py"), Instant()
    planned = {"spec": spec_of(finalists=1, trials=3).model_copy(update={"target": target})}
    before = target.read_text()

    def edits(candidate):
        target.write_text(f"{before}# a comment\n" if len(executor.ran) < when else f"{before}X = 1\n")
        return report(candidate)

    executor.behaviour = edits
    with pytest.raises(UserError, match=r"model\.py was edited while the study ran.*put its earlier text back"):
        run(tmp_path, executor, planned=planned)
    assert len(executor.ran) == when
    target.write_text(before)
    runner, again, _ = run(tmp_path, planned=planned)
    assert len(candidates(runner)) == 3 and len(again.ran) + when >= 5 and not records.running(runner.study)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"n_parameters": 5}, r"parameters \(5 instead of 1,000\)"),
        ({"structure": "a"}, {"structure": "b"}, "structure of the model"),
        ({"n_samples": 512}, {"n_samples": 300}, r"samples in the data set \(300 instead of 512\)"),
        (
            {"data": DataShape(fields=("0 int64[32]",), n_seen=300)},
            {"data": DataShape(fields=("0 int64[48]",), n_seen=300)},
            r"shape of the samples \(0 int64\[48\] instead of 0 int64\[32\]\)",
        ),
    ],
)
def test_a_model_or_data_that_other_files_changed_is_another_study(tmp_path, before, now, named):
    """Neither the target's text nor a setting shows it: `model.py` imports a module, or reads a file."""

    def ran(trials, **changes):
        executor = Instant()
        spec = spec_of(trials=trials, finalists=0)
        runner_of(tmp_path, executor, planned={"workload": replace(WORKLOAD, **changes), "spec": spec}).run()
        return len(executor.ran)

    assert ran(2, **before) == 2
    with pytest.raises(UserError, match=f"differs in {named}.*--fresh"):
        ran(3, **{**before, **now})
    assert ran(3, **before) == 1


@pytest.mark.system
def test_a_machine_that_is_not_what_it_was_is_said_where_a_study_goes_on(tmp_path):
    environment = replace(
        WORKLOAD.environment, versions={"torch": "2.9.0+cu126", "cuda": "12.6", "deepspeed": "0.19.8"}
    )
    versions = {"torch": "2.9.0+cu130", "cuda": "13.0", "deepspeed": "9.9"}
    upgraded = replace(environment, omp_num_threads="2", versions=versions)
    told = []
    for trials, found in ((2, environment), (3, environment), (4, upgraded)):
        planned = {"workload": replace(WORKLOAD, environment=found), "spec": spec_of(trials=trials, finalists=0)}
        watcher = Watcher()
        runner_of(tmp_path, Instant(), watcher=watcher, planned=planned).run()
        told.append([line for line in watcher.said if "not as when the study began" in line])
    assert [len(lines) for lines in told] == [0, 0, 1]
    assert "OMP_NUM_THREADS (2 instead of not set)" in told[2][0]
    assert "CUDA (13.0 instead of 12.6), DeepSpeed (9.9 instead of 0.19.8)" in told[2][0]


def test_a_re_tuning_that_is_taken_up_on_another_machine_names_no_command_that_there_is_not(tmp_path):
    """It advised `autotune retune s.retune-1`, and --fresh, which `autotune retune` has not."""
    folder, environment = tmp_path / "s" / "retunes", replace(WORKLOAD.environment, omp_num_threads="2")
    for found in (WORKLOAD.environment, environment):
        spec = spec_of(trials=2, finalists=0).model_copy(update={"name": "s.retune-1"})
        planned, watcher = {"workload": replace(WORKLOAD, environment=found), "spec": spec}, Watcher()
        runner_of(folder, Instant(), watcher=watcher, planned=planned).run()
    assert any("resuming" in said for said in watcher.said) and not any(
        "autotune retune" in said for said in watcher.said
    )


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"n_samples": 1000}, {"n_samples": 1010}),
        # Batches of a script that were padded to their longest sample, and two samples of a slow data set.
        *[
            (
                {"script": script, "data": DataShape(fields=("0 int64[2, 57]",), n_seen=n_seen, n_samples=900)},
                {"script": script, "data": DataShape(fields=("0 int64[2, *]",), n_seen=n_seen, n_samples=900)},
            )
            for script, n_seen in (
                (Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=1), 900),
                (None, 2),
            )
        ],
    ],
)
def test_data_that_grew_a_little_or_of_which_little_was_seen_are_the_same(tmp_path, before, now):
    for trials, found in ((2, before), (3, now)):
        executor = Instant()
        planned = {"workload": replace(WORKLOAD, **found), "spec": spec_of(trials=trials, finalists=0)}
        runner_of(tmp_path, executor, planned=planned).run()
    assert len(executor.ran) == 1


def test_a_study_of_a_script_goes_on_where_its_project_was_moved_but_not_in_another_folder(tmp_path):
    workload = replace(WORKLOAD, script=Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=1))

    def ran(script, working_dir, trials):
        script.parent.mkdir(exist_ok=True)
        shutil.copy(MODELS / "ok.py", script)
        spec = spec_of(trials=trials, finalists=0).model_copy(update={"target": script, "working_dir": working_dir})
        executor = Instant()
        runner_of(tmp_path, executor, planned={"workload": workload, "spec": spec}).run()
        return len(executor.ran)

    here, there = tmp_path / "here", tmp_path / "there"
    assert ran(here / "train.py", here, trials=2) == 2
    assert ran(there / "train.py", there, trials=3) == 1
    with pytest.raises(UserError, match=r'differs in script.working_dir \("\.\." instead of "\."\)'):
        ran(there / "train.py", tmp_path, trials=4)


def test_more_trials_another_sampler_or_more_time_are_no_other_study(tmp_path):
    run(tmp_path, trials=2, finalists=0)
    assert len(run(tmp_path, trials=3, finalists=0, sampler="grid", time_budget_s=600)[1].ran) == 1


def test_a_study_that_cannot_be_read_is_not_taken_for_one_that_is_not_there(tmp_path, monkeypatch):
    """It was begun anew from what its folder held."""
    run(tmp_path, trials=2, finalists=0)

    def garbled(*_):
        raise StoreError("a value of the study cannot be read; restore a copy")

    monkeypatch.setattr(records, "load_study", garbled)
    with pytest.raises(StoreError, match="restore a copy"):
        runner_of(tmp_path, Instant(), trials=2, finalists=0).open()


def test_a_study_that_somebody_else_made_is_refused(tmp_path):
    study = records.create_study(open_storage(records.default_url(tmp_path)), "s", ["minimize"], ["m"])
    study.tell(study.ask(), 1.0)
    with pytest.raises(UserError, match="was not made by autotune"):
        run(tmp_path)


def test_an_interrupted_trial_is_lost_and_run_again(tmp_path):
    executor = Instant()
    executor.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, executor, trials=5, finalists=0)
    runner, again, _ = run(tmp_path, trials=5, finalists=0)
    assert again.ran[0] == executor.ran[2]
    assert states(runner) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert records.running(runner.study) == []


def dead_run(folder, *, with_result):
    """Leaves a study as a killed driver does: two trials told, a third one running."""
    runner, _, _ = run(folder, trials=2, finalists=0)
    claim = runner.proposer.claim()
    candidate, path = claim.candidate, trial_path(folder / "s", claim.asked.number)
    path.mkdir(parents=True)
    if with_result:
        write_record(
            TrialDir(path).result,
            result.TrialResult(
                outcome=Outcome.CRASHED, reason="[Errno 28] No space left on device", candidate=candidate.values()
            ),
        )
    return candidate


def test_a_trial_that_was_running_when_the_driver_was_killed_is_retried(tmp_path):
    candidate = dead_run(tmp_path, with_result=False)
    runner, executor, _ = run(tmp_path, trials=4, finalists=0)
    assert executor.ran[0] == candidate
    assert states(runner) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_that_ended_just_before_the_driver_was_killed_is_told_with_what_to_do_and_not_retried(tmp_path):
    candidate = dead_run(tmp_path, with_result=True)
    runner, executor, _ = run(tmp_path, trials=4, finalists=0)
    assert candidate not in executor.ran
    told = records.told_data(records.told_trials(runner.study)[2])
    assert told["outcome"] == Outcome.CRASHED and "A disk is full" in told["reason"]
    assert len(executor.ran) == 1


def test_a_trial_that_went_on_in_its_engine_ends_with_the_time_budget_and_is_shown_meanwhile(tmp_path, monkeypatch):
    """It was waited for until its own deadline, and the live view stood still."""

    class Engine(Instant):
        status = Status.RUNNING

        def find(self, _):
            return self

        def poll(self):
            return self.status

        def cancel(self):
            self.status = Status.EXITED

    class Looking(Watcher):
        n_ticks = 0

        def tick(self):
            self.n_ticks += 1
            engine.over = self.n_ticks > 1

    candidate = dead_run(tmp_path, with_result=False)
    folder = TrialDir(trial_path(tmp_path / "s", 2))
    write_record(folder.request, TrialRequest(target="", candidate=candidate.values(), deadline_s=2.0))
    monkeypatch.setattr(base, "AGENT_GRACE_S", 0.0)
    write_record(folder.job, {})
    engine, view = Engine(), Looking()
    runner = runner_of(tmp_path, engine, watcher=view, trials=4, finalists=0, time_budget_s=600)
    runner.run()
    assert (view.n_ticks, engine.status, engine.ran) == (2, Status.EXITED, [])
    assert (
        states(runner) == ["COMPLETE", "COMPLETE", "FAIL"]
        and "the time budget of 600 s" in runner.study.user_attrs["ended"]
    )


def test_a_trial_of_another_machine_is_not_waited_for_beyond_the_time_budget(tmp_path, monkeypatch):
    """It was waited for until its own end, however long after the time budget."""
    engine, slept = Instant(), []
    first, _, _ = run(tmp_path, trials=2, finalists=0)
    StudyLeases(first.storage, "s", Owner.here()).claim(first.study)
    runner = runner_of(tmp_path, engine, trials=3, finalists=0, time_budget_s=600)
    runner.leases.alone = False  # as with a database server

    def sleep(_):
        slept.append(1)
        engine.over = len(slept) > 1
        assert len(slept) < 4

    monkeypatch.setattr(runner_module.time, "sleep", sleep)
    runner.run()
    assert len(slept) == 2 and "the time budget of 600 s" in runner.study.user_attrs["ended"]


def test_a_run_killed_before_its_first_trial_was_told_begins_anew(tmp_path):
    runner = runner_of(tmp_path, Instant())
    records.create_study(runner.storage, "s", ["minimize"], ["m"])
    assert len(run(tmp_path, trials=3, finalists=0)[1].ran) == 3


def test_a_run_killed_between_record_and_baseline_begins_anew(tmp_path):
    runner = runner_of(tmp_path, Instant())
    study = records.create_study(runner.storage, "s", ["minimize"] * 4, ["a", "b", "c", "d"])
    records.keep(study, runner.state.record(), tmp_path / "s")
    study.ask()
    after, executor, _ = run(tmp_path, trials=3, finalists=0)
    assert executor.ran[0] == Candidate(micro_batch_size=8)
    assert states(after) == ["COMPLETE"] * 3


def test_a_study_that_is_forgotten_leaves_no_reference_to_be_read_again(tmp_path):
    """A changed script was compared with the loss curves, and elsewhere with the times, of the one before it."""
    runner, executor, _ = run(tmp_path, trials=2, finalists=0)
    trials = tmp_path / "s" / "trials"
    for name in ("reference-8/1", "baseline-ab12", "noise", "warm", "inspect"):
        (trials / name).mkdir(parents=True, exist_ok=True)
    for name in ("warm.pt", ".warm.pt.01234567.1.999999999"):  # what a killed rank left is as large as the model
        (trials / name).touch()
    session._forget("s", runner.storage, tmp_path / "s", executor)
    assert [path.name for path in trials.iterdir() if path.name != "journal.jsonl"] == ["inspect"]


def test_a_trial_killed_before_it_had_a_candidate_is_closed(tmp_path):
    runner, _, _ = run(tmp_path, trials=2, finalists=0)
    runner.leases.claim(runner.study)
    after, _, _ = run(tmp_path, trials=3, finalists=0)
    assert states(after) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.system
def test_a_study_goes_on_without_its_trials_folder(tmp_path):
    run(tmp_path, trials=3, finalists=1)
    shutil.rmtree(tmp_path / "s" / "trials")
    runner, executor, _ = run(tmp_path, trials=4, finalists=1)
    assert len(candidates(runner)) == 4
    new, *again = executor.ran  # one more trial, then rounds of the best and the baseline
    assert new == candidates(runner)[-1] and candidates(runner)[0] in again
    assert set(again) <= set(candidates(runner)) and len(set(again)) > 1


def test_a_study_whose_database_is_gone_is_had_back_from_its_folder(tmp_path):
    executor = Instant(lambda c: report(c) if c.checkpoint_every == 0 else failed(Outcome.CRASHED, "no"))
    first = runner_of(tmp_path, executor, trials=6, finalists=1)
    first.run()
    before = [(m.candidate.key, m.outcome, m.metrics, m.repeats) for m in first.state.measured()]
    first.storage.engine.dispose()
    shutil.rmtree(tmp_path / "s" / "trials" / "0003")
    for path in tmp_path.glob("autotune.db*"):
        path.unlink()
    again, watcher = Instant(executor.behaviour), Watcher()
    second = runner_of(tmp_path, again, watcher=watcher, trials=6, finalists=1)
    second.run()
    assert [m.trial for m in second.state.measured()] == [0, 1, 2, 4, 5, 6]
    assert [(m.candidate.key, m.outcome, m.metrics, m.repeats) for m in second.state.measured()][:3] == before[:3]
    assert "whose folder holds 5 finished trials: they are taken up again" in " ".join(watcher.said)
    assert sum(each.check_gradient and not each.noise for each in again.requests) == 1  # only the one that is missing


@pytest.mark.system
def test_a_run_that_was_to_begin_anew_and_is_stopped_before_tells_no_old_answer(tmp_path, monkeypatch):
    """It printed the answer of the trials that it was to forget, and went on with them."""

    def stopped(*_):
        raise KeyboardInterrupt

    studies = answered(tmp_path / "studies")
    monkeypatch.setattr(session, "_planned", stopped)
    wanted = StudyRequest(
        spec=spec_of(), target=MODELS / "ok.py", overrides={}, folder=studies / "s", executor=Instant()
    )
    assert session.tune(wanted, fresh=True, learn=False).report is None
    assert session.tune(wanted, fresh=False, learn=False).report is not None


def test_a_wait_for_machines_is_told_to_who_follows_the_run_from_elsewhere(tmp_path, monkeypatch):
    """The engine told the run's own terminal alone; the wait for the first machines, and for a turn in planning, is the longest."""

    def planned(spec, executor, folder, view):
        executor.on_queue("slurm: job 7 is pending")
        view.waiting()
        return plan_of(spec)

    monkeypatch.setattr(session, "plan", planned)
    monkeypatch.setattr(session, "profiled", lambda found, *_: found)
    engine = SimpleNamespace(start=lambda: None)
    session._planned(SimpleNamespace(spec=spec_of(), executor=engine, folder=tmp_path), SILENT, 0.0)
    engine.on_queue("slurm: job 8 is pending")
    begins = ["study", "slurm: job 7", "another study measures", "slurm: job 8"]
    said = [each.text for each in JournalReader(tmp_path, os.getpid()).events()]
    assert len(said) == 4 and all(map(str.startswith, said, begins))


def test_a_run_that_was_to_begin_anew_and_has_too_few_machines_forgets_nothing(tmp_path, monkeypatch):
    """The trials were gone, and `--parallel` with less could only begin anew."""

    def refuse(*_):
        raise UserError("--parallel 9: there are too few devices")

    def over(*_):
        raise base.TimeOver

    studies = answered(tmp_path / "studies")
    monkeypatch.setattr(session, "_planned", lambda request, view, _: (plan_of(request.spec), view))
    monkeypatch.setattr(parallel, "executors_for", refuse)
    wanted = StudyRequest(
        spec=spec_of(), target=MODELS / "ok.py", overrides={}, folder=studies / "s", executor=Instant()
    )
    with pytest.raises(UserError, match="too few devices"):
        session.tune(wanted, fresh=True, learn=False)
    # Nor does one whose time is over before that; its time is not that of the runs which it was to forget.
    monkeypatch.setattr(session, "_planned", over)
    with pytest.raises(UserError, match="ended before the baseline was measured; give more time"):
        session.tune(wanted, fresh=True, learn=False)
    assert load.load("s", records.default_url(studies), studies / "s").picks


@pytest.mark.system
def test_trials_that_timed_out_run_again_where_there_is_more_time_for_them(tmp_path):
    """The advice that a timeout gives, a longer --trial-deadline, had no effect on a study that goes on."""
    slow = lambda c: c.micro_batch_size == 16  # noqa: E731
    space = [{"micro_batch_size": [8, 16], "checkpoint_every": [0, 1]}]
    given = {"sampler": "physics", "finalists": 0, "stop_below": 0.0, "stop_trials": False, "space": space}
    late = Instant(lambda c: failed(Outcome.TIMEOUT, "no end within 70 s") if slow(c) else report(c))
    before, _, _ = run(tmp_path, late, trial_deadline_s=70, **given)
    every = candidates(before)
    slow_ones = [c for c in every if slow(c)]
    assert slow_ones
    for deadline_s, ran in ((70, []), (300, slow_ones), (400, [])):
        runner, executor, watcher = run(tmp_path, trial_deadline_s=deadline_s, **given)
        assert Counter(executor.ran) == Counter(ran), deadline_s
        assert any("there is more time for a trial now" in said for said in watcher.said) == bool(ran)
    assert Counter(candidates(runner)) == Counter(every)
    assert {m.outcome for m in runner.state.measured()} == {Outcome.COMPLETE}


@pytest.mark.system
def test_a_baseline_that_timed_out_is_measured_again_where_it_has_more_time(tmp_path):
    late = Instant(lambda c: failed(Outcome.TIMEOUT, "no end within 70 s"))
    given = {"finalists": 1, "trials": 6}
    with pytest.raises(UserError, match="all ended the same way: timeout"):
        run(tmp_path, late, trial_deadline_s=70, **given)
    with pytest.raises(UserError, match="all ended the same way: timeout"):
        run(tmp_path, trial_deadline_s=70, **given)
    executor = Instant()
    executor.stop_at = 0  # while it is measured again
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, executor, trial_deadline_s=300, **given)
    runner, executor, watcher = run(tmp_path, trial_deadline_s=300, **given)
    assert executor.ran[0] == Candidate(micro_batch_size=8)
    assert "the baseline timed out and has more time now, so it is measured once more" in watcher.said
    assert runner.state.measured()[0].outcome is Outcome.COMPLETE and runner.state.reference is not None
    assert len(candidates(runner)) == 6


def test_what_was_lost_and_is_left_out_by_now_is_not_run_again(tmp_path):
    """A run with less time said which global batches it does not try, and began with one of them, which had been interrupted."""

    def stopped(candidate):
        if candidate.global_batch_size(1) > 8:
            raise KeyboardInterrupt
        return report(candidate)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Instant(stopped), trials=9, finalists=0)
    again = runner_of(tmp_path, executor := Instant(), trials=9, finalists=0)
    again.open()
    again.state.narrow(global_batch=(1, 8))
    again.run()
    assert executor.ran and max(candidate.global_batch_size(1) for candidate in executor.ran) == 8


@pytest.mark.cells(1)
@pytest.mark.parametrize("n", [5, 2], ids=["while the best are measured again", "in a trial"])
def test_a_study_that_is_deleted_while_it_runs_ends_in_a_sentence_and_its_folder_takes_it_up(tmp_path, n):
    """A value in the database could not be read, it said, and before that that another process had taken the trial."""
    executor, watcher = Instant(), Watcher()

    def deletes(candidate):
        if len(executor.ran) == n:
            records.delete_study(open_storage(records.default_url(tmp_path)), "s")
        return report(candidate)

    executor.behaviour = deletes
    with pytest.raises(
        UserError, match="study 's' was deleted from the database meanwhile; the same command without --fresh"
    ):
        runner_of(tmp_path, executor, watcher=watcher, trials=3, finalists=1).run()
    assert not any("taken for lost" in said for said in watcher.said)
    again, left, _ = run(tmp_path, trials=3, finalists=1)
    assert len(candidates(again)) == 3 and len(left.ran) + len(executor.ran) <= 6


def test_a_search_of_a_retuning_that_is_deleted_is_not_said_to_go_on():
    """Its folder is removed by the next re-tuning, and `retune` has no --fresh, which the sentence named."""
    held = SimpleNamespace(study_name=generation_name("s", 2), beating=contextlib.nullcontext)
    said = "search of re-tuning 2 of study 's' was deleted.*`autotune retune s` begins anew"
    with pytest.raises(UserError, match=said), runner_module._at_work(held, leads=True):
        raise KeyError(optuna_tables.GONE)
