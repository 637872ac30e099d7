"""What may be varied: reading, conditions, enumeration, legality counts."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.search.samplers import encoded
from autotune.space import feasibility
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.space.parameter import SpaceError, parse_parameters
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.study.spec.presets import presets
from autotune.study.spec.spec import read_yaml

BASELINE = Candidate(micro_batch_size=8, gradient_accumulation_steps=2)
CPU = Setting(world_size=2, ranks_per_node=2, n_blocks=4, n_samples=10_000)
PRESETS = {name: read_yaml(path) for name, path in presets("search_spaces").items()}


def space(**knobs):
    return SearchSpace.parse({name.replace("__", "."): data for name, data in knobs.items()}, "test.yaml")


def compose(*names):
    return SearchSpace.compose([(name, parse_parameters(PRESETS[name], name)) for name in names])


CONDITIONAL = {
    "micro_batch_size": [1, 2],
    "zero_stage": [0, 1, 3],
    "zero_optimization.overlap_comm": {"choices": [None, True], "when": {"zero_stage": [1]}},
    "zero_optimization.reduce_bucket_size": {"range": [16, 18], "power_of_two": True, "when": {"zero_stage": [1, 3]}},
    "offload_param": {"choices": ["none", "cpu"], "when": {"zero_stage": [3]}},
}


def conditional():
    return SearchSpace.parse(CONDITIONAL, "test.yaml")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_alone(name):
    assert SearchSpace.parse(PRESETS[name], name).parameters


def test_all_presets_compose_and_every_value_of_them_can_run_somewhere():
    whole = compose(*PRESETS)
    assert len(whole.parameters) == sum(len(data) for data in PRESETS.values())
    setting = Setting(accelerator="cuda", world_size=16, ranks_per_node=8, fp16=True, n_blocks=24)
    in_stages = replace(setting, pipeline_stages=2, partitions=("uniform", "parameters"))
    dead = [feasibility.dead_values(whole, BASELINE, each).keys() for each in (setting, in_stages)]
    assert not dead[0] & dead[1]


def test_the_space_offers_nothing_that_changes_a_knob_outside_it():
    """A study of batch and zero began with the bf16 of another study."""
    of_batch, default = space(micro_batch_size=[4, 8]), Candidate(micro_batch_size=4)
    other = Candidate(micro_batch_size=8, precision="bf16")
    assert of_batch.contains(other) and not of_batch.contains(other, default)
    assert of_batch.contains(Candidate(micro_batch_size=8), default)
    assert not of_batch.contains(Candidate(micro_batch_size=16), default)


def test_a_list_and_a_single_value_are_short_for_choices():
    short, long = {"zero_stage": [0, 1], "precision": "bf16"}, {"choices": [0, 1]}
    assert space(**short) == space(zero_stage=long, precision={"choices": ["bf16"]})


@pytest.mark.parametrize(
    ("data", "values"),
    [
        ({"range": [3, 6]}, [3, 4, 5, 6]),
        ({"range": [1, 8], "step": 3}, [1, 4, 7]),
        ({"range": [0, 3], "power_of_two": True}, [1, 2, 4, 8]),
        ([4, 1], [4, 1]),
    ],
)
def test_a_parameter_has_these_values_and_no_others(data, values):
    parameter = space(micro_batch_size=data).parameters[0]
    assert list(parameter.all_values()) == values and all(map(parameter.contains, values))
    assert not any(parameter.contains(value) for value in (2.5, True, None, 9, "4") if value not in values)
    with pytest.raises(SpaceError, match=f"micro_batch_size: 9 is not among {re.escape(parameter.describe())}"):
        parameter.encode(9)


def test_a_power_of_two_range_is_searched_by_exponent():
    parameter = space(zero_optimization__reduce_bucket_size={"range": [16, 18], "power_of_two": True}).parameters[0]
    assert (
        parameter.optuna_name == "zero_optimization.reduce_bucket_size (log2)" and parameter.describe() == "2^16..2^18"
    )
    assert (parameter.decode(17), parameter.encode(131_072)) == (131_072, 17)


@pytest.mark.parametrize("data", [[1, 2, 5], {"range": [1, 9], "step": 2}, {"range": [0, 9], "power_of_two": True}])
def test_optuna_values_decode_to_the_values_and_back(data):
    parameter = space(micro_batch_size=data).parameters[0]
    trial = optuna.create_study().ask()
    value = parameter.suggest(trial)
    assert value in parameter.all_values() and trial.params == {parameter.optuna_name: parameter.encode(value)}
    assert trial.distributions == {parameter.optuna_name: parameter.distribution()}


def test_parents_come_first_whatever_the_order_of_the_file():
    backwards = SearchSpace.parse(dict(reversed(CONDITIONAL.items())), "test.yaml")
    names = [parameter.name for parameter in backwards.parameters]
    assert names.index("zero_stage") < min(
        names.index(child) for child in CONDITIONAL if child not in ("zero_stage", "micro_batch_size")
    )


def test_a_space_is_written_as_it_is_read():
    assert SearchSpace.parse(conditional().to_data(), "again") == conditional()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([1], "a mapping of knobs"),
        ({"zero_stag": [1]}, "'zero_stage'"),
        ({True: [1]}, "not the name of a knob"),
        ({"zero_optimization.overlap_com": [True]}, "'overlap_comm'"),
        ({"zero_optimization": [True]}, "is a section"),
        ({"optimizer": ["Adam"]}, "is a section"),
        ({"communication_data_type": ["fp64"]}, "knows no 'fp64'"),
        ({"zero_optimization.reduce_bucket_size": [-5]}, "-5 is not above 0"),
        ({"communication_data_type": [["bf16"]]}, "not a single value"),
        *(({"zero_stage": data}, said) for data, said in (
            ([1, 5], "zero_stage: choices: 5 is not one of 0, 1, 2, 3"),
            ([1, 1], "there twice"),
            ([], "at least one value"),
            ({"choices": 1}, "a list"),
            ({"choices": [1], "wen": {}}, "'when'"),
            ({}, "either"),
            ({"choices": [1], "range": [0, 1]}, "either"),
            ({"range": [0, 4]}, "4 is not one of"),
        )),
        *(({"micro_batch_size": data}, said) for data, said in (
            ({"range": [0, 4]}, "at least 1"),
            ({"range": [4, 1]}, "low, high"),
            ({"range": [1, 2.5]}, "low, high"),
            ({"range": [1, 4], "step": 0}, "step"),
            ({"range": [1, 64], "power_of_two": True}, "exponents"),
            ({"range": [1, 6], "power_of_two": "yes"}, "true or false"),
            ({"choices": [1], "power_of_two": True}, "belongs to a `range`"),
            ({"range": [1, 8], "around_baseline": 2}, "belongs to `choices`"),
            ({"choices": [1], "around_baseline": True}, "whole number"),
            ({"choices": [1], "around_baseline": 65}, "from 0 to 64"),
            ([None], "not a whole number"),
        )),
        *(({"zero_stage": {"choices": [1], "when": when}, **more}, said) for when, more, said in (
            ([3], {}, "a mapping of parents"),
            ({"precision": []}, {}, "no value"),
            ({"precision": ["bf61"]}, {}, "'bf61' is not one of"),
            ({"precison": ["bf16"]}, {}, "'precision'"),
            ({"communication_data_type": ["bf16"]}, {}, "not a knob of this search space"),
            ({"communication_data_type": ["fp16"]}, {"communication_data_type": ["bf16"]}, "one of its values"),
            ({"precision": "bf16"}, {"precision": {"choices": ["bf16"], "when": {"zero_stage": 1}}}, "circle"),
            ({"zero_stage": 1}, {}, "circle"),
        )),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(data, said):
    with pytest.raises(SpaceError, match=said) as error:
        SearchSpace.parse(data, "test.yaml")
    assert str(error.value).startswith("test.yaml: ") and "\n" not in str(error.value)


def test_two_presets_with_one_knob_are_refused_by_name():
    mine = ("mine.yaml", parse_parameters({"zero_stage": [1]}, "mine.yaml"))
    with pytest.raises(SpaceError, match=r"mine\.yaml: zero_stage: already defined by zero"):
        SearchSpace.compose([("zero", parse_parameters(PRESETS["zero"], "zero")), mine])


def active(found, values, baseline=BASELINE):
    return [parameter.name for parameter in found.active(values, baseline)]


def test_parameters_are_active_under_their_parents_values():
    assert active(conditional(), {"micro_batch_size": 1, "zero_stage": 3}) == [
        "micro_batch_size", "zero_stage", "zero_optimization.reduce_bucket_size", "offload_param",
    ]  # fmt: skip
    assert active(conditional(), {}) == ["micro_batch_size", "zero_stage"]  # the parent is not decided yet
    # A parent outside the space has the baseline's value.
    child = space(bf16__bf16_master_weights_and_grads={"choices": [None, True], "when": {"precision": ["bf16"]}})
    assert not active(child, {}) and active(child, {}, Candidate(micro_batch_size=1, precision="bf16"))
    family = compose("zero", "precision")  # the grandchild of an inactive parent is inactive
    found = active(family, {"zero_stage": 1, "precision": "fp32"})
    assert not {"bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"} & {*found}
    # A condition on null holds where the parent is switched off.
    assert "data_types.grad_accum_dtype" in active(family, {"zero_stage": 1, "precision": "fp16"})


def test_parameters_are_chosen_one_after_the_other():
    values = conditional().suggest(lambda parameter: parameter.all_values()[-1], BASELINE)
    assert values == {
        "micro_batch_size": 2,
        "zero_stage": 3,
        "zero_optimization.reduce_bucket_size": 2**18,
        "offload_param": "cpu",
    }


def test_only_active_parameters_are_asked_for():
    asked = []
    conditional().suggest(lambda parameter: asked.append(parameter.name) or parameter.all_values()[0], BASELINE)
    assert asked == ["micro_batch_size", "zero_stage"]


def test_optuna_fills_a_space_define_by_run():
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    values = conditional().suggest(lambda parameter: parameter.suggest(trial), BASELINE)
    candidate = conditional().candidate(values, BASELINE)
    assert encoded(conditional(), candidate) == trial.params


def test_a_candidate_has_the_values_of_active_parameters_and_else_the_baselines():
    given = {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "precision": "bf16",
        "communication_data_type": "fp32",
    }
    candidate = conditional().candidate({"micro_batch_size": 1, "zero_stage": 0}, Candidate.of(given))
    assert candidate == Candidate.of({**given, "micro_batch_size": 1})
    # What is tuned but inactive is switched off, even if the baseline has it or a value is given.
    given = {"micro_batch_size": 8, "zero_stage": 3, "offload_param": "cpu", "zero_optimization.overlap_comm": True}
    assert conditional().candidate({**given, "zero_stage": 0}, Candidate.of(given)) == Candidate(micro_batch_size=8)
    # Null leaves the key out.
    values = {"micro_batch_size": 1, "zero_stage": 1, "zero_optimization.overlap_comm": None}
    values["zero_optimization.reduce_bucket_size"] = 65_536
    assert conditional().candidate(values, BASELINE).config == (("zero_optimization.reduce_bucket_size", 65_536),)


@pytest.mark.parametrize(("stage", "bucket", "inside"), [(1, 65_536, True), (1, 65_537, False), (0, 65_536, False)])
def test_a_space_contains_what_it_spans_and_nothing_else(stage, bucket, inside):
    values = {"micro_batch_size": 1, "zero_stage": stage, "zero_optimization.reduce_bucket_size": bucket}
    assert conditional().contains(Candidate.of(values)) is inside


def test_candidates_are_all_there_and_there_once():
    found = list(conditional().candidates(BASELINE))
    # Two micro-batches, of stage 0 alone, stage 1 with 2 x 3 and stage 3 with 3 x 2 settings.
    assert len(found) == len(set(found)) == conditional().size(BASELINE) == 2 * (1 + 6 + 6)


@settings(max_examples=50)
@given(
    names=st.lists(
        st.sampled_from(["batch", "zero", "precision", "checkpointing", "compression", "offload"]),
        min_size=1,
        max_size=3,
        unique=True,
    )
)
def test_enumeration_has_no_duplicates_and_counts_as_it_says(names):
    whole = compose(*names)
    counts = Counter(whole.candidates(BASELINE))
    assert len(counts) == whole.size(BASELINE) and set(counts.values()) == {1}


def test_every_draw_is_one_of_the_candidates():
    rng, whole = random.Random(0), set(conditional().candidates(BASELINE))
    assert set(conditional().draw(rng, BASELINE, 500)) == whole


def test_draws_are_uniform_over_candidates():
    counts = Counter(candidate.zero_stage for candidate in conditional().draw(random.Random(0), BASELINE, 13_000))
    assert all(abs(counts[stage] - expected) < 300 for stage, expected in ((0, 1000), (1, 6000), (3, 6000)))


def test_a_kept_batch_derives_the_accumulation():
    kept = compose("batch").keeping(BASELINE, 2)
    assert [parameter.name for parameter in kept.parameters] == ["micro_batch_size"]
    found = [(c.micro_batch_size, c.gradient_accumulation_steps) for c in kept.candidates(BASELINE)]
    assert found == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    # Without a tuned micro-batch it is the baseline's.
    assert [c.gradient_accumulation_steps for c in space(zero_stage=[0]).keeping(BASELINE, 2).candidates(BASELINE)] == [
        2
    ]


@pytest.mark.parametrize(
    ("micro", "steps", "kept", "free"),
    [
        (8, 2, (1, 2, 4, 8, 16), ((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16))),
        (24, 2, (1, 2, 3, 4, 6, 8, 12, 16, 24, 48), ((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96), (1, 2, 3, 4, 6, 8, 12, 16))),
        (8, 3, (1, 2, 3, 4, 6, 8, 12, 24), ((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64), (1, 2, 3, 4, 6, 8, 12, 16))),
        (256, 1, (1, 2, 4, 8, 16, 32, 64, 128, 256), ((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16))),
        (1, 64, (1, 2, 4, 8, 16, 32, 64), ((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64))),
    ],
)  # fmt: skip
def test_the_preset_of_the_batch_lies_around_the_baselines(micro, steps, kept, free):
    """Of 24 x 2 neither 12 x 4 nor 48 x 1 was tried, and nothing larger than a micro-batch of 128."""
    baseline = Candidate(micro_batch_size=micro, gradient_accumulation_steps=steps)
    found = compose("batch").around(baseline)
    assert tuple(parameter.choices for parameter in found.parameters) == free
    assert found.keeping(baseline, 2)["micro_batch_size"].choices == kept
    assert SearchSpace.stored(compose("batch").to_data(), "x").around(baseline) == found


@pytest.mark.parametrize(
    ("data", "always", "left"),
    [({"range": [2, 100]}, 12, (2, 3, 4, 6, 12)), ([1, 2, 5], 3, (1, 2, 3)), ([5], 12, (12,))],
)
def test_a_kept_batch_leaves_its_divisors_and_always_the_baselines_micro_batch(data, always, left):
    baseline = Candidate(micro_batch_size=always, gradient_accumulation_steps=12 // always)
    assert space(micro_batch_size=data).keeping(baseline, 2)["micro_batch_size"].choices == left


def test_a_condition_on_the_accumulation_holds_under_a_kept_batch_too():
    knobs = {
        "communication_data_type": {"choices": ["bf16"], "when": {"gradient_accumulation_steps": [4]}},
        **PRESETS["batch"],
    }
    kept = SearchSpace.parse(knobs, "test.yaml").keeping(BASELINE, 2)
    assert {c.gradient_accumulation_steps for c in kept.candidates(BASELINE) if c.config} == {4}


def legal(whole, setting):
    return {candidate for candidate in whole.candidates(BASELINE) if why_illegal(candidate, setting) is None}


def test_the_count_of_legal_candidates_is_exact_in_a_small_space_and_estimated_in_a_large_one():
    whole = compose("zero", "precision", "checkpointing")
    assert feasibility.count_legal(whole, BASELINE, CPU) == (len(legal(whole, CPU)), True)
    whole = compose("batch", "zero", "precision")
    exact, _ = feasibility.count_legal(whole, BASELINE, CPU)
    estimate, is_exact = feasibility.count_legal(whole, BASELINE, CPU, limit=100)
    assert not is_exact and abs(estimate / exact - 1) < 0.05


def test_a_value_that_can_never_run_is_dead_and_says_why():
    dead = feasibility.dead_values(compose("precision", "checkpointing"), BASELINE, CPU)
    assert dead["precision", "fp16"].startswith("fp16: this device has no fp16")
    dead = feasibility.dead_values(compose("offload"), BASELINE, CPU)
    assert dead["offload_param", "none"] == "needs zero_stage 3; it is 0 and not tuned"
    # One that runs with another knob is alive.
    setting = Setting(accelerator="cuda", world_size=2)
    assert ("offload_param", "cpu") not in feasibility.dead_values(compose("zero", "offload"), BASELINE, setting)


# Found by this test: fp32 accumulation runs here with bf16, and was called dead as only fp16 had been tried for it.
@example(
    names=["zero", "precision", "checkpointing"],
    setting=Setting(world_size=1, ranks_per_node=8, n_blocks=0, deepspeed_version="0.19.6"),
)
@settings(max_examples=30)
@given(
    names=st.lists(
        st.sampled_from(["zero", "precision", "checkpointing", "compression", "offload"]),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    setting=st.builds(
        Setting,
        accelerator=st.sampled_from(["cpu", "cuda"]),
        world_size=st.sampled_from([1, 2, 16]),
        ranks_per_node=st.just(8),
        fp16=st.booleans(),
        n_blocks=st.sampled_from([0, 3]),
        deepspeed_version=st.sampled_from(["0.19.6", "0.19.8"]),
    ),
)
def test_dead_values_are_those_that_no_legal_candidate_has(names, setting):
    whole = compose(*names)
    alive = {(name, value) for candidate in legal(whole, setting) for name, value in whole.values_of(candidate).items()}
    every = {(parameter.name, value) for parameter in whole.parameters for value in parameter.all_values()}
    assert set(feasibility.dead_values(whole, BASELINE, setting)) == every - alive


@pytest.mark.parametrize("baseline", [BASELINE, replace(BASELINE, zero_stage=1), Candidate(micro_batch_size=1)])
@pytest.mark.parametrize("n_samples", [1, 2, 10_000])
@pytest.mark.parametrize(
    "knobs", [{"zero_stage": [0]}, {"zero_stage": [1], "offload_param": ["none", "cpu"]}, CONDITIONAL]
)
def test_whether_anything_but_the_baseline_can_run_is_what_enumeration_says(knobs, n_samples, baseline):
    whole, setting = SearchSpace.parse(knobs, "test.yaml"), replace(CPU, n_samples=n_samples)
    others = [c for c in whole.candidates(baseline) if c != baseline and why_illegal(c, setting) is None]
    assert feasibility.holds_another(whole, baseline, setting) == bool(others)


def test_that_nothing_can_run_is_proven_without_walking_through_the_space():
    whole = compose("batch", "zero", "precision", "checkpointing", "compression", "buckets", "offload")
    assert whole.size(BASELINE) > 10**8
    assert not feasibility.holds_another(whole, Candidate(micro_batch_size=1), replace(CPU, n_samples=1))


def test_pruning_loses_no_legal_candidate():
    whole = compose("zero", "precision", "offload")
    pruned = feasibility.pruned(whole, BASELINE, CPU)
    assert legal(pruned, CPU) == legal(whole, CPU) and pruned.size(BASELINE) < whole.size(BASELINE)


def test_a_pruned_space_is_read_back_with_conditions_on_values_that_it_has_lost():
    """No study could be explained, and none started from it, whose base configuration made such a value illegal."""
    whole = compose("zero", "precision")
    setting = replace(CPU, base=(("data_types.grad_accum_dtype", "fp32"),))
    pruned = feasibility.pruned(whole, BASELINE, setting)
    master = "bf16.bf16_master_weights_and_grads"
    assert pruned[master].all_values() == (None,) and pruned["bf16.bf16_optimizer_states"].when == {master: (True,)}
    assert SearchSpace.stored(json.loads(json.dumps(pruned.to_data())), "record") == pruned


@pytest.mark.parametrize(
    "knob", [{"data.group_by_length": [None, True]},
             {"gradient_clipping": {"choices": [0.5, 1.0], "when": {"gradient_accumulation_steps": [2]}}}],
    ids=["rule", "condition"],
)  # fmt: skip
def test_what_rests_on_the_accumulation_rests_on_the_degree_that_it_follows(knob):
    """Grouping by length, which takes two micro-batches, was said to be impossible where only two ranks a sequence make them."""
    baseline = Candidate(micro_batch_size=1)
    kept = space(**knob, sequence_parallel_size=[1, 2], micro_batch_size=[1]).keeping(baseline, 2)
    setting = replace(CPU, heads=4, kv_heads=4, lengths=(1, 9))
    able = [c for c in kept.candidates(baseline) if why_illegal(c, setting) is None]
    assert feasibility.dead_values(kept, baseline, setting) == {}
    assert feasibility.count_legal(kept, baseline, setting) == (len(able), True) == (3, True)


def test_a_kept_batch_follows_the_degree_by_accumulation():
    tensor = "tensor_parallel.autotp_size"
    kept = space(**{tensor: [1, 2, 4], "micro_batch_size": [4, 16, 32]}).keeping(Candidate(micro_batch_size=8), 4)
    found = {
        (c.micro_batch_size, c.tensor_degree): c.gradient_accumulation_steps
        for c in kept.candidates(BASELINE)
        if c.global_batch_size(4) == 32
    }
    assert found == {
        (4, 1): 2,
        (8, 1): 1,
        (4, 2): 4,
        (8, 2): 2,
        (16, 2): 1,
        (4, 4): 8,
        (8, 4): 4,
        (16, 4): 2,
        (32, 4): 1,
    }
    assert all(kept.contains(c) for c in kept.candidates(BASELINE) if c.global_batch_size(4) == 32)


def test_a_baseline_that_is_split_keeps_its_batch_though_its_ranks_have_less_than_a_sample_each():
    tensor = "tensor_parallel.autotp_size"
    split = Candidate.of({"micro_batch_size": 1, tensor: 4})
    kept = space(zero_stage=[0, 1], micro_batch_size=[1, 2]).keeping(split, 4)
    found = {(c.micro_batch_size, c.gradient_accumulation_steps) for c in kept.candidates(split)}
    assert found == {(1, 1)} and all(c.tensor_degree == 4 for c in kept.candidates(split))


@pytest.mark.parametrize("data", [[1, 2, 4], [None, 2, 4], {"range": [0, 2], "power_of_two": True}])
def test_a_degree_of_one_is_none_however_it_is_written(data):
    tensor = "tensor_parallel.autotp_size"
    found = space(**{tensor: data})
    assert found[tensor].choices == (None, 2, 4)
    assert all(Candidate.from_key(c.key) == c and found.contains(c) for c in found.candidates(BASELINE))
