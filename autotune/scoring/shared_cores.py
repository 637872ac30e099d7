"""What other processes on a machine do to step times, from the cores that they were seen to use meanwhile.

Where others use u of c cores (but for a tenth of one) and a trial may keep t busy, its steps take about
min(t, c) / (c - u) times as long; but no longer than its threads waited for a core: what sleeps, or waits for data, leaves
its cores to others, who do it no harm. Readings are compared as beside the usual load of their study, and doubted by how
far their own was another one. Measured in benchmarks/shared_cores.py.
"""

import math
from collections.abc import Sequence

# The logarithm of a step time grows with that of this ratio by this slope, which differs from study to study by this
# standard deviation.
SLOPE, SLOPE_SD = 1.0, 0.5
# What a reading differs by besides, as a share of that logarithm: the load comes and goes while it is timed.
SPREAD = 0.15
# Cores that do not count: what the system does for a trial, as to move its messages, and the error of reading its clocks.
UNCOUNTED = 0.1
# The least share of its cores that others are taken to leave to a trial.
LEAST_LEFT = 0.1


def log_slowdown(others: float, wanted: float, n_cores: int, waited: Sequence[float] = ()) -> float:
    """Logarithm of how much longer steps take while others keep some cores busy; 0 where enough are left.

    Args:
        others: Cores that other processes keep busy, on average.
        wanted: Cores that the trial's ranks on this machine would use alone: one for each thread, within their limit.
        n_cores: Cores that they may use, those that others keep busy among them.
        waited: For each rank the share of the time in which its thread that waited most was ready and had no core; empty
            where that is not known. Ranks that wait for each other lose all that each of them lost, at most.
    """
    left = max(n_cores - max(0.0, others - UNCOUNTED), LEAST_LEFT * n_cores)
    most = -sum(math.log(max(1.0 - share, LEAST_LEFT)) for share in waited) if waited else math.inf
    return min(max(0.0, math.log(min(wanted, n_cores) / left)), most)
