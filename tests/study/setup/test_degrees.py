"""What a study knows of degrees before its trials: facts of the model, comparisons, and the degrees that are asked for."""

from dataclasses import replace

import pytest
from support.instant import WORKLOAD

from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.study.setup import degrees, profile_cache
from autotune.study.spec.spec import StudySpec
from autotune.trial.result import Outcome, TrialResult
from autotune.trial.workload import DataShape, Experts, Pipeline, Probed, Splitting

TENSOR, SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"
STAGES = "pipeline.stages"
EXPERTS = "expert_parallel.autoep_size"
LLAMA = Splitting(heads=4, kv_heads=2)


def refusal(splitting: Splitting, base=None, **knobs) -> str | None:
    facts = degrees.facts(replace(WORKLOAD, splitting=splitting), base or {}, 4)
    setting = Setting(world_size=4, ranks_per_node=4, **facts)
    return why_illegal(Candidate.of({"micro_batch_size": 1, **knobs}), setting)


def test_what_deepspeed_cannot_split_is_refused_unless_the_user_says_which_layers():
    strange = replace(LLAMA, tensor="AutoTP finds no pairs of layers to split in Net")
    assert "finds no pairs" in refusal(strange, **{TENSOR: 2})
    assert refusal(strange, {"tensor_parallel": {"partition_config": {"layer_specs": []}}}, **{TENSOR: 2}) is None
    assert "cannot be split: it looks" in refusal(replace(LLAMA, sequence="it looks at a window"), **{SEQUENCE: 2})


def test_a_comparison_counts_for_its_ranks_and_the_settings_beside_it():
    told = {"preset_model": "llama"}
    known = {Splitting.key(TENSOR, 2, 4): "the loss is 4.9", Splitting.key(TENSOR, 2, 4, told): ""}
    compared = replace(LLAMA, compared=known)
    assert refusal(compared, **{TENSOR: 2}) == "the loss is 4.9"
    assert refusal(compared, {"tensor_parallel": told}, **{TENSOR: 2}) is None
    elsewhere = replace(LLAMA, compared={Splitting.key(TENSOR, 2, 8): "the loss is 4.9"})
    assert refusal(elsewhere, **{TENSOR: 2}) is None


def test_the_degrees_of_a_script_stay_as_they_are():
    script = Probed(ds_config={}, micro_batch_size=1, gradient_accumulation_steps=1)
    facts = degrees.facts(replace(WORKLOAD, script=script), {}, 4)
    own = Setting(world_size=4, ranks_per_node=4, base=((TENSOR, 2),), **facts)
    assert why_illegal(Candidate.of({"micro_batch_size": 1, TENSOR: 2}), own) is None
    assert "give autotune the model as a model.py" in why_illegal(Candidate(micro_batch_size=1), own)


def test_experts_are_shared_out_where_deepspeed_can():
    def of(experts, base=None):
        facts = degrees.facts(replace(WORKLOAD, splitting=LLAMA, experts=experts), base or {}, 4)
        setting = Setting(world_size=4, ranks_per_node=4, **facts)
        return why_illegal(Candidate.of({"micro_batch_size": 1, EXPERTS: 4}), setting)

    assert "no mixture of experts" in of(None)
    assert of(Experts(counts=(8,), layers=2)) is None and "6 experts" in of(Experts(counts=(6,), layers=2))
    unknown = Experts(why_none="AutoEP finds no mixture in Net")
    assert "cannot be shared out: AutoEP finds" in of(unknown)
    assert of(unknown, {"expert_parallel": {"preset_model": "mixtral"}}) is None


def test_degrees_are_those_of_the_space_and_of_the_baseline():
    space = SearchSpace.parse({TENSOR: [1, 2], "zero_stage": [0, 1]}, "test")
    assert degrees.asked(space, Candidate.of({"micro_batch_size": 1, SEQUENCE: 4})) == [(SEQUENCE, 4), (TENSOR, 2)]


@pytest.mark.parametrize(
    ("n_parameters", "memory_bytes", "said"),
    [(10**13, 0, "TiB of a machine's memory"), (10**6, 8 << 20, "7.63 MiB of a device's memory")],
)
def test_a_model_that_no_machine_or_device_holds_several_times_is_not_compared(
    n_parameters, memory_bytes, said, tmp_path, monkeypatch
):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    devices = {"accelerator": "cuda", "device_memory_bytes": memory_bytes} if memory_bytes else {}
    here = replace(WORKLOAD.environment, **devices)
    huge = replace(WORKLOAD, splitting=LLAMA, n_parameters=n_parameters, environment=here)
    target = tmp_path / "model.py"
    target.write_text("def model(): ...\ndef data(): ...")
    setting = Setting(world_size=4, ranks_per_node=4, **degrees.facts(huge, {}, 4))
    spec, known = StudySpec.of(target, {"ranks": 4}), {Splitting.key(TENSOR, 2, 2): ""}
    profile_cache.save(
        replace(huge, splitting=replace(LLAMA, compared=known)), profile_cache.workload_key(target, False)
    )
    found = degrees.compared(spec, None, tmp_path, huge, {}, setting, [(TENSOR, 2)], print)
    assert said in found.caveats[-1]
    assert found.splitting.compared == known, "what two ranks found was dropped, and was found out anew"


def test_the_memory_of_a_login_node_is_none_of_the_machines_that_trials_run_on(monkeypatch):
    """Where it lets each user have a few GiB of its own, no model was compared on the nodes."""
    monkeypatch.setattr(degrees, "memory_bytes", lambda: 2**32)
    card = replace(WORKLOAD.environment, accelerator="cuda", device_memory_bytes=80 << 30)
    model, setting = replace(WORKLOAD, n_parameters=10**9, environment=card), Setting(world_size=4, ranks_per_node=4)
    assert degrees._too_large(model, setting, elsewhere=True) == ""
    assert "of a machine's memory" in degrees._too_large(model, setting, elsewhere=False)


@pytest.mark.parametrize(("phase", "compared"), [("build", {}), ("warmup", {Splitting.key(TENSOR, 2, 4): "split so"})])
def test_a_model_that_fails_whole_speaks_against_no_degree(phase, compared, tmp_path, monkeypatch):
    """The comparison is in fp32, which flash attention does not compute in, split or whole."""
    target = tmp_path / "model.py"
    target.write_text("def model(): ...\ndef data(): ...")
    ended = TrialResult(outcome=Outcome.CRASHED, reason="RuntimeError: FlashAttention only support fp16", phase=phase)
    monkeypatch.setattr(degrees, "_compare", lambda *_: ended)
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    whole = replace(WORKLOAD, splitting=LLAMA)
    setting = Setting(world_size=4, ranks_per_node=4, **degrees.facts(whole, {}, 4))
    found = degrees.compared(
        StudySpec.of(target, {"ranks": 4}), None, tmp_path, whole, {}, setting, [(TENSOR, 2)], print
    )
    assert {key: why[:8] for key, why in found.splitting.compared.items()} == compared
    assert bool(compared) is not any("fails by itself in fp32 (RuntimeError" in caveat for caveat in found.caveats)


def test_stages_need_one_shape_of_data_or_a_module_that_takes_any():
    one = Pipeline(stages=1, partition="parameters", partitions=("parameters", "uniform"), unfit={"4 uniform": "empty"})
    lengths = DataShape(fields=(), n_seen=2, table=((8, 1), (16, 1)))

    def refusal(pipeline, data=None, **knobs):
        facts = degrees.facts(replace(WORKLOAD, pipeline=pipeline, data=data, splitting=LLAMA), {}, 4)
        setting = Setting(world_size=4, ranks_per_node=4, n_blocks=4, **facts)
        return why_illegal(Candidate.of({"micro_batch_size": 1, **knobs}), setting)

    assert refusal(one, **{STAGES: 2}) is None
    assert "differ in length" in refusal(one, lengths, **{STAGES: 2}) and refusal(one, lengths) is None
    assert refusal(replace(one, dynamic=True), lengths, **{STAGES: 2}) is None
    assert refusal(one, **{STAGES: 4, "pipeline.partition": "uniform"}) == "empty"
    assert "own topology" in refusal(replace(one, fixed="its own topology"), **{STAGES: 2})
