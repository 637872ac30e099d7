"""The answer of `autotune advise`, for people and for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.advise.choose import Choice
from autotune.advise.constants import CONSTANTS
from autotune.forecast.knobs import (
    DEFAULT_BUCKET,
    DEFAULT_PREFETCH,
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PERSISTENCE,
    SUB_GROUP,
)
from autotune.forecast.prediction import Interval
from autotune.forecast.words import BINDS, SURE, memory_by_part, verdict
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DTYPES, DsConfig
from autotune.system.units import format_bytes, format_count, format_duration, format_seconds

# Keys of the DeepSpeed configuration that the words of an advice leave out: always, or at this value.
ALWAYS_SET = ("overlap_comm", "allgather_bucket_size", "sub_group_size")
USUAL = {"zero_hpz_partition_size": 1, "reduce_bucket_size": 500_000_000}
# Share of a memory from which it is what keeps the batch from growing.
FULL = 0.7
# Compared from 0.16.0 to 0.19.8: gradient_clipping was 0 and is 1, pin_memory was false and is true, and bf16 got a
# check for overflow, which is on. The sizes did not change, but the forecast rests on them.
PINNED: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "bf16": {"check_grad_overflow": True, "immediate_grad_update": False},
    "zero_optimization": {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "reduce_bucket_size": DEFAULT_BUCKET,
        "allgather_bucket_size": DEFAULT_BUCKET,
        "sub_group_size": SUB_GROUP,
        "stage3_prefetch_bucket_size": DEFAULT_PREFETCH,
        "stage3_param_persistence_threshold": PERSISTENCE,
        "stage3_max_live_parameters": MAX_LIVE_PARAMETERS,
        "stage3_max_reuse_distance": MAX_REUSE_DISTANCE,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


def ds_config(candidate: Candidate, base: Mapping[str, Any] | None = None) -> DsConfig:
    """The whole DeepSpeed configuration of a candidate; `base`, the user's own, goes before what is pinned."""
    own = dict(base or {})
    merged = {**PINNED, **own}
    for section in ("bf16", "zero_optimization"):
        merged[section] = {**PINNED[section], **(own.get(section) or {})}
    if candidate.precision in DTYPES:
        merged["data_types"] = {"grad_accum_dtype": candidate.precision, **(own.get("data_types") or {})}
    return candidate.to_deepspeed(merged)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice on one kind of devices.

    Attributes:
        others: The next best, with what speaks against each.
        sequence: Tokens of a sample; None where samples are no sequences of tokens, and are counted themselves.
        flops_per_token: Of forward and backward, without recomputation; of a sample where these are counted.
        fewest: The fewest of these devices, with offload and without.
        tokens: Tokens to train on; None if not asked.
        price_per_hour: Of a device; None if not stated.
    """

    model: str
    source: str
    chosen: Choice
    others: Sequence[Choice]
    goal: str
    sequence: int | None
    flops_per_token: float
    fewest: tuple[int | None, int | None]
    tokens: float | None = None
    price_per_hour: float | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def step_s(self) -> Interval:
        """Time of an optimizer step."""
        return Interval.around(self.chosen.total("time"), CONSTANTS.time_log_sd)

    @property
    def peak_bytes(self) -> Interval:
        """Peak of a device."""
        return Interval.around(self.chosen.total("memory"), CONSTANTS.memory_log_sd)

    @property
    def host_bytes(self) -> Interval:
        """Host memory of a node."""
        return Interval.around(self.chosen.total("host"), CONSTANTS.memory_log_sd)

    @property
    def unit(self) -> str:
        """What the throughput counts."""
        return "tokens" if self.sequence else "samples"

    @property
    def rate(self) -> Interval:
        """Throughput of all devices, in `unit` per second."""
        return Interval.around(self.chosen.tokens_per_s, CONSTANTS.time_log_sd)

    @property
    def mfu(self) -> Interval:
        """Share of the devices' peak that the model's FLOPs are."""
        devices = self.chosen.devices
        peak = devices.card.peak_flops(self.chosen.candidate.precision) or max(devices.card.flops.values())
        share = self.flops_per_token * self.chosen.tokens_per_s / (peak * devices.count)
        around = Interval.around(share, CONSTANTS.time_log_sd)
        return around._replace(high=min(1.0, around.high))

    @property
    def hours(self) -> Interval | None:
        """Time for the tokens that were asked about."""
        if self.tokens is None:
            return None
        return Interval.around(self.tokens / self.chosen.tokens_per_s / 3600, CONSTANTS.time_log_sd)

    @property
    def cost(self) -> Interval | None:
        """Money for them."""
        hours, price = self.hours, self.price_per_hour
        if hours is None or price is None:
            return None
        return hours.times(price * self.chosen.devices.count)

    @property
    def verdict(self) -> str:
        """Whether it fits."""
        return verdict(self.chosen.fits)

    @property
    def binds(self) -> list[str]:
        """What keeps it from being faster."""
        terms, total = self.chosen.terms("time"), self.chosen.total("time")
        name = max(terms, key=lambda key: terms[key])
        found = [f"{BINDS[name]}, {terms[name] / total:.0%} of the step"]
        memory, limit = self.chosen.total("memory"), self.chosen.devices.memory_bytes
        if memory > FULL * limit or self.chosen.fits_device < SURE:
            found.append(f"capacity: {memory / limit:.0%} of the device's memory")
        if self.chosen.fits_host < SURE:
            share = self.chosen.total("host") / self.chosen.devices.host_bytes
            found.append(f"capacity: {share:.0%} of the host's memory (--host-memory states yours)")
        return found

    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        return ds_config(self.chosen.candidate, self.base)

    def to_data(self) -> dict[str, Any]:
        """The answer for programs."""
        chosen, devices = self.chosen, self.chosen.devices
        return {
            "model": self.model,
            "model_source": self.source,
            "devices": {
                "card": devices.card.name, "count": devices.count, "per_node": devices.per_node,
                "source": devices.card.source,
            },
            "goal": self.goal,
            "candidate": chosen.candidate.values(),
            "global_batch": chosen.candidate.global_batch_size(devices.count),
            "sequence": self.sequence,
            "fits_probability": chosen.fits,
            "verdict": self.verdict,
            "peak_memory_bytes": {
                **self.peak_bytes._asdict(), "terms": chosen.terms("memory"), "limit": devices.memory_bytes,
                "fits_probability": chosen.fits_device,
            },
            "host_memory_bytes": {
                **self.host_bytes._asdict(), "terms": chosen.terms("host"), "limit": devices.host_bytes,
                "fits_probability": chosen.fits_host,
            },
            "step_time_s": {**self.step_s._asdict(), "terms": chosen.terms("time")},
            "tokens_per_s": self.rate._asdict() if self.sequence else None,
            "samples_per_s": self.rate.times(1 / (self.sequence or 1))._asdict(),
            "mfu": self.mfu._asdict(),
            "hours": self.hours._asdict() if self.hours else None,
            "cost": self.cost._asdict() if self.cost else None,
            "binds": self.binds,
            "others": [
                {
                    "candidate": other.candidate.values(), "fits_probability": other.fits,
                    f"{self.unit}_per_s": other.tokens_per_s, "why_not": other.why_not,
                }
                for other in self.others
            ],
            "fewest_devices": {"with_offload": self.fewest[0], "without_offload": self.fewest[1]},
            "ds_config": self.config(),
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The answer for people, line by line."""
        chosen, devices = self.chosen, self.chosen.devices
        batch = chosen.candidate.global_batch_size(devices.count)
        length = f", {self.sequence:,} tokens a sample" if self.sequence else ""
        yield f"{self.model} on {devices.describe()}{length}"
        yield ""
        named = f"best for {self.goal}" if chosen.fits >= SURE else "likeliest to fit"
        yield f"{named:<20}{in_words(chosen)}"
        tokens = f", {amount(batch * self.sequence)} tokens a step" if self.sequence else ""
        yield f"{'global batch':<20}{batch:,} samples{tokens}"
        yield ""
        yield from _waterfall(
            "device memory", self.peak_bytes, devices.memory_bytes, chosen.terms("memory"), verdict(chosen.fits_device)
        )
        yield ""
        yield from _waterfall(
            "host memory",
            self.host_bytes,
            devices.host_bytes,
            chosen.terms("host"),
            f"of a node, {verdict(chosen.fits_host)}",
        )
        yield ""
        step, rate, mfu = self.step_s, self.rate, self.mfu
        value, low, high = (format_seconds(x) for x in (step.value, step.low, step.high))
        yield f"{'step time':<20}{value} ({low} to {high})"
        each = rate.value / devices.count
        yield f"{self.unit + '/s':<20}{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f}), {each:,.0f} a device"
        yield f"{'MFU':<20}{mfu.value:.0%} ({mfu.low:.0%} to {mfu.high:.0%})"
        yield from self._totals()
        yield f"{'bound by':<20}{'; '.join(self.binds)}"
        if self.others:
            yield ""
            yield "next best"
            for other in self.others:
                yield f"  {in_words(other)}"
                yield f"    {other.why_not}"
        yield ""
        yield f"{'fewest devices':<20}{self._fewest()}"
        yield from (f"note: {note}" for note in self.notes)

    def _totals(self) -> Iterator[str]:
        hours, cost = self.hours, self.cost
        if hours is not None and self.tokens is not None:
            low, value, high = (format_duration(x * 3600) for x in (hours.low, hours.value, hours.high))
            yield f"{amount(self.tokens) + ' tokens':<20}{value} ({low} to {high})"
        if cost is not None:
            yield f"{'cost':<20}{cost.value:,.0f} ({cost.low:,.0f} to {cost.high:,.0f}), in the price's currency"

    def _fewest(self) -> str:
        name = self.chosen.devices.card.name
        some, plain = self.fewest
        if some is None:
            return f"no number of {name} up to 4,096 surely fits it"
        if plain in (None, some):
            return f"{some} x {name}" + ("" if plain else ", with offload to the host")
        return f"{some} x {name} with offload to the host, {plain} without"


def amount(number: float) -> str:
    """A number of parameters or tokens in short, as the field writes it: `8.19B`."""
    return format_count(number, "TBMk").replace(" ", "")


def in_words(choice: Choice) -> str:
    """A configuration in words, without the keys that every advice sets."""
    config = ((path.rsplit(".", 1)[-1], path, value) for path, value in choice.candidate.config)
    own = tuple((path, value) for key, path, value in config if key not in ALWAYS_SET and value != USUAL.get(key))
    return replace(choice.candidate, config=own).describe()


def _waterfall(name: str, whole: Interval, limit: float, terms: Mapping[str, float], said: str) -> Iterator[str]:
    """A memory by part, largest first."""
    value, low, high, most = (format_bytes(x) for x in (whole.value, whole.low, whole.high, limit))
    yield f"{name:<20}{value} ({low} to {high}) of {most}: {said}"
    yield from memory_by_part(terms, whole.value, {}, width=18)


def comparison(advice: Sequence[Advice]) -> Iterator[str]:
    """Advice on several kinds of devices, one line each; the configuration, which may be long, is last."""
    header = f"{'devices':<26}{'memory':>10}{'fits':>6}{advice[0].unit + '/s':>12}{'MFU':>6}"
    asked, priced = advice[0].tokens is not None, any(one.cost for one in advice)
    yield header + (f"{'time':>14}" if asked else "") + (f"{'cost':>12}" if priced else "") + "  configuration"
    for one in advice:
        chosen = one.chosen
        line = f"{chosen.devices.describe():<26}{format_bytes(chosen.total('memory')):>10}"
        line += f"{chosen.fits:>6.0%}{chosen.tokens_per_s:>12,.0f}{one.mfu.value:>6.0%}"
        line += f"{format_duration(one.hours.value * 3600):>14}" if one.hours else ""
        yield line + (f"{one.cost.value:>12,.0f}" if one.cost else "") + f"  {in_words(chosen)}"
