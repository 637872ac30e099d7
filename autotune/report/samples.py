"""What a report says of the data: lengths of the samples, padding, and where the longest ones lie against memory."""

from collections.abc import Iterator, Mapping

from autotune.report.data import Data, StudyReport
from autotune.system.units import format_bytes

# Share of the memory from which on it is told.
LEAST_SHARE = 0.01


def varies(report: StudyReport) -> bool:
    """Whether samples of different lengths were seen."""
    return len((report.workload.get("data") or {}).get("table") or ()) > 1


def notes(report: StudyReport) -> list[str]:
    """Sentences on the data of a study; none where all samples are of one length."""
    return [*_read(report.workload["data"]), *_trials(report)] if varies(report) else []


def _read(data: Data) -> Iterator[str]:
    n, whole = data["n_seen"], data.get("n_samples")
    read = (
        f"all {n:,} samples were"
        if n == whole
        else f"{n:,} of {whole:,} samples were"
        if whole
        else f"{n:,} samples of a stream were"
    )
    yield f"{read} read: the longest has a length of {int(data['table'][-1][0]):,}"


def _trials(report: StudyReport) -> Iterator[str]:
    """Padding and tail of the baseline and of what is recommended."""
    pick = report.picks.get("recommended")
    shown = {0: "the baseline"} | ({pick["trial"]: "what is recommended"} if pick is not None and pick["trial"] else {})
    rows = {row["trial"]: row for row in report.trials}
    for number, name in shown.items():
        row = rows.get(number, {})
        said = [f"{row['padding']:.0%} of the tokens are padding"] if row.get("padding") else []
        if tail := row.get("tail"):
            peak = row["metrics"].get("peak_memory_bytes")
            of = f", {format_bytes(peak)} at its peak" if peak else ""
            said.append(
                f"its worst batch, {tail['samples']} x {tail['length']:,}, fits{of}{_beside(report, tail, peak)}"
            )
        if said:
            yield f"{name} (trial {number}): {'; '.join(said)}"


def _beside(report: StudyReport, tail: Mapping[str, int], peak: float | None) -> str:
    """What the worst batch takes beside ordinary steps, and of what a rank may use."""
    steady, worst, limit = tail.get("steady_bytes"), tail.get("tail_bytes"), report.memory_limit_bytes
    times = f"; {worst / steady:.1f} times an ordinary step's {format_bytes(steady)}" if steady and worst else ""
    share = (
        f"; {peak / limit:.0%} of the {format_bytes(limit)} that a rank may use"
        if peak and limit and peak / limit >= LEAST_SHARE
        else ""
    )
    return times + share
