"""Record of a trial's request: everything that its ranks need to know."""

from dataclasses import dataclass, field, replace

from autotune.space.deepspeed import DsConfig, Scalar
from autotune.trial.lengths import Table
from autotune.trial.workload import TOTAL, Script


@dataclass(frozen=True, kw_only=True)
class TrialToBeat:
    """Bounds beyond which a trial is worse than a measured one on every objective, so that it can be stopped early.

    Attributes:
        step_time_s: From this step time on, all objectives that depend on time are worse.
        peak_memory_bytes: From this peak memory on, memory is worse; None if memory is no objective.
        log_slowdown: What other processes did to the step time that the first bound rests on (see `scoring.shared_cores`).
    """

    trial: int
    step_time_s: float
    peak_memory_bytes: float | None = None
    log_slowdown: float = 0.0

    def beats(self, step_time_s: float, peak_memory_bytes: float) -> bool:
        """Returns whether a trial with at least this step time and memory is worse on every objective."""
        return step_time_s >= self.step_time_s and (
            self.peak_memory_bytes is None or peak_memory_bytes >= self.peak_memory_bytes
        )


@dataclass(frozen=True, kw_only=True)
class TailCheck:
    """Check after a trial's measurement whether the training fits: a pass over the worst micro-batch, and more.

    Attributes:
        longest_at: Positions of the data set's longest samples, longest first; empty for a stream.
        length: The length that samples are stated to reach; 0 if none is.
        evaluate: Also run one evaluation step.
        save: Also save one checkpoint.
    """

    longest_at: tuple[int, ...] = ()
    length: int = 0
    evaluate: bool = False
    save: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Request of one trial.

    Attributes:
        target: Path of the user's `model.py` or training script.
        mode: `measure` runs a trial. `inspect` only loads the target and writes a `Workload`; `probe` does so after a
            few steps of an unchanged script. `split` compares the model, split as the candidate says, with the whole one.
            `profile` traces a pass of a `model.py` and writes a `Profile`. `rates`
            measures the machine and writes a `Machine`; `machine` does so at length, with the target's data, and writes
            a `Probe`. `build` compiles `op`.
        candidate: The configuration (none for `inspect`).
        nodes: Machines, with the same number of ranks on each.
        seed: Seed of weights and data order, the same for all trials of a study.
        budget_s: Training time, counted from the end of the first step, after which the measurement ends.
        max_steps: Optimizer steps after which it ends at the latest.
        min_samples: Samples to train on at least, so that loss curves of different batches overlap (budget permitting).
        deadline_s: Wall time after which the ranks are killed, from their start.
        device_memory_bytes: Stated memory limit of a device; None for the device's own.
        script: How to run the target, if it is a training script.
        noise: Also measure gradient sizes, for the noise scale; the hooks distort step times.
        check_gradient: Compare the first step's gradient with its micro-gradients.
        replicate: Above 0: an equivalent run instead of the study's own: weights rounded differently, other dropout.
        weights: File or folder of weights to start from, instead of those that `model()` makes.
        save_weights: File for the weights at the end.
        first_sample: Position in the order of the data to start at.
        learning_rate_factor: Factor on the learning rates of the target's own optimizer.
        changed_from: The baseline's values of the knobs in which the candidate differs from it; each needs a witness.
        rivals: Measured trials; this trial ends once it is known to be worse than one of them on every objective.
        op: DeepSpeed op to compile, by builder name.
        traced_steps: Steps to run under torch's profiler, after the measurement.
        tail: The check of the worst batch after the measurement; None for none.
        lengths: Lengths of the data set's samples; see `lengths.table`.
    """

    target: str
    mode: str = "measure"
    candidate: dict[str, Scalar] = field(default_factory=dict)
    ds_config: DsConfig = field(default_factory=dict)
    world_size: int = 1
    nodes: int = 1
    seed: int = 0
    budget_s: float = 10.0
    max_steps: int = 1000
    min_samples: int = 0
    deadline_s: float = 300.0
    device_memory_bytes: int | None = None
    script: Script | None = None
    noise: bool = False
    check_gradient: bool = False
    replicate: int = 0
    weights: str | None = None
    save_weights: str | None = None
    first_sample: int = 0
    learning_rate_factor: float = 1.0
    changed_from: dict[str, Scalar] = field(default_factory=dict)
    rivals: tuple[TrialToBeat, ...] = ()
    traced_steps: int = 0
    tail: TailCheck | None = None
    lengths: Table = ()
    op: str = ""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.nodes

    def on_ranks(self, world_size: int, nodes: int) -> "TrialRequest":
        """Returns the same trial on another number of ranks, with a stated global batch that follows it."""
        config = dict(self.ds_config)
        if TOTAL in config:
            config[TOTAL] = config[TOTAL] * world_size // self.world_size
        return replace(self, ds_config=config, world_size=world_size, nodes=nodes)
