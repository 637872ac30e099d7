"""The setting of a study that legality depends on, and the rules that refuse candidates in it."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar, version


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What legality depends on: the machine, the libraries and the workload.

    Attributes:
        accelerator: `cpu` or `cuda` (DeepSpeed's name of it).
        deepspeed_version: Installed version, as in 0.19.8.
        world_size: Ranks of a trial; candidates divide their degrees out.
        ranks_per_node: The same on one machine.
        idle_devices: Devices of a machine that ranks see and none computes on.
        pipeline_stages: Stages of a `PipelineModule` as the target builds it; 0 for another model.
        partition: How it shares its layers out among them.
        partitions: The ways that it can.
        unfit: Stages and ways to share layers out that leave a stage with nothing to train, each with the reason.
        no_stages: Why its stages cannot be changed; empty if they can.
        bf16: Whether the device computes in bfloat16.
        fp16: Whether DeepSpeed accepts fp16 on the device.
        tf32: Whether the device multiplies fp32 matrices in TensorFloat-32.
        n_blocks: Repeated blocks of the model that can be checkpointed.
        sparse: Classes of its modules that give sparse gradients; empty without any.
        n_samples: Samples in the data set; None where it has no end.
        global_batch: Allowed samples per optimizer step, lowest and highest.
        only_micro_batch: The micro-batch that alone trains with the baseline's loss, as trials showed; 0 where any does.
        plain_backward: The workload calls `loss.backward()`, not `engine.backward(loss)`.
        scales: It scales that loss by `engine.scale`, as fp16 needs.
        passes: Backward passes of a micro-batch before the call of `step()` that DeepSpeed takes for the last of a step.
        counts_itself: The script calls that once for all micro-batches of a step.
        unsynced: It adds up gradients within `engine.no_sync()`.
        merged_passes: The passes of a step of the baseline of which DeepSpeed loses gradients, as `merged_passes` counts them.
        by_hand: What the script changes itself between DeepSpeed's calls: `gradients`, `weights`.
        heeded: Of that, what DeepSpeed heeds in the baseline, as `heeded` finds it.
        base: Settings of the user's own configuration that candidates inherit and rules look at; see
            `inherited_settings`.
        own_optimizer: The target makes the optimizer, not the configuration.
        unsafe_precisions: Precisions in which trials of this workload ended with a dtype mismatch.
        lengths: Lengths of the shortest and the longest sample; 0 where they are not known.
        loader: Arguments of the target's own DataLoader.
        data_cannot: Settings of the data that the target cannot follow, each with the reason.
        fewest_in_row: Least samples of mean length whose tokens make a row that holds the longest sample; 0 where rows need not.
        steps_grouped: Optimizer steps whose samples are sorted together where samples are grouped by length.
        pins: DeepSpeed pins what it offloads to the host unless told otherwise.
        missing_ops: DeepSpeed's compiled ops that cannot be built, each with why and the remedy.
        heads: Attention heads of the model; 0 if unknown.
        kv_heads: Its heads of keys and values; 0 if unknown.
        no_degrees: Why the target cannot be run with degrees; empty if it can.
        own_sequence: Ranks over which a script splits each sequence.
        no_tensor: Why its layers cannot be split over ranks; empty if they can.
        experts: Experts of the model's mixtures, each number once; empty if it has none or they are unknown.
        no_experts: Why its experts cannot be shared out; empty if they can.
        own_experts: Its expert layers are DeepSpeed's own (deepspeed.moe).
        no_sequence: Why its sequences cannot be split over ranks; empty if they can.
        module_classes: Classes of the model's modules that have both parameters and modules of their own; empty if unknown.
        unlike: Degrees at which the split model computed something else than the whole one, each with what it was.
    """

    accelerator: str = "cpu"
    deepspeed_version: str = "0.19.8"
    world_size: int = 1
    ranks_per_node: int = 1
    idle_devices: int = 0
    pipeline_stages: int = 0
    partition: str = ""
    partitions: tuple[str, ...] = ()
    unfit: tuple[tuple[int, str, str], ...] = ()
    no_stages: str = ""
    bf16: bool = True
    fp16: bool = False
    tf32: bool = False
    n_blocks: int = 0
    sparse: str = ""
    n_samples: int | None = None
    global_batch: tuple[int, int] | None = None
    only_micro_batch: int = 0
    plain_backward: bool = False
    scales: bool = False
    passes: int = 1
    counts_itself: bool = False
    unsynced: bool = False
    merged_passes: int = 1
    by_hand: tuple[str, ...] = ()
    heeded: tuple[str, ...] = ()
    base: tuple[tuple[str, Scalar], ...] = ()
    own_optimizer: bool = False
    unsafe_precisions: tuple[str, ...] = ()
    lengths: tuple[int, int] = (0, 0)
    loader: tuple[tuple[str, Scalar], ...] = ()
    data_cannot: tuple[tuple[str, str], ...] = ()
    fewest_in_row: int = 0
    steps_grouped: int = 1
    pins: bool = False
    missing_ops: tuple[tuple[str, str], ...] = ()
    heads: int = 0
    kv_heads: int = 0
    no_degrees: str = ""
    own_sequence: int = 1
    no_tensor: str = ""
    no_sequence: str = ""
    experts: tuple[int, ...] = ()
    no_experts: str = ""
    own_experts: bool = False
    module_classes: tuple[str, ...] = ()
    unlike: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class Rule:
    """A reason why DeepSpeed (or the workload) refuses a candidate in a setting, or why the candidate is pointless.

    Attributes:
        broken: Whether it holds for a candidate, its DeepSpeed settings (inherited ones included) and a setting.
        why: The reason, with fields of candidate and setting as templates.
        reads: The knobs that `broken` looks at. `prefix*` stands for all that begin so; a rule may only ask whether one
            of them is set at all, and must stay broken when more of them are.
    """

    broken: Callable[[Candidate, dict[str, Scalar], Setting], bool]
    why: str
    reads: tuple[str, ...]


def older(setting: Setting, *release: int) -> bool:
    """Whether the installed DeepSpeed is older than a release."""
    return version(setting.deepspeed_version) < release


def range_words(bounds: tuple[int, int]) -> str:
    """A range in words: `8..64`, or `16` where it is of one number."""
    return "..".join(map(str, dict.fromkeys(bounds)))
