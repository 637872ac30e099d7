"""The command `advise`: the best configuration from a model's name and a card's name, before anything runs."""

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import AsJson, check_free, option, read_settings
from autotune.cli.terminal import fitted
from autotune.errors import UserError, nearest

LARGE = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
AMOUNT = re.compile(r"([0-9]+(?:[_,][0-9]{3})*\.?[0-9]*(?:e[0-9]+)?)\s*([kmbgt]?)", re.IGNORECASE)
PRICE = re.compile(r"\s*[$€£]?\s*([0-9]+\.?[0-9]*)\s*(?:[A-Z]{3}|[$€£])?\s*(?:/\s*h(?:our)?)?")
# A device that is stated to be one, as in 1xH100 or H100:1.
ONE = re.compile(r"^\s*1\s*[x*]|\bx\s*1\s*$|[*:]\s*1\s*$", re.IGNORECASE)
MOST_TOKENS = 10_000_000
FORMS = (".py", ".sh", ".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The part of a question that is the same for all devices: the model, its profile, and the user's configuration."""

    model: str
    source: str
    profile: Any
    flops_per_token: float
    base: Mapping[str, Any]
    notes: tuple[str, ...]
    target: Any
    may_adapt: bool = False


NO_DATA = "a model by name comes without data; --seq says how long its samples are"


Model = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL", help="A name (Qwen/Qwen3-8B, llama 3.1 8b), a config.json, a size (7B), or a model.py."
    ),
]
Gpus = Annotated[str | None, option("8xA100-40", "Devices: 8xA100-40, 2x8xH100 (two nodes), 4x4090.", "--gpus")]
Nodes = Annotated[int | None, option("N", "Nodes, each with the devices of --gpus.", "--nodes")]
Compare = Annotated[str | None, option("H100,4090", "Other cards, as many of each, or as many as stated.", "--compare")]
GoalName = Annotated[str, option("GOAL", "throughput, latency, memory or cost.", "--goal")]
GlobalBatch = Annotated[
    int | None, option("N", "Samples of an optimizer step to keep (default: free, up to 1 M tokens).", "--global-batch")
]
Length = Annotated[
    int | None,
    option("N", "Tokens of a sample (default: 4096, or the model's context; of a model.py its longest).", "--seq"),
]
Method = Annotated[str, option("NAME", "full, lora, or qlora (over weights of 4 bits).", "--method")]
LoraRank = Annotated[int, option("N", "Rank of adapters, on every linear layer.", "--lora-rank")]
Attention = Annotated[str, option("NAME", "eager, sdpa or flash.", "--attention")]
Loss = Annotated[str, option("NAME", "plain (fp32 logits), fused, or none (logits never whole).", "--loss")]
Optimizer = Annotated[str, option("NAME", "adamw, fused-adamw, adamw-8bit, lion, muon, sgd, ...", "--optimizer")]
Tokens = Annotated[str | None, option("10B", "Say the time that this number of tokens takes.", "--tokens")]
Price = Annotated[str | None, option("2.10/h", "Of a device; says the cost of the tokens.", "--price")]
DeviceMemory = Annotated[str | None, option("80GiB", "Memory of a device, over the table's.", "--device-memory")]
PeakFlops = Annotated[str | None, option("400T", "Peak of 16-bit products, over the table's.", "--peak-flops")]
Network = Annotated[str | None, option("400Gbit/s", "Of a node to the others, over the table's.", "--network")]
HostMemory = Annotated[str | None, option("512GiB", "Of a node, over the table's.", "--host-memory")]
Settled = Annotated[list[str] | None, option("KEY=VALUE", "A knob that is settled.", "--set")]
Output = Annotated[Path | None, option("FILE", "Write the DeepSpeed JSON.", "--output", "-o")]


def advise(
    model: Model,
    gpus: Gpus = None,
    nodes: Nodes = None,
    compare: Compare = None,
    goal: GoalName = "throughput",
    global_batch: GlobalBatch = None,
    seq: Length = None,
    method: Method = "full",
    lora_rank: LoraRank = 16,
    attention: Attention = "sdpa",
    loss: Loss = "plain",
    optimizer: Optimizer = "adamw",
    tokens: Tokens = None,
    price: Price = None,
    device_memory: DeviceMemory = None,
    peak_flops: PeakFlops = None,
    network: Network = None,
    host_memory: HostMemory = None,
    knobs: Settled = None,
    output: Output = None,
    *,
    as_json: AsJson = False,
) -> int:
    """Advise a configuration before the first run: fit, speed, cost. Exit status: 0, or 1 if nothing surely fits."""
    if output is not None:
        check_free("advise", output)
    how = {"method": method, "attention": attention, "optimizer": optimizer, "loss": loss}
    name = " ".join(model)
    goal, how = _checked(goal, how, {"seq": seq, "global-batch": global_batch, "lora-rank": lora_rank})
    _refuse_idle(name, how, lora_rank)
    devices = _devices(gpus, nodes, compare, _stated(device_memory, peak_flops, network, host_memory))
    wanted: dict[str, Any] = {
        "goal": goal, "global_batch": global_batch, "settings": read_settings(knobs or ()),
        "tokens": read_amount(tokens or "1B", "--tokens", "10B") if tokens or price else None,
        "price": _price(price) if price else None,
    }  # fmt: skip
    asked = _measured(name, seq) if name.endswith(FORMS) else _named(name, {**how, "lora_rank": lora_rank}, seq)
    if wanted["tokens"] is not None and not asked.profile.of_tokens:
        raise UserError(
            f"--tokens and --price speak of tokens, and the samples of {name} are no sequences of tokens; leave them out"
        )
    found = [_advice(asked, each, **wanted) for each in devices]
    return _said(found, output, as_json=as_json)


def _checked(goal: str, how: Mapping[str, str], numbers: Mapping[str, int | None]) -> tuple[str, dict[str, str]]:
    """The goal and how is trained in small letters, each one of the known, and numbers within bounds."""
    from autotune.advise.choose import GOALS
    from autotune.advise.shape import ATTENTIONS, LOSSES, METHODS, OPTIMIZERS

    known = {"method": METHODS, "attention": ATTENTIONS, "optimizer": tuple(OPTIMIZERS), "loss": LOSSES, "goal": GOALS}
    given = {name: value.lower() for name, value in {**how, "goal": goal}.items()}
    for name, value in given.items():
        if value not in known[name]:
            raise UserError(
                f"--{name} {value}: one of {', '.join(known[name])} is needed.{nearest(value, known[name])}"
            )
    for name, number in numbers.items():
        if number is not None and not 1 <= number <= MOST_TOKENS:
            raise UserError(f"--{name} {number}: a number from 1 to {MOST_TOKENS:,} is needed")
    return given.pop("goal"), given


def _refuse_idle(name: str, how: Mapping[str, str], lora_rank: int) -> None:
    """Refuses what would be passed over: adapters' rank without adapters, and how a target is trained, which it says itself."""
    usual = inspect.signature(advise).parameters
    other = [f"--{option} {value}" for option, value in how.items() if value != usual[option].default]
    ranked = [f"--lora-rank {lora_rank}"] if lora_rank != usual["lora_rank"].default else []
    if name.endswith(FORMS) and (other or ranked):
        raise UserError(
            f"{', '.join([*other, *ranked])}: {name} says itself how it trains; change it there, or leave this out"
        )
    if ranked and how["method"] == "full":
        raise UserError(
            f"{ranked[0]}: full fine-tuning has no adapters; give --method lora or qlora, or leave this out"
        )


def _said(found: Sequence[Any], output: Path | None, *, as_json: bool) -> int:
    """Prints the answer, writes the JSON if that is wanted, and returns the exit status."""
    from autotune.advise.answer import comparison
    from autotune.system import files

    if output is not None:
        files.write_text(output, json.dumps(found[0].config(), indent=2) + "\n", named=True)
    if as_json:
        print(json.dumps([one.to_data() for one in found] if len(found) > 1 else found[0].to_data(), indent=1))
    else:
        print(fitted("\n".join(comparison(found) if len(found) > 1 else found[0].lines())))
        if output is not None:
            print(f"wrote {output}")
    return 0 if found[0].verdict == "fits" else 1


def _named(name: str, how: Mapping[str, Any], seq: int | None) -> _Question:
    """A model of which the architecture is known."""
    from autotune.advise import architecture
    from autotune.advise.answer import amount
    from autotune.advise.shape import Training, profile_of, useful_flops
    from autotune.space import data
    from autotune.space.rule import Setting

    shape = architecture.find(name)
    sequence = seq or min(4096, shape.context or 4096)
    if 0 < shape.positions < sequence:
        raise UserError(
            f"--seq {sequence}: {shape.name} has {shape.positions:,} learned positions, and takes no longer samples"
        )
    if how["method"] != "full" and how["lora_rank"] > shape.hidden:
        raise UserError(
            f"--lora-rank {how['lora_rank']}: adapters are narrower than the model, which is {shape.hidden:,} wide"
        )
    training = Training(sequence=sequence, **how)
    notes = [shape.note] if shape.note else []
    if shape.context and sequence > shape.context:
        notes.append(f"{shape.name} was made for {shape.context:,} tokens, fewer than {sequence:,}")
    if how["method"] != "full":
        notes.append(f"adapters of rank {training.lora_rank} on every linear layer")
    said = f"{shape.name} ({amount(shape.n_parameters)} parameters), {how['method']} fine-tuning"
    profile = profile_of(shape, training)
    # Met with peft 0.21 and DeepSpeed 0.19.8: no weight is trained any more, or DeepSpeed ends in a KeyError.
    unsplit = "train adapters of the layers that it splits" if how["method"] != "full" else ""
    unsplit = "split the experts of a mixture" if shape.experts else unsplit
    return _Question(
        model=said,
        source=shape.source if shape.parameters else name,
        profile=profile,
        flops_per_token=useful_flops(shape, training) / sequence,
        base={},
        target=Setting(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            no_tensor=f"AutoTP does not {unsplit}" if unsplit else "",
            experts=(shape.experts,) if shape.experts else (),
            no_experts="" if profile.n_expert else "the model trains no experts of a mixture themselves",
            data_cannot=tuple((name, NO_DATA) for name in data.KNOBS),
        ),
        notes=tuple(notes),
        may_adapt=how["method"] == "full",
    )


def _measured(target: str, seq: int | None) -> _Question:
    """A model.py or a script, profiled here as `autotune predict` does, for samples of up to `seq` tokens."""
    from autotune.advise.answer import amount
    from autotune.report.progress import ProgressView
    from autotune.study.setup.capture import wanted_study
    from autotune.study.setup.forecasts import foresee_workload

    with ProgressView() as view:
        wanted, _ = wanted_study(target, {"max_length": seq} if seq else {}, view)
        found = foresee_workload(wanted, view)
    profile = found.profile
    said = f"{Path(target).name} ({amount(profile.n_parameters)} parameters, profiled here)"
    return _Question(
        model=said, source=target, profile=profile, flops_per_token=profile.flops_per_sample / profile.counted_per_sample,
        base=found.base_config, target=found.setting,
        notes=(*found.notes, "method, attention, optimizer and length are those of the target", *_shorter(profile, seq)),
    )  # fmt: skip


def _shorter(profile: Any, seq: int | None) -> list[str]:
    """A note where a target has longer samples than is stated."""
    if seq is None or seq >= profile.longest:
        return []
    cut = f"--set data.max_length={seq} cuts them"
    return [
        f"what fits is what fits with the target's longest sample of {profile.longest:,} tokens, not {seq:,}: {cut}"
    ]


def _advice(
    asked: _Question, devices: Any, *, goal: str, global_batch: int | None, settings: Mapping[str, Any],
    tokens: float | None, price: float | None,
) -> Any:  # fmt: skip
    """Advice on one kind of devices."""
    from autotune.advise.answer import Advice
    from autotune.advise.choose import FREE_SAMPLES, Question, best, fewest_devices
    from autotune.forecast.words import SURE
    from autotune.space.degree import configured_degrees

    settings = {**configured_degrees(dict(asked.target.base).get), **settings}
    question = Question(
        profile=asked.profile,
        devices=devices,
        goal=goal,
        global_batch=global_batch,
        settings=settings,
        target=asked.target,
    )
    chosen, others = best(question)
    notes = [*asked.notes]
    if settings:
        notes.append("settled: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    if chosen.candidate.checkpoint_every:
        notes.append(
            "recomputation is no setting of the JSON: switch on gradient checkpointing in the trainer or model"
        )
    if chosen.fits < SURE and asked.may_adapt:
        notes.append(
            "adapters need no optimizer states for the model's own weights: --method lora, or qlora, takes less"
        )
    if global_batch is None:
        most = "1 M tokens" if asked.profile.of_tokens else f"{FREE_SAMPLES:,} samples"
        notes.append(
            f"the global batch is free, up to {most} a step or one micro-batch a device; --global-batch N keeps yours"
        )
    notes.append("intervals hold 95 %; `autotune run` on the machine itself measures")
    return Advice(
        model=asked.model, source=asked.source, chosen=chosen, others=others, goal=goal,
        sequence=asked.profile.sequence if asked.profile.of_tokens else None,
        flops_per_token=asked.flops_per_token, fewest=fewest_devices(question), tokens=tokens, price_per_hour=price,
        base=asked.base, notes=notes,
    )  # fmt: skip


def _devices(gpus: str | None, nodes: int | None, compare: str | None, stated: Mapping[str, float]) -> list[Any]:
    """The devices that are asked about, those to compare with after them."""
    from autotune.advise.devices import Devices, device_card, read_gpus

    if not gpus:
        raise UserError("--gpus is needed: which devices, as in --gpus 8xA100-40, --gpus 2x8xH100 or --gpus 4x4090")
    count, per_node, name = read_gpus(gpus, nodes)
    first = Devices(card=device_card(name, stated), count=count, per_node=per_node, stated=stated)
    found = [first]
    for each in filter(None, map(str.strip, (compare or "").split(","))):
        many, of_node, other = read_gpus(each, option="--compare")
        card = device_card(other, {}, "--compare")
        own = {"count": many, "per_node": of_node} if many > 1 or ONE.search(each) else {}
        found.append(replace(first, card=card, stated={}, **own))
    return found


def _stated(memory: str | None, flops: str | None, network: str | None, host: str | None) -> dict[str, float]:
    """What the user states over the table's figures."""
    from autotune.system.units import parse_bandwidth, parse_size

    found = {}
    if memory:
        found["memory_bytes"] = parse_size(memory, "--device-memory")
    if host:
        found["host_bytes"] = parse_size(host, "--host-memory")
    if flops:
        found["flops"] = read_amount(flops, "--peak-flops", "400T")
    if network:
        found["network_bytes_per_s"] = parse_bandwidth(network, "--network")
    return found


def read_amount(text: str, option: str, example: str) -> float:
    """A number such as `10B` or `1.5e12`."""
    match = AMOUNT.fullmatch(text.strip())
    value = float(re.sub("[_,]", "", match[1])) * LARGE.get(match[2].lower(), 1.0) if match else 0.0
    if not (0 < value < 1e25 and math.isfinite(value)):
        raise UserError(f"{option} {text}: a number is needed, as in {example}")
    return value


def _price(text: str) -> float:
    match = PRICE.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--price {text}: the price of a device an hour is needed, as in 2.10/h")
    return float(match[1])
