"""Writes the tables of docs/develop/comparison.md from `results/`: what was measured, and of what was not, that it was not.

`python benchmarks/comparison.py` does it, and so does `benchmarks/figures.py`, which makes the README's table. A test
holds the page to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "develop" / "comparison.md", ROOT / "benchmarks" / "results"
NOT_YET = "Not measured yet: `{command}` has not run on an idle machine.\n"
TUNERS = {
    "deepspeed": "DeepSpeed's autotuner", "tpe": "Optuna's TPE, a process a trial", "random": "random search, a process a trial",
    "autotune": "autotune, the same knobs", "autotune-quick": "autotune, the same knobs, four trials",
    "autotune-all": "autotune, precision and ZeRO's settings too",
}  # fmt: skip


def peers(figures: Mapping[str, Any]) -> str:
    """Whole tuners on one script."""
    heads = "tuner | seconds to its answer | trials | samples/s of its answer under torchrun | its claim over that"
    lines = [f"| {heads} |", "| --- | --- | --- | --- | --- |"]
    for name, words in TUNERS.items():
        row = figures.get(name)
        if row is None:
            continue
        if "error" in row:
            reached = [row["error"], ""]
        else:
            over = (
                f" ({row['throughput_over_deepspeed']:.2f}x DeepSpeed's)" if "throughput_over_deepspeed" in row else ""
            )
            rate = format(row["samples_per_s"], ",.0f" if row["samples_per_s"] >= 100 else ".3g")
            reached = [f"{rate}{over}", f"{row['claim_over_measured']:.2f}"]
        lines.append(f"| {words} | {row['wall_s']:.0f} | {row.get('trials', '')} | {' | '.join(reached)} |")
    return "\n".join([*lines, "", measured_on(figures)]) + "\n"


def search(figures: Mapping[str, Any]) -> str:
    """The search alone, on tables of measured configurations."""
    lines = ["| table | trials | share of the true front's hypervolume |", "| --- | --- | --- |"]
    for table, kinds in figures["tables"].items():
        for n in ("10", "20", "30"):
            shown = {kind: found[n]["hypervolume"] for kind, found in kinds.items() if n in found}
            if shown:
                lines.append(
                    f"| {table} | {n} | {', '.join(f'`{kind}` {share:.2f}' for kind, share in shown.items())} |"
                )
    return "\n".join([*lines, "", f"Medians of {figures['seeds']} studies. {measured_on(figures)}"]) + "\n"


def measured_on(figures: Mapping[str, Any]) -> str:
    """Where and when."""
    where = figures["measured_on"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{where['date']}, {where['cores']} cores of an {where['processor']}; {versions}."


# The tables by the name of their results; how each is made, and by which command its figures are.
TABLES: dict[str, tuple[Callable[[Mapping[str, Any]], str], str]] = {
    "peers": (peers, "make bench-peers"),
    "peers-training_data": (peers, "make bench-peers SCRIPT=tests/models/scripts/training_data.py"),
    "search": (search, "python benchmarks/search.py"),
}


def rendered(text: str, results: Path = RESULTS) -> str:
    """The page with its tables as the results have them today."""
    for name, (table, command) in TABLES.items():
        file = results / f"{name}.json"
        body = table(json.loads(file.read_text())) if file.exists() else NOT_YET.format(command=command)
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, n = re.subn(pattern, lambda found, body=body: f"{found[1]}{body}{found[2]}", text, flags=re.DOTALL)
        if n != 1:
            raise ValueError(f"{PAGE}: there must be one place for {name}, not {n}")
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
