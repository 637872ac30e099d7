"""Nine simulated machines to train on, and what a trial reads there: noise and stragglers included.

The formulas differ from those of `autotune.forecast`: a saturation curve with steps, overlap as a power mean, a
slow-down near the memory limit, sizes that kernels dislike, and an offset of each level of a knob. What a number of
micro-steps costs follows from the times of micro-steps alone. The constants are drawn anew for each seed (`redrawn`).
No real machine is like any of these; what they have in common with real ones is that a forecast is wrong in many ways at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from autotune.scoring import pareto
from autotune.search.acquisition import dominated
from autotune.search.observation import Observation
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.trial.profile import Machine, Profile
from autotune.trial.result import Outcome

METRICS = ["step_time_s", "samples_per_s", "time_to_loss_s"]
ZERO = "zero_optimization."
# Knobs whose values have no offset of their own.
SIZES = ("micro_batch_size", "gradient_accumulation_steps")
# Standard deviations of logarithms: of the machine's rates about what was probed, and of the offset of each level.
RATE_SD, LEVEL_SD = 0.35, 0.06
RATES = ("flops", "link", "alpha", "memory", "launch", "host", "activations")
# Noise of a trial's loss curve and of its peak memory; of a micro-step, as a share of the trial's own, and at least.
LOSS_NOISE, MEMORY_NOISE, MICRO_SHARE, MICRO_NOISE = 0.05, 0.005, 0.5, 0.02
# How much slower a straggler reads.
STRAGGLING = (1.3, 2.0)
GPU_FLOPS = {"fp32": 6e13, "bf16": 3e14, "fp16": 3e14, "torch_autocast": 2e14}
CPU_FLOPS = {"fp32": 6e10, "bf16": 2e10, "torch_autocast": 2.5e10}


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How trials read.

    Attributes:
        sd: Standard deviation of the logarithm of a trial's step time.
        stragglers: Share of the trials that read 1.3 to 2 times slow as a whole.
    """

    sd: float = 0.025
    stragglers: float = 0.0

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.sd:.1%}" + (f", {self.stragglers:.0%} stragglers" if self.stragglers else "")


# The conditions that figures are stated for.
NOISES = (Noise(sd=0.025), Noise(sd=0.1), Noise(sd=0.025, stragglers=0.05))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a machine is and what is trained on it.

    Attributes:
        parameters: Of the model.
        blocks: Of the model.
        sequence: Tokens of a sample.
        ranks: Of a trial.
        link: Bytes per second and seconds of a message between ranks of a node.
        node: The same between nodes; none where all ranks are on one.
        ranks_per_node: On each.
        limit: Bytes of a rank.
        noise_scale: Batch at which twice the samples are needed.
        baseline: What the user's configuration has besides a micro-batch of 1, four of these, and ZeRO-2 on bf16.
        micro_batches: What is tuned.
        flops: By precision.
        memory: Bytes per second.
        launch: Seconds of a block in a micro-step.
        host: Bytes per second between host and device.
        odd: How much slower odd micro-batches are.
        accelerator: `cuda` or `cpu`.
    """

    parameters: int
    blocks: int
    sequence: int
    ranks: int
    link: tuple[float, float]
    limit: float
    noise_scale: float
    node: tuple[float, float] | None = None
    ranks_per_node: int = 0
    baseline: dict[str, Any] = field(default_factory=dict)
    micro_batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    flops: dict[str, float] = field(default_factory=lambda: GPU_FLOPS)
    memory: float = 2e12
    launch: float = 4e-4
    host: float = 2e10
    odd: float = 0.0
    accelerator: str = "cuda"


KINDS = {
    "compute": Kind(parameters=350_000_000, blocks=24, sequence=1024, ranks=4, link=(2e11, 2e-5), limit=80e9, noise_scale=128),
    "communication": Kind(
        parameters=1_300_000_000, blocks=24, sequence=512, ranks=16, link=(6e9, 8e-5), limit=80e9, noise_scale=1024
    ),
    "memory": Kind(
        parameters=1_300_000_000, blocks=24, sequence=1024, ranks=8, link=(1e11, 2e-5), limit=16e9, noise_scale=256
    ),
    "cpu": Kind(
        parameters=20_000_000, blocks=6, sequence=128, ranks=2, link=(2e9, 2e-4), limit=16e9, noise_scale=64, flops=CPU_FLOPS,
        memory=1e10, launch=1e-3, accelerator="cpu", baseline={"precision": "fp32"},
    ),
    "two nodes": Kind(
        parameters=760_000_000, blocks=24, sequence=1024, ranks=16, link=(2e11, 1e-5), node=(1.2e10, 4e-5), ranks_per_node=8,
        limit=40e9, noise_scale=512,
    ),
    "launches": Kind(
        parameters=25_000_000, blocks=12, sequence=256, ranks=8, link=(2e11, 2e-5), limit=40e9, noise_scale=256, launch=6e-4
    ),
    "odd sizes": Kind(
        parameters=350_000_000, blocks=24, sequence=512, ranks=8, link=(5e10, 2e-5), limit=40e9, noise_scale=128, odd=0.28,
        micro_batches=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16),
    ),
    "offload": Kind(
        parameters=3_400_000_000, blocks=32, sequence=1024, ranks=2, link=(1.5e10, 2e-5), limit=24e9, noise_scale=64, host=1.2e10,
        baseline={"offload_optimizer": "cpu"},
    ),
    "one device": Kind(
        parameters=760_000_000, blocks=24, sequence=1024, ranks=1, link=(1e11, 2e-5), limit=40e9, noise_scale=32,
        baseline={"zero_stage": 0},
    ),
}  # fmt: skip


class Costs(NamedTuple):
    """What candidates cost: seconds of a step, bytes, and seconds of an inner and a boundary micro-step."""

    seconds: np.ndarray
    sizes: np.ndarray
    inner: np.ndarray
    boundary: np.ndarray


@dataclass(frozen=True, eq=False)
class Columns:
    """Candidates by columns.

    Attributes:
        micro, accumulation, stage, bucket, every: Values of their knobs; `every` is 0 without recomputation.
        width: Bytes of a weight.
        precision: Names.
        overlap: Whether communication overlaps.
        host: Whether the optimizer is on the host.
        levels: Each level of a knob that has an offset.
        present: Which candidates have it, a column for each level.
    """

    micro: np.ndarray
    accumulation: np.ndarray
    stage: np.ndarray
    bucket: np.ndarray
    every: np.ndarray
    width: np.ndarray
    precision: list[str]
    overlap: np.ndarray
    host: np.ndarray
    levels: list[tuple[str, str]]
    present: np.ndarray

    @classmethod
    def of(cls, space: SearchSpace, candidates: Sequence[Candidate]) -> Columns:
        """The columns of some candidates of a space."""
        every = [c.values() for c in candidates]
        knobs = [parameter for parameter in space.parameters if parameter.name not in SIZES]
        levels = [(parameter.name, repr(value)) for parameter in knobs for value in parameter.all_values()]
        column = {level: n for n, level in enumerate(levels)}
        present = np.zeros((len(candidates), len(levels)))
        for row, values in enumerate(every):
            present[row, [column[level] for level in ((k, repr(v)) for k, v in values.items()) if level in column]] = (
                1.0
            )
        overlap = [values.get(ZERO + "overlap_comm") for values in every]
        return cls(
            micro=np.array([c.micro_batch_size for c in candidates], dtype=float),
            accumulation=np.array([c.gradient_accumulation_steps for c in candidates], dtype=float),
            stage=np.array([c.zero_stage for c in candidates]),
            bucket=np.array([float(values.get(ZERO + "reduce_bucket_size") or 5e8) for values in every]),  # type: ignore[arg-type]
            every=np.array([c.checkpoint_every for c in candidates]),
            width=np.array([2 if c.precision in ("bf16", "fp16") else 4 for c in candidates]),
            precision=[c.precision for c in candidates],
            overlap=np.array([c.zero_stage == 3 if o is None else bool(o) for c, o in zip(candidates, overlap, strict=True)]),
            host=np.array([c.offload_optimizer != "none" for c in candidates]), levels=levels, present=present,
        )  # fmt: skip

    def share(self, n_blocks: int) -> np.ndarray:
        """The share of the blocks that is recomputed."""
        blocks = np.ceil(n_blocks / np.maximum(self.every, 1)) / n_blocks
        return np.where(self.every > 0, blocks, 0.0)


@dataclass(frozen=True)
class World:
    """One simulated place to train: what it is, and what a profile of it would say.

    Attributes:
        name: Which of the kinds.
        space: What is tuned.
        setting: What legality depends on.
        default: The user's own configuration.
        profile: Of the workload.
        nominal: What was probed of the machine; the truth is off by factors that the seed decides.
        limit: Bytes of a rank.
        noise_scale: Batch at which twice the samples are needed.
        seed: Of the constants.
        odd: How much slower odd micro-batches are.
    """

    name: str
    space: SearchSpace
    setting: Setting
    default: Candidate
    profile: Profile
    nominal: Machine
    limit: float
    noise_scale: float
    seed: int
    odd: float = 0.0

    def truth(self, candidates: Sequence[Candidate]) -> Costs:
        """What candidates cost with the constants of the seed."""
        columns = Columns.of(self.space, candidates)
        return self.costs(columns, self.constants(columns))

    def constants(self, columns: Columns) -> np.ndarray:
        """Logarithms of what each rate and each level of a knob is off by: the seed decides."""
        rng = np.random.default_rng(self.seed)
        rates = [float(rng.normal(0, RATE_SD)) for _ in RATES]
        return np.array([*rates, *(float(rng.normal(0, LEVEL_SD)) for _ in columns.levels)])

    def costs(self, columns: Columns, constants: np.ndarray) -> Costs:
        """What candidates cost with these constants."""
        m, p, N = self.nominal, self.profile, self.nominal.world_size
        off = dict(zip(RATES, np.exp(constants[: len(RATES)]), strict=True))
        b, K, stage, w, share = (
            columns.micro,
            columns.accumulation,
            columns.stage,
            columns.width,
            columns.share(p.n_blocks),
        )
        # Samples are computed in tiles of four: 5 cost as much as 8.
        tiles = np.where(b > 4, 4 * np.ceil(b / 4), b)
        rate = np.array([m.flops.get(name, m.flops["fp32"]) for name in columns.precision]) * off["flops"]
        launch = m.launch_s * off["launch"] * p.n_blocks
        forward = p.flops_per_sample / 3 * (0.7 * b + 0.3 * tiles + 0.6) / rate + launch / 3
        forward = forward * (1 + self.odd * (b % 2))
        backward = 2 * forward + share * 0.85 * forward
        once = np.where(stage >= 1, 1.0, 2.0)
        n_buckets = np.maximum(1.0, p.n_trainable / columns.bucket)
        reduce_s = once * self._between_ranks_s(p.n_trainable * w, 2 * n_buckets / once, off)
        gather_s = self._between_ranks_s(p.n_parameters * w, np.full(len(b), float(p.n_blocks)), off)
        whole, shares = stage == 3, (stage == 1) | (stage == 2)
        forward = np.where(whole, (forward**3 + gather_s**3) ** (1 / 3) + 0.15 * gather_s, forward)
        backward = np.where(whole, (backward**3 + gather_s**3) ** (1 / 3) + 0.15 * gather_s, backward)
        gamma = np.where(columns.overlap, 2.5, 1.0)
        reduced = (backward**gamma + reduce_s**gamma) ** (1 / gamma)
        inner = forward + np.where(stage >= 2, reduced, backward)
        shard, host = p.n_trainable / np.where(stage >= 1, N, 1), columns.host
        memory = np.where(host, m.host_memory_bytes_per_s, m.memory_bytes_per_s) * off["memory"]
        optimizer = 30 * shard / memory + host * 2 * w * shard / (m.host_bytes_per_s * off["host"])
        boundary = forward + reduced + optimizer + np.where(shares, gather_s, 0.0)
        size = self._bytes(columns, share, shard, off)
        # Allocators slow down before they fail.
        slow = np.exp(columns.present @ constants[len(RATES) :]) * (1 + 2.0 * np.maximum(0.0, size / self.limit - 0.88))
        return Costs(((K - 1) * inner + boundary) * slow, size, inner * slow, boundary * slow)

    def _between_ranks_s(self, n_bytes: np.ndarray, n_calls: np.ndarray, off: dict[str, float]) -> np.ndarray:
        """Half an all-reduce: within nodes, then between them."""
        m = self.nominal
        N = m.world_size
        if N == 1:
            return np.zeros(len(n_bytes))
        L = m.ranks_per_node or N
        M = N // L
        wire = n_bytes * (L - 1) / L / m.link_bytes_per_s
        latency = n_calls * (L * m.link_alpha_s + (M * m.node_alpha_s if M > 1 else 0.0))
        if M > 1:
            wire = wire + n_bytes * (M - 1) / M / m.node_bytes_per_s
        return np.asarray(wire / off["link"] + latency * off["alpha"], dtype=float)

    def _bytes(self, columns: Columns, share: np.ndarray, shard: np.ndarray, off: dict[str, float]) -> np.ndarray:
        p, N, stage, w = self.profile, self.nominal.world_size, columns.stage, columns.width
        states = w * p.n_parameters / np.where(stage == 3, N, 1) + w * p.n_trainable / np.where(stage >= 2, N, 1)
        states = states + np.where(columns.host, 0.0, np.where(w == 2, 12, 8) * shard)
        kept = p.activation_bytes_per_sample * (1 - share) + p.checkpointed_bytes_per_sample * share
        live = off["activations"] * columns.micro**0.97 * kept * np.where(w == 2, 0.55, 1.0)
        return np.asarray(
            (states + live + w * np.minimum(columns.bucket, 2.0 * p.n_trainable)) * 1.06 + 2e8, dtype=float
        )


def worlds(names: Sequence[str] = tuple(KINDS)) -> list[World]:
    """The machines of these names, with constants of the first seed."""
    return [_world(name, KINDS[name], 1 + n) for n, name in enumerate(KINDS) if name in names]


def redrawn(world: World, seed: int) -> World:
    """A machine of that kind with other constants."""
    return replace(world, seed=1000 * (1 + seed) + world.seed)


def _world(name: str, kind: Kind, seed: int) -> World:
    knobs: dict[str, Any] = {
        "micro_batch_size": list(kind.micro_batches),
        "gradient_accumulation_steps": [1, 2, 4, 8, 16],
        "zero_stage": [0, 1, 2, 3],
        "precision": ["fp32", "bf16", "torch_autocast"],
        "checkpoint_every": [0, 1, 2, 4],
        ZERO + "overlap_comm": {"choices": [None, True], "when": {"zero_stage": [1, 2]}},
        ZERO + "reduce_bucket_size": {
            "range": [22, 28], "step": 3, "power_of_two": True, "when": {"zero_stage": [1, 2, 3]},
        },
        "offload_optimizer": {"choices": ["none", "cpu"], "when": {"zero_stage": [1, 2, 3]}},
    }  # fmt: skip
    if kind.accelerator == "cpu":
        del knobs["offload_optimizer"]
    per_node = kind.ranks_per_node or kind.ranks
    between: dict[str, Any] = {}
    if kind.node:
        between = {"ranks_per_node": per_node, "node_bytes_per_s": kind.node[0], "node_alpha_s": kind.node[1]}
    machine = Machine(
        accelerator=kind.accelerator, world_size=kind.ranks, flops=kind.flops, memory_bytes_per_s=kind.memory,
        link_bytes_per_s=kind.link[0], link_alpha_s=kind.link[1], host_bytes_per_s=kind.host, launch_s=kind.launch, **between,
    )  # fmt: skip
    own = {"precision": "bf16", "zero_stage": 2, **kind.baseline}
    buckets = ((ZERO + "reduce_bucket_size", 2**28),) if own["zero_stage"] else ()
    default = Candidate(micro_batch_size=1, gradient_accumulation_steps=4, config=buckets, **own)
    guessed = Profile.guess(kind.parameters, kind.parameters, kind.blocks, kind.sequence)
    return World(
        name=name, space=SearchSpace.parse(knobs, "simulation"), default=default, profile=replace(guessed, guessed=False),
        setting=Setting(
            accelerator=kind.accelerator, world_size=kind.ranks, ranks_per_node=per_node, n_blocks=kind.blocks, bf16=True, fp16=False
        ),
        nominal=machine, limit=kind.limit, noise_scale=kind.noise_scale, seed=seed, odd=kind.odd,
    )  # fmt: skip


class Table:
    """The truth of a world, every candidate of it.

    Attributes:
        world: The world.
        candidates: All that are legal.
        row: The number of each.
        seconds, sizes, inner, boundary: Their truth; see `World.truth`.
        batch: Global batches.
        samples: Samples to the target.
        fits: Whether the memory suffices.
        costs: Logarithms of the objectives, less is better.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.candidates = _legal(world.name, world.setting, world.default)
        self.row = {c: n for n, c in enumerate(self.candidates)}
        self.seconds, self.sizes, self.inner, self.boundary = world.truth(self.candidates)
        self.batch = np.array([c.global_batch_size(world.setting.world_size) for c in self.candidates], dtype=float)
        # E_min (1 + B / B_noise).
        self.samples = 1e6 * (1 + self.batch / world.noise_scale)
        self.fits = self.sizes <= world.limit
        self.costs = np.log(
            np.column_stack([self.seconds, self.seconds / self.batch, self.seconds * self.samples / self.batch])
        )

    @functools.cached_property
    def reachable(self) -> np.ndarray:
        """Points that the true front dominates, between its ideal and its nadir point."""
        usable = self.costs[self.fits]
        front = usable[pareto.front(-usable)]
        low, high = front.min(axis=0), front.max(axis=0)
        points = low + (high - low) * np.random.default_rng(0).random((20_000, 3))
        return np.asarray(points[dominated(points, front)])

    def share(self, costs: np.ndarray) -> float:
        """Share of the true front's hypervolume (of logarithms) that is dominated."""
        return float(dominated(self.reachable, costs).mean()) if len(costs) else 0.0


@functools.lru_cache(maxsize=32)
def _legal(name: str, setting: Setting, default: Candidate) -> list[Candidate]:
    space = next(world.space for world in worlds([name]))
    return [c for c in space.candidates(default) if why_illegal(c, setting) is None]


def measure(table: Table, row: int, rng: np.random.Generator, noise: Noise = NOISES[0]) -> dict[str, float]:
    """The metrics that a trial reads: the truth with noise."""
    slow = rng.uniform(*STRAGGLING) if noise.stragglers and rng.random() < noise.stragglers else 1.0
    seconds = float(table.seconds[row] * slow * np.exp(rng.normal(0, noise.sd)))
    to_loss = seconds * table.samples[row] / table.batch[row] * float(np.exp(rng.normal(0, LOSS_NOISE)))
    metrics = dict(zip(METRICS, (seconds, table.batch[row] / seconds, to_loss), strict=True))
    return {**metrics, "peak_memory_bytes": float(table.sizes[row] * np.exp(rng.normal(0, MEMORY_NOISE)))}


def micro_steps(table: Table, row: int, rng: np.random.Generator, noise: Noise = NOISES[0]) -> dict[str, float]:
    """What a trial's clock shows of an inner and a boundary micro-step; without accumulation there is no inner one to be timed."""
    candidate = table.candidates[row]
    if candidate.gradient_accumulation_steps == 1 and candidate.zero_stage < 2:
        return {}
    factors = np.exp(rng.normal(0, max(MICRO_NOISE, MICRO_SHARE * noise.sd), 2))
    return {"inner": float(table.inner[row] * factors[0]), "boundary": float(table.boundary[row] * factors[1])}


def tried(table: Table, candidate: Candidate, rng: np.random.Generator, noise: Noise = NOISES[0]) -> Observation:
    """A trial as the search sees it."""
    row = table.row[candidate]
    if not table.fits[row]:
        return Observation(candidate=candidate, outcome=Outcome.OOM)
    metrics, timed = measure(table, row, rng, noise), micro_steps(table, row, rng, noise)
    return Observation(
        candidate=candidate, metrics=metrics, inner_s=timed.get("inner"), boundary_s=timed.get("boundary")
    )
