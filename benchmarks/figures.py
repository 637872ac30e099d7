"""Writes the tables of docs/develop/figures.md, gpu.md and comparison.md beside it, and docs/clusters.md from `results`.

`python benchmarks/figures.py` (`make pages`) writes the pages; `python benchmarks/figures.py run [NAME ...]` (`make
bench`) runs the benchmarks of the figures, or those named, and then writes them: hours on an idle machine. A benchmark
that was never run has no row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES, CLUSTERS, COMPARISON, GPU = (
    ROOT / "docs" / "develop" / "figures.md",
    ROOT / "docs" / "clusters.md",
    ROOT / "docs" / "develop" / "comparison.md",
    ROOT / "docs" / "develop" / "gpu.md",
)
Results = Mapping[str, Any]
# What was measured, and the value as text.
Rows = list[tuple[str, str]]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1f} %"


def on_another_page(_: Results) -> Rows:
    """No row: the table of `TABLES` says it."""
    return []


def startup(found: Results) -> Rows:
    what = "start-up of a 2-rank ZeRO-1 trial, warm server against `torchrun` of the same trial"
    return [(what, f"{found['warm_s']:.2f} s against {found['torchrun_s']:.1f} s, {found['ratio']:.0f}x")]


def demo(found: Results) -> Rows:
    what = f"the example study, {found['n_trials']} trials, from the command to the answer"
    rows = [(what, f"{found['wall_s']:.0f} s")]
    if "probe_and_checks_share" in found:
        share = percent(found["probe_and_checks_share"])
        rows.append(("of it the probe of the noise scale, the quality gate and branches", share))
    return rows


def _ratio(ends: Sequence[float], digits: int = 1) -> str:
    """A ratio with its interval."""
    mean, low, high = (format(each, f".{digits}f") for each in ends)
    return f"{mean}x ({low} to {high})"


def forecast(found: Results) -> Rows:
    anchors = [n for n in ("0", "5", "10") if f"{n} anchors" in found]
    each = [found[f"{n} anchors"] for n in anchors]
    pairs = "; ".join(f"{percent(r['memory_error_median'])} and {percent(r['memory_error_p95'])}" for r in each)
    what = f"memory forecast of {found['configurations']} configurations after {' / '.join(anchors)} measured ones"
    rows = [(f"{what}: median and 95th percentile error", pairs)]
    if "time_error_median" in each[0]:
        taus = ", ".join(f"{r['time_kendall_tau']:.2f}" for r in each)
        what = "step-time forecast of the same: median error; Kendall's tau of the ranking"
        value = f"{', '.join(percent(r['time_error_median']) for r in each)}; {taus}"
        if again := found.get("one more measurement"):
            what += ". One real measurement, held against the others of its configuration, on that machine"
            value += f". {percent(again['time_error_median'])}; {again['time_kendall_tau']:.2f}"
        if perfect := found.get("perfect"):
            what += ". A forecast that knew every mean, against the same medians"
            value += f". {percent(perfect['time_error_median'])}; {perfect['time_kendall_tau']:.2f}"
        rows.append((what, value))
    return rows


def search_advice(found: Results) -> Rows:
    rows = []
    for table, kinds in found["tables"].items():
        needed = [kinds[kind]["trials_to_95_percent"] for kind in ("physics", "physics, no advice")]
        what = f"trials until 95 % of the true front's hypervolume, {table} table: from advice; without it"
        value = "; ".join(f"{each['median']:g} (mean {each['mean']:.1f})" for each in needed)
        rows.append((f"{what}, medians of {found['seeds']} studies", value))
    return rows


def search_longer(found: Results) -> Rows:
    rows = []
    for table, kinds in found["tables"].items():
        stopped, whole = (kinds[kind]["60"] for kind in ("physics", "physics, no trial stopped"))
        what = f"stopping trials early, {table} table, trials {found['longer']:g} times as long as measured"
        saved, lost = 1 - stopped["seconds"] / whole["seconds"], whole["hypervolume"] - stopped["hypervolume"]
        what += ": trial seconds saved in 60 trials; hypervolume lost"
        rows.append((what, f"{percent(saved)}; {lost:.3f}"))
    return rows


def ask(found: Results) -> Rows:
    size = f"{found['trials_told']} trials told and {found['candidates']:,} candidates"
    what = f"thinking about one trial: `physics` with {size}, three objectives, one thread"
    return [(what, f"{found['median_s']:.2f} s")]


def stopping(found: Results) -> Rows:
    every = found["overall"]
    ended, ran_all = every["ended"], every["ran_all"]
    what = f"{every['studies']} simulated studies of up to {found['trials']} trials, goals balanced and throughput: ended by themselves"
    rows = (
        [(what, f"{ended['studies']}, after {ended['trials_mean']:.1f} trials on average")] if ended["studies"] else []
    )
    for name, some in (("those that ended", ended), ("those that ran all trials", ran_all)):
        if some["studies"]:
            regret = (
                f"{percent(some['regret_mean'])}, {percent(some['regret_worst'])}; {percent(some['within_1_percent'])}"
            )
            rows.append((f"of {name}: answer behind the best, mean and worst; within 1 %", regret))
    return rows


def quick(found: Results) -> Rows:
    every = found["overall"]
    what = f"{every['studies']} simulated studies with `--quick`, goals balanced and throughput: answer behind the best"
    own, base = (every[f"{name}_median_and_worst_tenth"] for name in ("regret", "regret_of_baseline"))
    said = "{} in the median, {} in the worst tenth, after {:.1f} trials on average (the baseline: {} and {})"
    return [(what, said.format(*map(percent, own), every["trials_mean"], *map(percent, base)))]


def search_simulated(found: Results) -> Rows:
    rows = []
    for noise, kinds in found["noises"].items():
        for kind, row in kinds.items():
            every = row["overall"]
            what = f"{every['runs']} simulated studies on nine machines drawn anew, {noise} noise, {kind}:"
            if kind.endswith(" alone"):
                near = every["20"][f"{kind.removesuffix(' alone')}_near"]
                rows.append((f"{what} within 2 % of the best after 20 trials", percent(near)))
                continue
            what += (
                " share of the front after 10 / 20 / 30 trials; after 20 latency and throughput within 2 % of the best"
            )
            what += " (throughput and time to the loss)"
            shares = " / ".join(f"{every[n]['hypervolume']:.2f}" for n in ("10", "20", "30"))
            near, other = every["20"]["latency_and_throughput_near"], every["20"]["throughput_and_time_to_loss_near"]
            rows.append((what, f"{shares}; {percent(near)} ({percent(other)})"))
    return rows


def retune(found: Results) -> Rows:
    rows = []
    if "warm" in found:
        warm, changes = found["warm"], found["warm"]["changes"]
        runs = sum(c["runs"] for c in changes.values())
        within = sum(c["within_2_percent"] * c["runs"] for c in changes.values()) / runs
        worst = min(changes, key=lambda name: changes[name]["within_2_percent"])
        what = f"warm re-tuning in {warm['warm_trials']} trials against a cold search in {warm['cold_trials']}"
        what += (
            f", {len(changes)} kinds of change on three simulated machines ({runs} runs): regret of what is recommended"
        )
        median = percent(statistics.median(c["median_regret"] for c in changes.values()))
        least = f"least: {worst}, {percent(changes[worst]['within_2_percent'])}"
        rows.append((what, f"median {median}, within 2 % in {percent(within)} ({least})"))
    if "moved" in found:
        moved, n = found["moved"], found["moved"]["retunings"]
        asked = moved["regression_found"] + moved["regression_left"]
        what = (
            f"{n} re-tunings where nothing changed: configurations replaced; a 5 % regression of the one in use: found"
        )
        rows.append((what, f"{moved['unchanged_replaced']} of {n}; {moved['regression_found']} of {asked}"))
    return rows


def driver_overhead(found: Results) -> Rows:
    each = found["seconds_per_trial"]
    names = [name for name in ("physics", "tpe") if name in each]
    what = f"driver CPU time per trial (all that is not the trial), mean over {found['n_trials']} trials"
    values = ", ".join(f"{each[name]['mean_s']:.2f} s" for name in names)
    return [(f"{what}: {', '.join(f'`{name}`' for name in names)}", values)]


def terminal(found: Results) -> Rows:
    what = "processor time of `autotune --help`; of the help of a command, median and slowest; first word of `autotune run`"
    value = f"{found['help_cpu_s']:.2f} s; {found['command_help_cpu_s']:.2f} and {found['slowest_command_help_cpu_s']:.2f} s"
    return [(what, f"{value}; after {found['first_word_s']:.1f} s ({found['first_word_least_s']:.1f} at best)")]


def script_startup(found: Results) -> Rows:
    seconds = [row["beyond_steps_s"] for row in found["trials"]]
    what = "a warm trial of a training script, beyond its own steps (ZeRO 0 to 3)"
    return [(what, f"{min(seconds):.1f} to {max(seconds):.1f} s")]


def large_startup(found: Results) -> Rows:
    what = f"a warm trial of a model of {found['parameters'] / 1e9:.1f} billion parameters from disk"
    ways = found["ways"].items()
    beyond = ", ".join(f"{row['beyond_s']:.1f} s ({way})" for way, row in ways)
    moving = ", ".join(f"{row['moving_s']:.1f} s ({way})" for way, row in ways)
    return [
        (f"{what}, beyond its steps and reading and moving the weights", beyond),
        ("reading and moving these weights, in each trial", f"{moving}; under torchrun {found['moved_s']:.1f} s"),
    ]


def gate(found: Results) -> Rows:
    parts = {"faults": "injected faults that the quality gate refuses", "clean": "clean pairs that it refuses"}
    said = {name: text for name, text in parts.items() if name in found}
    values = "; ".join(f"{found[name]['refused']} of {found[name]['of']}" for name in said)
    return [("; ".join(said.values()), values)] if said else []


def time_to_target(found: Results) -> Rows:
    tasks = {name: row["kendall_tau"] for name, row in found.items() if isinstance(row, dict) and "kendall_tau" in row}
    what = "eight batches by predicted and by measured time to a target loss, Kendall's tau"
    return [(f"{what}: {'; '.join(tasks)}", ", ".join(f"{tau:.2f}" for tau in tasks.values()))]


def noise_scale(found: Results) -> Rows:
    each = found["ratio"].values()
    what = f"gradient noise scale that ranks measure, as a ratio to brute force ({len(each)} cases: ZeRO, precision, ranks)"
    return [(what, f"{min(each):.2f} to {max(each):.2f}")]


def bottleneck(found: Results) -> Rows:
    what = f"six bottlenecks planted in real trials, and a trial without one, named right in {found['rounds']} rounds"
    right = found["right"]
    return [(f"{what}: without a trace, with one", f"{right['verdicts']}, {right['traced_verdicts']}")]


def data_replayed(found: Results) -> Rows:
    kinds = found["by_kind"].values()
    late, before = (sum(kind[name] for kind in kinds) for name in ("late_oom", "late_oom_without_tail"))
    what = f"micro-batches recommended on {found['corpora']} synthetic corpora, over {found['steps']:,} steps each: out of memory"
    off = [abs(row["claim_over_rate"] - 1) for row in found["rows"]]
    own = [abs(row["own_steps_over_rate"] - 1) for row in found["rows"]]
    rate = "their claimed rate against 2,000 steps: within 5 %; worst error; the same from a trial's own steps alone"
    within = [sum(each <= 0.05 for each in errors) for errors in (off, own)]
    return [
        (
            f"{what} later; without the worst batch; error of the tail's peak",
            f"{late}; {before}; {percent(max(kind['worst_tail_error'] for kind in kinds))}",
        ),
        (rate, f"{within[0]} of {len(off)}, {percent(max(off))}; {within[1]} of {len(own)}, {percent(max(own))}"),
    ]


def data_packing(found: Results) -> Rows:
    factor, low, high = found["gains"]["samples_per_s"]
    gate = "passed" if (found["gate"] or {}).get("passed") else "not passed"
    what = "a study of an instruction-like corpus: useful tokens/s of what is recommended over the baseline's; the gate on equal samples"
    return [(what, f"{factor:.2f}x ({low:.2f} to {high:.2f}); {gate}")]


def data_loader(found: Results) -> Rows:
    factor, low, high = found["gain"]
    what = "a planted loader of 20 ms a sample: what `diagnose` says of the baseline; trials of the study; throughput of its answer"
    return [
        (
            what,
            f"{found['bound_by']}, {percent(found['waiting'])} of a step; {found['trials']}; {factor:.2f}x ({low:.2f} to {high:.2f})",
        )
    ]


def data_tail(found: Results) -> Rows:
    what = f"the check of the worst batch in all {found['trials']} trials of a study, in trials for each of {found['finalists']} finalists"
    return [(what, f"{found['trials_a_finalist']:.2f}")]


def inert(found: Results) -> Rows:
    what = f"{found['settings']} settings that do nothing, planted {found['planted']} times in studies of five families: scored"
    return [(what, f"{len(found['scored'])}")]


def shared_cores(found: Results) -> Rows:
    what = f"{found['each']} readings of {{}} beside processes that come and go on 2 cores: standard deviation of the"
    what += " logarithm as read; corrected for the cores that others used: {}"
    rows = []
    for waits in (False, True):
        for ranks, who in ((2, "two ranks of one thread"), (1, "one rank of two threads")):
            some = [r for r in found["rows"] if r["ranks"] == ranks and (r["model"] == "slow_loader") == waits]
            before, after = (statistics.median(row[name] for row in some) for name in ("read_sd", "corrected_sd"))
            trials = (
                "a trial that waits for its data" if waits else f"each of {len(some)} trials that compute (medians)"
            )
            rows.append((what.format(trials, who), f"{before:.2f}; {after:.2f}"))
    return rows


def claims(found: Results) -> Rows:
    what = f"what trials claim over what plain torchrun measures, {found['cases']} cases of 8 ms to 1 s a step"
    what += ": median; median error; 95 % intervals hold"
    value = f"{found['claim_over_measured']:.3f}; {percent(found['error_median'])}; {found['held']} of {found['cases']}"
    rows = [(what, value)]
    if found["hooks"]:
        each = sorted(row["wall_s"] for row in found["hooks"].values())
        what = f"step time of a script with the hooks, as a ratio to plain torchrun, {len(each)} cases: median; least, most"
        rows.append((what, f"{statistics.median(each):.2f}; {each[0]:.2f}, {each[-1]:.2f}"))
    return rows


def budgets(found: Results) -> Rows:
    what = f"time budgets of 20 to 90 s kept to 5 %, of {found['cases']} real studies; the largest overrun; the share that was left"
    each = [row["over"] for row in found["rows"]]
    left = percent(max(0.0, -statistics.median(each)))
    return [(what, f"{found['kept']}; {percent(max(0.0, found['most_over']))}; {left} in the median")]


def views(found: Results) -> Rows:
    def frame(row: Results) -> str:
        return f"{row['p95_ms']:.0f} / {row['longest_ms']:.0f} ms"

    def ratio(pairs: Sequence[Results]) -> str:
        each = sorted(pair["own"] / pair["plain"] for pair in pairs)
        return f"{statistics.median(each):.1f} ({each[0]:.1f} to {each[-1]:.1f})"

    trials, page = f"{found['n_trials']:,} trials", found["page"]
    what = (
        f"`autotune report` of a study of {trials}, from the command to the page, JSON and CSV: time; size of the page"
    )
    rows = [(what, f"{found['report_s']:.1f} s; {found['report_bytes'] / 1e6:.1f} MB")]
    does = {"scroll": "scrolling", "filter": "filtering", "sort": "sorting"}
    frames = "; ".join(f"{name} {' and '.join(frame(row[key]) for row in page.values())}" for key, name in does.items())
    what = f"its page in a browser without a GPU, {' and '.join(page)} pixels wide: until every plot is drawn"
    what += "; 95th percentile / longest time between two frames"
    drawn = " and ".join(f"{row['drawn_s']:.1f}" for row in page.values())
    rows.append((what, f"{drawn} s; {frames}"))
    what = f"the dashboard's page of a study of {trials}, as a ratio to plain optuna-dashboard's: the first request; later ones"
    return [*rows, (what, "; ".join(ratio(found["dashboard"][name]) for name in ("cold_s", "warm_s")))]


def executor_overhead(found: Results) -> Rows:
    engines = found["engines"]
    what = "what an engine costs a 2-rank trial beyond the trial itself, all on the loopback of one machine"
    return [(f"{what}: {', '.join(engines)}", ", ".join(f"{row['engine_s']:.2f} s" for row in engines.values()))]


def coordinators(found: Results) -> Rows:
    last = found["median_s"].get("last_100", found["median_s"]["all"])
    what = f"{found['workers']} coordinators on one study in PostgreSQL, {found['kills']} of them killed, {found['told']:,} trials"
    lost, twice = found["begun_and_never_told"] + found["left_running"], found["told_twice_or_duplicate"]
    value = f"{lost}, {twice}; {1000 * last['ask_and_tell_s']:.0f} ms"
    return [(f"{what}: lost, told twice; median time to ask and tell at the end", value)]


def chaos(found: Results) -> Rows:
    what = f"random kills ({', '.join(found['by_victim'])}) in {found['n_studies']} real studies"
    value = f"{found['invariants_broken']} of {found['struck']}; {found['trials_run_again']}"
    return [(f"{what}: invariants broken after resuming; trials run again", value)]


def outages(found: Results) -> Rows:
    what = f"outages of machines, engines and database ({', '.join(found['engines'])}) in real studies: trials lost or told twice; "
    what += "configurations blamed; studies that ended as if done"
    counts = (found["lost_or_told_twice"], found["candidates_blamed"], found["ended_as_if_done"])
    return [(what, f"{'; '.join(map(str, counts))}, of {found['outages']} outages")]


def project(found: Results) -> Rows:
    what = "projection from 1 and 2 ranks to {}: median error of the step time; Kendall's tau of the configurations"
    return [
        (what.format(name), f"{percent(row['error_median'])}; {row['kendall_tau']:.2f}")
        for name, row in found.items()
        if isinstance(row, dict) and "error_median" in row
    ]


def published(found: Results) -> Rows:
    memory, rate, tau, host = (found[name] for name in ("memory", "throughput", "kendall_tau", "host"))
    left_out = f"advice before any run, {found['groups']} published sources left out in turn"
    fits, failed = found["fits_high"], percent(found["said_fits_and_failed"])
    return [
        (f"{left_out}: fit or not, right of {fits['rows']} rows; wrongly said to fit", f"{percent(fits['right'])}; {failed}"),
        (f"{left_out}: peak memory of {memory['rows']} rows, median error; 95 % intervals hold",
         f"{percent(memory['median_error'])}; {percent(memory['intervals_hold'])}"),
        (f"{left_out}: throughput of {rate['rows']} rows, median error; 95 % intervals hold",
         f"{percent(rate['median_error'])}; {percent(rate['intervals_hold'])}"),
        (f"the same, Kendall's tau over {tau['pairs']} pairs of one model on one machine", f"{tau['tau']:.2f}"),
        (f"host memory under offload, {host['used']['rows']} published rows, median error; nothing fitted",
         percent(host["used"]["median_error"])),
    ]  # fmt: skip


def estimates(found: Results) -> Rows:
    rows = []
    for noise, row in found.get("machines", {}).items():
        what = f"whole studies on simulated machines, {noise} noise ({row['runs']} runs, {found['trials']} trials each): throughput"
        what += " of the recommended one over the best that was tried, mean and 10th percentile; its interval holds the truth"
        share = f"{row['of_tried']:.3f}, {row['of_tried_p10']:.3f}; {percent(row['held'])}"
        rows.append((what, f"{share} ({row['rounds']:.1f} rounds)"))
    for noise, row in found.get("same", {}).items():
        what = f"studies in which all candidates are the same, {noise} noise: a change is recommended"
        rows.append((what, f"{row['changes_recommended']} of {row['studies']}"))
    return rows


def degrees(found: Results) -> Rows:
    families = found["families"]
    gaps = [row["largest_loss_gap"] for row in families.values() if row["largest_loss_gap"] is not None]
    what = f"degrees that `check` calls legal, {found['ranks']} gloo ranks, ZeRO 0 to 3, tiny models ({', '.join(families)})"
    crashed = sum(len(row["crashed"]) for row in families.values())
    legal = sum(row["legal"] for row in families.values())
    return [
        (f"{what}: crashes; largest difference of a loss to the whole model's in {found['steps']} steps",
         f"{crashed} of {legal}; {max(gaps):.1e}"),
    ]  # fmt: skip


SCORE = "python benchmarks/forecast.py score benchmarks/truth/"
ADVICE = 'python benchmarks/search.py --only physics "physics, no advice" --trials 30 --name search_advice'
LONGER = "python benchmarks/search.py --name search_longer --longer 8 --seeds 16 --only"
# By the name of the results: the command that yields them, and its rows.
BENCHMARKS: dict[str, tuple[str, Callable[[Results], Rows]]] = {
    "startup": ("python benchmarks/overhead.py startup", startup),
    "demo": ("python benchmarks/demo.py", demo),
    "peers": ("make bench-peers", on_another_page),
    "search": ("python benchmarks/search.py", on_another_page),
    "search_advice": (ADVICE, search_advice),
    "search_longer": (f'{LONGER} physics "physics, no trial stopped"', search_longer),
    "forecast-code-gpt": (SCORE + "code-gpt.csv.gz", forecast),
    "forecast-conv": (SCORE + "conv.csv.gz", forecast),
    "forecast-degrees": (SCORE + "degrees.csv.gz", forecast),
    "degrees": ("python benchmarks/degrees.py", degrees),
    "ask": ("python benchmarks/ask.py", ask),
    "driver_overhead": ("python benchmarks/overhead.py driver", driver_overhead),
    "terminal": ("python benchmarks/overhead.py terminal", terminal),
    "script_startup": ("python benchmarks/overhead.py scripts", script_startup),
    "large_startup": ("python benchmarks/overhead.py large", large_startup),
    "gate": ("python benchmarks/gate.py", gate),
    "time_to_target": ("python benchmarks/time_to_target.py", time_to_target),
    "noise_scale": ("python benchmarks/noise_scale.py", noise_scale),
    "inert": ("python benchmarks/inert.py", inert),
    "shared_cores": ("python benchmarks/shared_cores.py", shared_cores),
    "claims": ("python benchmarks/claims.py", claims),
    "budgets": ("python benchmarks/budgets.py", budgets),
    "bottleneck": ("python benchmarks/planted.py", bottleneck),
    "data_replayed": ("python benchmarks/data.py replayed", data_replayed),
    "data_packing": ("python benchmarks/data.py packing", data_packing),
    "data_loader": ("python benchmarks/data.py loader", data_loader),
    "data_tail": ("python benchmarks/data.py tail", data_tail),
    "views": ("python benchmarks/views.py", views),
    "executor_overhead": ("python benchmarks/overhead.py executors", executor_overhead),
    "coordinators": ("python benchmarks/coordinators.py --seconds 5", coordinators),
    "estimates": ("python benchmarks/estimates.py", estimates),
    "stopping": ("python benchmarks/stopping.py --seeds 5", stopping),
    "quick": ("python benchmarks/stopping.py --quick --seeds 5", quick),
    "search_simulated": ("python benchmarks/search_simulated.py --seeds 4", search_simulated),
    "retune": ("python benchmarks/retune.py --seeds 3", retune),
    "chaos": ("python tests/support/chaos.py", chaos),
    "outages": ("python tests/support/outages.py slurm", outages),
    "project": ("python benchmarks/project.py", project),
    "published": ("python benchmarks/published.py", published),
}


def figures(results: Path = RESULTS) -> str:
    """Returns the table of figures, from the results that there are."""
    lines, hardware = ["| figure | value | command |", "| --- | --- | --- |"], dict[str, list[str]]()
    for name, (command, rows_of) in BENCHMARKS.items():
        file = results / f"{name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        where = found.pop("measured_on")
        if rows := rows_of(found):
            lines += [f"| {what} | {value} | `{command}` |" for what, value in rows]
            hardware.setdefault(f"{where['cores']} cores of {where['processor']}", []).append(where["date"])
    said = "; ".join(f"{place}, {' to '.join(sorted({min(days), max(days)}))}" for place, days in hardware.items())
    return "\n".join(
        [f"Measured on {said}; other work ran there too, so that absolute times are upper bounds.", "", *lines]
    )


TUNERS = {
    "deepspeed": "DeepSpeed's autotuner", "autotune": "`autotune run --quick`", "tpe": "Optuna's TPE, a process a trial",
    "random": "random search, a process a trial",
}  # fmt: skip


def tuners(found: Results) -> str:
    """Returns the table of whole tuners."""
    heads = "training | batch | tuner | runs | seconds to its answer | sooner | trials | samples/s of its answer under torchrun"
    lines = [f"| {heads} | over DeepSpeed's | its claim over that |", "| --- |" + " --- |" * 9]
    for name, tracks in found["trainings"].items():
        for track, by in tracks.items():
            for tuner in (tuner for tuner in TUNERS if tuner in by):
                row = by[tuner]
                sooner, faster = ("", "") if tuner == "deepspeed" else (_ratio(row["sooner"]), _ratio(row["faster"], 2))
                rate = format(row["samples_per_s"], ",.0f" if row["samples_per_s"] >= 100 else ".3g")
                shown = [
                    name,
                    track,
                    TUNERS[tuner],
                    f"{row['runs']} on {row['on']}",
                    f"{row['wall_s']:.0f}",
                    sooner,
                    f"{row['trials']:.0f}",
                    rate,
                    faster,
                ]
                lines.append(f"| {' | '.join(map(str, shown))} | {row['claim_over_measured']:.2f} |")
    return "\n".join([*lines, "", measured_on(found)])


def samplers(found: Results) -> str:
    """Returns the table of samplers on tables of measured configurations."""
    lines = ["| table | trials | share of the true front's hypervolume |", "| --- | --- | --- |"]
    for table, kinds in found["tables"].items():
        for n in ("10", "20", "30"):
            shown = [f"`{kind}` {row[n]['hypervolume']:.2f}" for kind, row in kinds.items() if n in row]
            lines += [f"| {table} | {n} | {', '.join(shown)} |"] if shown else []
    return "\n".join([*lines, "", f"Medians of {found['seeds']} studies. {measured_on(found)}"])


def _peers_aim(found: Results) -> tuple[str, bool]:
    rows = {
        f"{name}, {track}": by["autotune"]
        for name, tracks in found["trainings"].items()
        for track, by in tracks.items()
    }
    said = "; ".join(
        f"{where}: {row['sooner'][0]:.1f}x sooner, {row['faster'][0]:.2f}x the throughput"
        for where, row in rows.items()
    )
    # At least as fast: the same configuration, or not slower beyond what its interval allows.
    return said, all(row["sooner"][0] >= 10 and row["faster"][2] >= 1 for row in rows.values())


# Shares of the front that were aimed at, by trials.
SHARES_AIMED = {"10": 0.92, "20": 0.96, "30": 0.98}


def _shares(found: Mapping[str, Any]) -> tuple[str, bool]:
    """The shares of the front that a search found, and whether they are what was aimed at."""
    shares = {n: found[n]["hypervolume"] for n in SHARES_AIMED if n in found}
    return " / ".join(f"{share:.2f}" for share in shares.values()), all(
        share >= SHARES_AIMED[n] for n, share in shares.items()
    )


def _search_aim(found: Results) -> tuple[str, bool]:
    reached = {table: _shares(kinds.get("physics", {})) for table, kinds in found["tables"].items()}
    return "; ".join(f"{table} {said}" for table, (said, _) in reached.items()), all(
        good for _, good in reached.values()
    )


def _stopping_aim(found: Results) -> tuple[str, bool]:
    ended, n = found["overall"]["ended"], found["overall"]["studies"]
    share = ended["studies"] / n
    said = f"{percent(share)} ended; of those {percent(ended['within_1_percent'])} within 1 %"
    return said, share >= 0.8 and ended["within_1_percent"] >= 0.9


def _simulated_aim(found: Results) -> tuple[str, bool]:
    said, reached = [], True
    for noise, kinds in found["noises"].items():
        own, known = (
            (*_shares(kinds[kind]["overall"]), kinds[kind]["overall"]["20"]["latency_and_throughput_near"])
            for kind in ("physics", "formulas known")
        )
        said.append(f"{noise} noise: {own[0]}, {percent(own[2])} (formulas known: {known[0]}, {percent(known[2])})")
        reached = reached and own[1] and own[2] >= 0.9
    return "; ".join(said), reached


def _alone_aim(found: Results) -> tuple[str, bool]:
    near = {
        noise: [kinds[f"{metric} alone"]["overall"]["20"][f"{metric}_near"] for metric in ("latency", "throughput")]
        for noise, kinds in found["noises"].items()
    }
    said = "; ".join(f"{noise} noise: {', '.join(map(percent, both))}" for noise, both in near.items())
    return said, all(share >= 0.9 for both in near.values() for share in both)


def _estimates_aim(found: Results) -> tuple[str, bool]:
    shares = {noise: row["of_best_p10"] for noise, row in found["machines"].items()}
    said = ", ".join(f"{share:.3f} at {noise}" for noise, share in shares.items())
    return said, shares["2.5%"] >= 0.98 and shares["10.0%"] >= 0.96


def _forecast_aim(found: Results) -> tuple[str, bool]:
    own, perfect = found["10 anchors"], found["perfect"]
    said = (
        f"{percent(own['time_error_median'])}, {own['time_kendall_tau']:.2f}, {percent(own['time_interval_90_holds'])}"
    )
    said += f" (one that knew every mean: {percent(perfect['time_error_median'])}, {perfect['time_kendall_tau']:.2f})"
    good = own["time_error_median"] <= 0.09 and own["time_kendall_tau"] >= 0.88
    return said, good and 0.87 <= own["time_interval_90_holds"] <= 0.95


def _advice_aim(found: Results) -> tuple[str, bool]:
    ratios = {
        table: kinds["physics"]["trials_to_95_percent"]["mean"]
        / kinds["physics, no advice"]["trials_to_95_percent"]["mean"]
        for table, kinds in found["tables"].items()
    }
    return "; ".join(f"{table} {ratio:.2f} of them" for table, ratio in ratios.items()), max(ratios.values()) <= 0.5


def _same_aim(found: Results) -> tuple[str, bool]:
    rows = found["same"].values()
    return "; ".join(f"{row['changes_recommended']} of {row['studies']}" for row in rows), not any(
        row["changes_recommended"] for row in rows
    )


def _claims_aim(found: Results) -> tuple[str, bool]:
    said = f"{percent(found['error_median'])} off in the median, {found['held']} of {found['cases']} intervals hold"
    return said, found["error_median"] <= 0.03 and found["held"] >= 0.9 * found["cases"]


def _budgets_aim(found: Results) -> tuple[str, bool]:
    return f"{found['kept']} of {found['cases']}", found["kept"] == found["cases"] >= 20


def _gate_aim(found: Results) -> tuple[str, bool]:
    faults, clean = found["faults"], found["clean"]
    return gate(found)[0][1], faults["refused"] == faults["of"] and not clean["refused"]


def _chaos_aim(found: Results) -> tuple[str, bool]:
    return f"{found['invariants_broken']} of {found['struck']} kills", not found["invariants_broken"]


# What was aimed at before it was measured: in words, the results, and what they say.
AIMS: list[tuple[str, str, Callable[[Results], tuple[str, bool]]]] = [
    ("an answer as fast as DeepSpeed's autotuner's, 10 times sooner, its space", "peers", _peers_aim),
    ("what a trial claims, plain torchrun takes: within 3 %, 90 % of the intervals hold", "claims", _claims_aim),
    ("time budgets are kept to 5 %, 20 of 20", "budgets", _budgets_aim),
    ("of studies in which all candidates are the same, none recommends a change", "estimates", _same_aim),
    ("share of the front found after 10 / 20 / 30 trials: 0.92 / 0.96 / 0.98", "search", _search_aim),
    ("the same on nine simulated machines; latency and throughput within 2 % after 20 trials in 90 %", "search_simulated", _simulated_aim),
    ("there, latency and throughput each searched for alone: within 2 % after 20 trials in 90 %", "search_simulated", _alone_aim),
    ("recommended throughput over the best of the space, worst tenth: 0.98 at 2.5 % noise, 0.96 at 10 %", "estimates", _estimates_aim),
    *((f"step time after 10 trials, {table}: median error 9 %, tau 0.88, intervals hold 87 to 95 %", f"forecast-{table}", _forecast_aim)
      for table in ("code-gpt", "conv", "degrees")),
    ("the quality gate refuses every injected fault, and no clean pair", "gate", _gate_aim),
    ("whatever is killed, no trial is lost or told twice", "chaos", _chaos_aim),
    ("a search that starts from advice needs half the trials to 95 % of the front", "search_advice", _advice_aim),
    ("80 % of the studies end by themselves, 90 % of those within 1 % of the best", "stopping", _stopping_aim),
]  # fmt: skip


def aims(results: Path) -> str:
    """Returns the table of what was aimed at beside what was reached."""
    lines = ["| aim | reached | |", "| --- | --- | --- |"]
    for what, name, said in AIMS:
        if (file := results / f"{name}.json").exists():
            reached, good = said(json.loads(file.read_text()))
            lines.append(f"| {what} | {reached} | {'yes' if good else '**missed**'} |")
    return "\n".join(lines)


def measured_on(found: Results) -> str:
    where = found["measured_on"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{where['date']}, {where['cores']} cores of an {where['processor']}; {versions}."


def size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def capacity(found: Results) -> str:
    """Returns the tables of what studies cost beyond their trials."""
    where, ahead, to = found["measured_on"], found["extrapolated"], found["extrapolated"]["to"]
    lines = [
        f"Measured on {where['cores']} cores of {where['processor']}, {where['date']}.", "",
        "| told before | sampler | driver, processor time a trial | statements a trial | database bytes a trial |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for sampler, by in found["growing"].items():
        for n, row in by.items():
            cost = f"{row['cpu_s']:.2f} s | {row['statements']:.0f} | {size(row['bytes'])}"
            lines.append(f"| {int(n):,} | {sampler} | {cost} |")
        end, n = ahead[sampler], to["trials"]
        lines.append(
            f"| {n:,} (extrapolated) | {sampler} | {end['cpu_s_of_the_last_trial']:.2f} s; {end['cpu_s'] / 3600:.1f} h for all |"
            f" {end['statements'] / n:.0f} | {size(end['bytes'] / n)}; {size(end['bytes'])} for all |"
        )
    lines += ["", "| ranks of a trial | files | bytes |", "| --- | --- | --- |"]
    lines += [f"| {ranks} | {row['files']} | {size(row['bytes'])} |" for ranks, row in found["footprints"].items()]
    lines.append(f"| {to['devices']:,} (extrapolated) | {ahead['trial_files']:.0f} | {size(ahead['trial_bytes'])} |")
    if found.get("together"):
        lines += ["", "| studies at once, one PostgreSQL | trials told per second, all together | connections |"]
        lines.append("| --- | --- | --- |")
        lines += [f"| {n} | {row['trials_per_s']:.1f} | {row['connections']} |" for n, row in found["together"].items()]
        lines.append(
            f"| {to['studies']} (extrapolated, with drivers and server on these cores) | a trial of each study every"
            f" {ahead['seconds_between_trials_of_a_study']:.0f} s | {ahead['connections']:.0f} |"
        )
    return "\n".join(lines)


# By the name of the results, which marks the table's place on a page: how it is made, and the command that yields them.
TABLES: dict[Path, dict[str, tuple[Callable[[Results], str], str]]] = {
    COMPARISON: {"peers": (tuners, "make bench-peers"), "search": (samplers, "python benchmarks/search.py")},
    CLUSTERS: {"capacity": (capacity, "python benchmarks/capacity.py")},
    GPU: {"gpu-h100-80gb-hbm3": (gpu_results.table, "benchmarks/gpu.sh")},
}


def filled(text: str, name: str, body: str) -> str:
    """Returns a page with another table between `<!-- NAME -->` and `<!-- end -->`.

    Raises:
        ValueError: The page has not just one such place.
    """
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    text, n = re.subn(pattern, lambda found: f"{found[1]}{body}\n{found[2]}", text, flags=re.DOTALL)
    if n != 1:
        raise ValueError(f"a page must have one place for {name}, not {n}")
    return text


def page(path: Path, results: Path = RESULTS) -> str:
    """Returns a page with its tables as the results have them."""
    text = path.read_text()
    if path == FIGURES:
        return filled(text, "figures", figures(results))
    if path == COMPARISON:
        text = filled(text, "aims", aims(results))
    for name, (table, command) in TABLES[path].items():
        file = results / f"{name}.json"
        not_yet = f"Not measured yet: `{command}` has not run on an idle machine."
        text = filled(text, name, table(json.loads(file.read_text())) if file.exists() else not_yet)
    return text


def run(names: Sequence[str]) -> list[str]:
    """Runs benchmarks one after another; returns those that failed."""
    failed = []
    for name in names:
        argv = shlex.split(BENCHMARKS[name][0])
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
        print(f"== {datetime.datetime.now():%H:%M} {shlex.join(argv)}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        status = subprocess.run(argv, cwd=ROOT, check=False).returncode
        print(f"== status {status} after {time.perf_counter() - start:.0f} s", file=sys.stderr)
        failed += [name] if status else []
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run"], help="run the benchmarks first")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these, of {', '.join(BENCHMARKS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {min(unknown)!r}; known: {', '.join(BENCHMARKS)}")
    failed = run(arguments.names or list(BENCHMARKS)) if arguments.what else []
    for path in (FIGURES, COMPARISON, CLUSTERS, GPU):
        path.write_text(page(path))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
