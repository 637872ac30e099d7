"""The probe of a script: describe it as a `Workload` after some steps that nothing has changed."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from autotune.space.deepspeed import LOSSY_SINCE, LOSSY_STAGES, DsConfig, at_path, precision_of, version, without_auto
from autotune.space.degree import PIPELINE_DEGREE, configured_degrees, ranks_per_replica
from autotune.system import redaction
from autotune.trial import lengths
from autotune.trial.result import Observed
from autotune.trial.workload import DataShape, Probed, Workload
from autotune.worker.data import change, samples
from autotune.worker.measure.batches import BatchObserver
from autotune.worker.measure.buffers import BufferWatch, classes, said
from autotune.worker.measure.meter import Meter
from autotune.worker.model.inspect import with_batch_norm
from autotune.worker.profile.script import ForwardProfile
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.engine import PreparedModel

LOSES_GRADIENTS = (
    "the script goes backward {n} times before the step() that updates the weights, and DeepSpeed's ZeRO {stage} loses gradients"
    " there, so your training does: call engine.step() after each micro-batch, with their number as"
    " `gradient_accumulation_steps`, and go backward once in each, from the sum of its losses"
)
REPEATS = (
    "more micro-batches go backward than the loader yields, as where a loop trains several times on each batch (truncated"
    " backpropagation through time), and samples count each time. At another micro-batch a step trains on other parts of them, so"
    " each other micro-batch is checked, and none is drop-in"
)


def workload_of(
    context: ScriptContext, meter: Meter, prepared: PreparedModel, profile: ForwardProfile | None, plain: set[bool]
) -> Workload:
    """Describes a script after the steps of its probe; all ranks take part.

    Args:
        profile: Counts of the script's first forward; None if there are none.
        plain: Of its passes by `loss.backward()` rather than `engine.backward(loss)`, whether `engine.scale` scaled the loss, or it
            trains in fp16 without.
    """
    seen, engine, report, described = meter.observe(), meter.engine, context.report, prepared.workload
    assert described is not None
    counted, configured = seen.loader_batch_size or seen.micro_batch_size, engine.train_micro_batch_size_per_gpu()
    report.caveats += filter(None, [_how_counted(seen, configured, meter.batches)])
    report.caveats += _loses(described, seen.zero_stage, meter.passes_at_boundary)
    probed = _probed(context, meter, prepared, described, seen)
    probed = replace(probed, plain_backward=bool(plain), scales=False not in plain)
    data, described = _data(context, meter), with_batch_norm(described, engine.module)
    described = replace(described, by_micro_batch=context.by_micro_batch or described.by_micro_batch)
    described = _with_repeats(described, meter.batches)
    described = _with_updates(described, prepared.buffers, prepared.blocks)
    workload = replace(
        described,
        n_samples=data.n_samples if data is not None else None,
        environment=replace(described.environment, free_bytes=meter.memory.free_bytes),
        script=probed,
        optimizer=type(engine.basic_optimizer).__name__,
        caveats=[*described.caveats, *report.caveats],
        data=data,
    )
    if profile is None:
        return workload
    # The forward that was counted is the first one; a row of packed samples has as many as were drawn.
    first = meter.batches.sizes()[0] if seen.uneven else counted
    found = profile.profile(workload, prepared.own_config, first)
    widths = {width for _, width in meter.batches.texts.lengths}
    if found is not None and workload.data is not None and workload.data.varies and len(widths) > 1:
        found = replace(found, lengths=workload.data.table)
    return replace(workload, profile=found and replace(found, built_bytes=prepared.built_bytes))


def _with_repeats(workload: Workload, batches: BatchObserver) -> Workload:
    """Returns the workload with a note on a loop that trains several times on each batch of its loader.

    Ranks that split sequences take in one another's batches, too.
    """
    rows, n = batches.rows(), batches.draw_size
    if (
        not n
        or batches.shards > 1
        or batches.parts
        or batches.uneven
        or {first for first, _ in rows} != {n}
        or (n, None) not in rows
    ):
        return workload
    return replace(workload, by_micro_batch=REPEATS, caveats=[*workload.caveats, REPEATS])


def _with_updates(workload: Workload, watch: BufferWatch | None, blocks: Sequence[nn.Module]) -> Workload:
    """Returns the workload with the modules that change buffers as they go forward: those in blocks, and those of floats anywhere."""
    if watch is None:
        return workload
    again = classes(watch.changed & {module for block in blocks for module in block.modules()})
    floats = classes(watch.of_floats)
    caveats = [*workload.caveats, *said(again, floats)]
    return replace(workload, updates=again, by_micro_batch=workload.by_micro_batch or floats, caveats=caveats)


def _probed(
    context: ScriptContext, meter: Meter, prepared: PreparedModel, described: Workload, seen: Observed
) -> Probed:
    """Returns how the script trained, but for what its loop calls to go backward."""
    engine = meter.engine
    counts_itself = engine.gradient_accumulation_steps() != seen.gradient_accumulation_steps
    return Probed(
        ds_config=redaction.without_secrets(_as_trained(context, prepared.own_config, seen.dtype)),
        micro_batch_size=seen.loader_batch_size or seen.micro_batch_size,
        gradient_accumulation_steps=seen.gradient_accumulation_steps,
        family=context.family or "raw DeepSpeed",
        checkpoint_every=prepared.watch.every,
        flags=context.report.flags,
        config_source=prepared.config_source,
        written_config=prepared.written_config,
        initialized_at=prepared.initialized_at,
        configured_accumulation=engine.gradient_accumulation_steps(),
        counts_itself=counts_itself,
        passes=meter.passes_at_boundary // ((seen.gradient_accumulation_steps or 1) if counts_itself else 1),
        unsynced=meter.unsynced,
        model_parallel_size=context.request.world_size
        // (meter.data_parallel * _degree(prepared.own_config, described)),
        sequence_size=meter.batches.shards,
        pipeline_stages=getattr(engine, "num_stages", 0),
        expert_parallel=any(getattr(p, "allreduce", True) is False for p in engine.module.parameters()),
        learning_rates=prepared.own_rates,
        draw_size=seen.draw_size if seen.parts else 0,
        parts=seen.parts,
        uneven=seen.uneven,
        configured_micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        # DeepSpeed's global batch is a float where ranks split sequences.
        replicas=int(engine.train_batch_size())
        // (engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()),
        divides=context.sums_losses,
        by_hand=tuple(context.by_hand),
        clips=context.clipping is not None,
    )


def _loses(workload: Workload, stage: int, passes: int) -> list[str]:
    """Returns a note where the script's stage loses gradients of its backward passes at a boundary of accumulation."""
    lossy = stage in LOSSY_STAGES and version(workload.environment.versions["deepspeed"]) >= LOSSY_SINCE
    return [LOSES_GRADIENTS.format(n=passes, stage=stage)] if lossy and passes > 1 else []


def _how_counted(seen: Observed, configured: int, batches: BatchObserver) -> str:
    """Returns how samples are counted where that is not by the leading dimension at the engine's forward; else empty."""
    counted = seen.loader_batch_size or seen.micro_batch_size
    if seen.uneven is not None:
        least, most = seen.uneven
        unsure = (
            f". They were counted by the leading dimension at the engine's forward, and DeepSpeed's configuration states {configured}:"
            " where that dimension is none of samples, pass a tensor first of which it is, or draw them by a DataLoader"
        )
        return (
            f"batches hold {least} to {most} samples, {counted} on average, as the script makes them: they are measured as"
            f" they come, by all samples and tokens over all time{unsure if not batches.draw_size else ''}"
        )
    if not seen.loader_batch_size and counted and counted != configured:
        return (
            f"a micro-batch counts as {counted} samples, the leading dimension at the engine's forward, though DeepSpeed's"
            f" configuration states {configured}: where that dimension is none of samples, put them first, or draw them by a"
            " DataLoader"
        )
    if counted == seen.micro_batch_size:
        return ""
    if batches.flattened:
        return (
            f"the script puts the {counted} samples of a micro-batch one after the other in one row; where it packs several"
            " into one sample beforehand, tokens/s compare with training that does not, and samples/s do not"
        )
    return (
        f"samples are counted where the loader draws them, {counted} at a time:"
        f" the leading dimension at the engine's forward is {seen.micro_batch_size or 'not constant'}"
    )


def _degree(config: DsConfig, workload: Workload) -> int:
    """Returns the ranks that share a copy of the model by degrees, which belong to the candidate: it divides them out itself."""
    own = configured_degrees(lambda path: at_path(config, path))
    stages = workload.pipeline.stages if workload.pipeline is not None else 1
    return ranks_per_replica(own | {PIPELINE_DEGREE: stages})


def _data(context: ScriptContext, meter: Meter) -> DataShape | None:
    """Describes the batches that went forward, with the lengths of the data set's samples where a loader has one."""
    iterator = context.loaders.trained if context.trains_on_draws else None
    collate = iterator._collate_fn if iterator is not None else list
    batches = samples.describe(iter(meter.batches.noted.shapes), collate=collate)
    if batches is None:
        return None
    if iterator is None:
        return replace(batches, cannot=change.why_not(None, list, None, mapped=False, loader=False))
    dataset = iterator._dataset
    mapped = samples.is_map_style(dataset) and iterator._auto_collation
    # Other ranks would read it beside the first, whose word counts.
    read = samples.describe(dataset, {}, collate) if mapped and context.report.rank == 0 else None
    collates = bool(iterator._auto_collation)
    of_loader = change.why_not(dataset, collate, meter.engine.module, mapped=mapped, loader=True, collates=collates)
    of_samples = (batches if read is None else read).cannot
    cannot = context.data_limits(of_loader | of_samples, read)
    if read is None:
        known = () if meter.batches.flattened else meter.batches.texts.lengths
        seen = [int(n) for rows, _ in known for n in torch.as_tensor(rows).tolist()]
        read = replace(batches, table=lengths.table(seen) if seen else ())
    return replace(
        read,
        fields=batches.fields,
        cannot=cannot,
        loader=change.arguments_of(iterator),
        steps_grouped=context.steps_grouped,
    )


def _as_trained(context: ScriptContext, own: DsConfig, dtype: str) -> DsConfig:
    """Returns the script's configuration, with what it does not tell DeepSpeed: where it clips, the type of 16-bit weights."""
    if context.clipping is not None:
        own = {**own, "gradient_clipping": context.clipping}
    section = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if section is None or precision_of(without_auto(own)) != "fp32":
        return own
    context.once(
        f"the script trains {dtype} weights that DeepSpeed is not told of, without an fp32 copy;"
        f" the baseline says `{section}` in its configuration, and has one"
    )
    return {**own, section: {"enabled": True}}
