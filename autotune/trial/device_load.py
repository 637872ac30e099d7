"""What the devices of a trial did, and who else used them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# If other processes computed on a device for a larger share of the time, step times are not the configuration's alone.
BUSY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """A device during a trial, as NVIDIA's management library saw it; None where it does not tell.

    Attributes:
        uuid: The device; of several ranks all, joined by commas.
        free_bytes: Free memory before the rank used it; of several ranks the least.
        n_others: Other processes on it then; of several ranks the most.
        used_by_others: Share of the time that it was busy then, with others on it; of several ranks the most.
        sm_clock_mhz: Clock of its processors at the end of the timed steps; of several ranks the lowest.
        max_sm_clock_mhz: Their highest clock.
        throttled_by: What kept the clock down.
        power_w: Mean power over the timed steps, summed over ranks.
    """

    uuid: str = ""
    free_bytes: int | None = None
    n_others: int | None = None
    used_by_others: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] = ()
    power_w: float | None = None

    @classmethod
    def of_all(cls, each: "Sequence[DeviceLoad]") -> "DeviceLoad | None":
        """The load of a trial's devices; None without any."""
        if not each:
            return None

        def over(name: str, choose: Callable[[list[Any]], Any]) -> Any:
            values = [getattr(load, name) for load in each]
            return None if None in values else choose(values)

        return cls(
            uuid=",".join(load.uuid for load in each),
            throttled_by=tuple(dict.fromkeys(why for load in each for why in load.throttled_by)),
            **{name: over(name, min) for name in ("free_bytes", "sm_clock_mhz", "max_sm_clock_mhz")},
            **{name: over(name, max) for name in ("n_others", "used_by_others")},
            power_w=over("power_w", sum),
        )
