"""The command `advise`: the best configuration from a model's name and a card's name, before anything runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import AsJson
from autotune.errors import UserError, nearest

LARGE = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
AMOUNT = re.compile(r"([0-9][0-9_,]*\.?[0-9]*(?:e[0-9]+)?)\s*([kmbgt]?)", re.IGNORECASE)
PRICE = re.compile(r"\s*[$€£]?\s*([0-9]+\.?[0-9]*)\s*(?:[A-Z]{3}|[$€£])?\s*(?:/\s*h(?:our)?)?")
MOST_TOKENS = 10_000_000
FORMS = (".py", ".sh", ".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What all kinds of devices are asked about."""

    model: str
    profile: Any
    flops_per_token: float
    base: Mapping[str, Any]
    notes: tuple[str, ...]


def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name (Qwen/Qwen3-8B, llama-3.1-8b), a config.json, a size (7B), or a model.py."
        ),
    ],
    gpus: Annotated[
        str | None, typer.Option(metavar="8xA100-40", help="Devices: 8xA100-40, 2x8xH100 (two nodes), 4x4090.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Nodes of so many devices each.")] = None,
    compare: Annotated[str | None, typer.Option(metavar="H100,4090", help="Other cards, as many of each.")] = None,
    goal: Annotated[str, typer.Option(metavar="GOAL", help="throughput, latency, memory or cost.")] = "throughput",
    global_batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples of an optimizer step to keep (default: free, up to 1 M tokens)."),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a sample (default: 4096, or the model's context).")
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="full, lora, or qlora (over weights of 4 bits).")
    ] = "full",
    lora_rank: Annotated[int, typer.Option(metavar="N", help="Rank of adapters, on every linear layer.")] = 16,
    attention: Annotated[str, typer.Option(metavar="NAME", help="eager, sdpa or flash.")] = "sdpa",
    loss: Annotated[
        str, typer.Option(metavar="NAME", help="plain (fp32 logits), fused, or none (logits never whole).")
    ] = "plain",
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="adamw, fused-adamw, adamw-8bit, lion, muon, sgd, ...")
    ] = "adamw",
    tokens: Annotated[str | None, typer.Option(metavar="10B", help="Say the time for so many tokens.")] = None,
    price: Annotated[
        str | None, typer.Option(metavar="2.10/h", help="Of a device; says the cost of the tokens.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="80GiB", help="Memory of a device, over the table's.")
    ] = None,
    peak_flops: Annotated[
        str | None, typer.Option(metavar="400T", help="Peak of 16-bit products, over the table's.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="400Gbit/s", help="Of a node to the others, over the table's.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="512GiB", help="Of a node, over the table's.")] = None,
    knobs: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob that is settled.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the DeepSpeed JSON.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """Advise a configuration before the first run: does it fit, how fast, what does it cost.

    Returns:
        Exit status: 0, or 1 if nothing surely fits.

    Raises:
        UserError: An option cannot be used; it says which.
    """
    from autotune.advise import cards
    from autotune.advise.answer import comparison
    from autotune.advise.choose import GOALS
    from autotune.advise.shape import ATTENTIONS, LOSSES, METHODS, OPTIMIZERS
    from autotune.cli.predict import read_settings
    from autotune.system import files

    goal, method, attention, loss, optimizer = (text.lower() for text in (goal, method, attention, loss, optimizer))
    choices = {"goal": (goal, GOALS), "method": (method, METHODS), "attention": (attention, ATTENTIONS)}
    choices |= {"loss": (loss, LOSSES), "optimizer": (optimizer, tuple(OPTIMIZERS))}
    for name, (value, known) in choices.items():
        if value not in known:
            raise UserError(f"--{name} {value}: one of {', '.join(known)} is needed.{nearest(value, known)}")
    if not gpus:
        raise UserError("--gpus is needed: which devices, as in --gpus 8xA100-40, --gpus 2x8xH100 or --gpus 4x4090")
    for name, number in (("seq", seq), ("global-batch", global_batch), ("lora-rank", lora_rank)):
        if number is not None and not 1 <= number <= MOST_TOKENS:
            raise UserError(f"--{name} {number}: a number from 1 to {MOST_TOKENS:,} is needed")
    amount = read_amount(tokens, "--tokens", "10B") if tokens else None
    hourly = _price(price) if price else None
    settings = read_settings(knobs or ())
    stated = _stated(device_memory, peak_flops, network, host_memory)
    count, per_node, card = cards.read_gpus(gpus, nodes)
    first = _devices(card, count, per_node, stated)
    others = [_devices(name.strip(), count, per_node, {}) for name in (compare or "").split(",") if name.strip()]
    how = {"method": method, "attention": attention, "optimizer": optimizer, "lora_rank": lora_rank, "loss": loss}
    asked = _measured(model) if model.endswith(FORMS) else _named(model, how, seq)
    found = [_advice(asked, devices, goal, global_batch, settings, amount, hourly) for devices in (first, *others)]
    if output is not None:
        files.write_text(output, json.dumps(found[0].config(), indent=2) + "\n")
    if as_json:
        print(json.dumps([one.to_data() for one in found] if others else found[0].to_data(), indent=1))
    else:
        print("\n".join(comparison(found) if others else found[0].lines()))
        if output is not None:
            print(f"wrote {output}")
    return 0 if found[0].verdict == "fits" else 1


def _named(name: str, how: Mapping[str, Any], seq: int | None) -> _Asked:
    """A model of which the architecture is known."""
    from autotune.advise import architecture
    from autotune.advise.answer import amount
    from autotune.advise.shape import Training, profile_of, useful_flops

    shape = architecture.find(name)
    sequence = seq or min(4096, shape.context or 4096)
    training = Training(sequence=sequence, **how)
    notes = [shape.note] if shape.note else []
    if shape.context and sequence > shape.context:
        notes.append(f"{shape.name} was made for {shape.context:,} tokens, fewer than {sequence:,}")
    if how["method"] != "full":
        notes.append(f"adapters of rank {training.lora_rank} on every linear layer")
    said = f"{shape.name} ({amount(shape.n_parameters)} parameters), {how['method']} fine-tuning"
    profile = profile_of(shape, training)
    return _Asked(
        model=said,
        profile=profile,
        flops_per_token=useful_flops(shape, training) / sequence,
        base={},
        notes=tuple(notes),
    )


def _measured(target: str) -> _Asked:
    """A model.py or a script, profiled here as `autotune predict` does."""
    from autotune.advise.answer import amount
    from autotune.report.progress import ProgressView
    from autotune.study.setup.capture import wanted_study
    from autotune.study.setup.forecasts import foresee_workload

    with ProgressView() as view:
        wanted, _ = wanted_study(target, {}, view)
        found = foresee_workload(wanted, view)
    profile = found.profile
    said = f"{Path(target).name} ({amount(profile.n_parameters)} parameters, profiled here)"
    sequence = max(1, profile.sequence)
    return _Asked(
        model=said, profile=profile, flops_per_token=profile.flops_per_sample / sequence, base=found.base_config,
        notes=(*found.notes, "method, attention, optimizer and length are those of the target"),
    )  # fmt: skip


def _advice(
    asked: _Asked, devices: Any, goal: str, global_batch: int | None, settings: Mapping[str, Any], tokens: float | None,
    price: float | None,
) -> Any:  # fmt: skip
    from autotune.advise.answer import Advice
    from autotune.advise.choose import Question, best, fewest_devices
    from autotune.space.candidate import Candidate
    from autotune.space.deepspeed import check_setting

    for name, value in settings.items():
        check_setting(name, value, name)
    Candidate.of({"micro_batch_size": 1, **settings})
    question = Question(
        profile=asked.profile, devices=devices, goal=goal, global_batch=global_batch, settings=settings, base=asked.base
    )
    chosen, others = best(question)
    notes = [*asked.notes]
    if chosen.candidate.checkpoint_every:
        notes.append(
            "recomputation is no setting of the JSON: switch on gradient checkpointing in the trainer or model"
        )
    if global_batch is None:
        notes.append("the global batch is free, up to 1 M tokens a step; --global-batch N keeps yours")
    notes.append("intervals hold 95 %; `autotune run` on the machine itself measures")
    return Advice(
        model=asked.model, chosen=chosen, others=others, goal=goal, sequence=asked.profile.sequence,
        flops_per_token=asked.flops_per_token, fewest=fewest_devices(question), tokens=tokens, price_per_hour=price,
        base=asked.base, notes=notes, is_answer=bool(settings),
    )  # fmt: skip


def _devices(name: str, count: int, per_node: int, stated: Mapping[str, float]) -> Any:
    """Devices of a card of the table with what the user states over it, or of one that is stated alone."""
    from autotune.advise import cards

    memory, flops = stated.get("memory_gib"), stated.get("tflops")
    try:
        card = cards.find(name)
    except UserError:
        if not (memory and flops):
            raise
        card = cards.stated_card(name, memory, flops)
    if memory:
        card = replace(card, memory_gib=memory)
    if flops:
        card = replace(card, bf16_tflops=flops if card.bf16_tflops else 0.0, fp16_tflops=flops)
    return cards.Devices(card=card, count=count, per_node=per_node, stated=stated)


def _stated(memory: str | None, flops: str | None, network: str | None, host: str | None) -> dict[str, float]:
    """What the user states over the table's figures."""
    from autotune.system.units import parse_bandwidth, parse_bytes

    found = {}
    try:
        if memory:
            found["memory_gib"] = parse_bytes(memory) / 2**30
        if host:
            found["host_bytes"] = float(parse_bytes(host))
    except ValueError as error:
        raise UserError(
            f"{'--device-memory' if 'memory_gib' not in found and memory else '--host-memory'}: {error}"
        ) from None
    if flops:
        found["tflops"] = read_amount(flops, "--peak-flops", "400T") / 1e12
    if network:
        found["network_bytes_per_s"] = parse_bandwidth(network, "--network")
    if not all(value > 0 for value in found.values()):
        raise UserError("--device-memory, --host-memory and --peak-flops: more than 0 is needed")
    return found


def read_amount(text: str, option: str, example: str) -> float:
    """A number such as `10B` or `1.5e12`.

    Raises:
        UserError: It is none.
    """
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
