"""Every figure of the README: which benchmark yields it, and the table that is made of the results.

`python benchmarks/figures.py run [NAME ...]` runs the benchmarks, or those named, one after another, and then writes
the table (`make
bench`: hours on an idle machine); `python benchmarks/figures.py` only writes the table of what lies in `results`;
    `--check` says whether it
is what the README holds. A benchmark that was never run has no row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comparison
from common import between

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: made by `python benchmarks/figures.py` of benchmarks/results -->", "<!-- end of figures -->"
Results = dict[str, Any]
# What a row says: what was measured, and the value as text.
Rows = Callable[[Results], "Iterator[tuple[str, str]]"]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: Its results are `results/NAME.json`.
        command: What runs it, as the README shows it.
        rows: The README's rows, from its results.
    """

    name: str
    command: str
    rows: Rows


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1f} %"


def startup(found: Results) -> Iterator[tuple[str, str]]:
    what = "start-up of a 2-rank ZeRO-1 trial, warm server against `torchrun` of the same trial"
    yield what, f"{found['warm_s']:.2f} s against {found['torchrun_s']:.1f} s, {found['ratio']:.0f}x"


def demo(found: Results) -> Iterator[tuple[str, str]]:
    yield f"the example study, {found['n_trials']} trials, from the command to the answer", f"{found['wall_s']:.0f} s"
    if "probe_and_checks_share" in found:
        yield (
            "of it the probe of the noise scale, the quality gate and branches",
            percent(found["probe_and_checks_share"]),
        )


def peers(found: Results) -> Iterator[tuple[str, str]]:
    base = found.get("deepspeed", {})
    if "wall_s" not in base:
        return
    what = "DeepSpeed's own autotuner on one script: time to its answer; what it claims beside what is re-measured"
    yield what, f"{base['wall_s']:.0f} s; {percent(abs(base['claim_over_measured'] - 1))} off"
    names = {
        "autotune": "its space",
        "autotune-quick": "its space, four trials",
        "autotune-all": "our space",
        "tpe": "plain Optuna TPE",
        "random": "random search",
    }
    for name, said in names.items():
        row = found.get(name, {})
        if "throughput_over_deepspeed" in row:
            what = f"autotune in {said}" if name.startswith("autotune") else said
            sooner, faster = row["seconds_of_deepspeed_over_own"], row["throughput_over_deepspeed"]
            gap = percent(abs(row["claim_over_measured"] - 1))
            yield (
                f"{what}, beside it: sooner; throughput of the answer; its claim",
                f"{sooner:.1f}x; {faster:.2f}x; {gap} off",
            )


def forecast(found: Results) -> Iterator[tuple[str, str]]:
    anchors = [n for n in ("0", "5", "10") if f"{n} anchors" in found]
    rows = [found[f"{n} anchors"] for n in anchors]
    after = " / ".join(anchors)
    pairs = "; ".join(f"{percent(r['memory_error_median'])} and {percent(r['memory_error_p95'])}" for r in rows)
    name = f"{found['configurations']} configurations"
    yield f"memory forecast of {name} after {after} measured ones: median and 95th percentile error", pairs
    if "time_error_median" in rows[0]:
        taus = ", ".join(f"{r['time_kendall_tau']:.2f}" for r in rows)
        errors = ", ".join(percent(r["time_error_median"]) for r in rows)
        again = found.get("one more measurement")
        what, value = "step-time forecast of the same: median error; Kendall's tau of the ranking", f"{errors}; {taus}"
        if again:
            what += ". One real measurement, held against the others of its configuration, on that machine"
            value += f". {percent(again['time_error_median'])}; {again['time_kendall_tau']:.2f}"
        yield what, value


def search(found: Results) -> Iterator[tuple[str, str]]:
    for table, kinds in found["tables"].items():
        for n in ("10", "30"):
            shown = [
                kind
                for kind in ("physics", "physics, wrong prior", "tpe", "nsga2", "random")
                if n in kinds.get(kind, {})
            ]
            if shown:
                what = f"share of the true front's hypervolume after {n} trials on the {table} table, median of {found['seeds']} studies"
                yield what, "; ".join(f"{kind} {kinds[kind][n]['hypervolume']:.2f}" for kind in shown)


def search_longer(found: Results) -> Iterator[tuple[str, str]]:
    for table, kinds in found["tables"].items():
        stopped, whole = (kinds[kind]["60"] for kind in ("physics", "physics, no trial stopped"))
        what = f"stopping trials early, {table} table, trials {found['longer']:g} times as long as measured"
        saved, lost = 1 - stopped["seconds"] / whole["seconds"], whole["hypervolume"] - stopped["hypervolume"]
        yield f"{what}: trial seconds saved in 60 trials; hypervolume lost", f"{percent(saved)}; {lost:.3f}"


def ask(found: Results) -> Iterator[tuple[str, str]]:
    what = f"thinking about one trial: `physics` with {found['trials_told']} trials told and {found['candidates']:,} candidates"
    yield f"{what}, three objectives, one thread", f"{found['median_s']:.2f} s"


def retune(found: Results) -> Iterator[tuple[str, str]]:
    if "warm" in found:
        warm, changes = found["warm"], list(found["warm"]["changes"].values())
        runs = sum(c["runs"] for c in changes)
        within = sum(c["within_2_percent"] * c["runs"] for c in changes) / runs
        what = f"warm re-tuning in {warm['warm_trials']} trials against a cold search in {warm['cold_trials']}"
        worst = min(warm["changes"], key=lambda name: warm["changes"][name]["within_2_percent"])
        yield (
            f"{what}, {len(changes)} kinds of change on three simulated machines ({runs} runs): regret of what is recommended",
            f"median {percent(statistics.median(c['median_regret'] for c in changes))}, within 2 % in {percent(within)}"
            f" (least: {worst}, {percent(warm['changes'][worst]['within_2_percent'])})",
        )
    if "moved" in found:
        moved = found["moved"]
        n = moved["retunings"]
        asked = moved["regression_found"] + moved["regression_left"]
        yield (
            f"{n} re-tunings where nothing changed: configurations replaced; a 5 % regression of the one in use: found",
            f"{moved['unchanged_replaced']} of {n}; {moved['regression_found']} of {asked}",
        )


def driver_overhead(found: Results) -> Iterator[tuple[str, str]]:
    each = found["seconds_per_trial"]
    names = [name for name in ("physics", "tpe") if name in each]
    what = f"driver CPU time per trial (all that is not the trial), mean over {found['n_trials']} trials"
    yield (
        f"{what}: {', '.join(f'`{name}`' for name in names)}",
        ", ".join(f"{each[name]['mean_s']:.2f} s" for name in names),
    )


def script_startup(found: Results) -> Iterator[tuple[str, str]]:
    seconds = [row["beyond_steps_s"] for row in found["trials"]]
    yield (
        "a warm trial of a training script, beyond its own steps (ZeRO 0 to 3)",
        f"{min(seconds):.1f} to {max(seconds):.1f} s",
    )


def hook_overhead(found: Results) -> Iterator[tuple[str, str]]:
    yield from ratios("step time of a training script with the hooks, as a ratio to plain torchrun", found)


def ratios(what: str, found: Results) -> Iterator[tuple[str, str]]:
    """One row of all cases that have a ratio."""
    rows = {name: row["ratio"] for name, row in found.items() if isinstance(row, dict) and "ratio" in row}
    yield f"{what}: {'; '.join(rows)}", ", ".join(f"{ratio:.2f}" for ratio in rows.values())


def gate(found: Results) -> Iterator[tuple[str, str]]:
    parts = {"faults": "injected faults that the quality gate refuses", "clean": "clean pairs that it refuses"}
    said = {name: text for name, text in parts.items() if name in found}
    if said:
        yield "; ".join(said.values()), "; ".join(f"{found[name]['refused']} of {found[name]['of']}" for name in said)


def time_to_target(found: Results) -> Iterator[tuple[str, str]]:
    tasks = {name: row for name, row in found.items() if isinstance(row, dict) and "kendall_tau" in row}
    what = "eight batches by predicted and by measured time to a target loss, Kendall's tau"
    yield f"{what}: {'; '.join(tasks)}", ", ".join(f"{row['kendall_tau']:.2f}" for row in tasks.values())


def noise_scale(found: Results) -> Iterator[tuple[str, str]]:
    ratios = found["ratio"].values()
    what = f"gradient noise scale that ranks measure, as a ratio to brute force ({len(ratios)} cases: ZeRO, precision, ranks)"
    yield what, f"{min(ratios):.2f} to {max(ratios):.2f}"


def bottleneck(found: Results) -> Iterator[tuple[str, str]]:
    right = found["right"]
    what = f"six bottlenecks planted in real trials, and a trial without one, named right in {found['rounds']} rounds"
    yield f"{what}: without a trace, with one", f"{right['verdicts']}, {right['traced_verdicts']}"


def views(found: Results) -> Iterator[tuple[str, str]]:
    trials, page = f"{found['n_trials']:,} trials", found["page"]
    what = (
        f"`autotune report` of a study of {trials}, from the command to the page, JSON and CSV: time; size of the page"
    )
    yield what, f"{found['report_s']:.1f} s; {found['report_bytes'] / 1e6:.1f} MB"
    does = {"scroll": "scrolling", "filter": "filtering", "sort": "sorting"}
    frames = "; ".join(f"{name} {' and '.join(frame(row[key]) for row in page.values())}" for key, name in does.items())
    what = f"its page in a browser without a GPU, {' and '.join(page)} pixels wide: until every plot is drawn"
    what += "; 95th percentile / longest time between two frames"
    drawn = " and ".join(f"{row['drawn_s']:.1f}" for row in page.values())
    yield what, f"{drawn} s; {frames}"
    cold, warm = (ratio_of(found["dashboard"][name]) for name in ("cold_s", "warm_s"))
    what = f"the dashboard's page of a study of {trials}, as a ratio to plain optuna-dashboard's: the first request; later ones"
    yield what, f"{cold}; {warm}"


def frame(found: dict[str, float]) -> str:
    return f"{found['p95_ms']:.0f} / {found['longest_ms']:.0f} ms"


def ratio_of(pairs: Sequence[dict[str, float]]) -> str:
    found = sorted(pair["own"] / pair["plain"] for pair in pairs)
    return f"{statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"


def claim(found: Results) -> Iterator[tuple[str, str]]:
    yield from ratios(
        "step time of the exported JSON under a plain `torchrun` script, as a ratio to what the trial claimed", found
    )


def executor_overhead(found: Results) -> Iterator[tuple[str, str]]:
    engines = found["engines"]
    what = "what an engine costs a 2-rank trial beyond the trial itself, all on the loopback of one machine"
    yield f"{what}: {', '.join(engines)}", ", ".join(f"{row['engine_s']:.2f} s" for row in engines.values())


def coordinators(found: Results) -> Iterator[tuple[str, str]]:
    last = found["median_s"].get("last_100", found["median_s"]["all"])
    what = f"{found['workers']} coordinators on one study in PostgreSQL, {found['kills']} of them killed, {found['told']:,} trials"
    lost, twice = found["begun_and_never_told"] + found["left_running"], found["told_twice_or_duplicate"]
    yield (
        f"{what}: lost, told twice; median time to ask and tell at the end",
        f"{lost}, {twice}; {1000 * last['ask_and_tell_s']:.0f} ms",
    )


def chaos(found: Results) -> Iterator[tuple[str, str]]:
    what = f"random kills ({', '.join(found['by_victim'])}) in {found['n_studies']} real studies"
    yield (
        f"{what}: invariants broken after resuming; trials run again",
        f"{found['invariants_broken']} of {found['struck']}; {found['trials_run_again']}",
    )


def project(found: Results) -> Iterator[tuple[str, str]]:
    for name, row in found.items():
        if isinstance(row, dict) and "error_median" in row:
            what = f"projection from 1 and 2 ranks to {name}: median error of the step time; Kendall's tau of the configurations"
            yield what, f"{percent(row['error_median'])}; {row['kendall_tau']:.2f}"


SEARCH_LONGER = (
    'python benchmarks/search.py --name search_longer --longer 8 --seeds 16 --only physics "physics, no trial stopped"'
)
BENCHMARKS = (
    Benchmark(name="startup", command="python benchmarks/overhead.py startup", rows=startup),
    Benchmark(name="demo", command="python benchmarks/demo.py", rows=demo),
    Benchmark(name="peers", command="make bench-peers", rows=peers),
    Benchmark(name="search", command="python benchmarks/search.py", rows=search),
    Benchmark(name="search_longer", command=SEARCH_LONGER, rows=search_longer),
    Benchmark(
        name="forecast-code-gpt",
        command="python benchmarks/forecast.py score benchmarks/truth/code-gpt.csv.gz --target studies/code-gpt/model.py",
        rows=forecast,
    ),
    Benchmark(
        name="forecast-conv", command="python benchmarks/forecast.py score benchmarks/truth/conv.csv.gz --target benchmarks/truth/conv.py",
        rows=forecast,
    ),
    Benchmark(name="ask", command="python benchmarks/ask.py", rows=ask),
    Benchmark(name="driver_overhead", command="python benchmarks/overhead.py driver", rows=driver_overhead),
    Benchmark(name="script_startup", command="python benchmarks/overhead.py scripts", rows=script_startup),
    Benchmark(name="hook_overhead", command="python benchmarks/overhead.py hooks", rows=hook_overhead),
    Benchmark(name="claim", command="python benchmarks/overhead.py claim", rows=claim),
    Benchmark(name="gate", command="python benchmarks/gate.py", rows=gate),
    Benchmark(name="time_to_target", command="python benchmarks/time_to_target.py", rows=time_to_target),
    Benchmark(name="noise_scale", command="python benchmarks/noise_scale.py", rows=noise_scale),
    Benchmark(name="bottleneck", command="python benchmarks/planted.py", rows=bottleneck),
    Benchmark(name="views", command="python benchmarks/views.py", rows=views),
    Benchmark(name="executor_overhead", command="python benchmarks/overhead.py executors", rows=executor_overhead),
    Benchmark(name="coordinators", command="python benchmarks/coordinators.py --seconds 5", rows=coordinators),
    Benchmark(name="retune", command="python benchmarks/retune.py --seeds 3", rows=retune),
    Benchmark(name="chaos", command="python tests/support/chaos.py", rows=chaos),
    Benchmark(name="project", command="python benchmarks/project.py", rows=project),
)  # fmt: skip


def table(results: Path = RESULTS) -> str:
    """The README's table, from the results that there are."""
    lines, hardware = ["| figure | value | command |", "| --- | --- | --- |"], dict[str, list[str]]()
    for each in BENCHMARKS:
        file = results / f"{each.name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        where = found.pop("measured_on")
        rows = list(each.rows(found))
        lines += [f"| {what} | {value} | `{each.command}` |" for what, value in rows]
        if rows:
            hardware.setdefault(f"{where['cores']} cores of {where['processor']}", []).append(where["date"])
    said = "; ".join(f"{place}, {span(dates)}" for place, dates in hardware.items())
    return "\n".join(
        [f"Measured on {said}; other work ran there too, so that absolute times are upper bounds.", "", *lines]
    )


def span(dates: Sequence[str]) -> str:
    first, last = min(dates), max(dates)
    return first if first == last else f"{first} to {last}"


def with_table(text: str, results: Path = RESULTS) -> str:
    """A text with the table between its marks.

    Raises:
        ValueError: It has no marks.
    """
    return between(text, BEGIN, END, table(results))


def run(names: Sequence[str]) -> list[str]:
    """Runs benchmarks one after another; returns those that failed."""
    failed = []
    for each in BENCHMARKS:
        if names and each.name not in names:
            continue
        argv = shlex.split(each.command)
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
        print(f"== {datetime.datetime.now():%H:%M} {each.command}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        status = subprocess.run(argv, cwd=ROOT, check=False).returncode
        print(
            f"== {'done' if status == 0 else f'failed with status {status}'} after {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
        failed += [each.name] if status else []
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run"], help="run the benchmarks first")
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the README holds the table")
    arguments = parser.parse_args()
    known = [each.name for each in BENCHMARKS]
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"there is no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    failed = run(arguments.names) if arguments.what else []
    text = README.read_text()
    made = with_table(text)
    if arguments.check:
        sys.exit(
            "README.md does not hold the figures of benchmarks/results: python benchmarks/figures.py"
            if made != text
            else 0
        )
    README.write_text(made)
    comparison.PAGE.write_text(comparison.rendered(comparison.PAGE.read_text()))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
