"""Re-tuning: what moved is found, what did not is left alone, and whatever interrupts it leaves nothing half done."""

import errno
import json
import math
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy
from support.instant import (
    ENVIRONMENT,
    WORKLOAD,
    Instant,
    Watcher,
    answered,
    failed,
    plan_of,
    recorded,
    report,
    runner_of,
    spec_of,
)
from support.paths import MODELS

from autotune import session
from autotune.errors import UserError
from autotune.report import files, load
from autotune.report.results import StudyResult
from autotune.retune import comparison
from autotune.retune import retuning as retuning_module
from autotune.retune.comparison import Comparison, EarlierRatio, Reading
from autotune.retune.decision import Decision, Difference, RetuneVerdict
from autotune.retune.retuning import CommandError, RetuneRequest, Retuning, last_looked_at
from autotune.scoring.measured import Measured
from autotune.scoring.objective import Objective
from autotune.session import open_study
from autotune.space.candidate import Candidate
from autotune.space.parameter import SpaceError
from autotune.study import fingerprint, warm_start
from autotune.study.events import Kind
from autotune.study.fingerprint import Change, Fingerprint
from autotune.study.storage import analysed, records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import GoneError, History
from autotune.study.storage.tables import DECISION, RECOMMENDATION
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.result import NoiseTerms, Outcome, TrialResult

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
SPACE = {"micro_batch_size": [4, 8, 16], "precision": ["fp32", "bf16"], "checkpoint_every": [0, 1]}
STUDY = {"trials": 12, "sampler": "grid", "objectives": ["throughput"], "repeats": 3, "stop_trials": False,
         "memory_filter": False, "space": [SPACE]}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study, its files written."""
    return answered(tmp_path_factory.mktemp("finished"), **STUDY)


@dataclass(frozen=True)
class Replaced:
    """A copy of the finished study whose configuration a re-tuning has replaced, undisturbed, with as many measurements."""

    studies: Path
    decision: Decision
    n_ran: int


@pytest.fixture(scope="module")
def replaced(finished, tmp_path_factory):
    studies, executor = shutil.copytree(finished, tmp_path_factory.mktemp("replaced") / "studies"), Instant(slow_bf16)
    return Replaced(studies, retune(studies, executor), len(executor.ran))


@pytest.fixture
def tmp_path(finished, tmp_path_factory):
    """A folder with a copy of the finished study."""
    return shutil.copytree(finished, tmp_path_factory.mktemp("study") / "studies")


def retuning(folder, **asked):
    return Retuning(open_study("s", studies=folder), RetuneRequest(**asked), Watcher())


def retune(folder, executor, plan=None, **asked):
    run = retuning(folder, **asked)
    run.begin()
    return run.run(plan or plan_of(spec_of(**STUDY)), executor)


def config(folder):
    return json.loads((folder / "s" / "ds_config.json").read_text())


def history(folder):
    return History(open_storage(records.default_url(folder)).engine)


def slow_bf16(candidate):
    """What a new version made of it: bf16 takes twice as long."""
    found = report(candidate)
    factor = 2.2 if candidate.precision == "bf16" else 1.0
    return replace(found, step_times_s=[each * factor for each in found.step_times_s])


def rows(folder):
    engine = open_storage(records.default_url(folder)).engine
    with engine.connect() as connection:
        tables = (RECOMMENDATION, DECISION)
        return {
            table.name: connection.scalar(sqlalchemy.select(sqlalchemy.func.count()).select_from(table))
            for table in tables
        }


# Unchanged, improved, failed.


def test_where_nothing_moved_it_stops_after_a_few_measurements_in_turns(tmp_path):
    before, executor = config(tmp_path), Instant()
    decision = retune(tmp_path, executor)
    assert decision.verdict is RetuneVerdict.UNCHANGED and "what it was, within 4%" in decision.reason
    assert len(executor.ran) == 2 * comparison.FEWEST and len(set(executor.ran)) == 2
    assert config(tmp_path) == before


def test_load_by_others_beside_one_of_the_two_is_no_move(tmp_path):
    """A process that came when what is in use was measured, and was gone beside the baseline, began a search."""
    incumbent = Candidate.of(
        json.loads((tmp_path / "s" / "recommended.json").read_text())["picks"]["recommended"]["candidate"]
    )

    def beside_others(candidate):
        factor = 1.3 if candidate == incumbent else 1.0
        times = [each * factor for each in report(candidate).step_times_s]
        return replace(report(candidate), step_times_s=times, log_slowdown=math.log(factor))

    decision = retune(tmp_path, Instant(beside_others))
    assert decision.verdict is RetuneVerdict.UNCHANGED and not decision.check.moved


@pytest.mark.parametrize(("loads", "expected"), [((0.3, 0.0), 0.2), ((0.3, 0.3), 0.5), ((0.3, None), 0.5)])
def test_earlier_rounds_are_compared_beside_equal_load(loads, expected):
    def measured(trial, candidate, step_s, load):
        metrics = {"step_time_s": step_s, "samples_per_s": 8 / step_s}
        return Measured(
            trial=trial, candidate=candidate, ds_config={}, outcome=Outcome.COMPLETE, metrics=metrics, ci95={},
            repeats={1: metrics, 2: metrics},
            log_slowdown={} if load is None else {1: load, 2: load},
        )  # fmt: skip

    own, base = Candidate(micro_batch_size=8, zero_stage=1), Candidate(micro_batch_size=8)
    both = [measured(0, base, 1.0, loads[1]), measured(1, own, math.exp(0.5), loads[0])]
    assert comparison.earlier_ratio(both, own, base).logs == pytest.approx((expected, expected))


def test_a_baseline_in_use_is_measured_once_and_not_beside_itself(tmp_path):
    """Each round measured it twice, as what is in use and as the baseline."""
    run, plan, executor = retuning(tmp_path), plan_of(spec_of(**STUDY)), Instant()
    run.begin()
    run.incumbent = plan.baseline
    decision = run.run(plan, executor)
    assert decision.verdict is RetuneVerdict.UNCHANGED and "the baseline itself, and it still runs" in decision.reason
    assert len(executor.ran) == 1


def test_a_target_that_is_edited_meanwhile_is_that_of_the_next_one(tmp_path):
    """The sentence spoke of --fresh and --study, which a re-tuning does not have."""
    target = shutil.copy(MODELS / "ok.py", tmp_path / "model.py")

    def edits(candidate):
        target.write_text("def model(): ...\n")
        return report(candidate)

    plan = plan_of(spec_of(**STUDY).model_copy(update={"target": target}))
    with pytest.raises(UserError, match=r"model\.py was edited .*: the next re-tuning is of the new text$"):
        retune(tmp_path, Instant(edits), plan)


def test_its_measurements_are_told_as_comparisons_one_at_a_time_and_not_as_trials(tmp_path):
    """The live line listed each of them until the end, and called the third round `trial 3 again`."""
    run, shown, seen = retuning(tmp_path), dict[int, str](), list[list[str]]()

    def note(event):
        if event.kind is Kind.TRIAL_STARTED:
            event.note_under_way(shown)
            seen.append(list(shown.values()))

    run.observer.emit = note
    run.begin()
    run.run(plan_of(spec_of(**STUDY)), Instant())
    assert seen and all(len(lines) == 1 and lines[0].startswith("comparison: micro-batch") for lines in seen)


def test_a_configuration_that_became_slower_is_replaced_and_the_previous_one_kept(finished, replaced):
    before, decision = config(finished), replaced.decision
    assert before["bf16"] == {"enabled": True}
    assert decision.verdict is RetuneVerdict.IMPROVED
    assert Difference("precision", "bf16", "fp32") in decision.differences
    assert config(replaced.studies) != before and "bf16" not in config(replaced.studies)
    assert json.loads((decision.folder / "previous" / "ds_config.json").read_text()) == before
    kept = history(replaced.studies).decisions("s")[0]
    assert (
        kept["verdict"] == "improved"
        and kept["evidence"]["duel"]["gain"] > 0.03
        and kept["ended_at"] >= kept["began_at"]
    )
    assert len(history(replaced.studies).recommendations("s")) == 2


def test_one_crash_of_what_is_in_use_starts_no_search(tmp_path):
    """A link that flapped once cost a search, as if the configuration did not run any more."""
    executor = Instant()
    executor.behaviour = lambda c: report(c) if len(executor.ran) > 1 else failed(Outcome.CRASHED, "a link flapped")
    decision = retune(tmp_path, executor)
    assert decision.verdict is RetuneVerdict.UNCHANGED and decision.n_trials == 0 and decision.check is not None


@pytest.mark.system
def test_the_search_takes_a_fifth_of_the_trials_but_no_fewer_than_six_and_no_time_budget_of_the_study_ends_it(
    tmp_path, replaced
):
    """It was spent by the measurements in turns, and the search ended with an error of autotune itself."""
    assert replaced.decision.n_trials == 6
    brief = plan_of(spec_of(**STUDY | {"trials": 32}, time_budget_s=0.001))
    assert retune(tmp_path, Instant(slow_bf16), brief).n_trials == 7


def test_after_a_replacement_the_study_answers_with_the_new_configuration(replaced, tmp_path_factory):
    studies = shutil.copytree(replaced.studies, tmp_path_factory.mktemp("again") / "studies")
    found = load.load("s", records.default_url(studies), studies / "s")
    assert found.picks["recommended"]["candidate"]["precision"] == "fp32"
    assert found.name == "s" and found.picks["recommended"]["ds_config"] == config(studies)
    assert (
        StudyResult(found).folder == studies / "s"
    )  # where it is loaded from, and its page goes; its trials lie below retunes
    assert retune(studies, Instant(slow_bf16)).verdict is RetuneVerdict.UNCHANGED


def test_a_configuration_that_no_longer_runs_is_replaced_without_a_gain_to_show(tmp_path):
    decision = retune(
        tmp_path, Instant(lambda c: failed(Outcome.OOM, "no room") if c.precision == "bf16" else report(c))
    )
    assert decision.verdict is RetuneVerdict.IMPROVED
    assert "does not run any more (oom: no room)" in decision.reason
    assert config(tmp_path).get("bf16") is None


@pytest.mark.system
def test_a_global_batch_that_a_retuning_cannot_compare_is_not_called_one_that_cannot_run(tmp_path_factory):
    """Its noise scale was not to be told, so it searched the baseline's batch alone, and the baseline replaced a gain of four times."""
    space = [{"micro_batch_size": [4, 8, 32], "checkpoint_every": [0, 1]}]
    asked = {
        "trials": 6,
        "sampler": "grid",
        "objectives": ["throughput", "convergence"],
        "space": space,
        "global_batch": "free",
    }
    studies = answered(tmp_path_factory.mktemp("batch"), **asked)
    assert config(studies)["train_micro_batch_size_per_gpu"] == 32
    decision = retune(studies, Instant(lambda c: report(c, noise=None)), plan_of(spec_of(**asked)), cause="forced")
    assert decision.n_trials and decision.verdict is RetuneVerdict.UNCHANGED, decision.reason


def test_one_failure_of_what_is_in_use_does_not_have_the_challenger_win():
    """A full disk or a network's fault replaced a configuration in production by a slower one, which failed, too."""

    def reading(step_s):
        if not step_s:
            return Reading(outcome=Outcome.CRASHED, reason="no space left")
        return Reading(outcome=Outcome.COMPLETE, metrics={"step_time_s": step_s, "samples_per_s": 8 / step_s})

    objectives = [Objective(name="latency", metric="step_time_s")]
    both = comparison.compare(
        objectives, (None, None), 0.03, lambda n: {"challenger": reading(0), "incumbent": reading(0)}
    )
    assert not both.decides(0.03)
    once = comparison.compare(
        objectives, (None, None), 0.03, lambda n: {"challenger": reading(1.2), "incumbent": reading(n != 3 and 1.0)}
    )
    assert not once.decides(0.03) and once.gain < 0
    assert once.why_not(0.03).startswith(
        "what was found is not better beyond noise: -"
    )  # not "its gain is within noise"
    always = comparison.compare(
        objectives, (None, None), 0.03, lambda n: {"challenger": reading(1.2), "incumbent": reading(0)}
    )
    assert always.decides(0.03)


@pytest.mark.parametrize("failing", [0, 4])
def test_a_comparison_that_stays_open_takes_the_most_rounds_and_no_more(failing):
    """It took two more; a round in which what is in use failed is made up for."""

    def rounds(n):
        gone = Reading(outcome=Outcome.CRASHED, reason="no space left")
        times = {"challenger": 1.0, "incumbent": 1.03 + 0.3 * (n % 2 - 0.5)}
        found = {
            side: Reading(outcome=Outcome.COMPLETE, metrics={"step_time_s": s, "samples_per_s": 8 / s})
            for side, s in times.items()
        }
        return found | {"incumbent": gone} if n == failing else found

    found = comparison.compare([Objective(name="latency", metric="step_time_s")], (None, None), 0.03, rounds)
    assert found.n_rounds == comparison.MOST and not found.sure


@pytest.mark.system
def test_a_larger_batch_keeps_its_worth_where_the_noise_scale_cannot_be_told_again(tmp_path_factory):
    """Goodput dropped out of the duel then, and latency decided for the smaller batch that is worth less."""
    batches = {
        "objectives": ["throughput", "latency", "convergence"],
        "space": [{"micro_batch_size": [8, 32], "checkpoint_every": [0, 1]}],
    }

    def behaviour(slowdown, micro_sq):
        noise = NoiseTerms(micro_batch_size=2, n_micro=4, micro_sq=micro_sq * 10, mean_sq=[2.0] * 30)

        def found(candidate):
            step_s = (
                0.01 * (slowdown if candidate.micro_batch_size == 32 else 1) * (1 + 0.3 * candidate.checkpoint_every)
            )
            return report(candidate, step_times_s=[step_s * (1 + 0.002 * (i % 3)) for i in range(24)], noise=noise)

        return found

    studies = answered(tmp_path_factory.mktemp("batches"), Instant(behaviour(1.7, [6.9, 7.0, 7.1])), **STUDY | batches)
    assert config(studies)["train_micro_batch_size_per_gpu"] == 32
    run = retuning(studies)
    run.begin()
    decision = run.run(plan_of(spec_of(**STUDY | batches)), Instant(behaviour(2.2, [2.0] * 3)))
    assert run.observer.said and "not to be told" in "".join(run.observer.said)
    assert decision.verdict is RetuneVerdict.UNCHANGED and abs(decision.duel.gain) < 0.03


@pytest.mark.system
def test_where_the_space_varies_the_batch_alone_the_noise_scale_of_the_study_counts(tmp_path_factory):
    """The re-tuning failed: other batches could not be compared, and the space varied nothing else."""
    asked = STUDY | {"objectives": ["throughput", "convergence"], "space": [{"micro_batch_size": [4, 8, 32]}]}
    studies, plan = answered(tmp_path_factory.mktemp("batch"), **asked), plan_of(spec_of(**asked))
    silent = NoiseTerms(micro_batch_size=2, n_micro=4, micro_sq=[2.0] * 30, mean_sq=[2.0] * 30)
    run = retuning(studies, cause="forced")
    run.begin()
    decision = run.run(plan, Instant(lambda c: report(c, noise=silent)))
    assert decision.verdict is RetuneVerdict.UNCHANGED and decision.n_trials == 3, decision.reason
    (said,) = (line for line in run.observer.said if "not to be told" in line)
    assert "what was measured before counts: gradient noise scale: 4.32 samples" in said and "--fresh" not in said


def test_where_nothing_runs_it_fails_and_the_configuration_stays(tmp_path):
    before = config(tmp_path)
    with pytest.raises(Exception, match="all ended the same way") as error:
        retune(tmp_path, Instant(lambda c: failed(Outcome.CRASHED, "broken driver")))
    assert "--fresh" not in str(error.value)  # `autotune retune` has no such option
    assert config(tmp_path) == before


def test_a_search_without_an_answer_says_why_in_the_reports_words(tmp_path, monkeypatch):
    """It began with "no configuration ran", and went on with how many completed."""
    why = "3 configurations completed, but none passed its checks"
    run = retuning(tmp_path)
    monkeypatch.setattr(load, "read", lambda *_: SimpleNamespace(picks={}, why_nothing=why))
    runner = SimpleNamespace(study=run.current, state=SimpleNamespace(reference=None))
    assert run._compared(runner, None, {"generation": 1, "folder": tmp_path}).lines() == [f"failed: {why}"]


def test_a_gain_below_the_least_one_replaces_nothing(tmp_path):
    before = config(tmp_path)
    decision = retune(tmp_path, Instant(slow_bf16), min_gain=0.9)
    assert decision.verdict is RetuneVerdict.UNCHANGED and "--min-gain" in decision.reason
    assert config(tmp_path) == before


@pytest.mark.system
def test_what_can_run_is_searched_although_nothing_moved(tmp_path):
    """fp16 has come with a new device: nothing became slower, and still there may be something better."""
    plan = plan_of(spec_of(**STUDY))
    newer = replace(WORKLOAD, environment=replace(ENVIRONMENT, fp16=True))
    decision = retune(tmp_path, Instant(), replace(plan, workload=newer))
    assert [change.part for change in decision.changes] == ["fp16"]
    assert decision.n_trials == 6 and not decision.check.moved


@pytest.mark.system
def test_the_user_s_command_hears_of_a_replacement_and_of_nothing_else(tmp_path, capfd):
    command = f'echo it runs; echo "$AUTOTUNE_STUDY $AUTOTUNE_OLD_CONFIG $AUTOTUNE_NEW_CONFIG" >> {tmp_path}/told'
    retune(tmp_path, Instant(), on_change=command)
    assert not (tmp_path / "told").exists()
    decision = retune(tmp_path, Instant(slow_bf16), on_change=command)
    assert (tmp_path / "told").read_text().split() == [
        "s", str(decision.folder / "previous" / "ds_config.json"), str(tmp_path / "s" / "ds_config.json"),
    ]  # fmt: skip
    printed = capfd.readouterr()
    assert "it runs" in printed.err and "it runs" not in printed.out  # where a program reads the decision


@pytest.mark.process
def test_a_user_s_command_that_fails_leaves_the_decision_as_it_is(tmp_path):
    """The history said of the replacement that it had failed, and the next one looked at the same changes again."""
    with pytest.raises(CommandError, match="the configuration is replaced, but --on-change ended with status 3"):
        retune(tmp_path, Instant(slow_bf16), on_change="exit 3")
    [row] = history(tmp_path).decisions("s")
    assert row["verdict"] == RetuneVerdict.IMPROVED and row["evidence"]["duel"] and "precision" not in config(tmp_path)
    assert history(tmp_path).interrupted("s") is None


# Interrupted, deleted.


@pytest.mark.parametrize("at", [12, *(pytest.param(at, marks=pytest.mark.system) for at in (3, 7, 22))])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path, replaced, at):
    executor = Instant(slow_bf16)
    executor.stop_at = at
    with pytest.raises(KeyboardInterrupt):
        retune(tmp_path, executor)
    assert history(tmp_path).interrupted("s") is not None
    executor.stop_at = -1
    decision = retune(tmp_path, executor)
    assert decision.verdict is RetuneVerdict.IMPROVED and decision.generation == 1
    assert len(history(tmp_path).decisions("s")) == 1
    assert len(executor.ran) - replaced.n_ran <= 2  # at most the round under way is measured again


def test_a_round_that_was_interrupted_or_measured_another_answer_is_measured_anew(tmp_path_factory):
    """What was measured before the interruption was compared with what was measured after it, on a machine that may be slower then."""
    folder, ran = tmp_path_factory.mktemp("rounds"), []
    sides = {"incumbent": Candidate(micro_batch_size=4), "baseline": Candidate(micro_batch_size=8)}

    def measured(candidate, path):
        if len(ran) == 1:
            ran.clear()
            raise KeyboardInterrupt
        ran.append(candidate)
        result = TrialResult(outcome=Outcome.OOM, reason=f"{len(ran)}", candidate=candidate.values())
        write_record(TrialDir(path).result, result)
        return result

    rounds = retuning_module.Rounds(folder, sides, SimpleNamespace(measure_again=measured))
    with pytest.raises(KeyboardInterrupt):
        rounds(1)
    ran.extend(["before", "the interruption"])
    for _ in range(2):
        assert {name: reading.reason for name, reading in rounds(1).items()} == {"incumbent": "3", "baseline": "4"}
    # The study was run on meanwhile: what had been measured counted for the answer that it has now.
    later = replace(rounds, sides=sides | {"incumbent": Candidate(micro_batch_size=2)})
    assert {name: reading.reason for name, reading in later(1).items()} == {"incumbent": "5", "baseline": "6"}


@pytest.mark.system
def test_one_that_was_interrupted_on_another_machine_starts_again_and_leaves_the_engine_its_files(tmp_path, replaced):
    """The orders to the agents of a cluster were removed while these waited, and the re-tuning for ever with them."""
    executor = Instant(slow_bf16)
    executor.stop_at = 9
    with pytest.raises(KeyboardInterrupt):
        retune(tmp_path, executor)
    orders = tmp_path / "s" / "retunes" / "0001" / "trials" / "agents" / "spool" / "orders.json"
    orders.parent.mkdir(parents=True)
    orders.write_text("[]")
    plan, again = plan_of(spec_of(**STUDY)), Instant(slow_bf16)
    newer = replace(plan, workload=replace(WORKLOAD, environment=replace(ENVIRONMENT, device_name="another")))
    decision = retune(tmp_path, again, newer)
    assert decision.verdict is RetuneVerdict.IMPROVED and orders.exists()
    assert len(again.ran) == replaced.n_ran  # nothing of the other machine's counts


def test_one_that_was_killed_while_it_replaced_the_files_finishes_that(tmp_path, monkeypatch):

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_answer", killed)
        with pytest.raises(KeyboardInterrupt):
            retune(tmp_path, Instant(slow_bf16))
    before, executor = config(tmp_path), Instant(slow_bf16)
    assert before.get("bf16")
    decision = retune(tmp_path, executor)
    assert decision.verdict is RetuneVerdict.IMPROVED and executor.ran == []
    assert config(tmp_path).get("bf16") is None
    assert json.loads((decision.folder / "previous" / "ds_config.json").read_text()) == before


@pytest.mark.system
def test_one_that_was_killed_after_it_replaced_the_answer_is_finished_although_the_target_changed_since(
    tmp_path, monkeypatch
):
    """Its study, which holds the answer by then, was deleted, and the re-tuning ended with a KeyError.

    And one whose `--on-change` killed it each time counted as failed, with its answer in use.
    """

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retuning_module, "_run_command", killed)
        for _ in range(3):  # what takes it up runs it, too, and then finishes without it
            with pytest.raises(KeyboardInterrupt):
                retune(tmp_path, Instant(slow_bf16), on_change="exit 3")
    changed = replace(WORKLOAD, n_parameters=2000, structure="another")
    found, executor = replace(plan_of(spec_of(**STUDY)), workload=changed), Instant(slow_bf16)
    decision = retune(tmp_path, executor, found)
    assert decision.verdict is RetuneVerdict.IMPROVED and executor.ran == []
    assert config(tmp_path).get("bf16") is None and json.loads((decision.folder / "decision.json").read_text())
    assert load.load("s", records.default_url(tmp_path), tmp_path / "s").study["stored_as"] == "s.retune-1"
    # It has not examined what changed since, which is a reason for the next one.
    run = retuning(tmp_path)
    assert fingerprint.changes(last_looked_at(run.history, "s", run.kept), Fingerprint.now(found))


def test_one_that_is_killed_again_and_again_counts_as_failed(tmp_path):
    for _ in range(3):
        retuning(tmp_path).begin()
    with pytest.raises(Exception, match="killed 3 times"):
        retuning(tmp_path).begin()
    assert history(tmp_path).decisions("s")[0]["verdict"] == "failed"
    assert retune(tmp_path, Instant()).generation == 2


def test_a_full_disk_as_one_that_was_killed_begins_again_is_no_further_kill(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    retuning(tmp_path).begin()
    with monkeypatch.context() as patch:
        patch.setattr(retuning_module, "write_record", full)
        for _ in range(4):
            with pytest.raises(OSError, match="No space"):
                retuning(tmp_path).begin()
    retuning(tmp_path).begin()


@pytest.mark.parametrize(
    ("begun", "later", "counts"),
    [
        ("forced", "due", "forced"),
        ("asked", "stale", "asked"),
        ("stale", "stale", "stale"),
        ("stale", "asked", "asked"),
        ("asked forced", "due", "forced"),  # what the second one was asked for was lost to the third
    ],
)
def test_what_takes_an_interrupted_one_up_does_no_less_than_it_was_begun_for(tmp_path, begun, later, counts):
    """`--if-stale` ended one that had searched with "nothing has changed"."""
    for cause in begun.split():
        retuning(tmp_path, cause=cause).begin()
    again = retuning(tmp_path, cause=later)
    again.begin()
    assert again.asked.cause == counts


def test_what_takes_an_interrupted_one_up_has_the_options_that_it_was_begun_with(tmp_path):
    """A schedule replaced the configuration for a smaller gain than was asked for, and for other ranks; the user's command never ran."""
    retuning(tmp_path, min_gain=0.1, trials=9, on_change="deploy", ranks=4, checkpoint="/state").begin()
    retuning(tmp_path, trials=4).begin()
    later = retuning(tmp_path, cause="due")
    later.begin()
    stated = {"min_gain": 0.1, "trials": 4, "on_change": "deploy", "ranks": 4, "checkpoint": "/state"}
    assert later.asked == RetuneRequest(cause="due", **stated)
    assert any("(--min-gain=0.1 --trials=4 --ranks=4 --checkpoint=/state)" in said for said in later.observer.said)
    assert retuning(tmp_path, min_gain=0.03).min_gain == 0.03  # the default, stated: it kept 0.1
    later.fail("it failed")
    anew = retuning(tmp_path)
    anew.begin()
    assert anew.asked == RetuneRequest()


@pytest.mark.system
def test_a_study_that_is_deleted_meanwhile_leaves_no_row_and_ends_with_a_sentence(tmp_path):
    class Deleting(Instant):
        def submit(self, folder):
            if len(self.ran) == 9:
                records.delete_study(open_storage(records.default_url(tmp_path)), "s")
            return super().submit(folder)

    with pytest.raises(GoneError, match="was deleted meanwhile"):
        retune(tmp_path, Deleting(slow_bf16))
    assert set(rows(tmp_path).values()) == {0}
    assert records.study_names(open_storage(records.default_url(tmp_path))) == []


# What counts as moved.


def turns(incumbent, baseline):
    return lambda n: {
        "incumbent": Reading(outcome=Outcome.COMPLETE, metrics={"step_time_s": incumbent(n), "peak_memory_bytes": 1e9}),
        "baseline": Reading(outcome=Outcome.COMPLETE, metrics={"step_time_s": baseline(n), "peak_memory_bytes": 1e9}),
    }


THEN = EarlierRatio(logs=(math.log(0.5), math.log(0.503), math.log(0.498)), step_time_s=1.0, peak_memory_bytes=1e9)


def test_a_machine_that_became_slower_altogether_has_moved_nothing():
    standing = comparison.check_drift(THEN, turns(lambda n: 0.7 + 0.001 * (n % 2), lambda n: 1.4))
    assert not standing.moved and standing.machine == pytest.approx(math.log(1.4))
    assert any("the baseline itself is 40% slower than it was" in line for line in standing.lines())


def test_a_baseline_that_has_never_run_is_not_said_to_run_no_more():
    """Where the baseline runs out of memory each re-tuning said that of it, or that it was another one."""
    gone = Reading(outcome=Outcome.OOM, reason="no room")
    for then, said in (None, "does not run (oom: no room)"), (THEN, "does not run any more (oom: no room)"):
        standing = comparison.check_drift(then, lambda n: turns(lambda n: 0.5, lambda n: 1.0)(n) | {"baseline": gone})
        assert standing.moved and standing.reason == f"the baseline {said}"
    assert "did not run then" in comparison.check_drift(None, turns(lambda n: 0.5, lambda n: 1.0)).reason


def test_a_large_change_is_told_as_a_factor():
    standing = comparison.check_drift(THEN, turns(lambda n: 1.35 + 0.001 * (n % 2), lambda n: 1.0))
    assert "2.7 times slower than it was" in standing.reason


@pytest.mark.parametrize("factor", [1.05, 0.93])
def test_five_percent_against_the_baseline_has_moved(factor):
    standing = comparison.check_drift(THEN, turns(lambda n: 0.5 * factor + 0.001 * (n % 2), lambda n: 1.0))
    assert standing.moved and ("slower" if factor > 1 else "faster") in standing.reason
    assert standing.shift == pytest.approx(math.log(factor), abs=0.01)


def test_the_interval_of_the_shift_holds_the_truth_as_often_as_it_says():
    """With quantiles of the normal that of a few rounds held it in 85 to 90 of 100."""
    draw, held = random.Random(0), 0
    for _ in range(1000):
        then = EarlierRatio(logs=[draw.gauss(0, 0.01) for _ in range(3)], step_time_s=1.0)
        standing = comparison.check_drift(then, turns(lambda n: math.exp(draw.gauss(0, 0.01)), lambda n: 1.0))
        held += standing.shift_ci95[0] <= 0 <= standing.shift_ci95[1]
    assert 930 < held < 980


def test_rounds_that_cannot_show_anything_are_not_run():
    then = EarlierRatio(logs=(math.log(0.5),), across=True, step_time_s=1.0)
    standing = comparison.check_drift(then, turns(lambda n: 0.5 + 0.04 * (n % 2), lambda n: 1.0))
    assert standing.moved and standing.n_rounds == comparison.FEWEST


def test_noise_that_could_hide_it_is_no_proof_that_nothing_moved():
    wide = EarlierRatio(logs=(math.log(0.45), math.log(0.55)), step_time_s=1.0)
    standing = comparison.check_drift(wide, turns(lambda n: 0.5 + 0.04 * (n % 2), lambda n: 1.0))
    assert standing.moved and "noise" in standing.reason and standing.n_rounds == comparison.MOST


def test_more_memory_has_moved():
    then = replace(THEN, peak_memory_bytes=0.5e9)
    assert "memory" in comparison.check_drift(then, turns(lambda n: 0.5, lambda n: 1.0)).reason


def test_a_baseline_in_use_is_compared_with_nothing():
    standing = comparison.check_drift(replace(THEN, logs=()), turns(lambda n: 1.0, lambda n: 1.0))
    assert not standing.moved and standing.n_rounds == 1 and "baseline itself" in standing.reason
    assert standing.lines() == []


def test_a_decision_reads_back_as_it_was_written(tmp_path):
    decision = Decision(
        verdict=RetuneVerdict.IMPROVED, reason="b replaces a", generation=2, folder=tmp_path,
        changes=[Change(part="cores", before=4, after=8)], duel=Comparison(gain=None, won=True, failed="it cannot run"),
        check=comparison.check_drift(THEN, turns(lambda n: 0.6, lambda n: 1.0)),
        differences=[Difference("precision", "bf16", "fp32")], explained=["so"], n_trials=8, notes=["a note"],
    )  # fmt: skip
    data = json.loads(json.dumps(decision.to_data()))
    assert Decision.of_data(data, tmp_path) == decision
    assert "folder" not in data and data["differences"] == [{"knob": "precision", "before": "bf16", "after": "fp32"}]


# What earlier studies teach.


def test_a_new_study_of_the_same_model_starts_from_what_an_earlier_one_found(tmp_path):
    watcher, planned = Watcher(), {"workload": replace(WORKLOAD, structure="abc")}
    for name in ("a", "t"):
        changes = {**STUDY, "name": name, "sampler": "physics", "stop_below": 0.0, "trials": 8}
        runner = recorded(tmp_path, Instant(), watcher=watcher, learn=True, planned=planned, **changes)
        runner.run()
    assert any("starting from 8 trials of study a" in text for text in watcher.said)
    told = [records.told_candidate(each) for each in records.told_trials(runner.study)]
    best = load.load("a", records.default_url(tmp_path), tmp_path / "a").picks["recommended"]["candidate"]
    assert told[1] == Candidate.of(best)


@pytest.mark.system
def test_a_new_study_does_not_begin_with_what_the_checks_of_an_earlier_one_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.study.budget.CHECK_SHARE", 1e9)  # no trial takes time here
    worse = lambda c: replace(report(c), losses=[3.0 * (c.precision == "bf16") + x for x in report(c).losses])  # noqa: E731
    changes = {**STUDY, "sampler": "physics", "stop_below": 0.0, "trials": 8, "repeats": 1}
    planned = {"workload": replace(WORKLOAD, structure="abc")}
    first = recorded(tmp_path, Instant(worse), planned=planned, **changes, name="a")
    first.run()
    refused = {m.candidate for m in first.state.measured() if m.refused}
    assert any(candidate.precision == "bf16" for candidate in refused)
    later = recorded(tmp_path, Instant(worse), learn=True, planned=planned, **changes, name="t")
    later.run()
    assert records.told_candidate(records.told_trials(later.study)[1]) not in refused


@pytest.fixture(scope="module")
def beside(finished, tmp_path_factory):
    """The folder of the finished study with another one, of a model of the structure `abc` on one rank."""
    studies = shutil.copytree(finished, tmp_path_factory.mktemp("beside") / "studies")
    changes = {**STUDY, "name": "a", "sampler": "physics", "stop_below": 0.0, "trials": 5}
    recorded(studies, Instant(), planned={"workload": replace(WORKLOAD, structure="abc")}, **changes).run()
    return studies


@pytest.mark.system
@pytest.mark.parametrize(
    ("structure", "ranks", "doubt"), [("abc", 1, 0.5), ("abc", 2, 0.8), ("d", 1, 0.8), ("d", 2, None)]
)
def test_a_model_with_the_same_blocks_teaches_only_on_as_many_ranks(beside, structure, ranks, doubt):
    storage = open_storage(records.default_url(beside))
    new = plan_of(spec_of(**STUDY | {"name": "new"}))
    new = replace(new, world_size=ranks, workload=replace(WORKLOAD, structure=structure))
    known = warm_start.related(storage, new, beside)
    assert (known and known.doubt) == doubt


@pytest.mark.system
def test_of_two_studies_of_the_same_model_the_one_on_as_many_ranks_teaches(tmp_path):
    planned = {"workload": replace(WORKLOAD, structure="abc")}
    changes = {**STUDY, "sampler": "physics", "stop_below": 0.0, "trials": 5}
    for name, ranks in (("a", 1), ("later", 2)):
        recorded(tmp_path, Instant(), planned=planned | {"world_size": ranks}, **changes | {"name": name}).run()
    storage = open_storage(records.default_url(tmp_path))
    new = replace(plan_of(spec_of(**STUDY | {"name": "new"})), **planned)
    known = warm_start.related(storage, new, tmp_path)
    assert known.name == "a"


def test_a_study_whose_space_cannot_be_read_teaches_nothing_and_stops_no_other(beside, monkeypatch):
    """A new study of the same model ended in that one's error."""

    def refuse(*_):
        raise SpaceError("study a: zero_stage: 7 is not one of 0, 1, 2, 3")

    storage = open_storage(records.default_url(beside))
    assert warm_start.from_study(storage, "a", beside / "a", "the same model on this machine") is not None
    monkeypatch.setattr(analysed, "search_of", refuse)
    assert warm_start.from_study(storage, "a", beside / "a", "the same model on this machine") is None


def test_a_deleted_study_leaves_no_rows(tmp_path):
    assert all(count for name, count in rows(tmp_path).items() if name != "autotune_decision")
    records.delete_study(open_storage(records.default_url(tmp_path)), "s")
    assert set(rows(tmp_path).values()) == {0}


@pytest.mark.system
@pytest.mark.parametrize("still_there", [False, True])
def test_a_lost_database_takes_the_re_tuning_along_that_replaced_the_answer(replaced, tmp_path_factory, still_there):
    """The answer went back to the one that had been replaced, and the next re-tuning wrote over the last one's files."""
    studies = shutil.copytree(replaced.studies, tmp_path_factory.mktemp("lost") / "studies")
    folder = studies / replaced.decision.folder.relative_to(replaced.studies)
    answer = config(studies)
    for path in studies.glob("autotune.db*"):
        path.unlink()
    if not still_there:
        (folder / "record.json").unlink()
    watcher = Watcher()
    runner_of(studies, Instant(slow_bf16), watcher=watcher, **STUDY).run()
    found = load.load("s", records.default_url(studies), studies / "s")
    assert (found.picks["recommended"]["ds_config"] == answer) == still_there
    assert any("is not taken up again" in said for said in watcher.said) != still_there
    assert retune(studies, Instant(slow_bf16)).generation == 2
    assert (folder / "decision.json").exists()


def test_a_study_that_was_begun_anew_is_not_had_back_with_an_earlier_answer(replaced, tmp_path_factory):
    """--fresh left the re-tunings of before in the folder: after the database was lost, one of them was the answer again."""
    studies = shutil.copytree(replaced.studies, tmp_path_factory.mktemp("anew") / "studies")
    url, few = records.default_url(studies), STUDY | {"trials": 2, "finalists": 0}
    session._forget("s", open_storage(url), studies / "s", Instant())
    runner_of(studies, Instant(slow_bf16), **few).run()
    answers = [load.load("s", url, studies / "s")]
    for path in studies.glob("autotune.db*"):
        path.unlink()
    runner_of(studies, Instant(slow_bf16), **few).run()
    answers.append(load.load("s", url, studies / "s"))
    assert answers[0].study["stored_as"] == answers[1].study["stored_as"] == "s"
    assert answers[0].picks["recommended"]["trial"] == answers[1].picks["recommended"]["trial"]
