"""`autotune predict`: its answer, a study's trials that correct it, and the cache of profiles and rates."""

import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import autotune as autotune_command
from support.commands import called, one_sentence
from support.instant import WORKLOAD, Instant, plan_of, report, runner_of, spec_of
from support.paths import MODELS
from support.zoo import ADAMW

import autotune
from autotune.cli import predict as predict_command
from autotune.cli.options import read_settings
from autotune.errors import UserError
from autotune.report import load
from autotune.space.candidate import Candidate
from autotune.study.events import SILENT
from autotune.study.setup import forecasts, plan, profile_cache
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import records
from autotune.trial.folder import write_record
from autotune.trial.profile import Machine, Pass, Profile
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult
from autotune.trial.workload import Probed, Splitting, Workload

P = 10_000_000
TARGET = MODELS / "ok.py"
PASS = Pass(
    moments=((0.0, 8e6, 0.0),), kept_bytes=(0, 8e6), largest_bytes=(0, 1e6), flops=(0, 6e9), moved_bytes=(1e7, 1e7), n_ops=500,
)  # fmt: skip
PROFILE = Profile(
    n_parameters=P, n_trainable=P, flops_per_sample=6e9, activation_bytes_per_sample=8e6, checkpointed_bytes_per_sample=1e6, n_blocks=4,
    sequence=128, sizes=((1_000_000, 10),), passes={"fp32/0": PASS}, caveats=("something was assumed",),
)  # fmt: skip
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A cache that knows the target, and a folder without studies."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    own = "def optimizer" in TARGET.read_text()
    profile_cache.save(WORKLOAD, profile_cache.workload_key(TARGET, not own))
    profile_cache.save(PROFILE, profile_cache.workload_key(TARGET, None if own else OPTIMIZER))
    for ranks in (1, 2):
        machine = replace(Machine.guess("cpu", ranks), measured=True, workspace_bytes=5e7)
        profile_cache.save(machine, profile_cache.machine_key(ranks))
    return tmp_path


def predict(target, overrides, settings, *, as_json):
    return predict_command.predict(str(target), overrides, settings, as_json=as_json)


def said(capsys, *settings, **overrides):
    predict(TARGET, overrides, settings, as_json=True)
    return json.loads(capsys.readouterr().out)


@pytest.mark.process
def test_the_answer_adds_up_and_holds_its_intervals(known, capsys):
    data = said(capsys, "micro_batch_size=16", "zero_stage=1", ranks=2)
    for name in ("peak_memory_bytes", "step_time_s"):
        assert data[name]["low"] < data[name]["value"] < data[name]["high"]
        assert sum(term["value"] for term in data[name]["terms"]) == pytest.approx(data[name]["value"])
    assert data["samples_per_s"]["value"] == pytest.approx(32 / data["step_time_s"]["value"])
    assert data["tokens_per_s"]["value"] == pytest.approx(128 * data["samples_per_s"]["value"])
    terms = {term["name"]: term["value"] for term in data["peak_memory_bytes"]["terms"]}
    assert data["largest_tensor_bytes"] == 16 * 1e6
    assert (terms["activations"], terms["weights"], terms["workspace"]) == pytest.approx((16 * 8e6, 4 * P, 5e7))
    assert data["notes"] == ["something was assumed"]


@pytest.mark.process
def test_the_library_gives_the_commands_answer_without_a_word(known, capfd):
    found = autotune.predict(TARGET, set={"micro_batch_size": 16, "zero_stage": 1}, ranks=2, device_memory_bytes="1GiB")
    assert capfd.readouterr() == ("", "")
    data = said(capfd, "micro_batch_size=16", "zero_stage=1", ranks=2, device_memory_bytes="1GiB")
    assert (found.candidate, found.ranks, found.device_memory_bytes) == (data["candidate"], 2, 2**30)
    for name in ("peak_memory_bytes", "step_time_s", "samples_per_s", "tokens_per_s"):
        assert getattr(found, name) == tuple(data[name][key] for key in ("value", "low", "high"))
    assert sum(found.memory_terms_bytes.values()) == pytest.approx(found.peak_memory_bytes.value)
    assert sum(found.step_time_terms_s.values()) == pytest.approx(found.step_time_s.value)
    keys = ("binds", "fits_probability", "largest_micro_batch_size", "measured")
    assert [getattr(found, key) for key in keys] == [data[key] for key in keys] and list(found.notes) == data["notes"]
    predict(TARGET, {"ranks": 2, "device_memory_bytes": "1GiB"}, ["micro_batch_size=16", "zero_stage=1"], as_json=False)
    assert str(found) == capfd.readouterr().out.rstrip("\n")


@pytest.mark.parametrize(
    ("settings", "words"), [({"zero_stge": 3}, "Did you mean 'zero_stage'"), ({"zero_stage": [1]}, "a plain value")]
)
def test_the_library_says_a_wrong_knob_in_one_sentence(known, settings, words):
    with pytest.raises(UserError, match=words) as error:
        autotune.predict(TARGET, set=settings)
    assert "\n" not in str(error.value)


def test_the_library_forecasts_by_no_study_that_is_not_there(known):
    with pytest.raises(UserError, match="there is no study 'none'"):
        autotune.predict(TARGET, name="none")


@pytest.mark.process
def test_the_answer_for_other_devices_names_them_and_rests_on_their_data_sheet(known, capsys):
    def lines(gpus, *settings, **overrides):
        predict_command.predict(str(TARGET), overrides, settings, gpus=gpus, as_json=False)
        return capsys.readouterr().out.splitlines()

    h100 = lines("2xH100-80GB", "precision=bf16", ranks=None)
    assert h100[0].endswith("bf16, ZeRO 0, 2 rank(s), on 2 x H100-80GB") and "79.1 GiB: fits" in h100[2]
    assert any("nothing was measured on it" in line and "data sheet" in line for line in h100)
    assert lines("H100", ranks=16)[0].endswith("16 rank(s), on 2 nodes of 8 x H100-80GB")
    with pytest.raises(UserError, match=r"this cannot run on 1 x V100-SXM-32GB: .*bfloat16"):
        lines("V100-32GB", "precision=bf16")
    with pytest.raises(UserError, match=r"--device: unknown card 'RTX 3080 Ti'; the nearest are [^;]*$"):
        lines("RTX 3080 Ti")


def test_devices_of_several_nodes_all_count_and_lie_in_their_nodes(known, capsys):
    def data(gpus, *settings):
        predict_command.predict(str(TARGET), {}, settings, gpus=gpus, as_json=True)
        return json.loads(capsys.readouterr().out)

    sixteen = data("2x8xH100", "zero_stage=3", "precision=fp16", "zero_optimization.zero_quantized_gradients=true")
    micro, steps = (sixteen["candidate"][name] for name in ("micro_batch_size", "gradient_accumulation_steps"))
    assert sixteen["ranks"] == 16
    assert sixteen["samples_per_s"]["value"] == pytest.approx(16 * micro * steps / sixteen["step_time_s"]["value"])
    with pytest.raises(UserError, match="no effect on one node"):
        data("8xH100", "zero_stage=3", "precision=fp16", "zero_optimization.zero_quantized_gradients=true")
    with pytest.raises(UserError, match="does not fit into machines of 8"):
        data("2x8xH100", "tensor_parallel.autotp_size=16")


def test_a_baseline_that_this_machine_cannot_run_is_answered_for_devices_that_can(known, capsys):
    offloads = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    predict_command.predict(str(TARGET), {"base_config": offloads}, [], gpus="2xH100")
    assert "optimizer on the host, 2 rank(s), on 2 x H100" in capsys.readouterr().out
    with pytest.raises(UserError, match="the baseline cannot run here: offload"):
        predict_command.predict(str(TARGET), {"base_config": offloads}, [])


@pytest.mark.process
def test_people_get_a_waterfall_a_verdict_and_what_binds(known, capsys):
    predict(TARGET, {"device_memory_bytes": "1GiB"}, ["micro_batch_size=64"], as_json=False)
    text = capsys.readouterr().out
    assert "####  (the largest tensor 61.0 MiB)" in text and "may not fit" not in text and ": fits" in text
    assert "binds       memory: activations" in text and "largest micro-batch that surely fits:" in text


@pytest.mark.process
def test_less_memory_is_seen_not_to_be_enough(known, capsys):
    data = said(capsys, "micro_batch_size=64", device_memory_bytes="400MiB")
    assert data["fits_probability"] < 0.1
    assert 1 <= data["largest_micro_batch_size"] < 64
    assert said(capsys, device_memory_bytes="100MiB")["largest_micro_batch_size"] is None


@pytest.mark.process
def test_ranks_that_are_not_here_share_the_states_and_are_said_to_be_assumed(known, capsys):
    here, there = (said(capsys, "zero_stage=3", "micro_batch_size=1", ranks=ranks) for ranks in (2, 64))
    assert there["peak_memory_bytes"]["value"] < here["peak_memory_bytes"]["value"]
    assert "links differ" in there["notes"][-1] and not any("links" in note for note in here["notes"])
    (known / "study.yaml").write_text(f"target: {TARGET}\nexecutor: slurm\nnodes: 2\n")
    predict(known / "study.yaml", {}, (), as_json=True)
    cluster = json.loads(capsys.readouterr().out)
    assert cluster["ranks"] == 2 and "rates are those of 1 rank(s)" in cluster["notes"][-1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("zero_stge=3", "Did you mean 'zero_stage'"),
        ("zero_stage=7", "7 is not one of 0, 1, 2, 3"),
        ("micro_batch_size=many", "not a whole number"),
        ("zero_stage", "KEY=VALUE is needed"),
        ("zero_optimization.reduce_buckets=5", "has no key 'reduce_buckets'"),
        ("precision=fp16", "cannot run here: fp16"),
        ("zero_stage=[1]", "a plain value is needed"),
    ],
)
def test_a_wrong_knob_or_value_is_one_sentence(known, setting, words):
    with pytest.raises(UserError) as error:
        predict(TARGET, {}, [setting], as_json=False)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_values_read_as_people_write_them():
    given = ["zero_optimization.reduce_bucket_size=5e8", "zero_optimization.overlap_comm=true", "precision=bf16"]
    read = read_settings([*given, "communication_data_type=null", "gradient_clipping=0.5"])
    assert list(read.values()) == [5e8, True, "bf16", None, 0.5]


@pytest.mark.process
def test_a_script_is_run_once_and_then_predicted_from_the_cache(executor, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(forecasts, "executor_for", lambda *_: nullcontext(executor))
    for ranks in (1, 2):
        profile_cache.save(Machine.guess("cpu", ranks), profile_cache.machine_key(ranks))
    script = str(MODELS / "scripts" / "dict_config.py")
    settings = ["--set", "zero_stage=2", "--set", "micro_batch_size=4", "--ranks", "2", "--json"]
    first, again = (called("predict", script, *settings, cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0 and "running dict_config.py, once" in first.stderr, first.stderr
    assert again.returncode == 0 and again.stderr == ""
    assert json.loads(first.stdout) == json.loads(again.stdout)
    data = json.loads(again.stdout)
    assert (data["ranks"], data["candidate"]["zero_stage"], data["candidate"]["micro_batch_size"]) == (2, 2, 4)
    assert data["peak_memory_bytes"]["value"] > 0 and any("one forward of the script" in note for note in data["notes"])
    other = called("predict", script, "--ranks", "64", "--json", cwd=tmp_path)
    assert other.returncode == 0 and json.loads(other.stdout)["ranks"] == 64, other.stderr


@pytest.mark.process
def test_the_stages_of_a_pipeline_are_not_predicted(tmp_path, monkeypatch):
    script = Probed(ds_config={}, micro_batch_size=2, gradient_accumulation_steps=1, pipeline_stages=2)
    known = replace(WORKLOAD, profile=PROFILE, script=script)
    monkeypatch.setattr(forecasts, "_known", lambda *_: (known, []))
    with pytest.raises(UserError, match="pipelines cannot be predicted"):
        predict(MODELS / "scripts" / "pipeline.py", {}, [], as_json=False)


def test_ranks_of_a_scripts_own_groups_do_not_count_as_readers_of_samples(known, monkeypatch, capsys):
    """Two ranks that train one copy of the model together read one micro-batch: the rate was twice too high."""
    script = Probed(ds_config={}, micro_batch_size=2, gradient_accumulation_steps=1, model_parallel_size=2)
    workload = replace(WORKLOAD, profile=PROFILE, script=script)
    monkeypatch.setattr(forecasts, "_known", lambda *_: (workload, []))
    data = said(capsys, "micro_batch_size=16", ranks=4)
    assert data["ranks"] == 4
    assert data["samples_per_s"]["value"] == pytest.approx(16 * 2 / data["step_time_s"]["value"])


def test_a_script_is_known_by_its_sources_its_arguments_the_libraries_and_its_settings(tmp_path, monkeypatch):
    script, settings = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text("import deepspeed\n\ndeepspeed.initialize()")
    settings.write_text("{}")

    def key(*arguments, **given):
        given |= {"script_args": arguments, "working_dir": str(tmp_path)}
        return profile_cache.script_key(StudySpec.of_target(script, given))

    first, base = key("--steps", "3"), {"train_micro_batch_size_per_gpu": 4}
    assert key("--steps", "3") == first
    # The configuration that stands for `{ds_config}` was no part of it: that of an earlier call was answered for.
    assert (
        len(
            {
                first,
                key("--steps", "4"),
                *(key("--steps", "3", **each) for each in ({"ranks": 2}, {"base_config": base})),
            }
        )
        == 4
    )
    settings.write_text('{"fp16": {"enabled": true}}')
    edited = key("--steps", "3")
    monkeypatch.setattr(profile_cache, "installed", lambda: {"transformers": "1"})
    assert len({first, edited, key("--steps", "3")}) == 3


def write_trial(
    folder: Path, number: int, candidate: Candidate, peak: int, ranks: int = 2, target: Path = TARGET, outcome: str = "complete",
    reason: str = "",
):  # fmt: skip
    steps = {"median_s": 0.5, "ci95_s": 0.01, "n_steps": 5, "n_warmup": 2}
    path = folder / "trials" / f"{number:04d}"
    request = TrialRequest(target=str(target), candidate=candidate.values(), world_size=ranks)
    write_record(path / "request.json", request)
    data = {
        "outcome": outcome,
        "candidate": candidate.values(),
        "world_size": ranks,
        "peak_memory_bytes": peak,
        "reason": reason,
    }
    assert TrialResult.__dataclass_fields__.keys() >= {*data, "steps"}
    write_record(path / "result.json", {**data, "steps": steps})


def inputs(accelerator: str = "cpu") -> Any:
    """What the forecasts of a study's target take its trials with."""
    return SimpleNamespace(share_bytes=2.0**34, setting=SimpleNamespace(accelerator=accelerator))


@pytest.mark.process
def test_the_trials_of_the_study_correct_the_forecast(known, capsys):
    """What they measured is a fifth more than the formulas say."""
    (known / "studies" / "other").mkdir(parents=True)
    before = said(capsys, "micro_batch_size=64", "zero_stage=1", ranks=2)["peak_memory_bytes"]
    for number, (micro, stage) in enumerate([(2, 0), (8, 1), (16, 2), (32, 1), (32, 0)]):
        one = said(capsys, f"micro_batch_size={micro}", f"zero_stage={stage}", ranks=2, name="other")
        peak = int(1.2 * one["peak_memory_bytes"]["value"])
        write_trial(known / "studies" / "ok", number, Candidate(micro_batch_size=micro, zero_stage=stage), peak)
    data = said(capsys, "micro_batch_size=64", "zero_stage=1", ranks=2)
    after = data["peak_memory_bytes"]
    assert data["corrected_by"] == {"study": "ok", "memory": 5, "step_time": 5} and data["measured"] == {}
    assert after["value"] == pytest.approx(1.2 * before["value"], rel=0.06)
    again = said(capsys, "micro_batch_size=16", "zero_stage=2", ranks=2)
    assert again["measured"]["step_time_s"] == 0.5


@pytest.mark.process
def test_a_trial_that_ran_out_of_memory_raises_the_forecast_beyond_what_it_had(known, capsys):
    """Only the search knew of it: `predict` said that the same configuration surely fits."""
    asked = ("micro_batch_size=64", "zero_stage=1")
    before = said(capsys, *asked, ranks=2)
    write_trial(known / "studies" / "ok", 0, Candidate(micro_batch_size=64, zero_stage=1), 0, outcome="oom")
    path = known / "studies" / "ok" / "trials" / "0000" / "request.json"
    limit = int(1.5 * before["peak_memory_bytes"]["value"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device_memory_bytes": limit}))
    after = said(capsys, *asked, ranks=2)
    assert (
        before["peak_memory_bytes"]["value"] < limit < after["peak_memory_bytes"]["value"] and after["measured"] == {}
    )
    assert any("ran out of" in note and "study ok" in note for note in after["notes"])


@pytest.mark.system
def test_what_a_study_measured_is_what_its_report_says(tmp_path):
    """The first measurement of a trial alone, which read low, was shown and learned."""
    seen: list[Candidate] = []

    def behaviour(candidate):
        seen.append(candidate)
        whole = report(candidate)
        factor = 0.9 if seen.count(candidate) == 1 else 1.0
        return replace(whole, step_times_s=[factor * step_s for step_s in whole.step_times_s])

    runner_of(tmp_path, Instant(behaviour), trials=3, repeats=2, objectives=["latency"]).run()
    found = load.load("s", records.default_url(tmp_path), tmp_path / "s")
    measured = forecasts.measured_in(tmp_path / "s", TARGET, inputs())[1]
    assert any(point["measurements"] > 1 for point in found.points.values()) and len(measured) == len(found.points)
    for point in found.points.values():
        own = measured[Candidate.of(point["candidate"])]
        assert {name: own[name] for name in ("step_time_s", "peak_memory_bytes")}.items() <= point["metrics"].items()


def test_trials_of_another_target_or_other_ranks_or_without_a_result_do_not_count(tmp_path):
    write_trial(tmp_path, 0, Candidate(micro_batch_size=1), 10**8)
    write_trial(tmp_path, 1, Candidate(micro_batch_size=2), 10**8, ranks=4)
    write_trial(tmp_path, 2, Candidate(micro_batch_size=3), 10**8, target=MODELS / "tied.py")
    write_trial(tmp_path, 3, Candidate(micro_batch_size=4), 10**8)
    (tmp_path / "trials" / "0003" / "result.json").write_text('{"outcome": "comp')
    assert list(forecasts.measured_in(tmp_path, TARGET, inputs())[2]) == [Candidate(micro_batch_size=1)]


@pytest.mark.parametrize(("accelerator", "known"), [("cuda", [2]), ("cpu", [1, 2])])
def test_a_trial_whose_host_ran_out_of_memory_says_nothing_of_the_devices(tmp_path, accelerator, known):
    """A trial with offload that the host was too small for raised the forecasts of the device's memory beyond its size."""
    for n, why in enumerate(("could not pin 4 GiB of host memory", "CUDA out of memory"), start=1):
        write_trial(tmp_path, n, Candidate(micro_batch_size=n), 0, outcome="oom", reason=why)
    found = forecasts.measured_in(tmp_path, TARGET, inputs(accelerator))[2]
    assert found == {Candidate(micro_batch_size=n): {"exceeded_bytes": 2.0**34} for n in known}


@pytest.mark.system
def test_it_answers_without_torch_and_without_optuna(known):
    code = (
        "import sys, json, autotune\n"
        f"print(json.dumps({{'ranks': autotune.predict({str(TARGET)!r}, set={{'zero_stage': 1}}).ranks}}))\n"
        "assert not {'torch', 'deepspeed', 'optuna', 'sqlalchemy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1


@pytest.mark.process
def test_the_command_answers_in_json_and_ends_a_mistake_with_one_line(known):
    settings = "--set zero_stage=3 --set micro_batch_size=8 --ranks 64 --device-memory 80GiB --json".split()
    done = autotune_command("predict", str(TARGET), *settings, cwd=known)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["ranks"], data["device_memory_bytes"], data["candidate"]["zero_stage"]) == (64, 80 * 2**30, 3)
    wrong = called("predict", str(TARGET), "--set", "zero_stge=3", cwd=known)
    assert one_sentence(wrong).startswith("autotune: ") and wrong.stderr.count("\n") == 1


@pytest.mark.process
def test_what_is_known_is_found_out_once(zoo, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    bare = replace(WORKLOAD, profile=None, machine=None)
    told = list[str]()
    view = SimpleNamespace(doing=told.append, waiting=lambda: None)
    where = MODELS / "tied.py", ADAMW, 1
    found, notes = profile_cache.measure_missing(bare, *where, zoo.executor, tmp_path / "trials", view)
    assert found.profile is not None and found.machine is not None and found.machine.measured and notes == []

    class NoExecutor:
        def __getattr__(self, name):
            raise AssertionError(name)

    moving = replace(found.profile, updates="Ranged", by_micro_batch="Codebook")
    again, _ = profile_cache.measure_missing(replace(found, profile=moving), *where, NoExecutor(), tmp_path / "trials")
    assert (again.updates, again.by_micro_batch) == ("Ranged", "Codebook"), "as a script's probe finds them"
    again, _ = profile_cache.measure_missing(bare, *where, NoExecutor(), tmp_path / "trials", view)
    assert told == [
        "profiling the model, once",
        "measuring the machine's rates, once",
    ]  # a run that went on said it again
    assert (again.profile, again.machine) == (found.profile, found.machine)
    assert profile_cache.load(Workload, profile_cache.workload_key(MODELS / "tied.py", True)) == bare


@pytest.mark.usefixtures("known")
def test_what_was_found_beside_a_targets_own_optimizer_is_not_known_beside_a_configurations(monkeypatch):
    """Its settings were refused, since the target made its own when it was looked at."""
    asked = list[Any]()
    monkeypatch.setattr(forecasts, "_profiled", lambda spec, *_: (asked.append(spec.base_config), (WORKLOAD, []))[1])
    for config in (None, ADAMW):
        spec = StudySpec.of_target(TARGET, {"base_config": config})
        forecasts._known(spec, spec.inspected, SILENT)
    assert asked == [ADAMW]


def test_what_is_edited_while_it_is_profiled_or_probed_is_known_by_its_earlier_text(tmp_path, monkeypatch):
    """The profile of the old model, or script, was that of the new one for every later forecast."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "model.py"
    target.write_text((MODELS / "ok.py").read_text())
    key = profile_cache.workload_key(target)

    def run(_, path, request):
        target.write_text("import torch\n\n\ndef model():\n    return torch.nn.Linear(1, 1)\n")
        write_record(path / "profile.json", PROFILE)
        return TrialResult(outcome=Outcome.COMPLETE)

    monkeypatch.setattr(profile_cache.base, "run", run)
    bare = replace(WORKLOAD, profile=None, machine=Machine.guess("cpu", 1))
    profile_cache.measure_missing(bare, target, {}, 1, Instant(), tmp_path / "trials")
    assert profile_cache.load(Profile, key) == PROFILE
    assert profile_cache.load(Profile, profile_cache.workload_key(target)) is None

    script = tmp_path / "train.py"
    script.write_text((MODELS / "scripts" / "accelerate_loop.py").read_text())
    spec = StudySpec.of(script, {})
    key = profile_cache.script_key(spec)

    def planned(*_):
        script.write_text(f"{script.read_text()}\nX = 1\n")
        return plan_of(spec_of())

    monkeypatch.setattr(plan, "_planned", planned)
    digest = plan.target_digest(script)
    found = plan.plan(spec, Instant(), tmp_path)
    assert found.cache_key == key
    assert found.fingerprint["target"] == digest, "so that the run ends before the new text is measured"


def test_a_script_is_run_for_a_forecast_when_no_study_measures(tmp_path, monkeypatch):
    """It disturbed the trial that another study was measuring; and a cluster's rates were kept as this machine's."""
    held, engines = list[bool](), list[str]()

    class Turns(Instant):
        @contextmanager
        def turn(self, _):
            held.append(True)
            yield
            held.clear()

    monkeypatch.setattr(
        forecasts, "executor_for", lambda spec, *_: engines.append(spec.executor) or nullcontext(Turns())
    )
    monkeypatch.setattr(forecasts, "inspect_workload", lambda *_: held[0] and WORKLOAD)
    monkeypatch.setattr(profile_cache, "measure_missing", lambda found, *_: (found, held))
    spec = StudySpec.of(MODELS / "ok.py", {"executor": "slurm"})
    assert forecasts._profiled(spec, spec.inspected, SILENT, None) == (WORKLOAD, []) and engines == ["local"]


@pytest.mark.usefixtures("known")
def test_a_forecast_that_profiles_anew_forgets_nothing_that_was_found_of_the_model(monkeypatch):
    """Beside another optimizer the model was loaded anew, and each degree compared once more in the next study."""
    key = profile_cache.workload_key(TARGET, True)
    whole = replace(WORKLOAD, splitting=Splitting(heads=4, kv_heads=4, compared={"tensor": ""}))
    profile_cache.save(whole, key)
    monkeypatch.setattr(forecasts, "executor_for", lambda *_: nullcontext(Instant()))
    monkeypatch.setattr(profile_cache.base, "run", lambda *_: TrialResult(outcome=Outcome.CRASHED))
    spec = StudySpec.of_target(TARGET, {"base_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}})
    forecasts._known(spec, spec.inspected, SILENT)
    assert profile_cache.load(Workload, key).splitting == whole.splitting


@pytest.mark.process
def test_a_model_that_cannot_be_profiled_leaves_a_note_and_a_guess(zoo, tmp_path, monkeypatch, write_model):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    target = write_model("""
        import torch

        def model():
            return torch.nn.Linear(8, 8)

        def batch(n):
            return torch.ones(n, 9), torch.zeros(n, 8)
    """)
    profile_cache.save(Machine.guess("cpu", 1), profile_cache.machine_key(1))
    found, notes = profile_cache.measure_missing(WORKLOAD, target, ADAMW, 1, zoo.executor, tmp_path / "trials")
    assert found.profile is None and "was not profiled" in notes[0]


def test_what_the_target_imports_from_beside_it_belongs_to_its_key(tmp_path):
    target, beside, other = tmp_path / "model.py", tmp_path / "layers.py", tmp_path / "other.py"
    target.write_text("from layers import Layer\n")
    beside.write_text("import math\n")
    other.write_text("")
    first = profile_cache.workload_key(target)
    other.write_text("x = 1\n")
    assert profile_cache.workload_key(target) == first
    beside.write_text("import math  # changed\n")
    assert profile_cache.workload_key(target) != first != profile_cache.workload_key(target, {"type": "SGD"})


def test_what_a_target_names_belongs_to_its_key(tmp_path, monkeypatch):
    """A model of another size was forecast as the one before."""
    target, settings, other = tmp_path / "model.py", tmp_path / "size.txt", tmp_path / "study.yaml"
    target.write_text("""WIDTH = int(os.environ.get('WIDTH', open(HERE / "size.txt").read()))\n""")
    settings.write_text("64")
    keys = [profile_cache.workload_key(target)]
    other.write_text("trials: 3")
    monkeypatch.setenv("HEIGHT", "5")
    assert profile_cache.workload_key(target) == keys[0]
    settings.write_text("128")
    keys.append(profile_cache.workload_key(target))
    for width in ("256", "512"):
        monkeypatch.setenv("WIDTH", width)
        keys.append(profile_cache.workload_key(target))
    assert len(set(keys)) == 4


def test_the_rates_of_other_machines_than_a_hostfile_named_are_not_those_of_its_machines(tmp_path):
    """After an edit of the file, or with as many ranks on fewer machines, the rates between the machines before were assumed."""
    hostfile, keys = tmp_path / "hosts", set[str]()
    for second, nodes in (("b", 2), ("c", 2), ("c", 1)):
        spec = spec_of().model_copy(update={"hostfile": hostfile, "nodes": nodes})
        hostfile.write_text(f"a\n{second}  # another comment\n")
        keys.add(profile_cache.machine_key(2, profile_cache.place_of(spec, 2, WORKLOAD)))
    assert len(keys) == 3
