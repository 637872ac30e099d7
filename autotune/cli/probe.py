"""The command `probe`: the rates that this machine reaches with a number of ranks, measured once and kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, option
from autotune.errors import UserError
from autotune.system import device, temporary
from autotune.system.machine import check_ranks
from autotune.system.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autotune.trial.links import Link, Probe

DEADLINE_S = 240.0
DEFAULT_RANKS = 2
# Message sizes that the table shows; JSON has all of them.
SHOWN_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


def probe(
    target: Annotated[Path | None, typer.Argument(metavar="[MODEL.PY]", help="Whose data to draw too.")] = None,
    ranks: Annotated[int | None, option("N", "Ranks that share the machine (default: one per GPU, else 2).")] = None,
    *,
    again: Annotated[bool, typer.Option("--again", help="Measure even where an earlier probe is kept.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the rates of this machine, measured now or kept from an earlier probe."""
    from autotune.study.setup import profile_cache
    from autotune.trial.links import Probe
    from autotune.trial.target import inspect_target

    world_size = ranks if ranks is not None else (len(device.here().each) or DEFAULT_RANKS)
    if world_size < 1:
        raise UserError(f"probe: --ranks takes a number of ranks from 1 on; it was {world_size}")
    check_ranks(world_size, "probe: --ranks")
    if target is not None and inspect_target(target).kind != "model":
        raise UserError(f"probe: {target}: only the data of a model.py can be drawn without its training")
    key = profile_cache.machine_key(world_size)
    found = profile_cache.load(Probe, key) if target is None and not again else None
    kept = found is not None
    if found is None:
        found = measure(target, world_size)
        profile_cache.save(replace(found, data=None), key)  # the machine's own: the data are those of a target
        profile_cache.save(found.machine, key)  # forecasts and searches on this machine start from it
    if as_json:
        print(json.dumps({**asdict(found), "ranks": world_size, "kept": kept}, indent=1))
    else:
        print("\n".join(lines(found, kept=kept)))


def measure(target: Path | None, world_size: int) -> Probe:
    """Probe the machine with a number of ranks."""
    from autotune.executors import base
    from autotune.executors.local import LocalExecutor
    from autotune.report.progress import ProgressView
    from autotune.trial.folder import TrialDir, read_record
    from autotune.trial.links import Probe
    from autotune.trial.request import TrialRequest
    from autotune.trial.result import Outcome
    from autotune.trial.target import inspect_target

    with temporary.folder("autotune-probe") as folder, ProgressView() as view:
        view.doing("importing torch and DeepSpeed once")
        modules = inspect_target(target).imports if target else []
        request = TrialRequest(target=str(target or ""), mode="machine", world_size=world_size, deadline_s=DEADLINE_S)
        with contextlib.closing(LocalExecutor(modules, folder / "server.log")) as executor:
            executor.start()
            with executor.turn(view.waiting):  # beside a trial it would read slow
                view.doing(f"probing the machine with {world_size} rank(s); takes about half a minute")
                result = base.run(executor, folder / "probe", request, view.tick)
        if result.outcome is not Outcome.COMPLETE:
            raise UserError(f"the machine could not be probed: {result.end}")
        return read_record(TrialDir(folder / "probe").probe, Probe)


def lines(found: Probe, *, kept: bool) -> Iterator[str]:
    """A probe for a terminal."""
    machine = found.machine
    threads = f", {found.threads} thread(s) each" if found.threads else ""
    yield f"{found.device_name}: {machine.world_size} rank(s) at once{threads}; every figure is one rank's"
    yield ""
    yield "matrix products"
    for name, rate in found.flops.items():
        yield f"  {name:<6} {rate / 1e9:>12,.1f} GFLOP/s   at {found.sizes[name]} x {found.sizes[name]}"
    yield ""
    yield f"memory         {machine.memory_bytes_per_s / 1e9:>8,.1f} GB/s, read and written by a copy"
    if machine.accelerator != "cpu":
        yield f"from the host  {machine.host_bytes_per_s / 1e9:>8,.1f} GB/s, from pinned memory"
    optimizer = (machine.optimizer_bytes_per_s or 0.0) / 1e9
    yield f"optimizer      {optimizer:>8,.1f} GB/s, the 28 bytes of each parameter that AdamW moves"
    if machine.accelerator != "cpu":
        yield f"  offloaded    {machine.host_memory_bytes_per_s / 1e9:>8,.1f} GB/s, the same where it runs on the host"
    yield f"one operation  {machine.op_s * 1e6:>8,.1f} us in training, however small"
    yield ""
    yield from _links(found.links) if found.links else ["messages       none between the ranks: there is one"]
    yield ""
    yield "data loader    samples/s of a rank (a sample: 3 x 64 x 64 numbers, 48 KiB)"
    for each in found.loader:
        workers = f"{each.n_workers} worker{'s' if each.n_workers != 1 else ' '}"
        yield f"  {workers} {each.samples_per_s:>12,.0f}   {each.bytes_per_s / 1e9:.2f} GB/s"
    if found.data is not None:
        yield f"  your data, drawn by the rank itself: {found.data.samples_per_s:,.0f} samples/s"
    yield from (f"note: {caveat}" for caveat in found.caveats)
    if kept:
        yield "note: measured earlier and kept; --again measures anew"


def _links(links: tuple[Link, ...]) -> Iterator[str]:
    sizes = [size for size, _ in links[0].times_s if size in SHOWN_BYTES]
    yield f"{'messages':<15}{'alpha':>10}{'beta':>14}{'off by':>8}" + "".join(
        f"{format_bytes(size):>10}" for size in sizes
    )
    for link in links:
        times = dict(link.times_s)
        cells = "".join(f"{format_seconds(times[size]):>10}" for size in sizes)
        fitted = f"{format_seconds(link.alpha_s):>10}{link.bytes_per_s / 1e9:>9,.2f} GB/s{link.error:>8.0%}"
        yield f"{link.collective:<15}{fitted}{cells}"
