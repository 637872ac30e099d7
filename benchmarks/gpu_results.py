"""Makes figures of what `gpu.py` wrote: `benchmarks/results/gpu-CARD.json` and `studies/CARD-MODEL/`.

`python benchmarks/gpu_results.py DIR [--into FOLDER]`; it needs no GPU and no torch. With `--into`, both go below that
folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

from autotune.system.cards import find_card

ROOT = Path(__file__).parent.parent
NEAR_BEST = 0.02
NOT_RUN = "not run"  # begins the error of a part that the time did not suffice for
# Parts that write a line for each trial, and those that are commands.
TRIALS = ("grid", "larger", "honesty trial", "forecast", "limit trial", "kill trial")
COMMANDS = ("default", "doctor", "search command", "trainer")

Row = dict[str, Any]


def read(folder: Path) -> list[Row]:
    """The lines that were written, by several calls if need be; the last of each may be cut short where that was killed."""
    rows = []
    for line in (folder / "results.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    ran = {row["part"] for row in rows if not row.get("error")}
    return [row for row in rows if not (str(row.get("error")).startswith(NOT_RUN) and row["part"] in ran)]


def figures(rows: list[Row]) -> dict[str, Any]:
    """Every figure, by part; a part that did not run says so."""
    system = next((row for row in rows if row["part"] == "system"), None)
    if system is None:
        raise SystemExit("the run ended before it had looked at the machine: see log.txt beside it")
    models = {row["model"]: row for row in rows if row["part"] == "model"}
    measured = [row for row in rows if row["part"] in TRIALS and "model" in row and "outcome" in row]
    card = system["environment"]["device_name"]
    started = [row for row in rows if row["part"] == "startup" and "warm_s" in row]
    return {
        "card": card,
        "models": {name: model_figures(row, [m for m in measured if m["model"] == name], card) for name, row in models.items()},
        "warm_server": {"forks": not system["cold_reason"], "cold_reason": system["cold_reason"]},
        "startup": {
            name: startup([row for row in started if row["model"] == name]) for name in dict.fromkeys(r["model"] for r in started)
        },
        "commands": [
            {"words": row["words"], "exit_status": row["outcome"], "seconds": row["seconds"]}
            for row in rows if row["part"] in COMMANDS and "words" in row
        ],
        "segments": [
            {name: row[name] for name in ("candidate", "allocator", "outcome", "allocated_bytes", "reserved_bytes", "step_time_s")}
            for row in rows if row["part"] == "segments" and "allocator" in row
        ],
        "kill": next((kill(row) for row in rows if row["part"] == "kill" and "killed" in row), None),
        "seconds": {row["of"]: row["seconds"] for row in rows if row["part"] == "clock"},
        "limits": [limit(row) for row in rows if row["part"] == "limits"],
        "search": search(rows),
        "honesty": honesty([row for row in rows if row["part"] == "honesty" and "ratio" in row]),
        "outcomes": dict(Counter(row["outcome"] for row in measured)),
        "crashes": sorted({f"{row['words']}: {row['reason']}" for row in measured if row["outcome"] in ("crashed", "timeout", "lost")}),
        "not_run": [f"{row['part']}: {first_line(row['error'])}" for row in rows if row.get("error")]
        + ([] if any(row["part"] == "end" for row in rows) else ["the call was ended before its last part"]),
        "measured_on": {
            "date": system["date"], "device": card, "device_memory_bytes": system["environment"]["device_memory_bytes"],
            "cores": system["environment"]["n_cores"], "versions": system["environment"]["versions"], "dry_run": system["dry"],
        },
    }  # fmt: skip


def first_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def model_figures(model: Row, rows: list[Row], card: str) -> dict[str, Any]:
    """A model's configurations, and how well they were foretold."""
    complete = [row for row in rows if row["outcome"] == "complete" and row.get("step_time_s")]
    table = [configuration(row, model, card) for row in complete if row["part"] not in ("limit trial", "kill trial")]
    utilised = [row["flops_share"] for row in table if row["flops_share"]]
    return {
        "parameters": model["profile"]["n_parameters"],
        "flops_per_sample": model["profile"]["flops_per_sample"],
        "rates": {name: model["machine"][name] for name in ("flops", "memory_bytes_per_s", "host_bytes_per_s", "op_s")},
        "forecast": {
            **{name: forecast(complete, name) for name in ("before", "after")},
            "unseen": forecast([row for row in complete if row["part"] == "forecast"], "after"),
        },
        "best_flops_share": max(utilised, default=None),
        "most_alloc_retries": max((row["alloc_retries"] or 0 for row in table), default=None),
        "configurations": table,
    }


def configuration(row: Row, model: Row, card: str) -> dict[str, Any]:
    """One configuration: what it takes, and how much of the device's arithmetic it uses (MFU: the model's own FLOPs)."""
    seconds, samples = row["step_time_s"], row["samples_per_step"]
    rate = samples / seconds
    precision = row["candidate"].get("precision", "fp32")
    joules, tokens = row.get("joules_per_step"), row["tokens_per_step"]
    peak = peak_flops(card, precision, model["machine"]["flops"])
    same = ("words", "part", "step_time_s", "ci95_s", "peak_memory_bytes", "alloc_retries")
    return {name: row[name] for name in same} | {
        "samples_per_s": rate, "tokens_per_s": tokens / seconds if tokens else None,
        "flops_share": model["profile"]["flops_per_sample"] * rate / peak, "peak_reserved_bytes": row["reserved_memory_bytes"],
        "joules_per_sample": joules / samples if joules is not None else None,
        "watts": joules / seconds if joules is not None else None, "startup_s": row["wall_s"] - row["n_steps"] * seconds,
    }  # fmt: skip


def peak_flops(card: str, precision: str, measured: dict[str, float]) -> float:
    """FLOP/s that a precision could reach: by the data sheet, without one what a large matrix product reaches."""
    known = find_card(card)
    return (known and known.peak_flops(precision)) or measured.get(precision, measured["fp32"])


def forecast(rows: list[Row], name: str) -> dict[str, Any] | None:
    """Errors of what was expected before any trial, or after those that came before each."""
    rows = [row for row in rows if "expected" in row]
    found: dict[str, Any] = {}
    for metric in ("peak_memory_bytes", "step_time_s"):
        pairs = [(row["expected"][name][metric], row[metric]) for row in rows if row.get(metric)]
        found[metric] = errors(pairs)
    if not any(found.values()):
        return None
    tau = (
        kendalltau([said["value"] for said, _ in pairs], [real for _, real in pairs]).statistic
        if len(pairs) > 2
        else None
    )
    return found | {"step_time_kendall_tau": tau, "n": len(pairs)}


def errors(pairs: list[tuple[dict[str, float], float]]) -> dict[str, float] | None:
    if not pairs:
        return None
    off = sorted(abs(said["value"] / real - 1) for said, real in pairs)
    holds = statistics.mean(said["low"] <= real <= said["high"] for said, real in pairs)
    p95 = off[min(len(off) - 1, int(0.95 * len(off)))]
    return {"error_median": statistics.median(off), "error_p95": p95, "interval_90_holds": holds}


def startup(rows: list[Row]) -> dict[str, Any]:
    warm, plain = (statistics.median(row[name] for row in rows) for name in ("warm_s", "torchrun_s"))
    return {"warm_s": warm, "torchrun_s": plain, "ratio": plain / warm, "rounds": len(rows)}


def kill(row: Row) -> dict[str, Any]:
    """A trial whose rank was killed on a nearly full device, and the next such trial."""
    return {name: row[name] for name in ("candidate", "killed", "ended_s", "next_trial", "why")}


def limit(row: Row) -> dict[str, Any]:
    """A cap: what was said to fit, what did, and whether the end of memory was seen as such."""
    if "error" in row:
        return {"card": row["card"], "error": row["error"]}
    honest = row["surely_fits"] <= row["ran"] or row["out_of_memory"] is None
    return {
        **{name: row[name] for name in ("model", "card", "candidate", "surely_fits", "likely_fits", "ran", "out_of_memory", "outcomes")},
        "what_surely_fits_ran": honest, "left_unused": 1 - row["surely_fits"] / row["ran"] if row["ran"] else None,
    }  # fmt: skip


def search(rows: list[Row]) -> dict[str, Any] | None:
    """A study: how soon it was near its best, and what it took beyond its trials."""
    end = next((row for row in rows if row["part"] == "search" and "wall_s" in row), None)
    trials = [row for row in rows if row["part"] == "search trial"]
    if end is None or not trials:
        return None
    done = [row for row in trials if row["outcome"] == "complete" and row["step_time_s"]]
    rates = sorted((row["ended_s"], row["samples_per_step"] / row["step_time_s"]) for row in done)
    best = max((rate for _, rate in rates), default=None)
    near = next(((n, at) for n, (at, rate) in enumerate(rates, 1) if best and rate >= (1 - NEAR_BEST) * best), None)
    baseline = next((row for row in trials if int(row["trial"]) == 0 and row["step_time_s"]), None)
    return {
        "exit_status": end["exit_status"], "trials": len(trials), "outcomes": dict(Counter(row["outcome"] for row in trials)),
        "wall_s": end["wall_s"], "best_samples_per_s": best,
        "best_over_baseline": best / (baseline["samples_per_step"] / baseline["step_time_s"]) if best and baseline else None,
        "near_best_after_trials": near[0] if near else None, "near_best_after_s": near[1] if near else None,
        "beyond_its_trials_s": (end["wall_s"] - end["trials_s"]) / len(trials),
    }  # fmt: skip


def honesty(rows: list[Row]) -> dict[str, Any] | None:
    """Step time in a plain script as a ratio to what the trial claimed: above 1, the claim was too good."""
    if not rows:
        return None
    by_configuration: dict[str, list[float]] = {}
    for row in rows:
        by_configuration.setdefault(json.dumps(row["candidate"], sort_keys=True), []).append(row["ratio"])
    medians = [statistics.median(ratios) for ratios in by_configuration.values()]
    worst = max(abs(ratio - 1) for ratio in medians)
    return {"plain_over_claimed": medians, "worst": worst, "rounds": min(map(len, by_configuration.values()))}


def table(found: dict[str, Any]) -> str:
    """Returns the figures as a table for a page."""
    rows = []
    for name, row in found["startup"].items():
        what = f"start-up of a trial of {name}, warm server against `torchrun` of the same"
        rows.append((what, f"{row['warm_s']:.1f} s against {row['torchrun_s']:.0f} s, {row['ratio']:.0f}x"))
    for name, model in found["models"].items():
        before, after = model["forecast"]["before"], model["forecast"]["after"]
        for metric, what in (("step_time_s", "step time"), ("peak_memory_bytes", "peak memory (reserved)")):
            errors, holds = (
                [100 * each[metric][key] for each in (before, after)] for key in ("error_median", "interval_90_holds")
            )
            rows.append(
                (
                    f"{name}, {before['n']} configurations, {what}: median error before any trial, and after those before it; "
                    "90 % intervals hold",
                    f"{errors[0]:.1f} and {errors[1]:.1f} %; {holds[0]:.0f} and {holds[1]:.0f} %",
                )
            )
        rows.append(
            (f"{name}: model FLOPs utilisation of the best of these", f"{100 * model['best_flops_share']:.0f} %")
        )
    if limits := [row for row in found["limits"] if "ran" in row]:
        kept, unused = (
            sum(row["what_surely_fits_ran"] for row in limits),
            statistics.median(row["left_unused"] for row in limits),
        )
        what = "cases (card or cap, with and without recomputation) whose largest micro-batch that was said to fit ran; left unused, median"
        rows.append((what, f"{kept} of {len(limits)}; {100 * unused:.0f} %"))
    if honest := found["honesty"]:
        what = "step time of a plain script that waits for the device at its ends only, over what the trial claimed"
        rows.append((what, ", ".join(f"{ratio:.2f}x" for ratio in honest["plain_over_claimed"])))
    if killed := found["kill"]:
        what = "a trial whose rank is killed in mid-step on a nearly full card; the next such trial"
        rows.append((what, f"{killed['killed']}; {killed['next_trial']}"))
    where = found["measured_on"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        f"{where['device']}, {where['cores']} cores, {where['date']}; {versions}.",
        "",
        "| figure | value |",
        "| --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {what} | {value} |" for what, value in rows)])


def slug(card: str) -> str:
    """A card as a part of a file's name: `NVIDIA H100 80GB HBM3` is `h100-80gb-hbm3`."""
    words = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-").split("-")
    return "-".join(word for word in words if word not in ("nvidia", "r", "tm", "processor", "geforce")) or "unknown"


def take_study(folder: Path, card: str, studies: Path) -> list[Path]:
    """Lays what is to be committed of the archived study into `studies/CARD-MODEL/`."""
    archive = folder / "study.tar.gz"
    if not archive.exists():
        return []
    found = []
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            model, _, name = member.name.partition("/")
            source = packed.extractfile(member)
            if source is None or not name or "/" in name or ".." in member.name:
                continue
            path = studies / f"{card}-{model}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read().replace(f"studies/{model}/".encode(), f"studies/{card}-{model}/".encode()))
            found.append(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, help="in place of this repository")
    arguments = parser.parse_args()
    found = figures(read(arguments.folder))
    card = slug(found["card"]) if not found["measured_on"]["dry_run"] else "dry-run"
    results = arguments.into or ROOT / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"gpu-{card}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)
    for file in take_study(arguments.folder, card, (arguments.into or ROOT) / "studies"):
        print(file)
    failed = [
        f"{each['words']} ended with {each['exit_status']}" for each in found["commands"] if each["exit_status"] != 0
    ]
    if found["measured_on"]["dry_run"] and (wrong := [*found["not_run"], *failed]):
        raise SystemExit("a dry run leaves nothing out: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
