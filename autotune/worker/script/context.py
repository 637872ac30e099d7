"""The script under trial: the state that its hooks and the framework adapters share."""

import contextlib
import copy
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from autotune.errors import UserError
from autotune.space.candidate import Candidate, from_deepspeed
from autotune.space.deepspeed import OWNED_PATHS, ConfigError, DsConfig
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.trial.workload import DataShape
from autotune.worker import rank
from autotune.worker.containers import DTYPES, tensors_in, to_device
from autotune.worker.measure.memory import Memory
from autotune.worker.measure.recorder import Recorder
from autotune.worker.script import ds_config, execute

if TYPE_CHECKING:
    from autotune.worker.measure.meter import Meter

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Variables that CUDA, torch's allocator and NCCL read once.
READ_ONCE = ("CUDA_", "NCCL_", "PYTORCH_")
# But for the devices themselves, and what Lightning sets for all its users.
OTHERWISE_SET = (VISIBLE, "CUDA_DEVICE_ORDER", "PYTORCH_NVML_BASED_CUDA_CHECK")


class ScriptError(UserError):
    """The script does something that cannot be tuned."""


class ScriptContext:
    """A training script, the candidate that it is run with, and the report that grows meanwhile.

    Attributes:
        candidate: The configuration under trial; None in a probe, which changes nothing.
        script: The script, its templates filled in for this rank.
        scratch: Folder of the trial for files that a framework cannot be kept from writing.
        meter: The meter of the trained engine, once there is one.
        family: The framework that the script uses, for reports; empty for plain DeepSpeed.
        casts_inputs: Convert floating-point inputs to the type of 16-bit weights; off where a framework does so.
        sums_losses: The framework or the script divides the loss: backward calls get parts of a step's loss, not micro-batch losses.
        clipping: The norm at which a script clips gradients itself, where DeepSpeed is to; None where it was not seen to.
        by_hand: What else the script changes itself, where DeepSpeed heeds that at some stages alone.
        by_micro_batch: The note on what in its loop trains otherwise at another micro-batch; empty if nothing does.
        trains_on_draws: Samples are those that a loader draws; else a trainer generates from them what goes forward.
        batch_factor: Micro-batches in a loader's batch, for frameworks that split batches between ranks.
        batch_classes: Classes of what its loaders yield.
        in_backward: An engine's backward pass is running.
        raised: The latest error of a call of the engine, which the script has caught if it goes on; empty without one.
        at_end: Called before the process ends.
        began: When the script began.
        left_out: Names of DeepSpeed's own flag for the configuration, if the command leaves it out.
        json_flags: The flags that name a JSON file, by its absolute path.
        loaders: The `Loaders` that hook its DataLoaders.
        steps_grouped: Optimizer steps whose samples are sorted together where samples are grouped by length.
        data_by_framework: Settings of the data that a framework's own arguments carry, and the changes in words.
        data_limits: Returns the settings of the data that cannot be followed, each with the reason, as a framework
            corrects those of its DataLoader.
    """

    def __init__(self, recorder: Recorder, request: TrialRequest, memory: Memory) -> None:
        assert request.script is not None
        self.recorder, self.request, self.memory = recorder, request, memory
        self.report = recorder.report
        self.script = execute.in_rank(request.script, recorder.folder.ds_config)
        self._environment, self.began = dict(os.environ), time.time()
        self.candidate = Candidate.of(request.candidate) if request.candidate else None
        self.scratch = recorder.folder.scratch
        self.meter: Meter | None = None
        self.family = ""
        self.casts_inputs = True
        self.sums_losses = self.script.probed.divides
        self.clipping: float | None = None
        self.by_hand: list[str] = []
        self.by_micro_batch = ""
        self.trains_on_draws = True
        self.batch_factor = 1
        self.batch_classes = set[type]()
        self.in_backward, self.raised = False, ""
        self.at_end: Callable[[], None] = lambda: None
        self.left_out: list[str] = []
        self.json_flags: dict[str, list[str]] = {}
        self.loaders: Any = None
        self.steps_grouped = 1
        self.data_by_framework: dict[str, list[str]] = {}
        self.data_limits: Callable[[dict[str, str], DataShape | None], dict[str, str]] = lambda found, _: found

    def check_devices(self) -> None:
        """Refuses a script that chose its devices itself, when CUDA had started already; notes other settings of it."""
        if not self.memory.cuda:
            return
        local_rank, chosen = int(os.environ["LOCAL_RANK"]), os.environ.get(VISIBLE)
        own, meant = (
            dict(enumerate(value.split(","))).get(local_rank) if value is not None else str(local_rank)
            for value in (self._environment.get(VISIBLE), chosen)
        )
        if meant != own:
            raise ScriptError(
                f"the script sets {VISIBLE} to {chosen!r} itself, which comes too late in a trial, where CUDA has started:"
                f" take that out of it, and set it for all: {VISIBLE}={chosen} autotune ..."
            )
        late = [
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(READ_ONCE) and name not in OTHERWISE_SET and value != self._environment.get(name)
        ]
        if late:
            self.once(
                f"the script sets {' '.join(late)} itself, which may come too late in a trial, where CUDA has started:"
                f" set it for all: {' '.join(late)} autotune ..."
            )

    def value(self, field: str) -> tuple[int, int] | None:
        """Returns a field's value in the untouched script and in the candidate; None if equal or set by the user."""
        if self.candidate is None or field in self.script.carried:
            return None
        was, wanted = getattr(self.script.probed, field), getattr(self.candidate, field)
        if field == "micro_batch_size" and self.in_rows:
            wanted = 1
        return (was, wanted) if was and was != wanted else None

    @property
    def in_rows(self) -> bool:
        """Returns whether the candidate has a token budget: a framework packs the samples of a micro-batch into one row."""
        return self.candidate is not None and "token_budget" in self.candidate.data_changes

    @property
    def draw_sizes(self) -> tuple[int, int] | None:
        """Returns the samples of a loader's batch in the untouched script and in the candidate, if the script cuts such batches up."""
        return self.script.probed.draw_sizes(self.candidate) if self.candidate is not None else None

    def drawn(self) -> tuple[int, int] | None:
        """Returns the samples that a loader draws at once, in the untouched script and in the candidate; None if equal.

        That is a micro-batch, unless a framework splits batches between ranks, or the script cuts them up.
        """
        change, sizes = self.value("micro_batch_size"), self.draw_sizes
        if sizes is not None and "micro_batch_size" not in self.script.carried:
            return sizes if sizes[0] != sizes[1] else None
        return (self.batch_factor * change[0], self.batch_factor * change[1]) if change else None

    def config(self, own: DsConfig) -> DsConfig:
        """Returns the DeepSpeed configuration to run with in place of the script's own."""
        return own if self.candidate is None else _with_stage(copy.deepcopy(self.request.ds_config))

    def config_beside(self, own: DsConfig, first: DsConfig) -> tuple[DsConfig, list[str]]:
        """Returns the configuration of another trained model (a critic), and what changes in it, in words.

        It follows the trial where its own configuration has what the first model's has, and else stays: the baseline then
        trains all models as the script does.

        Args:
            own: The script's configuration of that model.
            first: Its configuration of the first one.
        """
        candidate, probed = self.candidate, self.script.probed
        if candidate is None:
            return own, []
        try:
            mine, theirs = (from_deepspeed(config, self.request.world_size) for config in (first, own))
        except ConfigError:  # a framework fills in the batch
            return _with_stage(candidate.to_deepspeed(own)), []
        paths = dict(candidate.config)
        theirs = Candidate.of(theirs.values() | theirs.stated(own, paths))
        was = mine.values() | mine.stated(first, paths) | {
            "micro_batch_size": probed.micro_batch_size or 0, "precision": probed.precision,
            "gradient_accumulation_steps": probed.gradient_accumulation_steps or 0, "checkpoint_every": candidate.checkpoint_every,
        }  # fmt: skip
        before = theirs.values()
        moved = {
            name: value
            for name, value in candidate.values().items()
            if value != was.get(name) and before.get(name) == was.get(name)
        }
        wanted = Candidate.of({**before, **moved})
        return _with_stage(wanted.to_deepspeed(own)), wanted.changes_from(theirs)

    def early_config(self, own: DsConfig) -> DsConfig:
        """Returns the configuration for a framework that reads it early and fills in the "auto" values of `own`."""
        if self.candidate is None:
            return own
        config = self.config(own)
        ds_config.keep_auto(config, own, OWNED_PATHS)
        # Counted from the batch, and refused by transformers where the two differ.
        for name in ("total_num_steps", "warmup_num_steps"):
            if name in config.get("scheduler", {}).get("params", {}):
                config["scheduler"]["params"][name] = "auto"
        return config

    def cast(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Returns the inputs in the type of the candidate's weights; None if the script's types will do."""
        if self.candidate is None or not self.casts_inputs or self.candidate.precision == self.script.probed.precision:
            return None
        dtype = DTYPES.get(self.candidate.precision)
        others = {*DTYPES.values()} - {dtype}

        def is_batch(value: Any) -> bool:
            # Other objects may be none: a cache that the model adds to must not be copied.
            return dataclasses.is_dataclass(value) or type(value) in self.batch_classes

        if dtype is None or not any(t.dtype in others for t in tensors_in((args, kwargs), objects=is_batch)):
            return None
        name = str(dtype).removeprefix("torch.")
        self.changed(f"Inputs: cast floating-point inputs to `{name}` before the engine's forward.")
        cast: tuple[Any, Any] = to_device((args, kwargs), torch.device(engine.device), dtype, objects=is_batch)
        return cast

    @contextlib.contextmanager
    def inside_backward(self) -> Iterator[None]:
        """Marks an engine's backward pass, so that calls in it do not count as the script's own passes."""
        before, self.in_backward = self.in_backward, True
        try:
            with self.memory_errors_end_it():
                yield
        finally:
            self.in_backward = before

    @contextlib.contextmanager
    def memory_errors_end_it(self) -> Iterator[None]:
        """Ends the trial where memory runs out, since a script may catch that and go on with a smaller batch."""
        try:
            yield
        except Exception as error:
            if rank.classify(error)[0] is Outcome.OOM:
                self.abort(error)
            self.raised = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def changed(self, text: str, *, reproducible: bool = True) -> None:
        """Notes a change that the trial needs besides the DeepSpeed configuration.

        Args:
            text: A sentence with code in backticks; it starts with `Command line:` for a change of a flag.
            reproducible: Whether the user can make the same change by a flag, a constant or a line of code.
        """
        if text not in self.report.side_changes:
            self.report.side_changes.append(text)
            if not reproducible:
                self.report.unreproducible.append(text)

    def once(self, caveat: str) -> None:
        """Adds a caveat to the report unless it is there."""
        if caveat not in self.report.caveats:
            self.report.caveats.append(caveat)

    def lift(self, name: str, value: object) -> None:
        """Notes that a limit of the script is lifted, since it would end before it can be measured."""
        self.once(f"`{name}={value}` ends a run before it can be measured, so trials train without it")

    def saver(self, name: str, folder: str = "") -> Callable[..., Any]:
        """Returns a hook for a function that saves or uploads: it notes the call and does nothing else.

        Args:
            folder: A method's first argument, if that is a folder: it is made, as the script may write into it, too.
        """

        def not_saved(_original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
            self.once(f"{name} is not carried out in trials")
            place = kwargs.get(folder, next(iter(args[1:]), None)) if folder else None
            if isinstance(place, str | os.PathLike):
                os.makedirs(place, exist_ok=True)
            return True

        return not_saved

    def abort(self, error: BaseException) -> NoReturn:
        """Reports an error and ends the process, so that the script cannot catch it."""
        self.at_end()
        rank.abort(self.recorder, error)


def _with_stage(config: DsConfig) -> DsConfig:
    """Returns a configuration that states its ZeRO stage: a framework may look there."""
    config.setdefault("zero_optimization", {"stage": 0})
    return config


def depends_on_micro_batch(context: ScriptContext, why: str) -> None:
    """Notes why a script trains otherwise at another micro-batch."""
    context.by_micro_batch = context.by_micro_batch or why
    context.once(why)
