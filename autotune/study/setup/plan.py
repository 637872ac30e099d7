"""The plan of a study: workload, baseline, space and legality, worked out before the first trial."""

import contextlib
import copy
import functools
import hashlib
import io
import math
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.executors.base import Executor
from autotune.scoring.convergence.learning_rate import LearningRate, default_rule
from autotune.scoring.convergence.quality_gate import trains_alike
from autotune.space import data as data_knobs
from autotune.space import feasibility, own_tuner
from autotune.space.candidate import Candidate, from_deepspeed
from autotune.space.deepspeed import SIDE_EFFECT_KEYS, DsConfig, Scalar, at_path, check_retired, drop_path, set_path
from autotune.space.degree import EXPERT_DEGREE, EXPERTS_SPLIT, PIPELINE_DEGREE, configured_degrees, ranks_per_replica
from autotune.space.installed import pins_by_default
from autotune.space.legality import heeded, inherited_settings, merged_passes, why_illegal
from autotune.space.retired import renamed
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.space.torch_settings import has_tf32
from autotune.study.events import SILENT, EventSink
from autotune.study.setup import batch_changes, degrees, profile_cache
from autotune.study.setup.devices import UNLIKE, check_devices, held_by_others, limit_bytes, limit_notes, of_ranks
from autotune.study.setup.remedies import SCRIPT_BATCH
from autotune.study.setup.script import (
    DEFAULT_MICRO_BATCH,
    frozen_knobs,
    inspect_workload,
    script_request,
    with_movable,
)
from autotune.study.spec.spec import StudySpec
from autotune.system import redaction
from autotune.system.machine import check_ranks, why_bf16_is_slow
from autotune.trial.lengths import expected
from autotune.trial.request import TrialRequest
from autotune.trial.target import Target
from autotune.trial.workload import Script, Workload

DEFAULT_LEARNING_RATE = 1e-3
# What DeepSpeed's schedules cannot do without, and Hugging Face's configurations leave to its Trainer.
FILLED_IN_BY_TRAINERS = tuple(map("scheduler.params.{}".format, ("total_num_steps", "cycle_min_lr", "cycle_max_lr")))
# Settings of a study that say what must fit the memory beside a training step.
OF_WHAT_FITS = ("max_length", "with_eval", "with_save")
# Settings of a configuration that change no trial, and so no study.
IN_NO_TRIAL = SIDE_EFFECT_KEYS | {"steps_per_print"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study as known before its first trial.

    Attributes:
        spec: The user's request.
        workload: Findings about the target, by one rank.
        base_config: The user's DeepSpeed configuration, completed by an optimizer if the target defines none, without what is tuned.
        baseline: Its candidate, with the values of the settings that are tuned.
        space: The search space without dead values.
        full_space: The search space with them.
        setting: Everything that legality depends on.
        began: When the command began, in seconds of the monotonic clock; budgets count from there, else from the run's
            first moment.
        cache_key: Of a script, under which what was found in it is kept for forecasts.
        text: Digest of the target's text in which all this was found.
    """

    spec: StudySpec
    target: Target
    workload: Workload
    world_size: int
    base_config: DsConfig
    baseline: Candidate
    space: SearchSpace
    full_space: SearchSpace
    setting: Setting
    notes: list[str] = field(default_factory=list)
    began: float | None = None
    cache_key: str = ""
    text: str = ""

    @property
    def memory_limit_bytes(self) -> float | None:
        """Memory limit of a rank: the stated one, up to its device's memory; on a CPU else its share of the host's."""
        spec, environment = self.spec, self.workload.environment
        on_each = self.world_size // spec.nodes_for(self.world_size)
        return limit_bytes(environment, spec.device_memory_bytes, on_each, self.world_size, spec.at_once)

    def ds_config(self, candidate: Candidate) -> DsConfig:
        """Returns the complete DeepSpeed configuration of a candidate."""
        return self.workload.ds_config(candidate, self.base_config)

    def drops_in(self, candidate: Candidate) -> bool:
        """Returns whether a candidate trains as the baseline does: with its global batch, its numerics and its batch statistics."""
        own, world = self.baseline, self.data_parallel
        return (
            candidate.global_batch_size(world) == own.global_batch_size(world)
            and not (self.workload.by_micro_batch and candidate.micro_batch_size != own.micro_batch_size)
            and self.same_numerics(candidate)
        )

    def same_numerics(self, candidate: Candidate) -> bool:
        """Returns whether a candidate trains with the baseline's numerics, whatever its batch."""
        own = self.baseline
        return candidate.precision == own.precision and (  # the rest takes longer, and thousands are asked
            trains_alike(candidate, own, self.ds_config(candidate), self.ds_config(own), self.workload)
        )

    def same_samples(self, candidate: Candidate) -> bool:
        """Returns whether a step of a candidate trains on the samples of a step of the baseline, in whatever precision."""
        own, world = self.baseline, self.data_parallel
        return (
            candidate.global_batch_size(world) == own.global_batch_size(world)
            and candidate.other_numerics == own.other_numerics
            and not self.workload.scales_otherwise(candidate, own)
        )

    def learning_rate(self) -> LearningRate:
        """How the learning rate follows the batch in this study's trials."""
        rule: str = self.spec.learning_rate_rule
        if rule == "auto":
            rule = default_rule(self.workload.optimizer or str(self.base_config.get("optimizer", {}).get("type", "")))
        return LearningRate(rule=rule, baseline_batch=self.baseline.global_batch_size(self.data_parallel))

    @property
    def replicated(self) -> bool:
        """Whether every rank trains the whole model on separate data: neither layers nor experts are split."""
        script = self.workload.script
        parted = self.workload.pipeline is not None or (
            script is not None and (script.pipeline_stages > 0 or script.expert_parallel)
        )
        return self.data_parallel == self.world_size and not parted and self.baseline.is_whole

    @property
    def splits_batch(self) -> bool:
        """Whether a batch of the target can be split into other micro-batches."""
        script = self.workload.script
        return script is None or set(SCRIPT_BATCH) <= set(script.movable)

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks."""
        return self.workload.data_parallel(self.world_size)

    def script(self, candidate: Candidate) -> Script | None:
        """Returns how the script is run for a candidate; None for a `model.py`."""
        probed = self.workload.script
        return script_request(self.spec, probed, candidate, self.baseline) if probed else None

    def request(self, candidate: Candidate) -> TrialRequest:
        """Returns the request for a trial of a candidate, with what all trials of the study share."""
        spec = self.spec
        return TrialRequest(
            target=str(spec.target), candidate=candidate.values(), ds_config=self.ds_config(candidate),
            world_size=self.world_size, nodes=spec.nodes_for(self.world_size), seed=spec.seed,
            deadline_s=spec.trial_deadline_s, device_memory_bytes=spec.device_memory_bytes, script=self.script(candidate),
        )  # fmt: skip

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be equal in two runs of one study, without secrets."""
        spec = self.spec
        return redaction.redact(
            {
                "target": self.text or target_digest(spec.target),
                "space": spec.space.to_data(),
                "objectives": [o.model_dump() for o in spec.objectives],
                "constraints": [c.model_dump() for c in spec.constraints],
                "ranks": self.world_size,
                **({"nodes": spec.n_nodes} if spec.n_nodes > 1 else {}),
                **({"executor": spec.executor} if spec.executor != "local" else {}),
                "base_config": spec.base_config,
                **({"checkpoint_every": spec.checkpoint_every} if spec.checkpoint_every else {}),
                "global_batch": spec.global_batch if isinstance(spec.global_batch, str) else list(spec.global_batch),
                "device_memory_bytes": spec.device_memory_bytes,
                # What was tried with shorter samples, or without a check, was not shown to fit.
                **{name: value for name in OF_WHAT_FITS if (value := getattr(spec, name))},
                "seed": spec.seed,
                "learning_rate_rule": spec.learning_rate_rule,
                **({"from_checkpoint": str(spec.from_checkpoint)} if spec.from_checkpoint else {}),
                "accelerator": self.workload.environment.accelerator,
                **({"script": self._script_fingerprint()} if self.workload.script else {}),
            }
        )

    def _script_fingerprint(self) -> dict[str, Any]:
        """Returns the command line and the configuration that it leads to, which may lie in other files."""
        assert self.workload.script is not None
        how, own = self.spec.how(), self.baseline.with_own(self.base_config)
        return {
            "args": list(how.arguments),
            "set": self.spec.script_set,
            "working_dir": how.from_script,
            # Without its variables: a launcher may draw a port or name a folder by date.
            **({"command": self.spec.command} if self.spec.command else {}),
            **({"arg_mappings": self.spec.arg_mappings} if self.spec.arg_mappings else {}),
            "base_config": {key: own[key] for key in own if key not in IN_NO_TRIAL},
        }


def target_digest(target: Path) -> str:
    """Returns a digest of a target's text; of Python without comments and empty lines, which change no measurement."""
    text = target.read_bytes()
    if target.suffix == ".py":
        with contextlib.suppress(SyntaxError, ValueError, tokenize.TokenError):
            text = _without_comments(text)
    return hashlib.sha256(text).hexdigest()[:16]


@functools.lru_cache(maxsize=4)  # a study asks before each trial
def _without_comments(code: bytes) -> bytes:
    """Returns Python without comments, and without lines that are empty then; empty lines within a text stay."""
    tokens = list(tokenize.tokenize(io.BytesIO(code).readline))
    lines = code.decode(tokens[0].string).replace("\r\n", "\n").split("\n")  # not at a form feed, as by splitlines
    for row, column in (token.start for token in tokens if token.type == tokenize.COMMENT):
        lines[row - 1] = lines[row - 1][:column].rstrip()
    empty = {token.start[0] for token in tokens if token.type == tokenize.NL and not lines[token.start[0] - 1].strip()}
    return "\n".join(line for row, line in enumerate(lines, 1) if row not in empty).encode()


def plan(spec: StudySpec, executor: Executor, folder: Path, view: EventSink = SILENT) -> Plan:
    """Loads the target in a rank and works out baseline, space and setting.

    Args:
        view: Told what the run does if that takes minutes, and when it waits for another study.
    """
    # Beside another study's trial a probe would disturb it, and take what that holds of a device for used by others.
    with executor.turn(view.waiting):
        text, kind = target_digest(spec.target), spec.inspected.kind  # the file may be edited meanwhile
        key = profile_cache.script_key(spec) if kind == "script" else ""
        return replace(_planned(spec, executor, folder, view.doing), cache_key=key, text=text)


def _planned(spec: StudySpec, executor: Executor, folder: Path, doing: Callable[[str], None]) -> Plan:
    """Returns the plan, in this study's turn."""
    target = spec.inspected
    if not spec.runs_elsewhere:
        check_ranks(spec.stated_ranks or 1, "--ranks")
    trials = folder / "trials"
    first_ranks = 1 if target.kind == "model" else spec.stated_ranks or 1
    workload = inspect_workload(spec, executor, trials / "inspect", first_ranks, doing)
    environment = workload.environment
    world_size = spec.stated_ranks or spec.n_nodes * (environment.n_devices if environment.accelerator != "cpu" else 1)
    if target.kind == "script" and world_size > first_ranks:  # its configuration may depend on the ranks
        workload = inspect_workload(spec, executor, trials / "inspect", world_size, doing)
    check_devices(spec, environment, world_size)
    on_each = world_size // spec.nodes_for(world_size)
    in_use = on_each * spec.at_once  # trials side by side have devices apart
    environment = of_ranks(workload.environment, in_use)
    workload = replace(workload, environment=environment)
    base_config, baseline, setting = grounds(spec, target, workload, world_size)
    space = spec.space.around(baseline)
    wanted = degrees.asked(space, baseline)
    workload = degrees.compared(spec, executor, trials / "split", workload, base_config, setting, wanted, doing)
    if wanted:
        base_config, baseline, setting = grounds(spec, target, workload, world_size)
    if target.kind == "script":
        workload = with_movable(spec, executor, trials / "moved", workload, baseline, world_size)
        space = space.pinned(frozen_knobs(spec, workload, baseline))
        found = {name: getattr(workload.script, name) for name in ("passes", "counts_itself", "unsynced", "by_hand")}
        setting = replace(setting, **found)
        setting = replace(setting, merged_passes=merged_passes(baseline, setting), heeded=heeded(baseline, setting))
    if spec.global_batch == "keep":
        space = space.keeping(baseline, setting.world_size)
        if wanted:  # the accumulation cannot make up for every degree
            setting = replace(setting, global_batch=(baseline.global_batch_size(setting.world_size),) * 2)
    pruned = feasibility.pruned(space, baseline, setting)
    if not feasibility.holds_another(pruned, baseline, setting):
        refused = feasibility.dead_values(space, baseline, setting).values()
        kept = f", with its global batch of {baseline.global_batch_size(setting.world_size)} kept (--global-batch free lets it vary)"
        why = next(iter(refused), "only the baseline itself can" + kept * (spec.global_batch == "keep"))
        raise UserError(f"no candidate of the search space can run here: {why}")
    later = batch_changes.notes(target.path if target.kind == "script" else None, base_config)
    later += batch_changes.outside(baseline.global_batch_size(setting.world_size), setting.global_batch)
    workload = replace(workload, caveats=[*workload.caveats, *later])
    notes = [
        *environment.remarks,
        *held_by_others(environment, in_use),
        *limit_notes(spec, environment),
        *workload.caveats,
        *own_tuner.notes(base_config),
    ]
    if environment.accelerator == "cpu":
        tried = pruned["precision"].all_values() if "precision" in pruned else ()
        notes += _cpu_notes(spec, environment.n_cores, on_each, {*tried, baseline.precision})
    if executor.cold_reason:
        notes.append(executor.cold_reason)
    return Plan(
        spec=spec, target=target, workload=workload, world_size=world_size, base_config=base_config, baseline=baseline,
        space=pruned, full_space=space, setting=setting, notes=notes,
    )  # fmt: skip


def _cpu_notes(spec: StudySpec, n_cores: int, on_each: int, precisions: set[Scalar]) -> list[str]:
    """Returns why trials on a CPU will be slow: few cores for the ranks of a machine, precisions that it emulates."""
    notes = []
    if n_cores < on_each:
        notes.append(f"{on_each} ranks share {n_cores} cores: step times will read slow and noisy")
    sixteen = {"bf16", "torch_autocast"} & precisions
    if sixteen and not spec.runs_elsewhere and (slow := why_bf16_is_slow()):
        are = f"{' and '.join(sorted(sixteen))} {'are' if len(sixteen) > 1 else 'is'}"
        notes.append(
            f"{slow}, so {are} emulated and slow; a search tries what is predicted to be over 3x slower at most once"
        )
    return notes


def grounds(
    spec: StudySpec, target: Target, workload: Workload, world_size: int
) -> tuple[DsConfig, Candidate, Setting]:
    """Returns the complete configuration of a study's baseline, the baseline, and the setting of legality."""
    environment = workload.environment
    base_config = completed(spec, target, workload)
    data_parallel = workload.data_parallel(world_size)
    setting = Setting(
        accelerator=environment.accelerator,
        deepspeed_version=environment.versions["deepspeed"],
        world_size=data_parallel,
        ranks_per_node=max(1, data_parallel // spec.nodes_for(world_size)),
        idle_devices=max(0, environment.n_devices - world_size // spec.nodes_for(world_size)),
        bf16=environment.bf16,
        fp16=environment.fp16,
        tf32=has_tf32(environment.accelerator, environment.capability),
        n_blocks=workload.n_blocks,
        sparse=workload.sparse,
        module_classes=workload.module_classes,
        n_samples=workload.n_samples,
        global_batch=spec.global_batch if isinstance(spec.global_batch, tuple) else None,
        plain_backward=workload.script is not None and workload.script.plain_backward,
        scales=workload.script is not None and workload.script.scales,
        own_optimizer=workload.client_optimizer,
        base=inherited_settings(base_config),
        pins=pins_by_default(),
        missing_ops=tuple(environment.missing_ops.items()),
        **degrees.facts(workload, base_config, world_size),
        **_of_data(workload),
    )
    check_retired(base_config, setting.deepspeed_version)
    baseline = _baseline(spec, base_config, workload, data_parallel)
    reason = why_illegal(baseline, replace(setting, global_batch=None))
    if reason is not None:
        why = "; ".join([reason, *(each for each in environment.remarks if each.startswith(UNLIKE))])
        raise UserError(f"the baseline cannot run here: {why}")
    return _carried(spec.space, base_config, baseline, setting)


def _carried(
    space: SearchSpace, base_config: DsConfig, baseline: Candidate, setting: Setting
) -> tuple[DsConfig, Candidate, Setting]:
    """Returns the three with the tuned settings moved from the configuration to the baseline.

    A candidate that leaves one to DeepSpeed's default would inherit it from the configuration, also what does not act with the baseline.
    One that no candidate may have, as it acts on nothing here, stays there.
    """
    config, anywhere = copy.deepcopy(base_config), replace(setting, global_batch=None)
    tuned = [parameter.name for parameter in space.parameters if at_path(base_config, parameter.name) != "auto"]
    acting = baseline.stated(base_config, tuned)
    for path in tuned:
        own = {path: space[path].spelt(acting[path])} if path in acting else {}
        carrying = Candidate.of(baseline.values() | own)
        if why_illegal(carrying, anywhere) is None:
            baseline = carrying
            drop_path(config, path)
    return config, baseline, replace(setting, base=inherited_settings(config))


def _of_data(workload: Workload) -> dict[str, Any]:
    """What legality depends on of the data."""
    data = workload.data
    if data is None:
        return {"data_cannot": tuple((name, "the target's data could not be read") for name in data_knobs.KNOBS)}
    shortest = int(data.table[0][0]) if data.table else 0
    # Lengths of which only some samples' are known bound nothing.
    ends = (shortest, data.longest) if data.whole or data.varies else (0, 0)
    cannot = tuple(data.cannot.items())
    in_row = math.ceil(data.longest / max(1.0, expected(data.table))) if workload.script is not None else 0
    return {
        "fewest_in_row": in_row,
        "lengths": ends, "loader": tuple(data.loader.items()), "data_cannot": cannot, "steps_grouped": data.steps_grouped,
    }  # fmt: skip


def profiled(found: Plan, executor: Executor, folder: Path, view: EventSink = SILENT) -> Plan:
    """Returns the plan with the workload's profile and the machine's rates, which forecasts need."""
    spec, place = found.spec, profile_cache.place_of(found.spec, found.world_size, found.workload)
    workload, notes = profile_cache.measure_missing(
        found.workload, spec.target, found.base_config, found.world_size, executor, folder / "trials", view, place
    )
    if found.cache_key and not spec.runs_elsewhere:  # so that `predict` need not run it again
        profile_cache.save(replace(workload, machine=None), found.cache_key)
    if workload.profile is not None and spec.max_length:
        reaching = workload.profile.reaching(spec.max_length)
        notes += reaching.caveats[len(workload.profile.caveats) :]
        workload = replace(workload, profile=reaching)
    return replace(found, workload=workload, notes=[*found.notes, *notes])


def completed(spec: StudySpec, target: Target, workload: Workload) -> DsConfig:
    """Returns the user's configuration, completed by what a trial needs.

    AdamW if neither it nor the target has an optimizer; buffers that follow 16-bit weights if the model has any.
    """
    if workload.script is not None:
        # The batch that ran replaces the configured one: DeepSpeed never compares the two.
        config = {key: value for key, value in workload.script.ds_config.items() if key != "train_batch_size"}
        config["train_micro_batch_size_per_gpu"] = workload.script.micro_batch_size
        config["gradient_accumulation_steps"] = workload.script.gradient_accumulation_steps
        follows = not any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    else:
        config, follows = copy.deepcopy(spec.base_config or {}), True
        for path in FILLED_IN_BY_TRAINERS:
            if at_path(config, path) == "auto":
                raise UserError(
                    f"base config: {path} is 'auto', which transformers fills in where its Trainer trains; for a model.py give"
                    " a number, or leave out 'scheduler'"
                )
        if "optimizer" not in config and "optimizer" not in target.defines:
            # Torch's AdamW runs at once; DeepSpeed's own is compiled for a minute, by a toolkit that few machines have.
            params: dict[str, Any] = {"lr": DEFAULT_LEARNING_RATE, "torch_adam": True}
            if workload.environment.accelerator == "cuda":  # one kernel for all tensors; on the host, too, if offloaded
                params["fused"] = True
            config["optimizer"] = {"type": "AdamW", "params": params}
    if workload.pipeline is not None and at_path(config, PIPELINE_DEGREE) is None:
        set_path(config, PIPELINE_DEGREE, workload.pipeline.stages)
    if workload.experts is not None and workload.experts.degree > 1:
        set_path(config, EXPERT_DEGREE, workload.experts.degree)
        set_path(config, EXPERTS_SPLIT, True)
    if follows and workload.float_buffers and "buffer_dtype" not in config.get("data_types", {}):
        set_path(config, "data_types.buffer_dtype", "auto")
    return renamed(config)


def _baseline(spec: StudySpec, config: DsConfig, workload: Workload, world_size: int) -> Candidate:
    if not spec.batch_is_configured and workload.script is None:
        most = [spec.global_batch[1]] if isinstance(spec.global_batch, tuple) else []
        most += [workload.n_samples] if workload.n_samples is not None else []
        degrees_here = configured_degrees(lambda path: at_path(config, path))
        copies = max(1, world_size // ranks_per_replica(degrees_here))
        micro = max(1, min([DEFAULT_MICRO_BATCH, *(n // copies for n in most)]))
        config = {**config, "train_micro_batch_size_per_gpu": micro}
    own = workload.script.checkpoint_every if workload.script else spec.checkpoint_every
    return replace(from_deepspeed(config, world_size), checkpoint_every=own)
