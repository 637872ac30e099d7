"""The best configuration for a goal among all legal ones, the next best and why not, and the fewest devices."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.advise.devices import Devices
from autotune.advise.forecast import Forecasts, forecast
from autotune.errors import UserError
from autotune.forecast.words import SURE
from autotune.space.candidate import FIELDS, Candidate
from autotune.space.deepspeed import ZERO, Scalar
from autotune.space.degree import EXPERT_DEGREE, SEQUENCE_DEGREE, TENSOR_DEGREE, degrees_of, ranks_per_replica
from autotune.space.legality import GRAD_ACCUM_DTYPE, why_illegal
from autotune.space.rule import Setting
from autotune.space.torch_settings import has_tf32
from autotune.system.units import format_bytes
from autotune.trial.profile import Floats, Profile

GOALS = ("throughput", "latency", "memory", "cost")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Elements of a bucket with those of a step of stage 3's optimizer: DeepSpeed's defaults, and small ones.
BUCKETS = ((500_000_000, 1_000_000_000), (50_000_000, 100_000_000))
# Tokens of an optimizer step up to which a free global batch may grow, as throughput alone would let it grow on.
FREE_TOKENS = 2**20
# The same in samples, where these are no sequences of tokens.
FREE_SAMPLES = 4096
# What is not worse by more is a tie, of which the plainest is taken.
TIE = 0.01
MOST_COUNT = 4096
# What needs more than this times the memory is not worth a line.
NEARLY = 1.5
HPZ, OVERLAP, BUCKET = f"{ZERO}zero_hpz_partition_size", f"{ZERO}overlap_comm", f"{ZERO}reduce_bucket_size"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What advice is asked for.

    Attributes:
        goal: One of `GOALS`.
        global_batch: Samples of an optimizer step to keep; None if it is free.
        settings: Knobs that are settled, as a candidate has them.
        target: What legality depends on of the model and how it is trained, its configuration's settings (`base`) among it; what it
            says of a machine does not count.
        splits: Whether degrees are looked at beyond those that are settled.
    """

    profile: Profile
    devices: Devices
    goal: str = "throughput"
    global_batch: int | None = None
    settings: Mapping[str, Scalar] = field(default_factory=dict, hash=False)
    target: Setting = field(default_factory=Setting)
    splits: bool = False

    def setting(self) -> Setting:
        """What legality depends on, by the latest DeepSpeed that the rules know: the machine is not here."""
        devices = self.devices
        return replace(
            self.target, accelerator="cuda", deepspeed_version=Setting.deepspeed_version, world_size=devices.count,
            ranks_per_node=devices.local, idle_devices=0, bf16="bf16" in devices.card.flops, fp16=True,
            tf32=has_tf32("cuda", devices.card.capability), n_blocks=self.profile.n_blocks, global_batch=None, missing_ops=(),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration with its forecast, as one row of a table of forecasts.

    Attributes:
        table: Forecasts of all candidates there.
        why_not: What speaks against it, for one that was not chosen.
    """

    devices: Devices
    table: Forecasts
    row: int
    why_not: str = ""

    @property
    def candidate(self) -> Candidate:
        """The configuration."""
        return self.table.candidates[self.row]

    @property
    def fits(self) -> float:
        """Probability that it fits."""
        return float(self.table.fits[self.row])

    @property
    def fits_device(self) -> float:
        """Probability that it fits the memory of a device."""
        return float(self.table.fits_device[self.row])

    @property
    def fits_host(self) -> float:
        """Probability that it fits the memory of a node's host."""
        return float(self.table.fits_host[self.row])

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all devices; of samples where these are no sequences of tokens."""
        return float(self.table.tokens_per_s[self.row])

    def terms(self, name: str) -> dict[str, float]:
        """The parts of `memory`, `host` or `time`."""
        return {key: float(column[self.row]) for key, column in getattr(self.table, name).items()}

    def total(self, name: str) -> float:
        """The sum of the parts of `memory`, `host` or `time`."""
        return sum(self.terms(name).values())


def best(question: Question) -> tuple[Choice, list[Choice]]:
    """The best configuration for the goal, and the next best of other kinds with what speaks against each.

    Where nothing fits, the best is what comes nearest.
    """
    if question.goal == "cost":
        found, refused = list[tuple[Choice, list[Choice]]](), UserError("no number of devices divides the global batch")
        for n in _counts(question.devices.count, question.devices.per_node):
            if question.global_batch is None or question.global_batch % n == 0:
                try:
                    found.append(_best(replace(question, devices=question.devices.of(n))))
                except UserError as error:  # as where a group of ranks does not divide them
                    refused = error
        if not found:
            raise refused
        return max(found, key=lambda pair: _cheapest_first(pair[0]))
    return _best(question)


def _cheapest_first(choice: Choice) -> tuple[float, float]:
    """What orders the best of each number of devices: the tokens of each device where it surely fits, else how likely that is."""
    return min(SURE, round(choice.fits, 9)), choice.tokens_per_s / choice.devices.count


def _best(question: Question) -> tuple[Choice, list[Choice]]:
    table = forecast_all(question)
    scores = _scores(question.goal, table)
    row = _top(scores, table, range(len(scores)))
    if table.fits[row] < SURE and not question.splits and question.devices.local > 1:
        # Degrees are for what fits in no other way: how they pay in time differs more between machines than is known.
        return _best(replace(question, splits=True))
    chosen = Choice(devices=question.devices, table=table, row=row)
    return chosen, _next(chosen, scores, question.profile.unit)


def forecast_all(question: Question) -> Forecasts:
    """Forecasts of every legal configuration."""
    setting = question.setting()
    reasons = {candidate: why_illegal(candidate, setting) for candidate in _candidates(question)}
    legal = [candidate for candidate, why in reasons.items() if why is None]
    if not legal:
        commonest = Counter(filter(None, reasons.values())).most_common(1)
        total, count = question.global_batch, question.devices.count
        why = (
            commonest[0][0] if commonest else f"no such micro-batch gives a global batch of {total} on {count} devices"
        )
        raise UserError(f"nothing can run as asked: {why}")
    return forecast(legal, question.profile, question.devices, dict(question.target.base))


def _candidates(question: Question) -> Iterator[Candidate]:
    """All configurations worth a look, whether legal or not."""
    devices, fixed = question.devices, dict(question.settings)
    own: dict[str, Scalar]
    own = {name: fixed.pop(name) for name in ("micro_batch_size", "gradient_accumulation_steps") if name in fixed}
    plainest = _plainest_stage(question)
    batches: dict[int, list[tuple[int, int]]] = {}
    recomputed = [every for every in (0, 1, 2, 4) if every <= question.profile.n_blocks]
    for stage, every, (optimizer, param) in itertools.product(
        range(4), recomputed, (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
    ):
        is_alone = devices.count == 1 and stage > plainest and optimizer == "none" and "zero_stage" not in fixed
        if is_alone or (stage == 0 and optimizer != "none") or (stage < 3 and param != "none"):
            continue
        sends = devices.count > 1 or {optimizer, param} != {"none"}
        for extra in _extras(stage if sends else 0, question, splits=question.splits and optimizer == "none"):
            values = {
                "zero_stage": stage, "checkpoint_every": every, "offload_optimizer": optimizer, "offload_param": param,
                "precision": devices.precision, **extra, **fixed,
            }  # fmt: skip
            if int(str(values["zero_stage"])) != stage:
                continue  # another stage was asked for
            named = {k: v for k, v in values.items() if k in FIELDS}
            config = tuple(sorted((k, v) for k, v in values.items() if k not in FIELDS and v is not None))
            shape = Candidate(**{"micro_batch_size": 1, **named}, config=config)  # type: ignore[arg-type]
            shared = _shared({**extra, **fixed})
            if shared not in batches:
                batches[shared] = list(_batches(question, own, shared))
            for micro, steps in batches[shared]:
                yield replace(shape, micro_batch_size=micro, gradient_accumulation_steps=steps)


def _plainest_stage(question: Question) -> int:
    """The lowest ZeRO stage that can run: 0, except where DeepSpeed refuses that, as in fp16."""
    named = {name: value for name, value in question.settings.items() if name in FIELDS}
    one = {"precision": question.devices.precision, **named, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    one |= {"offload_optimizer": "none", "offload_param": "none"}
    setting = question.setting()
    legal = (n for n in range(4) if why_illegal(Candidate(**{**one, "zero_stage": n}), setting) is None)  # type: ignore[arg-type]
    return next(legal, 0)


def _shared(values: Mapping[str, Scalar]) -> int:
    """Ranks that share a copy of the model or a sequence."""
    return ranks_per_replica(degrees_of(values.get))


def _extras(stage: int, question: Question, *, splits: bool) -> Iterator[dict[str, Scalar]]:
    """Further settings of a stage that are worth a look."""
    yield from _unsplit(stage, question)
    degree = 2
    while splits and stage <= 1 and degree <= question.devices.local:
        for path in (TENSOR_DEGREE, SEQUENCE_DEGREE, EXPERT_DEGREE):
            yield from ({**each, path: degree} for each in itertools.islice(_unsplit(stage, question), 1))
        degree *= 2


def _unsplit(stage: int, question: Question) -> Iterator[dict[str, Scalar]]:
    if stage == 0:
        yield {}
        return
    devices, target = question.devices, question.target
    # DeepSpeed does not read it with a PipelineModule, and at stage 1 with sums in fp32 (`legality`).
    unread = target.pipeline_stages > 0 or (stage == 1 and dict(target.base).get(GRAD_ACCUM_DTYPE) == "fp32")
    overlap: dict[str, Scalar] = {} if unread else {OVERLAP: True}
    for bucket, group in BUCKETS:
        buckets: dict[str, Scalar] = {BUCKET: bucket, **overlap}
        if stage == 3:
            buckets[f"{ZERO}sub_group_size"] = group
        yield buckets
        if stage == 3 and devices.nodes > 1:
            yield {**buckets, HPZ: devices.per_node}


def _batches(question: Question, own: Mapping[str, Scalar], shared: int) -> Iterator[tuple[int, int]]:
    """Micro-batches with accumulation steps: of the global batch, or free up to `FREE_TOKENS` (`FREE_SAMPLES`) a step.

    Ranks that share a copy of the model or a sequence, `shared` of them, share their samples. The smallest micro-batch
    is there in any case: many devices with one long sample each are more tokens than that.
    """
    count, total = max(1, question.devices.count // shared), question.global_batch
    if total is not None and total % count:
        raise UserError(f"--global-batch {total} does not divide among {count} devices; give a multiple of {count}")
    micros: Sequence[int] = [int(str(own["micro_batch_size"]))] if "micro_batch_size" in own else MICRO_BATCHES
    free = FREE_TOKENS if question.profile.of_tokens else FREE_SAMPLES
    stated = int(str(own["gradient_accumulation_steps"])) if "gradient_accumulation_steps" in own else None
    for micro in micros:
        if total is not None:
            if total // count % micro == 0 and stated in (None, total // count // micro):
                yield micro, total // count // micro
            continue
        most = free // max(1, micro * count * question.profile.counted_per_sample)
        if (stated or 1) > most and micro > micros[0]:
            break
        for steps in {stated} if stated else {1, max(1, min(4, most)), max(1, most)}:
            yield micro, steps


def _scores(goal: str, table: Forecasts) -> Floats:
    """What a goal is worth, as a number of which more is better."""
    if goal == "latency":
        return np.asarray(1.0 / table.step_s, dtype=float)
    return np.asarray(1.0 / table.peak_bytes if goal == "memory" else table.tokens_per_s, dtype=float)


def _top(scores: Floats, table: Forecasts, among: Sequence[int]) -> int:
    """Of some rows that of the best score that surely fits, of ties the plainest; else what is likeliest to fit."""
    rows = np.asarray(among)
    sure = rows[table.fits[rows] >= SURE]
    if not len(sure):  # of what is as likely the smallest, and of these the best
        likely, peaks = np.round(table.fits, 9), np.round(table.peak_bytes)
        return int(max(rows, key=lambda row: (likely[row], -peaks[row], scores[row])))
    near = sure[scores[sure] >= (1 - TIE) * scores[sure].max()]
    return int(min(near, key=lambda row: (*_plainness(table.candidates[row]), table.peak_bytes[row])))


def _plainness(candidate: Candidate) -> tuple[int, ...]:
    """How much of a configuration needs a reason: offload, a second copy of weights, stage 3, recomputation, every k-th block."""
    offloads = (candidate.offload_optimizer != "none") + (candidate.offload_param != "none")
    parted = candidate.ranks_per_replica * candidate.expert_degree
    every = candidate.checkpoint_every
    return offloads, parted, HPZ in dict(candidate.config), candidate.zero_stage == 3, every > 0, every > 1


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """What makes configurations differ in kind, and not in size."""
    hpz, degrees = (
        dict(candidate.config).get(HPZ),
        (candidate.tensor_degree, candidate.sequence_degree, candidate.expert_degree),
    )
    offloads = candidate.offload_optimizer, candidate.offload_param
    return candidate.zero_stage, candidate.checkpoint_every, *offloads, hpz, degrees


def _next(chosen: Choice, scores: Floats, unit: str, n: int = 3) -> list[Choice]:
    """The best of the other kinds: those that fit by score, and last one that would be better if it fitted."""
    table = chosen.table
    kinds: dict[tuple[object, ...], list[int]] = {}
    for row, candidate in enumerate(table.candidates):
        kinds.setdefault(_kind(candidate), []).append(row)
    kinds.pop(_kind(chosen.candidate))
    tops = sorted((_top(scores, table, rows) for rows in kinds.values()), key=lambda row: -scores[row])
    fitting = [row for row in tops if table.fits[row] >= SURE]
    near = table.peak_bytes < NEARLY * chosen.devices.memory_bytes
    better = [row for row in tops if table.fits[row] < SURE and near[row] and scores[row] > scores[chosen.row]]
    better.sort(key=lambda row: -table.fits[row])
    rows = [*fitting[: n - 1], *better[:1]] if better else fitting[:n]
    return [replace(chosen, row=row, why_not=_why_not(chosen, row, unit)) for row in rows]


def _why_not(chosen: Choice, row: int, unit: str) -> str:
    """What speaks against another row."""
    other, table = replace(chosen, row=row), chosen.table
    limit = chosen.devices.memory_bytes
    if other.fits < SURE:
        if other.fits_device <= other.fits_host:
            needed = format_bytes(other.total("memory"))
            return f"needs {needed} of {format_bytes(limit)}: fits with probability {other.fits:.0%}"
        return f"needs {format_bytes(other.total('host'))} of the host's {format_bytes(chosen.devices.host_bytes)}"
    ratio = other.tokens_per_s / chosen.tokens_per_s
    each = {key: column / table.step_s / table.tokens_per_s for key, column in table.time.items()}
    grown = max(each, key=lambda key: each[key][row] - each[key][chosen.row])
    more = format_bytes(other.total("memory"))
    if ratio < 1 - TIE:
        return f"{ratio:.2f}x the {unit}/s: more time for {grown}; {more}"
    return f"{ratio:.2f}x the {unit}/s; {more}, where the chosen one needs {format_bytes(chosen.total('memory'))}"


def fewest_devices(question: Question) -> tuple[int | None, int | None]:
    """The fewest of these devices on which the model trains at all: with offload to the host, and without.

    As for the best, degrees are looked at where nothing else fits.
    """
    found: list[int | None] = [None, None]
    for count in _counts(MOST_COUNT, question.devices.per_node):
        fixed = {**question.settings, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "checkpoint_every": 1}
        if question.profile.n_blocks == 0:
            fixed["checkpoint_every"] = 0
        asked = replace(question, devices=question.devices.of(count), global_batch=None, settings=fixed)
        for splits in (False, True) if asked.devices.local > 1 else (False,):
            with_offload, without = _who_fit(replace(asked, splits=splits))
            found = [found[0] or (count if with_offload else None), found[1] or (count if without else None)]
            if with_offload:
                break
        if None not in found:
            break
    return found[0], found[1]


def _who_fit(question: Question) -> tuple[bool, bool]:
    """Whether any configuration surely fits, and whether one without offload does."""
    try:
        table = forecast_all(question)
    except UserError:
        return False, False
    fitting = [table.candidates[int(row)] for row in np.flatnonzero(table.fits >= SURE)]
    return bool(fitting), any(c.offload_optimizer == c.offload_param == "none" for c in fitting)


def _counts(most: int, per_node: int) -> list[int]:
    """Numbers of devices: doubled within a node, then whole nodes, doubled."""
    found, n = [], 1
    while n <= most:
        found.append(n)
        n = n * 2 if n >= per_node or n * 2 <= per_node else per_node
    return found if most in found or most == MOST_COUNT else [*found, most]
