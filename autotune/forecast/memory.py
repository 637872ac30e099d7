"""Memory of a rank, as DeepSpeed allocates it: model states, buckets, gathered parameters, activations, temporaries.

Four instants can each be the highest: while `deepspeed.initialize` makes the engine, and in a step inside backward,
when gradients are reduced, and in the optimizer's step. Each is a sum of terms; the peak is the instant with the
largest sum.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autotune.forecast.knobs import Knobs
from autotune.trial.profile import Floats, Machine, Profile

Mask = NDArray[np.bool_]
Terms = dict[str, Floats]

# Standard deviation of the logarithm of each term: states follow from counting, activations and what the runtime adds
# do not.
SPREADS = {
    "weights": 0.02,
    "loading": 0.02,
    "gradients": 0.1,
    "master": 0.02,
    "states": 0.02,
    "buckets": 0.15,
    "gathered": 0.2,
    "activations": 0.06,
    "step": 0.15,
    "data": 0.1,
    "workspace": 0.4,
    "kernels": 0.8,
    "allocator": 0.5,
}
GUESSED_ACTIVATIONS = 0.8
# What a process needs once it has trained a step: Python objects, thread pools, libraries' own buffers.
WORKSPACE_BYTES = {"cuda": 1e8, "cpu": 4.5e7}
# 16-bit arithmetic on a CPU compiles extra kernels and keeps reordered weights.
KERNEL_BYTES = {"cuda": 0.0, "cpu": 8e6}
# What a caching allocator holds beyond what is in use: rounding and pieces that fit nothing.
FRAGMENTATION = {"cuda": 0.06, "cpu": 0.0}
# Of a weight at 4 bits, and its part of the fp32 scale of each 64 (bitsandbytes NF4 without double quantisation).
PACKED_BYTES, SCALE_BYTES = 0.5, 0.0625
# The flat copy of a stage-0 all-reduce (deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE), in elements.
ALLREDUCE_ELEMENTS = 5e8
# What a process has before its optimizer is made.
LASTING = ("weights", "data", "workspace", "kernels")
# Up to this share of the device a flat copy of the weights counts. Nearer the limit it would cast doubt on a fit that
# DeepSpeed itself makes sure of, by flattening on the host.
ROOMY = 0.85


def at_peak(phases: Mapping[str, Terms], *, guessed: bool) -> Terms:
    """Returns the bytes of a rank at its peak, by term: those of the instant with the largest sum.

    Args:
        phases: The terms at each instant, as `memory_phases` gives them.
        guessed: Whether the profile is a guess.
    """
    totals = np.stack([np.sum(list(terms.values()), axis=0) for terms in phases.values()])
    if guessed:
        # Activations may be several times what was guessed, so they stay in sight where another instant is thought to
        # be higher.
        return phases["backward"] | {"step": totals.max(axis=0) - totals[0]}
    highest = totals.argmax(axis=0)
    tables = list(phases.values())
    return {name: np.choose(highest, [terms[name] for terms in tables]) for name in SPREADS}


def memory_phases(knobs: Knobs, profile: Profile, machine: Machine) -> dict[str, Terms]:
    """The terms inside backward, while gradients are reduced, in the optimizer's step, and while the engine is made.

    P parameters, Pt trainable, N ranks, w and g bytes of a weight and of a summed gradient (ZeRO, SC20; allocations as
    in DeepSpeed's engine.py, stage_1_and_2.py, stage3.py, unfused_optimizer.py, bf16_optimizer.py):

    * weights w P, at stage 3 w P / N; frozen ones are never sharded below stage 3;
    * master 4 Pt with 16-bit weights, from stage 1 on over N; in fp32 ZeRO clones its shard all the same;
    * states (8 bytes for Adam) Pt, from stage 1 on over N.
    """
    n = len(knobs.micro)
    fixed = _fixed(knobs, profile, machine)
    phases: dict[str, Terms] = {}
    for name, moving in (
        ("backward", _in_backward(knobs, profile, machine)),
        ("reduce", _in_reduction(knobs, profile, machine)),
        ("step", _in_step(knobs, profile, machine)),
    ):
        terms = {key: np.zeros(n) for key in SPREADS} | fixed
        for key, value in moving.items():
            terms[key] = terms[key] + value
        in_use = np.sum(list(terms.values()), axis=0)
        terms["allocator"] = in_use * FRAGMENTATION.get(machine.accelerator, 0.0)
        phases[name] = terms
    loading = _in_loading(knobs, profile, machine, fixed)
    # Nothing was freed by then, so nothing lies in pieces.
    phases["loading"] = {key: np.zeros(n) for key in SPREADS} | {key: fixed[key] for key in LASTING} | loading
    return phases


def _fixed(knobs: Knobs, profile: Profile, machine: Machine) -> Terms:
    """What is there all the time."""
    Pt, N = float(profile.n_trainable), float(machine.world_size)
    w, stage = knobs.weight_bytes, knobs.stage
    over_1 = np.where(stage >= 1, N, 1.0)
    on_device, param_on_device = 1.0 - knobs.offload_optimizer, 1.0 - knobs.offload_param
    left = staying_share(knobs, profile, machine.world_size)
    held = on_device + left
    weights = held_bytes(knobs, profile) * np.where(stage == 3, param_on_device * (1.0 / N + second_share(knobs)), 1.0)
    # Scales are no parameters: each rank keeps them all, also of weights that it shares or that wait on the host.
    weights = weights + SCALE_BYTES * profile.quantized
    # Stage 3 too: it would share them where the device is the same, but compares a `torch.device` with a text.
    clones = np.where(stage >= 1, 4.0, 0.0)
    master_bytes = np.where(knobs.master_16 > 0, 2.0, 4.0)
    master = np.where(w == 2.0, master_bytes, clones) * Pt / over_1 * held
    states = np.where(knobs.states_16 > 0, 0.5, 1.0) * profile.optimizer_bytes * Pt / over_1 * held
    # Held between steps: stage 3's flat gradients, and the unsharded fp32 sums of BF16_Optimizer.
    sums = knobs.gradient_bytes * Pt * on_device
    gradients = _where((stage == 3, sums / N), (bf16_optimizer(knobs), sums), otherwise=0.0)
    gradients = gradients + master_bytes * Pt / N * left  # master weights that stay have gradients of their type
    # What stages 1 and 2 offload passes a buffer of the largest gradient (stage_1_and_2.py, `temp_grad_buffer_for_gpu_offload`).
    passing = np.where((stage == 1) | (stage == 2), w * float(profile.largest_parameter), 0.0)
    return {
        "weights": weights,
        "master": master,
        "states": states,
        "gradients": gradients,
        "buckets": passing * knobs.offload_optimizer,
        "data": np.full(len(w), profile.data_bytes if machine.accelerator == "cpu" else 0.0),
        "workspace": np.full(len(w), machine.workspace_bytes or WORKSPACE_BYTES.get(machine.accelerator, 1e8)),
        "kernels": np.where(
            knobs.arithmetic != "fp32", machine.kernel_bytes or KERNEL_BYTES.get(machine.accelerator, 0.0), 0.0
        ),
    }


def staying_share(knobs: Knobs, profile: Profile, ranks: int) -> Floats:
    """Share of an offloaded optimizer that stays on the device: whole sub-groups (zero/stage3.py, `subgroup_to_device`)."""
    n = np.maximum(1.0, np.ceil(profile.n_trainable / ranks / knobs.sub_group))
    return np.where(knobs.stage == 3, np.floor((1.0 - knobs.ratio) * n) / n, 0.0) * knobs.offload_optimizer


def second_share(knobs: Knobs) -> Floats:
    """Share of the weights in a rank's second copy (hpZ), which is where its first is (partition_parameters.py, `remote_device`)."""
    return np.where((knobs.hpz > 1) & (knobs.stage == 3), 1.0 / np.maximum(knobs.hpz, 1.0), 0.0)


def held_bytes(knobs: Knobs, profile: Profile) -> Floats:
    """Bytes of all weights, without the scales of those of 4 bits."""
    w = knobs.weight_bytes
    return w * float(profile.n_parameters) - (w - PACKED_BYTES) * profile.quantized


def _in_loading(knobs: Knobs, profile: Profile, machine: Machine, fixed: Terms) -> Terms:
    """While `deepspeed.initialize` makes the engine: what is there beside the weights that stay.

    Without `zero.Init` each rank has the whole model on its device before stage 3 shards it, with offload too
    (deepspeed/runtime/engine.py, `_configure_distributed_model`, casts and moves it; zero/parameter_offload.py,
    `_convert_to_zero_parameters`, then shards one parameter after the other). Stages 1 and 2 copy the trainable weights
    into a flat buffer beside the originals (zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`), on the device
    where that has room, else on the host; before DeepSpeed's pull request 7828 of 2026 always there. What stage 0
    (fp16/fused_optimizer.py, fp16/unfused_optimizer.py), bf16_optimizer.py and master weights copy is less than a step
    needs.
    """
    whole, flat = held_bytes(knobs, profile), knobs.weight_bytes * float(profile.n_trainable)
    has_room = whole + flat + fixed["workspace"] <= ROOMY * machine.device_bytes
    built = 0.0 if profile.built_bytes is None else np.maximum(whole, profile.built_bytes * float(profile.n_parameters))
    at_3 = np.maximum(0.0, built - fixed["weights"])
    return {"loading": _where((knobs.stage == 3, at_3), ((knobs.stage >= 1) & has_room, flat), otherwise=0.0)}


def bf16_optimizer(knobs: Knobs) -> Mask:
    """BF16_Optimizer: 16-bit gradients of a backward beside their sums, in fp32 but for a pipeline without ZeRO.

    DeepSpeed takes it neither for fp16 nor with an offloaded optimizer (runtime/engine.py, `_do_optimizer_sanity_check`).
    """
    on_device = (knobs.precision == "bf16") & (knobs.offload_optimizer == 0)
    return np.asarray((knobs.stage == 1) & on_device & ((knobs.gradient_bytes > 2.0) | knobs.unasked), dtype=bool)


def _apart(knobs: Knobs) -> Mask:
    """The optimizer of stages 1 and 2 with sums in another type than the weights.

    Stage 1 then has all gradients in the type of the sums; and the own part of the sums stays on the device even where
    the optimizer is offloaded (zero/stage_1_and_2.py, `use_grad_accum_attribute`, `_build_compact_grad_partition_buffer`).
    """
    other = (knobs.weight_bytes == 2.0) & (knobs.gradient_bytes > 2.0) & ~bf16_optimizer(knobs)
    return np.asarray(other & ((knobs.stage == 1) | (knobs.stage == 2)), dtype=bool)


def _whole_bytes(knobs: Knobs) -> Floats:
    """Bytes of a gradient that was not reduced yet."""
    return np.where((knobs.stage == 1) & _apart(knobs), knobs.gradient_bytes, knobs.weight_bytes)


def _where(*cases: tuple[Mask, Floats | float], otherwise: Floats | float) -> Floats:
    """For each row the value of the first case that holds."""
    found: Floats | float = otherwise
    for holds, value in reversed(cases):
        found = np.where(holds, value, found)
    return np.asarray(found, dtype=float)


def _bucket(knobs: Knobs, profile: Profile, machine: Machine) -> Floats:
    """Elements of a bucket that count: it is allocated whole even for a smaller model, but on a CPU only pages that are touched do."""
    size = np.minimum(knobs.reduce_bucket, float(profile.n_trainable))
    return np.asarray(size if machine.accelerator == "cpu" else knobs.reduce_bucket, dtype=float)


def _bucket_bytes(knobs: Knobs, profile: Profile, machine: Machine) -> Floats:
    """Bytes of the contiguous buckets from stage 1 on, without the second of each that overlapping takes.

    There is one for each type that gradients travel in, each of the whole size: under autocast those of linear and
    convolutional layers travel in 16 bits, others in 32 (runtime/torch_autocast.py, `get_all_comm_dtypes`). Stages 1 and 2
    hold both in fp32 (zero/stage_1_and_2.py, `setup_buckets`), stage 3 each in its type. On a CPU both together are
    touched as far as one would be.
    """
    size, at_3 = _bucket(knobs, profile, machine), knobs.stage == 3
    two = (knobs.arithmetic == "autocast") & (machine.accelerator != "cpu")
    one = np.where(at_3, _stage_3_bytes(knobs), _whole_bytes(knobs))
    return np.asarray(size * (one + np.where(two, knobs.weight_bytes, 0.0)), dtype=float)


def _in_backward(knobs: Knobs, profile: Profile, machine: Machine) -> Terms:
    """Activations and temporaries at their highest, with the gradients that are complete by then."""
    Pt, N = float(profile.n_trainable), float(machine.world_size)
    w, g, stage, whole = knobs.weight_bytes, knobs.gradient_bytes, knobs.stage, _whole_bytes(knobs)
    on_device = np.where(_apart(knobs), 1.0, 1.0 - knobs.offload_optimizer)
    several, keeps_all = knobs.accumulation > 1, stage < 2
    bucket, filled = _bucket_bytes(knobs, profile, machine), np.minimum(knobs.reduce_bucket, Pt)
    waits = filled >= Pt
    # On a CPU a bucket that nothing overflows is touched as gradients come into it, not before.
    on_cpu = np.full(len(w), machine.accelerator == "cpu")
    grows = waits & on_cpu
    # Bytes that an element of a complete gradient keeps: at stages 0 and 1 all of them, until the step; from the second
    # micro-step on all gradients are there from the start. At stage 2 what waits in the bucket and the own part of what
    # was reduced. Stage 3 has its part from the start.
    waiting = (stage == 2) & (grows | (waits & (knobs.contiguous == 0)))
    early = _where(
        (keeps_all & several, 0.0),
        (keeps_all, whole),
        (waiting, w),
        ((stage == 2) & ~waits, g / N * on_device),
        otherwise=0.0,
    )
    settled = _where((keeps_all & several, whole * Pt), ((stage == 2) & several, g * Pt / N * on_device), otherwise=0.0)
    # Stages 1 and 2 allocate their buckets when the first gradient comes and release them where gradients are reduced
    # (`setup_buckets`, `_release_ipg_buffers`): stage 2 in each micro-step, stage 1 after the last. Stage 3 keeps its own.
    flat = (knobs.contiguous > 0) & ~(on_cpu & (waits | (stage == 1)))
    in_bucket = _where(
        ((stage == 0) | bf16_optimizer(knobs), 0.0), (stage == 3, bucket), (flat, bucket * (1.0 + knobs.overlap)),
        ((stage == 2) & ~waits, filled * w), otherwise=0.0,
    )  # fmt: skip
    there = (stage == 3) | ((stage == 1) & several)
    activations, complete, with_first = _activations(knobs, profile, early, np.where(there, 0.0, in_bucket))
    return {
        # What fits is what fits with the longest samples.
        "activations": activations * profile.worst_share(knobs.micro, knobs.budgeted, knobs.limits),
        "gradients": complete + settled,
        "buckets": np.where(there, in_bucket, with_first),
        "gathered": _gathered(knobs, profile, machine),
    }


def _activations(
    knobs: Knobs, profile: Profile, gradient_bytes: Floats, bucket_bytes: Floats
) -> tuple[Floats, Floats, Floats]:
    """Bytes of activations at the highest instant of backward, of the gradients complete by then, and of buckets.

    From the passes that were followed, linear in the micro-batch; accumulation, stage and offload do not change them.
    Recomputation of every k-th block where only all and none were followed lies between the two.
    """
    live, complete, buckets = (np.zeros(len(knobs.micro)) for _ in range(3))
    arithmetic = knobs.arithmetic
    share = knobs.recomputed_share(profile.n_blocks)
    for name, every in dict.fromkeys(zip(arithmetic.tolist(), knobs.recomputed.tolist(), strict=True)):
        rows = np.flatnonzero((arithmetic == name) & (knobs.recomputed == every))
        live[rows], complete[rows], buckets[rows] = profile.highest(
            name, int(every), float(share[rows[0]]), knobs.micro[rows], gradient_bytes[rows], bucket_bytes[rows]
        )
    return live, complete, buckets


def _gathered(knobs: Knobs, profile: Profile, machine: Machine) -> Floats:
    """Stage 3: weights that are whole at the same time."""
    whole, outside = stored_elements(knobs, profile), (1 - profile.block_share) * float(profile.n_parameters)
    flying = outside + 2 * (whole - outside) / max(profile.n_blocks, 1)
    live = np.maximum(kept_elements(knobs, profile) + small_elements(knobs, profile), flying)
    live = np.where(knobs.stage == 3, np.minimum(whole, live), 0.0)
    return np.asarray(knobs.weight_bytes * live * (1.0 if machine.world_size > 1 else 0.5), dtype=float)


def stored_elements(knobs: Knobs, profile: Profile) -> Floats:
    """Elements of all parameters as stage 3 splits and gathers them: several weights of 4 bits lie in each of theirs."""
    return held_bytes(knobs, profile) / knobs.weight_bytes


def kept_elements(knobs: Knobs, profile: Profile) -> Floats:
    """Elements that stage 3 has whole when forward is over, and need not gather again for backward; small parameters left out.

    What is used again within the reuse distance is not released: forward and backward use of a weight are at most 2 P apart.
    And what is fetched ahead piles up to `stage3_max_live_parameters`, whatever the prefetch bucket: each module, with
    parameters or without, fetches at least one more, and what was there already then stays until it was used
    (zero/partitioned_param_coordinator.py; as counted with two ranks on a small transformer).
    """
    split = np.maximum(0.0, stored_elements(knobs, profile) - small_elements(knobs, profile))
    ahead = np.where(knobs.prefetch > 0, knobs.max_live, 0.0)
    return np.asarray(np.minimum(split, np.maximum(knobs.reuse_distance / 2, ahead)), dtype=float)


def small_elements(knobs: Knobs, profile: Profile) -> Floats:
    """Elements in parameters that stage 3 does not release."""
    thresholds, row = np.unique(knobs.persistence, return_inverse=True)  # very many candidates have a few of them
    return np.array([float(profile.small_elements(threshold)) for threshold in thresholds])[row]


def _stage_3_bytes(knobs: Knobs) -> Floats:
    """Bytes of a gradient in stage 3's bucket: the type that travels, which is 16 bits wide under autocast."""
    return np.where(knobs.arithmetic == "autocast", 2.0, knobs.weight_bytes)


def wire_bytes(knobs: Knobs, machine: Machine) -> Floats:
    """Bytes of a gradient between ranks.

    From stage 1 on each has the type of its layer under autocast, whatever `communication_data_type` says
    (runtime/base_optimizer.py, `get_param_comm_dtype`): 16 bits for linear and convolutional ones, which nearly all are. On
    a CPU the casts take what shorter messages save: as if none were made, the trials of benchmarks/truth are nearer.
    """
    of_layers = (knobs.arithmetic == "autocast") & (knobs.stage >= 1) & (machine.accelerator != "cpu")
    return np.where(of_layers, 2.0, knobs.wire_bytes)


def _in_reduction(knobs: Knobs, profile: Profile, machine: Machine) -> Terms:
    """The end of backward: complete gradients, the last bucket, and its flat copy in the type that travels."""
    Pt, N = float(profile.n_trainable), float(machine.world_size)
    w, g, stage, whole = knobs.weight_bytes, knobs.gradient_bytes, knobs.stage, _whole_bytes(knobs)
    both, on_device = bf16_optimizer(knobs), np.where(_apart(knobs), 1.0, 1.0 - knobs.offload_optimizer)
    bucket, filled = _bucket_bytes(knobs, profile, machine), np.minimum(knobs.reduce_bucket, Pt)
    reduced = np.where(both, g, whole)
    # Stages 1 and 2 move gradients into the bucket and their own part out of it; at stage 1 the rest stays.
    own = np.where(stage == 2, np.maximum(g, w), whole) * Pt / N * on_device
    gradients = _where(
        ((stage == 0) | both, w * Pt),
        (stage == 1, np.where(filled < Pt, whole * (Pt - filled), 0.0) + own),
        (stage == 2, own),
        otherwise=0.0,
    )
    flat = np.where((stage == 0) | both, min(Pt, ALLREDUCE_ELEMENTS), filled)
    sent = wire_bytes(knobs, machine)
    copies = reduced * flat + np.where(sent != reduced, sent * flat, 0.0)
    # Stage 3 flattens once more for the scatter, receives its part, and casts that to the type of the sums.
    e = _stage_3_bytes(knobs)
    copies = np.where(stage == 3, flat * (e * (2.0 + 1.0 / N) + np.where(g != e, g / N, 0.0)), copies)
    # Without a contiguous buffer the gradients themselves wait.
    kept = np.where(knobs.contiguous > 0, bucket * (1.0 + knobs.overlap), filled * whole)
    held = _where(((stage == 0) | both, 0.0), (stage == 3, bucket), otherwise=kept)
    gathered = np.maximum(small_elements(knobs, profile), float(profile.largest_module))
    return {"gradients": gradients, "buckets": copies + held, "gathered": np.where(stage == 3, w * gathered, 0.0)}


def _in_step(knobs: Knobs, profile: Profile, machine: Machine) -> Terms:
    """The optimizer's step: gradients in the master's type, and what the optimizer needs besides."""
    Pt, N = float(profile.n_trainable), float(machine.world_size)
    w, stage = knobs.weight_bytes, knobs.stage
    on_device = 1.0 - knobs.offload_optimizer
    shard = Pt / np.where(stage >= 1, N, 1.0)
    tile = np.where(stage == 3, np.minimum(knobs.sub_group, shard), shard)
    master = np.where(knobs.master_16 > 0, 2.0, 4.0)
    # Stage 0 in fp32 steps on the gradients themselves; BF16_Optimizer on its own sums in fp32; all others on a flat copy.
    # Stage 0 and BF16_Optimizer drop the gradients of backward only afterwards.
    left = np.where((stage == 0) | bf16_optimizer(knobs), w * Pt, 0.0)
    copy = np.where(((stage == 0) & (w == 4.0)) | (bf16_optimizer(knobs) & ~knobs.unasked), 0.0, master * tile)
    single = np.where(stage == 0, Pt if profile.scratch_for_all else float(profile.largest_parameter), tile)
    scratch = profile.optimizer_scratch * master / 4.0 * single
    # ZeRO flattens the gradients of its shard (group by group; here they are of one), casts the flat copy, and drops those that
    # it flattened only then: at stage 3 they count as gradients, and sums in fp32 of 16-bit gradients are flat from the start
    # (stage_1_and_2.py, `step`, `_use_compact_grad_partition_buffer`; stage3.py, `_prepare_fp32_grad_for_sub_group`).
    g, once = knobs.gradient_bytes, (stage == 3) | _apart(knobs)
    flat = np.where(stage >= 1, tile * (g * np.where(once, 1.0, 2.0) + np.where(g != master, master, 0.0)), 0.0)
    flat = np.where(bf16_optimizer(knobs), 0.0, flat)
    bucket = np.where(stage == 3, _bucket_bytes(knobs, profile, machine), 0.0)
    return {"gradients": left, "step": np.maximum(copy + scratch, flat) * on_device, "buckets": bucket}


def spreads(profile: Profile) -> Mapping[str, float]:
    """Standard deviation of the logarithm of each term, before anything was measured."""
    return {**SPREADS, "activations": GUESSED_ACTIVATIONS} if profile.guessed or profile.cut_short else SPREADS
