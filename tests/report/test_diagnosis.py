"""What `autotune diagnose` says of a study's trial, and planted causes in real trials."""

import gzip
import json
import shutil
from dataclasses import replace

import pytest
from support.diagnosed import of_result
from support.instant import WORKLOAD, Instant, runner_of
from support.instant import report as instant_report
from support.zoo import MIB

from autotune.cli import answer
from autotune.errors import UserError
from autotune.report import diagnosis, load
from autotune.scoring.step_parts import StepObservation
from autotune.session import open_study
from autotune.space.candidate import Candidate
from autotune.study.storage import records
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.profile import Profile
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


def phased(candidate):
    return instant_report(candidate, phase_times_s={"data": 0.05, "forward": 0.01, "backward": 0.02, "step": 0.005})


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """A folder of studies, with one of three trials whose phases were kept."""
    runner = runner_of(tmp_path_factory.mktemp("phased"), Instant(phased), trials=3)
    runner.run()
    runner.storage.engine.dispose()
    return runner.state.folder.parent


@pytest.fixture
def study(studies, tmp_path, monkeypatch):
    """The folder of a copy of it."""
    shutil.copytree(studies, tmp_path / "studies")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "studies" / "s"


def test_what_breaks_a_constraint_is_not_advised(study):
    """Its values were named as a gain over those of the trials that keep it."""
    found = open_study("s").report
    slow, fast = found.trials[0], found.trials[1]
    fast |= {
        "candidate": slow["candidate"] | {"data.num_workers": 2},
        "metrics": fast["metrics"] | {"samples_per_s": 1e6},
    }
    assert [each.value for each in diagnosis.of_trial(found, study, 0).advice] == [2]
    fast["feasible"] = False
    assert diagnosis.of_trial(found, study, 0).advice == []


@pytest.mark.usefixtures("study")
def test_the_command_says_it_for_people_and_for_programs(capsys):
    answer.diagnose("s")
    said = capsys.readouterr().out
    assert "bound by input pipeline" in said and "num_workers" in said
    answer.diagnose("s", 0, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["trial"] == 0 and found["bound_by"] == "input pipeline" and found["candidate"]["micro_batch_size"] == 8


@pytest.mark.system
def test_a_trial_that_did_not_complete_is_refused_in_a_sentence(tmp_path, monkeypatch):
    def behaviour(candidate):
        return phased(candidate) if candidate.micro_batch_size == 8 else None

    runner_of(tmp_path / "studies", Instant(behaviour), trials=6).run()
    monkeypatch.chdir(tmp_path)
    report = load.load("s", records.default_url(tmp_path / "studies"), tmp_path / "studies" / "s")
    number = next(row["trial"] for row in report.trials if row["outcome"] != "complete")
    with pytest.raises(UserError, match="did not complete"):
        answer.diagnose("s", number)
    with pytest.raises(UserError, match="no finished trial 99"):
        answer.diagnose("s", 99)


def test_a_study_whose_trial_folders_are_gone_is_still_answered(study, tmp_path, capsys):
    (study / "trials").rename(tmp_path / "elsewhere")
    answer.diagnose("s", 0)
    assert "bound by input pipeline" in capsys.readouterr().out


@pytest.mark.system
def test_a_trial_whose_phases_were_not_kept_is_told_so(tmp_path, monkeypatch, capsys):
    runner_of(tmp_path / "studies", Instant(), trials=3).run()
    monkeypatch.chdir(tmp_path)
    answer.diagnose("s", 0)
    said = capsys.readouterr().out
    assert "what bounds it is not known" in said and "phases of its step were not kept" in said


def test_a_trial_whose_files_are_gone_cannot_be_traced_and_that_is_said(study):
    shutil.rmtree(study / "trials" / "0000")
    with pytest.raises(UserError, match="without --profile"):
        answer.diagnose("s", 0, profile=True)


def test_a_trial_that_ran_elsewhere_is_not_traced_here(study):
    (study / "study.yaml").write_text("target: model.py\nexecutor: slurm\n")
    with pytest.raises(UserError, match="ran on slurm"):
        answer.diagnose("s", 0, profile=True)


@pytest.mark.system
@pytest.mark.smoke
def test_a_trial_is_run_again_and_its_trace_kept_and_read(zoo, study, capsys):
    folder = TrialDir(study / "trials" / "0000")
    request = read_record(folder.request, TrialRequest)
    again = zoo.request("gpt_tiny", micro=8, world_size=1)
    write_record(folder.request, replace(again, candidate=request.candidate))
    answer.diagnose("s", 0, profile=True)
    said = capsys.readouterr().out
    assert "traced: between operations" in said and "perfetto" in said and "aten::" in said
    with gzip.open(folder.path / "profile" / "trace-rank-0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"autotune: data", "autotune: forward", "autotune: backward", "autotune: step", "aten::addmm"} <= names


@pytest.mark.parametrize(("own", "expected"), [({}, 30), ({"data.packing": True}, 20), ({"data.max_length": 10}, 10)])
def test_a_steps_operations_are_those_of_the_lengths_that_it_takes_in(own, expected):
    """They were counted at the profiled length, so that a packed batch reached twice the share of the peak."""
    profile = Profile(
        n_parameters=1000, n_trainable=10, flops_per_sample=40.0, activation_bytes_per_sample=1.0, checkpointed_bytes_per_sample=1.0,
        n_blocks=4, sequence=40, lengths=((10.0, 500), (30.0, 500)),
    )  # fmt: skip
    candidate = Candidate.of({"micro_batch_size": 64, **own}).values()
    found = diagnosis.of_workload(replace(WORKLOAD, profile=profile), candidate, 1)
    assert found["flops_per_step"] == pytest.approx(64 * expected)


@pytest.mark.parametrize(("state_bytes", "moved"), [(8.0, 28.0), (4.0, 20.0), (0.0, 12.0)])
def test_an_optimizers_bytes_are_those_of_its_own_states(state_bytes, moved):
    """They were counted as Adam's 28 bytes a parameter for every optimizer."""
    profile = Profile(
        n_parameters=1000, n_trainable=10, flops_per_sample=1.0, activation_bytes_per_sample=1.0, checkpointed_bytes_per_sample=1.0,
        n_blocks=4, sequence=1, optimizer_bytes=state_bytes,
    )  # fmt: skip
    known = replace(WORKLOAD, profile=profile)
    assert diagnosis.of_workload(known, Candidate(micro_batch_size=8).values(), 1)["optimizer_bytes"] == 10 * moved
    mixture = replace(known, profile=replace(known.profile, n_expert=8))
    degree = (("expert_parallel.autoep_size", 2), ("expert_parallel.enabled", True))
    for stage, n_updated in ((0, 6), (1, 10)):  # at stage 0 a rank updates its half of the experts
        own = Candidate(micro_batch_size=8, zero_stage=stage, config=degree)
        assert diagnosis.of_workload(mixture, own.values(), 2)["optimizer_bytes"] == n_updated * moved
    assert "optimizer_bytes" not in diagnosis.of_workload(WORKLOAD, Candidate(micro_batch_size=8).values(), 1)


REAL = [
    ("slow_loader", 1, {}, "input pipeline"),
    ("slow_rank", 2, {}, "stragglers"),
    ("wide_table", 1, {}, "optimizer"),
    ("many_layers", 2, {"zero_stage": 2, "zero_optimization.reduce_bucket_size": 1024}, "communication"),
    ("heavy_blocks", 1, {"micro": 8, "checkpoint_every": 1, "traced_steps": 1}, "recomputation"),
    ("many_layers", 1, {"micro": 1, "gradient_accumulation_steps": 8, "traced_steps": 1}, "launch overhead"),
    ("long_streams", 1, {"micro": 4, "traced_steps": 1}, "memory bandwidth"),
]
SLOW = ("launch overhead", "communication")


@pytest.mark.cells(2)
@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "world_size", "what", "cause"),
    [pytest.param(*each, id=each[-1], marks=[pytest.mark.system] * (each[-1] in SLOW)) for each in REAL],
)
@pytest.mark.alone
def test_a_cause_planted_in_a_real_trial_is_named(zoo, model, world_size, what, cause):
    """In one of three trials: where others use the machine, one rank waits for the other for a reason of theirs."""
    seen = []
    for _ in range(3):
        result = zoo.run(model, world_size=world_size, **what)
        assert result.outcome is Outcome.COMPLETE, result.reason
        seen.append(of_result(result, zoo.folder.path, replace(WORKLOAD, n_blocks=4)))
        if seen[-1].bound_by == cause:
            return
    pytest.fail(str([[(part.name, part.share) for part in found.parts] for found in seen]))


@pytest.mark.alone
@pytest.mark.system
def test_a_real_batch_that_only_memory_keeps_small_is_bound_by_its_capacity(zoo):
    limit = {"world_size": 1, "device_memory_bytes": 300 * MIB}
    refused = zoo.run("many_layers", micro=32768, **limit)
    assert refused.outcome is Outcome.OOM, refused.reason
    small = zoo.run("many_layers", micro=1, gradient_accumulation_steps=8, traced_steps=1, **limit)
    assert small.outcome is Outcome.COMPLETE, small.reason
    other = StepObservation(trial=1, candidate=refused.candidate, samples_per_s=None, outcome=str(refused.outcome))
    alone, beside = (of_result(small, zoo.folder.path, WORKLOAD, others) for others in ([], [other]))
    assert (alone.bound_by, beside.bound_by) == ("launch overhead", "memory capacity")
    assert 0 < next(part.share for part in alone.parts if part.name == "memory capacity") < 1
