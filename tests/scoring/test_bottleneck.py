"""What a trial is bound by: six planted causes, what follows from each, and what cannot be known."""

from dataclasses import replace

import pytest

from autotune.scoring.bottleneck import BOUND_FROM, diagnose
from autotune.scoring.effects import effects
from autotune.scoring.step_parts import Evidence, StepObservation
from autotune.trial.device_load import DeviceLoad
from autotune.trial.result import Traced

BALANCED = {
    "data": 0.001, "forward": 0.100, "backward": 0.205, "step": 0.020, "reduce": 0.010, "gather": 0.002, "wait": 0.001,
}  # fmt: skip
PLAIN = {
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "zero_stage": 0,
    "precision": "bf16",
    "checkpoint_every": 0,
}


def candidate(**knobs):
    return PLAIN | knobs


def seen(number, samples_per_s, *, outcome="complete", forward=None, **knobs):
    phases = {"forward": forward} if forward else {}
    return StepObservation(
        trial=number, candidate=candidate(**knobs), samples_per_s=samples_per_s, outcome=outcome, phases_s=phases
    )


def evidence(*ranks, knobs=(), **more):
    """A trial with one table of phases for each rank, in seconds."""
    tables = [BALANCED | rank for rank in ranks or ({}, {})]
    own = seen(1, 100.0, forward=max(t["forward"] for t in tables), **dict(knobs))
    given = {
        "seen": own,
        "world_size": len(tables),
        "ranks": [dict(enumerate(tables))],
        "n_blocks": 4,
        "n_parameters": 10**6,
    }
    return Evidence(**given | more)


def part(found, name):
    return next(each for each in found.parts if each.name == name)


def share(found, name):
    return part(found, name).share


SMALL_BATCH = [
    seen(n, 100.0, forward=0.080 + 0.0025 * b, micro_batch_size=b) for n, b in enumerate((2, 4, 16), start=2)
]
PLANTED = [
    ("compute", evidence(), []),
    ("input pipeline", evidence({"data": 0.080}, {"data": 0.075}), []),
    ("stragglers", evidence({"wait": 0.120}, {"forward": 0.220}), []),
    ("communication", evidence({"reduce": 0.220}, {"reduce": 0.225}), []),
    ("optimizer", evidence({"step": 0.200}, {"step": 0.210}), []),
    ("recomputation", evidence({"backward": 0.305}, {"backward": 0.305}, knobs={"checkpoint_every": 1}.items()), []),
    ("launch overhead", evidence(), SMALL_BATCH),
]


TRAFFIC = {"products": 0.05, "traffic": 0.10, "launches": 0.001}
PLANTED.append(("memory bandwidth", evidence(expected_s=TRAFFIC), []))


@pytest.mark.parametrize(("cause", "what", "others"), PLANTED, ids=[cause for cause, *_ in PLANTED])
def test_a_planted_cause_is_named_and_the_parts_make_up_the_step(cause, what, others):
    found = diagnose(what, others)
    assert found.bound_by == cause
    assert 0.9 < sum(part.share for part in found.parts if part.seconds is not None) < 1.01


def test_a_bottleneck_that_is_not_the_largest_part_says_what_decides():
    """Stragglers of 17 % were named above an optimizer of 26 %, with no word of why."""
    found = diagnose(evidence({"step": 0.120}, {"step": 0.120, "wait": 0.090}), [])
    shares = {part.name: part.share or 0.0 for part in found.parts}
    assert found.bound_by == "stragglers" and shares["stragglers"] < shares["optimizer"]
    assert found.notes[0].startswith("stragglers (") and found.notes[0].endswith("worth the trouble (here 15%)")
    assert not any("the largest part" in note for note in diagnose(evidence(), []).notes)


def test_a_rank_that_is_slow_in_its_backward_too_is_a_straggler_and_not_a_slow_network():
    found = diagnose(evidence({"wait": 0.310}, {"forward": 0.200, "backward": 0.415}), [])
    assert found.bound_by == "stragglers" and share(found, "communication") < 0.05
    assert "rank 1 is the slowest" in part(found, "stragglers").known
    assert any("rank 1 takes" in note and "most of it in backward" in note for note in found.notes)


def test_one_slow_loader_among_ranks_is_a_straggler_and_slow_ones_everywhere_are_the_input_pipeline():
    slow = {"data": 0.150}
    assert diagnose(evidence(slow, {"wait": 0.150}, {"wait": 0.150}, {"wait": 0.150}), []).bound_by == "stragglers"
    assert diagnose(evidence(slow, slow, slow, slow), []).bound_by == "input pipeline"


def test_recomputation_that_was_timed_goes_before_what_a_forward_leads_to_expect():
    timed = {"backward": 0.200, "recompute": 0.150}
    found = diagnose(evidence(timed, timed, knobs={"checkpoint_every": 1}.items()), [])
    assert found.bound_by == "recomputation"
    assert part(found, "recomputation").seconds == 0.150 and part(found, "compute").seconds == pytest.approx(0.300)


def test_ranks_that_wait_alike_lose_nothing_to_a_straggler():
    """Meeting before many small messages costs time by itself."""
    assert share(diagnose(evidence({"wait": 0.3}, {"wait": 0.3}), []), "stragglers") == 0


def traced(**kinds_s):
    """A trace of forward and backward of 300 ms, 200 of them in operations that are worth it."""
    spent = {"products": 0.1, "traffic": 0.1, "messages": 0.0} | kinds_s
    return Traced(
        file="t.json.gz",
        n_steps=2,
        spans_s={"forward": 0.1, "backward": 0.2, "step": 0.02},
        kinds_s={"forward": dict.fromkeys(spent, 0.0), "backward": spent},
        messages_s=spent["messages"],
        hidden_s=0.75 * spent["messages"],
    )


def test_a_trace_tells_products_memory_and_the_host_apart():
    found = diagnose(evidence({}, traced={0: traced()}, world_size=1, ranks=[{0: BALANCED}]), SMALL_BATCH)
    # The trace goes before what other trials say.
    computing = BALANCED["forward"] + BALANCED["backward"]
    assert part(found, "launch overhead").known.startswith("traced")
    for name in ("launch overhead", "memory bandwidth", "compute"):
        assert part(found, name).seconds == pytest.approx(computing * 0.1 / 0.3)


def test_messages_that_overlap_with_computing_are_said_to():
    found = diagnose(evidence(traced={rank: traced(messages=0.04) for rank in (0, 1)}), [])
    assert any("40.0 ms" in note and "75% of that overlaps" in note for note in found.notes)


def test_memory_traffic_that_takes_less_than_the_arithmetic_is_no_bottleneck():
    found = diagnose(evidence(expected_s={"products": 0.10, "traffic": 0.09, "launches": 0.001}), [])
    assert found.bound_by == "compute" and share(found, "memory bandwidth") > 0.35


def test_one_disturbed_step_among_three_decides_nothing():
    quiet, disturbed = {0: BALANCED, 1: BALANCED}, {0: BALANCED | {"wait": 0.8}, 1: BALANCED | {"forward": 0.9}}
    assert diagnose(evidence(ranks=[disturbed, quiet, quiet]), []).bound_by == "compute"


def test_steps_that_were_taken_apart_are_held_against_the_run_that_they_are_of():
    """Run again on a busy machine all steps are slow; that says nothing of the shares."""
    rough = "read the shares as rough"
    assert any(rough in note for note in diagnose(evidence(step_s=0.2), []).notes)
    assert not any(rough in note for note in diagnose(evidence(step_s=0.2, beside_s=0.34), []).notes)


def test_with_one_rank_nothing_is_lost_to_others():
    found = diagnose(evidence({"backward": 0.6}), [])
    assert share(found, "communication") == 0 and share(found, "stragglers") == 0


def test_a_full_device_is_named_where_it_stands_in_the_way():
    heavy = {"backward": 0.305}
    found = diagnose(
        evidence(heavy, heavy, knobs={"checkpoint_every": 1}.items(), peak_memory_bytes=95, memory_limit_bytes=100), []
    )
    assert found.bound_by == "memory capacity"
    assert any("allocator" in note for note in diagnose(evidence(alloc_retries=3), []).notes)


def test_larger_micro_batches_that_do_not_fit_are_named_where_nothing_else_differs():
    others = [
        seen(8, None, outcome="predicted_oom", micro_batch_size=64, gradient_accumulation_steps=2),
        seen(9, None, outcome="oom", micro_batch_size=32),
        seen(10, None, outcome="oom", micro_batch_size=32, precision="fp32"),
    ]
    assert next(note for note in diagnose(evidence(), others).notes if "do not fit" in note).endswith("trial 8, 9")


def larger(outcome, **knobs):
    return seen(9, 150.0 if outcome == "complete" else None, outcome=outcome, micro_batch_size=32, **knobs)


SMALLER = [seen(n, 100.0, forward=0.080 + 0.0025 * b, micro_batch_size=b) for n, b in enumerate((1, 2, 4), start=2)]
RECOMPUTING = evidence({"recompute": 0.1}, {"recompute": 0.1}, knobs={"checkpoint_every": 2}.items())
NEARLY_FULL = {"peak_memory_bytes": 90, "memory_limit_bytes": 100}
CAPACITY = {
    "a full device keeps the batch small": (evidence(**NEARLY_FULL), SMALLER, "memory capacity"),
    "a half full one does not": (evidence(peak_memory_bytes=50, memory_limit_bytes=100), SMALLER, "launch overhead"),
    "nor does a full one on which a larger batch ran": (evidence(**NEARLY_FULL), SMALL_BATCH, "launch overhead"),
    "nor one on which it ran and broke a constraint": (evidence(**NEARLY_FULL), [*SMALLER, larger("infeasible")], "launch overhead"),
    "nor one on which it ran and was refused": (evidence(**NEARLY_FULL), [*SMALLER, larger("diverged")], "launch overhead"),
    "a half full one that the larger batch does not fit": (
        evidence(peak_memory_bytes=50, memory_limit_bytes=100), [*SMALLER, larger("oom")], "memory capacity",
    ),
    "a larger batch that surely does not fit": (evidence(), [*SMALLER, larger("predicted_oom")], "memory capacity"),
    "one of another precision tells nothing": (evidence(), [*SMALLER, larger("oom", precision="fp32")], "launch overhead"),
    "less recomputed does not fit": (RECOMPUTING, [seen(9, None, outcome="oom", checkpoint_every=0)], "memory capacity"),
    "less recomputed fits": (RECOMPUTING, [seen(9, 120.0, checkpoint_every=4)], "recomputation"),
    "what recomputes more tells nothing": (RECOMPUTING, [seen(9, None, outcome="oom", checkpoint_every=1)], "recomputation"),
    "a batch that keeps the device busy is no matter of memory": (evidence(**NEARLY_FULL), [larger("oom")], "compute"),
    "nor is a slow loader": (evidence({"data": 0.08}, {"data": 0.08}, **NEARLY_FULL), [larger("oom")], "input pipeline"),
}  # fmt: skip


@pytest.mark.parametrize(("what", "others", "verdict"), CAPACITY.values(), ids=CAPACITY)
def test_memory_capacity_is_named_where_it_alone_stands_in_the_way(what, others, verdict):
    found = diagnose(what, others)
    assert found.bound_by == verdict
    assert any("does not fit the memory" in note for note in found.notes) == (verdict == "memory capacity")


def test_what_was_not_measured_is_said_to_be_so():
    found = diagnose(evidence(ranks=[{}]), [])
    assert found.bound_by == "" and "were not kept" in found.notes[0] and "--profile" in found.notes[0]
    assert {part.name for part in found.parts if part.known == "not measured"} == {"compute", *BOUND_FROM}
    alone = diagnose(evidence(), [])
    assert share(alone, "launch overhead") is None and share(alone, "memory bandwidth") is None


def test_advice_comes_from_the_trial_that_differs_in_nothing_else():
    slow = evidence({"reduce": 0.220}, {"reduce": 0.225})
    others = [
        seen(5, 150.0, gradient_accumulation_steps=4),
        seen(6, 300.0, gradient_accumulation_steps=8, precision="fp16"),
        seen(7, 90.0, zero_stage=1),
        seen(8, 200.0, precision="fp32"),
    ]
    advice = diagnose(slow, others).advice
    assert [(each.knob, each.value, each.factor) for each in advice] == [("gradient_accumulation_steps", 4, 1.5)]
    assert advice[0].why == "measured: trial 5 differs in nothing else"
    noisy = diagnose(slow, [replace(each, log_reach=0.5) for each in others]).advice
    assert noisy[0].why == "measured: trial 5 differs in nothing else; within noise"


def test_where_no_trial_differs_in_one_knob_only_the_whole_study_is_asked():
    trials = [
        (candidate(precision=p, zero_stage=z, gradient_accumulation_steps=k), (2.0 if k == 4 else 1.0) * (1.3 if p == "bf16" else 1.0))
        for p in ("fp32", "bf16") for z in (0, 1, 2) for k in (1, 4)
    ]  # fmt: skip
    found = effects("samples_per_s", trials, candidate())
    unlike = {"precision": "fp32", "gradient_accumulation_steps": 4}
    slow = evidence({"reduce": 0.220}, {"reduce": 0.225})
    refused = seen(5, 154.0, outcome="diverged", **unlike)
    assert diagnose(slow, [refused], found).advice == []
    advice = diagnose(slow, [seen(5, 154.0, **unlike)], found).advice
    assert advice[0].knob == "gradient_accumulation_steps" and advice[0].factor == pytest.approx(2.0, rel=0.1)
    assert "estimated from 12 trials" in advice[0].why
    # Of a knob that changed with another one, which says nothing of this bottleneck, it was left out.
    joined = [({"other": values["gradient_accumulation_steps"] > 1} | values, rate) for values, rate in trials]
    own, others = {"other": False}, [seen(5, 200.0, other=True, gradient_accumulation_steps=4)]
    found = effects("samples_per_s", joined, candidate(**own))
    (first, *_) = diagnose(evidence({"reduce": 0.220}, {"reduce": 0.225}, knobs=own), others, found).advice
    assert (first.knob, first.value) == ("gradient_accumulation_steps", 4) and first.why.endswith(", with other")


def test_a_known_devices_peak_gives_the_mfu():
    for device, said in (("NVIDIA H100 80GB HBM3", "% of its peak"), ("AMD EPYC", "no peak is known")):
        found = diagnose(evidence(device_name=device, tokens_per_step=10**9, step_s=10.0), [])
        assert said in next(note for note in found.notes if "MFU" in note)


def test_without_a_known_peak_the_mfu_is_that_of_the_probed_one_and_of_the_counted_operations():
    found = diagnose(evidence(device_name="AMD EPYC", flops_per_step=2e9, step_s=0.1, peak_flops=4e10), [])
    small = diagnose(evidence(device_name="AMD EPYC", flops_per_step=2e5, step_s=0.1, peak_flops=4e10), [])
    assert any(
        "a rank computes 1.00 MFLOP/s over" in note for note in small.notes
    )  # as of a tiny model; it said 0.0 GFLOP/s
    assert any("10.0 GFLOP/s" in note and "25% of the 40.0" in note and "(MFU)" in note for note in found.notes)


def test_convolutions_may_pass_the_peak_of_fp32_where_torch_has_them_take_tensorfloat():
    given = {
        "device_name": "NVIDIA A100-SXM4-80GB",
        "flops_per_step": 3e13,
        "step_s": 1.0,
        "world_size": 1,
        "tf32": False,
    }
    for knobs, said in (
        ({"precision": "fp32"}, "convolutions compute in TensorFloat-32"),
        ({}, "10% of its peak in bf16"),
    ):
        notes = diagnose(evidence({}, knobs=knobs, **given), []).notes
        assert said in next(note for note in notes if "FLOP/s over the whole step" in note)


def test_the_energy_of_a_sample_is_that_of_the_tables():
    """It followed from the median step, which is short where some steps are long, beside a metric of all steps."""
    told = evidence(step_s=0.1, device_load=DeviceLoad(power_w=300.0), joules_per_sample=2.5)
    assert "the devices draw 300 W, 2.5 J a sample" in diagnose(told, []).notes


def test_an_offloaded_optimizer_is_not_held_against_the_devices_bandwidth():
    """Its 5 GB/s, of the host's memory, read as 0 % of what an H100 moves."""
    given = {"device_name": "NVIDIA H100 80GB HBM3", "optimizer_bytes": 2e8}
    for offload, said in (("none", "of the device's bandwidth"), ("cpu", "on the host")):
        notes = diagnose(evidence(knobs={"zero_stage": 2, "offload_optimizer": offload}, **given), []).notes
        assert next(note for note in notes if "optimizer step moves" in note).endswith(said)


@pytest.mark.parametrize(
    ("knobs", "parts"),
    [
        ({}, 1),
        ({"tensor_parallel.autotp_size": 2}, 2),
        ({"pipeline.stages": 2}, 2),
        ({"sequence_parallel_size": 2}, 1),
        ({"tensor_parallel.autotp_size": 2, "zero_stage": 1}, 2),
    ],
)
def test_an_optimizer_moves_what_its_rank_holds(knobs, parts):
    """At stage 0 a rank of a tensor or pipeline group passed for updating the whole model: at twice the rate."""
    notes = diagnose(evidence(knobs=knobs, optimizer_bytes=2e9), []).notes
    rate = next(note for note in notes if "optimizer step moves" in note).split("about ")[1].split(" GB/s")[0]
    assert float(rate.replace(",", "")) == pytest.approx(2 / parts / BALANCED["step"], rel=0.05)
