"""Words for a forecast in `predict`, `advise` and `project`: whether it fits, its memory by part, what binds its time."""

from collections.abc import Iterator, Mapping

from autotune.system.units import format_bytes

# Probability from which a configuration counts as fitting, and the quantile of a normal there. Of what is said to fit by
# it, up to 1.6 % of our measurements do not (`benchmarks/forecast.py`); 1.5 % of all published runs are said to fit and
# ran out of memory (`benchmarks/published.py`).
SURE, SURE_Z = 0.9, 1.2816
# By the name of the largest term of the step time.
BINDS = {
    "compute": "compute: the matrix products",
    "traffic": "the memory bandwidth of the device",
    "recompute": "compute: blocks are computed twice to save memory",
    "communication": "communication between the ranks",
    "messages": "the latency of many messages between the ranks: larger buckets help",
    "groups": "what the ranks of a group send each other for a split model: a smaller degree helps",
    "optimizer": "the optimizer's step: more micro-batches a step, or shards of it, help",
    "offload": "the link between host and device",
    "launches": "the fixed cost of each operation: a larger micro-batch helps",
    "bookkeeping": "what ZeRO does for each parameter: a lower stage or a larger micro-batch helps",
    "partitioning": "what ZeRO-3 fetches, releases and splits: a lower stage or a larger micro-batch helps",
    "input": "drawing the samples",
}
# A smaller share of the memory is not shown.
SHOWN_SHARE = 0.005


def verdict(fits: float) -> str:
    """A probability to fit in words."""
    return "fits" if fits >= SURE else "may not fit" if fits > 1 - SURE else "does not fit"


def memory_by_part(terms: Mapping[str, float], total: float, notes: Mapping[str, str], width: int) -> Iterator[str]:
    """Bytes by part as bars, largest first.

    Args:
        notes: Remark behind a part.
        width: Columns that the name of a part takes.
    """
    longest = max(terms.values())
    for name, size in sorted(terms.items(), key=lambda term: -term[1]):
        if size >= SHOWN_SHARE * total:
            bar = "#" * max(1, round(30 * size / longest))
            yield f"  {name:<{width}}{format_bytes(size):>10}  {bar}{notes.get(name, '')}"
