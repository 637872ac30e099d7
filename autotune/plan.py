"""A study worked out as far as it goes without a trial: workload, baseline, space, and what can run here."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune import UserError, masking, profiles, trial
from autotune.candidate import (
    SIDE_EFFECT_KEYS,
    Candidate,
    DsConfig,
    Scalar,
    Setting,
    check_retired,
    from_deepspeed,
    inherited_settings,
    precision_of,
    set_path,
    without_auto,
)
from autotune.convergence import LearningRate, default_rule
from autotune.executors import base, choice
from autotune.executors.base import Executor
from autotune.executors.host import most_ranks
from autotune.invocation import DS_CONFIG, MAPPED_KEYS, Invocation, fill, template_values, templates_in, with_flag
from autotune.space import SearchSpace
from autotune.spec import StudySpec
from autotune.target import Target
from autotune.trial import Outcome, Probed, Script, TrialDir, TrialRequest, TrialResult, Workload

DEFAULT_MICRO_BATCH = 8
DEFAULT_LEARNING_RATE = 1e-3
SCRIPT_BATCH = {"micro_batch_size": "micro-batch", "gradient_accumulation_steps": "accumulation"}
# How argparse, and most who read a command line, end a script whose arguments are missing or wrong.
USAGE_STATUS = "exited with status 2"
# What the user can do where the tuner finds no way.
REMEDY = {
    name: f"To tune it, say what carries it: a flag (`--flag {{{name}}}` on the command line) or a constant of the script"
    f" (`--set NAME={{{name}}}`)"
    for name in SCRIPT_BATCH
}
# The same for what a trial asked for and did not see, by the first word of its reason.
UNSEEN_REMEDIES = {
    **REMEDY,
    "global batch": REMEDY["micro_batch_size"],
    "dtype": "Where the script chooses the type of its weights itself, leave that to DeepSpeed, or `precision` out of the space",
    "checkpoint_every": "Where the script recomputes activations itself, say how often by a flag (`--flag {checkpoint_every}` on the"
    " command line), or leave `checkpointing` out of the space",
}
# What a template stands for in the untouched script.
UNTOUCHED = Candidate(micro_batch_size=DEFAULT_MICRO_BATCH).values()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study with everything found out that does not need a trial.

    Attributes:
        spec: What the user asked for.
        target: What the target file is.
        workload: What the target turned out to be.
        world_size: Ranks.
        base_config: The user's DeepSpeed configuration, with an optimizer where the target brings none.
        baseline: The candidate that it means.
        space: What is tuned, dead values removed.
        full_space: The same before anything was removed.
        setting: What legality depends on.
        notes: What the user should know.
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

    @property
    def memory_limit_bytes(self) -> float | None:
        """What a rank may use: the stated limit, else what its device has; on a CPU the ranks share the machine's."""
        return self.spec.device_memory_bytes or self.workload.environment.share_bytes(self.world_size) or None

    def ds_config(self, candidate: Candidate) -> DsConfig:
        """The complete DeepSpeed configuration of a candidate of this study."""
        config = candidate.to_deepspeed(self.base_config)
        return self.workload.script.completed(config, candidate) if self.workload.script else config

    def learning_rate(self, noise_samples: float | None = None) -> LearningRate:
        """How the learning rate follows the batch in this study's trials."""
        rule: str = self.spec.learning_rate_rule
        if rule == "auto":
            rule = default_rule(self.workload.optimizer or str(self.base_config.get("optimizer", {}).get("type", "")))
        return LearningRate(
            rule=rule, baseline_batch=self.baseline.global_batch_size(self.data_parallel), noise_samples=noise_samples
        )

    @property
    def replicated(self) -> bool:
        """Whether every rank trains the whole model, on data of its own: neither its layers nor its experts are split between them."""
        script = self.workload.script
        parted = script is not None and (script.pipeline_stages > 0 or script.expert_parallel)
        return self.data_parallel == self.world_size and not parted

    @property
    def splits_batch(self) -> bool:
        """Whether the target lets a batch be split into other micro-batches."""
        script = self.workload.script
        return script is None or set(SCRIPT_BATCH) <= set(script.movable)

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own."""
        return self.workload.data_parallel(self.world_size)

    def script(self, candidate: Candidate) -> Script | None:
        """How the script is run for a candidate; None where the target is a `model.py`."""
        return (
            script_request(self.spec, self.workload.script, candidate, self.baseline) if self.workload.script else None
        )

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for two runs to belong to one study, without its secrets, which are none of what is measured."""
        spec = self.spec
        return masking.masked(
            {
                "target": hashlib.sha256(spec.target.read_bytes()).hexdigest()[:16],
                "space": spec.space.to_data(),
                "objectives": [o.model_dump() for o in spec.objectives],
                "constraints": [c.model_dump() for c in spec.constraints],
                "ranks": self.world_size,
                **({"nodes": spec.n_nodes} if spec.n_nodes > 1 else {}),
                **({"executor": spec.executor} if spec.executor != "local" else {}),
                "base_config": spec.base_config,
                "global_batch": spec.global_batch if isinstance(spec.global_batch, str) else list(spec.global_batch),
                "device_memory_bytes": spec.device_memory_bytes,
                "seed": spec.seed,
                "learning_rate_rule": spec.learning_rate_rule,
                **({"from_checkpoint": str(spec.from_checkpoint)} if spec.from_checkpoint else {}),
                "accelerator": self.workload.environment.accelerator,
                **({"script": self._script_fingerprint()} if self.workload.script else {}),
            }
        )

    def _script_fingerprint(self) -> dict[str, Any]:
        """The command line, and what it made of the configuration, which may lie in other files."""
        assert self.workload.script is not None
        how = self.spec.how()
        return {
            "args": list(how.arguments),
            "set": self.spec.script_set,
            "working_dir": how.working_dir,
            # Not its variables: a launcher may draw a port or name a folder for the day.
            **({"command": self.spec.command} if self.spec.command else {}),
            **({"arg_mappings": self.spec.arg_mappings} if self.spec.arg_mappings else {}),
            "base_config": {key: value for key, value in self.base_config.items() if key not in SIDE_EFFECT_KEYS},
        }


def remedy(reason: str) -> str:
    """What the user can do about something that a trial of a script asked for and did not see; empty where nothing is known."""
    found = next((text for what, text in UNSEEN_REMEDIES.items() if reason.startswith(f"{what}:")), "")
    return "" if not found or found in reason else f". {found}"


def studies_folder(spec_path: Path) -> Path:
    """Where the studies lie: `studies` around the study's own file, if it lies in one, else in the working directory."""
    around = spec_path.absolute().parent.parent
    return around if around.name == "studies" and spec_path.suffix in (".yaml", ".yml") else Path("studies").absolute()


@contextlib.contextmanager
def executor_for(spec: StudySpec, folder: Path, on_queue: Callable[[str], None] = lambda _: None) -> Iterator[Executor]:
    """The engine of a study, started and ended whatever happens; arguments and errors as for `executor_of`."""
    executor = choice.executor_of(spec, folder, on_queue)
    try:
        executor.start()
        yield executor
    finally:
        executor.close()


def plan(spec: StudySpec, executor: Executor, folder: Path) -> Plan:
    """Loads the target in a rank and works out baseline, space and setting.

    Raises:
        UserError: The target, the baseline or the space cannot be used, and why.
    """
    target = spec.inspected()
    if not spec.runs_elsewhere and (spec.stated_ranks or 1) > (most := most_ranks()):
        raise UserError(
            f"--ranks: {spec.stated_ranks} ranks are more than this machine can hold at once ({most}); give fewer"
        )
    workload = inspect_workload(
        spec, executor, folder / "trials" / "inspect", 1 if target.kind == "model" else spec.stated_ranks or 1
    )
    environment = workload.environment
    nodes = spec.n_nodes
    world_size = spec.stated_ranks or nodes * (environment.n_devices if environment.accelerator == "cuda" else 1)
    if target.kind == "script" and world_size > 1 and not spec.stated_ranks:
        workload = inspect_workload(
            spec, executor, folder / "trials" / "inspect", world_size
        )  # its configuration may depend on the ranks
    if environment.accelerator == "cuda" and world_size > nodes * environment.n_devices:
        whose = "the launch command" if spec.invocation and spec.invocation.world_size == world_size else "--ranks"
        have = "this machine has" if nodes == 1 else f"each of the {nodes} machines has"
        raise UserError(f"{whose} asks for {world_size} ranks: {have} {environment.n_devices} devices")
    base_config, baseline, setting = grounds(spec, target, workload, world_size)
    space = spec.space
    if target.kind == "script":
        workload = _moved(spec, executor, folder / "trials" / "moved", workload, baseline, world_size)
        space = space.pinned(_frozen(spec, workload, baseline))
    if spec.global_batch == "keep":
        space = space.keeping(
            baseline.global_batch_size(setting.world_size), setting.world_size, baseline.micro_batch_size
        )
    pruned = space.pruned(baseline, setting)
    if next((c for c in pruned.candidates(baseline) if c != baseline and c.illegal(setting) is None), None) is None:
        why = next(iter(space.refusals(baseline, setting)), "the space holds nothing but the baseline")
        raise UserError(f"no candidate of the search space can run here: {why}")
    notes = list(workload.caveats)
    on_each = world_size // spec.nodes_for(world_size)
    if environment.n_cores < on_each and environment.accelerator == "cpu":
        notes.append(f"{on_each} ranks share {environment.n_cores} cores: step times will read slow and noisy")
    if executor.cold_reason:
        notes.append(f"every trial starts a new Python, which costs seconds: {executor.cold_reason}")
    return Plan(
        spec=spec, target=target, workload=workload, world_size=world_size, base_config=base_config, baseline=baseline,
        space=pruned, full_space=space, setting=setting, notes=notes,
    )  # fmt: skip


def grounds(
    spec: StudySpec, target: Target, workload: Workload, world_size: int
) -> tuple[DsConfig, Candidate, Setting]:
    """The complete configuration of a study's baseline, the baseline, and what legality depends on.

    Raises:
        UserError: The baseline cannot run here.
    """
    environment = workload.environment
    base_config = _completed(spec, target, workload)
    data_parallel = workload.data_parallel(world_size)
    setting = Setting(
        accelerator=environment.accelerator,
        deepspeed_version=environment.versions["deepspeed"],
        world_size=data_parallel,
        ranks_per_node=max(1, data_parallel // spec.nodes_for(world_size)),
        pipeline_stages=workload.script.pipeline_stages if workload.script else 0,
        bf16=environment.bf16,
        fp16=environment.fp16,
        n_blocks=workload.n_blocks,
        n_samples=workload.n_samples,
        global_batch=spec.global_batch if isinstance(spec.global_batch, tuple) else None,
        client_optimizer=workload.client_optimizer
        and (target.kind == "script" or "optimizer" not in (spec.base_config or {})),
        plain_backward=workload.script is not None and workload.script.plain_backward,
        base=inherited_settings(base_config),
    )
    check_retired(base_config, setting.deepspeed_version, "base config")
    baseline = _baseline(spec, base_config, workload, data_parallel)
    reason = baseline.illegal(_without_batch_bounds(setting))
    if reason is not None:
        raise UserError(f"the baseline cannot run here: {reason}")
    return base_config, baseline, setting


def profiled(found: Plan, executor: Executor, folder: Path, on_wait: Callable[[], None] = lambda: None) -> Plan:
    """The plan with the workload's profile and the machine's rates, from which forecasts follow."""
    spec = found.spec
    trials = folder / "trials"
    engine = (
        spec.executor,
        sorted(spec.executor_options.items()),
        str(spec.hostfile),
        found.workload.environment.device_name,
    )
    where = engine if spec.runs_elsewhere else ()
    place = profiles.Place(spec.nodes_for(found.world_size), where)
    workload, notes = profiles.find_out(
        found.workload, spec.target, found.base_config, found.world_size, executor, trials, on_wait, place
    )
    if workload.script is not None and not spec.runs_elsewhere:  # so that `predict` need not run it once more
        profiles.keep(replace(workload, machine=None), profiles.script_key(spec.how(), spec.script_set, spec.ranks))
    return replace(found, workload=workload, notes=[*found.notes, *notes])


def inspect_workload(spec: StudySpec, executor: Executor, path: Path, world_size: int) -> Workload:
    """Loads a `model.py`, or runs a script untouched for a few steps, and says what it is.

    Raises:
        UserError: It cannot be, and why.
    """
    is_script = spec.inspected().kind == "script"
    request = TrialRequest(
        target=str(spec.target), mode="probe" if is_script else "inspect", seed=spec.seed, world_size=world_size,
        nodes=spec.nodes_for(world_size), deadline_s=spec.trial_deadline_s,
        # Loading a model takes host memory; whether it fits a device is for the baseline to find out.
        device_memory_bytes=spec.device_memory_bytes if is_script else None,
        script=script_request(spec, None, None, None) if is_script else None,
        ds_config=_untouched_config(spec) if is_script else {},
    )  # fmt: skip
    result = base.run(executor, path, request)
    if result.outcome is Outcome.LOST:  # whoever watched it was killed, as may happen once
        result = base.run(executor, path, request)
    if result.outcome is not Outcome.COMPLETE:
        how = "run as it is" if is_script else "loaded"
        log = TrialDir(path).log(result.failed_rank or 0)
        hint = _usage(log, spec.target) if is_script and result.reason.endswith(USAGE_STATUS) else ""
        raise UserError(f"{spec.target} cannot be {how}: {result.reason}{hint} (see {shown(log)})")
    workload = trial.read(TrialDir(path).workload, Workload)
    if workload.script is not None:
        for name in SCRIPT_BATCH:
            if getattr(workload.script, name) is None:
                raise UserError(
                    f"{spec.target}: the {name} varies from step to step, so that no trial could be checked"
                )
    return workload


def _usage(log: Path, target: Path) -> str:
    """What a script that ended as argparse does said last, and how it is given arguments."""
    with contextlib.suppress(OSError):
        said = [line for line in log.read_text(errors="replace").splitlines() if "error: " in line]
        last = f" ({said[-1].partition('error: ')[2][:200]})" if said else ""
        return f"{last}; if it needs arguments: autotune run {target.name} -- ITS ARGUMENTS"
    return ""


def _untouched_config(spec: StudySpec) -> DsConfig:
    """What `{ds_config}` stands for before anything is tuned."""
    if DS_CONFIG not in spec.templated():
        return {}
    return {"train_micro_batch_size_per_gpu": DEFAULT_MICRO_BATCH, "gradient_accumulation_steps": 1} | (
        spec.base_config or {}
    )


def script_request(
    spec: StudySpec, probed: Probed | None, candidate: Candidate | None, baseline: Candidate | None
) -> Script:
    """How the script is run for a candidate; for None as the user would, templates filled with the usual batch."""
    how, templated, mappings = spec.how(), spec.templated(), mapped_flags(spec, probed)
    before = baseline.values() if baseline is not None else UNTOUCHED
    values = candidate.values() if candidate is not None else UNTOUCHED
    fillers = template_values(values)
    arguments, changes = tuple(fill(argument, fillers) for argument in how.arguments), []
    moved = {name: value for name, value in values.items() if candidate is not None and value != before.get(name)}
    shown = templates_in([*how.arguments, *how.environment.values()])
    changes += [
        f"Command line: `{{{n}}}` in it is {value} instead of {before[n]}." for n, value in moved.items() if n in shown
    ]
    for name, flag in mappings.items():
        if name in moved:
            arguments = with_flag(arguments, (flag,), str(moved[name]))
            changes.append(f"Command line: `{flag} {moved[name]}` instead of {before[name]}.")
    for name, text in spec.script_set.items():
        if set(templates_in([text])) & set(moved):
            was, now = (fill(text, some) for some in (template_values(before), fillers))
            changes.append(f"Constant: `{name} = {now}` in {spec.target.name} instead of {was}.")
    return Script(
        arguments=arguments,
        working_dir=how.working_dir,
        module=how.module,
        environment=_told({name: fill(value, fillers) for name, value in how.environment.items()}, how),
        # A probe leaves a constant that carries the batch as it is, and so learns its value.
        assignments={k: fill(v, fillers) for k, v in spec.script_set.items() if candidate is not None or "{" not in v},
        micro_batch_size=(probed.micro_batch_size or 0) if probed else 0,
        gradient_accumulation_steps=(probed.gradient_accumulation_steps or 0) if probed else 0,
        precision=precision_of(without_auto(probed.ds_config)) if probed else "",
        checkpoint_every=probed.checkpoint_every if probed else 0,
        learning_rates=probed.learning_rates if probed else (),
        carried=tuple(name for name in SCRIPT_BATCH if name in templated or name in mappings),
        side_changes=tuple(changes),
    )


def _told(environment: dict[str, str], how: Invocation) -> dict[str, str]:
    """The variables as a trial's file names them: secrets are left to the environment of its processes, where the engine has put them."""
    fixed, shown = how.fixed_environment, masking.masked(environment)
    return {name: value for name, value in environment.items() if name not in fixed or shown[name] == value}


def mapped_flags(spec: StudySpec, probed: Probed | None) -> dict[str, str]:
    """The flag that carries a field, as the study says, else as the script's DeepSpeed JSON says for DeepSpeed's own tuner.

    A template goes before both.
    """
    section = (probed.ds_config.get("autotuning") or {}).get("arg_mappings") if probed is not None else None
    own = {key: flag for key, flag in (section or {}).items() if key in MAPPED_KEYS and isinstance(flag, str)}
    templated = spec.templated()
    return {
        MAPPED_KEYS[key]: flag for key, flag in (spec.arg_mappings or own).items() if MAPPED_KEYS[key] not in templated
    }


def _moved(
    spec: StudySpec, executor: Executor, path: Path, workload: Workload, baseline: Candidate, world_size: int
) -> Workload:
    """Runs the script once with another micro-batch and accumulation, and sees which of them really changed.

    If it cannot run so, it is run with one of them changed at a time.
    """
    assert workload.script is not None
    probed, micro, steps = workload.script, baseline.micro_batch_size, baseline.gradient_accumulation_steps
    # A global batch that is kept stays here too; else its two parts must prove that each moves without the other.
    keeps = spec.global_batch == "keep"
    halves = steps // 2 if micro == 1 and steps % 2 == 0 else steps * 2
    wanted = {
        "micro_batch_size": micro // 2 if micro > 1 else 2,
        "gradient_accumulation_steps": halves if keeps else steps + 1,
    }

    def run(names: Iterable[str], folder: str) -> TrialResult:
        candidate = Candidate.of({**baseline.values(), **{name: wanted[name] for name in names}})
        config = probed.completed(candidate.to_deepspeed(probed.ds_config), candidate)
        request = TrialRequest(
            target=str(spec.target), candidate=candidate.values(), ds_config=config, world_size=world_size,
            nodes=spec.nodes_for(world_size), seed=spec.seed, max_steps=2, budget_s=0.0,
            deadline_s=spec.trial_deadline_s, device_memory_bytes=spec.device_memory_bytes,
            script=script_request(spec, probed, candidate, baseline),
        )  # fmt: skip
        return base.run(executor, path.with_name(folder), request)

    both = run(SCRIPT_BATCH, path.name)
    results = {name: both if both.observed is not None else run([name], f"{path.name}-{name}") for name in SCRIPT_BATCH}
    movable, changes, caveats = [], list[str](), list(workload.caveats)
    for name, result in results.items():
        changes += [change for change in result.side_changes if change not in changes]
        word, was, seen = SCRIPT_BATCH[name], getattr(baseline, name), result.observed
        if seen is None:
            caveats.append(
                f"with a {word} of {wanted[name]} the script ended with {result.outcome}: {result.reason}; so it stays {was}"
            )
        elif wanted[name] in (getattr(seen, name), seen.loader_batch_size if name == "micro_batch_size" else None):
            movable.append(name)
        else:
            caveats.append(f"the {word} stays {was}: nothing that the tuner can reach moves it. {REMEDY[name]}")
    flags = {name: names for result in results.values() for name, names in result.flags.items()}
    flags |= {name: [flag] for name, flag in mapped_flags(spec, probed).items()}
    probed = replace(probed, movable=tuple(movable), moved_by=tuple(changes), flags=probed.flags | flags)
    return replace(workload, script=probed, caveats=caveats)


def _frozen(spec: StudySpec, workload: Workload, baseline: Candidate) -> dict[str, Scalar]:
    """The knobs of the space that the script does not let move, with the values they keep."""
    assert workload.script is not None
    fixed = [name for name in SCRIPT_BATCH if name not in workload.script.movable]
    if fixed and spec.global_batch == "keep":
        fixed = list(SCRIPT_BATCH)  # where one of the two stays and the product too, so does the other
    return {name: baseline.values()[name] for name in fixed}


def _completed(spec: StudySpec, target: Target, workload: Workload) -> DsConfig:
    """The user's configuration with what it leaves open and a trial needs.

    AdamW where neither it nor the target brings an optimizer; buffers that follow 16-bit weights where the model has any.
    """
    if workload.script is not None:
        # What ran goes before what was configured: DeepSpeed never compares the two.
        batch = {"train_micro_batch_size_per_gpu": workload.script.micro_batch_size}
        config = {key: value for key, value in workload.script.ds_config.items() if key != "train_batch_size"}
        config |= batch | {"gradient_accumulation_steps": workload.script.gradient_accumulation_steps}
        wide = not any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        if workload.float_buffers and wide and "buffer_dtype" not in config.get("data_types", {}):
            set_path(config, "data_types.buffer_dtype", "auto")
        return config
    config = copy.deepcopy(spec.base_config or {})
    if "optimizer" not in config and "optimizer" not in target.defines:
        # On CPU DeepSpeed would compile its own Adam for a minute; torch's runs at once.
        extra = {"torch_adam": True} if workload.environment.accelerator == "cpu" else {}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": DEFAULT_LEARNING_RATE, **extra}}
    if workload.float_buffers and "buffer_dtype" not in config.get("data_types", {}):
        set_path(config, "data_types.buffer_dtype", "auto")
    return config


def _baseline(spec: StudySpec, config: DsConfig, workload: Workload, world_size: int) -> Candidate:
    if not spec.batch_is_configured and workload.script is None:
        micro = DEFAULT_MICRO_BATCH
        if isinstance(spec.global_batch, tuple):
            micro = max(1, min(micro, spec.global_batch[1] // world_size))
        if workload.n_samples is not None:
            micro = max(1, min(micro, workload.n_samples // world_size))
        config = {**config, "train_micro_batch_size_per_gpu": micro}
    own = workload.script.checkpoint_every if workload.script else 0
    return replace(from_deepspeed(config, world_size), checkpoint_every=own)


def _without_batch_bounds(setting: Setting) -> Setting:
    return replace(setting, global_batch=None)


def shown(path: Path) -> Path:
    """A path as people see it: relative where it lies below the working directory."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path
