"""The findings of a study as plain data, and how its trials and metrics are written."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from autotune.errors import UserError
from autotune.report import trial_notes
from autotune.report.timeline import Run
from autotune.scoring.effects import Effects, effects
from autotune.scoring.metrics import METRICS
from autotune.space.candidate import Candidate, differing
from autotune.study.events import n_spent
from autotune.study.setup.devices import limit_bytes
from autotune.system.units import Scale, scale_for
from autotune.trial import lengths
from autotune.trial.command import Invocation
from autotune.trial.folder import adapter
from autotune.trial.result import BESIDE
from autotune.trial.workload import Environment

Data: TypeAlias = Mapping[str, Any]

TITLES = {"drop_in": "drop-in", "out_of_reach": "out of reach"}
THROUGHPUT = "samples_per_s"
# Lengths of the longest samples, in average ones, from which on they may be what does not fit.
LONG_TIMES = 1.5
# What makes room for the longest samples.
FOR_LONG_SAMPLES = (
    "cut them (`data.max_length` in the search space; or state a smaller --max-length if it says too much), recompute"
    " (`checkpoint_every: 1`), split sequences over ranks (`sequence_parallel_size`), or take devices with more memory"
)


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """A study as plain data: the one input of everything in this package.

    Attributes:
        study: `name`, `folder`, `target`, `ranks`, `objectives` (names of metrics, in order), `n_trials`, `wall_s`, and what
            else is worth showing. Where a re-tuning replaced the answer, `stored_as` and `stored_in` are its name and folder.
        recommended: The content of `recommended.json`: `picks` by name, and `baseline`.
        front: The content of `front.json`.
        trials: Every trial: `trial`, `role`, `outcome`, `reason`, `phase`, `candidate`, `wall_s`, `caveats`, what
            `scoring.recommend.figures` makes of it (`metrics`, `ci95`, `gains`, `luck`, `speedup`, `measurements`), `readings_s` (the
            step times that were read), and where known `losses`, `step_times_s`, `n_warmup` (steps that were not timed), `censored`
            (metrics that are extrapolated), `feasible`, `unreproducible` (changes that only a trial can make), `unwitnessed` (settings of
            which nothing shows that they acted), `failed_again` (how a re-measurement ended badly), `tied` (it cannot be told
            from the recommended one), `log_slowdown` (others' load), `phase_times_s`, `gate` (what the quality gate said),
            `forecast` (by metric what the trials before led to expect: value and both ends of the 90 % interval), `hosts`,
            `machine` (device, driver, libraries), `waited_s` (for machines), `lost_attempts` (why each was lost).
        environment: The fields of `trial.Environment`.
        workload: The fields of `trial.Workload`.
        invocation: How the script is started, where a script was tuned.
        runs: What ran when, where the study's folder tells.
    """

    study: Data
    recommended: Data
    front: Sequence[Data]
    trials: Sequence[Data]
    environment: Data = field(default_factory=dict)
    workload: Data = field(default_factory=dict)
    invocation: Invocation | None = None
    runs: Sequence[Run] = ()

    @property
    def name(self) -> str:
        """The study's name."""
        return str(self.study["name"])

    @property
    def world_size(self) -> int:
        """Ranks of every trial."""
        return int(self.study.get("ranks") or 1)

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own: all of them, but for the stages of a pipeline."""
        return int(self.study.get("data_parallel") or self.world_size)

    @property
    def baseline(self) -> Data | None:
        """The user's own configuration, measured; None if it did not complete."""
        return self.recommended.get("baseline") or None

    @property
    def picks(self) -> Mapping[str, Data]:
        """The picks by name."""
        return self.recommended.get("picks") or {}

    @property
    def why_nothing(self) -> str:
        """Why there is no pick, where there is none."""
        ends = Counter(self.outcomes)
        if ends["oom"] and ends["oom"] + ends["predicted_oom"] == len(self.trials):
            predicted = f", {ends['predicted_oom']} more are predicted to" if ends["predicted_oom"] else ""
            ran_out = f"{ends['oom']} ran out of it{predicted}"
            n_tail = sum(trial["outcome"] == "oom" and trial.get("phase") == "tail" for trial in self.trials)
            # The length that samples reach, or are stated to reach, and how many times the average that is.
            table = (self.workload.get("data") or {}).get("table") or ()
            longest = max(lengths.longest(table), self.study.get("max_length") or 0)
            times = longest / (lengths.expected(table) or math.inf)
            of = f" ({longest:,})" if longest else ""
            if n_tail:
                return (
                    f"the longest samples{of} fit the device memory in no configuration that was tried: {ran_out},"
                    f" {n_tail} only at the longest samples; {FOR_LONG_SAMPLES}"
                )
            long = f"; samples reach a length of {longest:,}, {times:.1f} times the average: {FOR_LONG_SAMPLES}"
            return f"no configuration fits the device memory: {ran_out}{long if times >= LONG_TIMES else ''}"
        complete = [trial for trial in self.trials if trial["outcome"] == "complete"]
        if not complete:
            return "no configuration completed"
        held = [trial for trial in complete if trial.get("feasible") is not False]
        doubtful, n = next((trial for trial in held if trial.get("doubt")), None), len(complete)
        why = "yields every objective" if held else "keeps every constraint"
        if doubtful is not None:
            why = f"{'' if len(held) == n else 'that keeps every constraint '}passed its checks"
            why += f" (trial {doubtful['trial']}: {doubtful['doubt']})"
        return f"{n} configuration{'s' * (n > 1)} completed, but none {why}"

    @property
    def memory_limit_bytes(self) -> float | None:
        """What a rank may use: what the user stated, up to the device's memory, on a CPU else a rank's share of the machine's."""
        stated = self.study.get("device_memory_bytes")
        environment = adapter(Environment).validate_python(dict(self.environment))
        on_each = self.world_size // self.study.get("nodes", 1)
        return limit_bytes(environment, stated, on_each, self.world_size, self.study.get("at_once") or 1)

    @property
    def trials_left(self) -> int:
        """Trials of the budget that did not run, since somebody stopped the search or it goes on; 0 if it is over."""
        wanted: int | None = self.study.get("trials_wanted")
        if wanted is None or self.study.get("ended"):
            return 0
        return max(0, wanted - n_spent(self.outcomes, wanted))

    @property
    def outcomes(self) -> list[str]:
        """How each trial ended."""
        return [trial["outcome"] for trial in self.trials]

    def picks_by_trial(self) -> list[tuple[list[str], Data]]:
        """Each picked trial once, with all that it was picked for."""
        return [(names, pick) for name, pick in self.picks.items() if (names := self.picked_for(pick))[0] == name]

    def picked_for(self, pick: Data) -> list[str]:
        """All that a picked trial was picked for."""
        return [name for name, other in self.picks.items() if other["trial"] == pick["trial"]]

    @property
    def objectives(self) -> list[str]:
        """The objectives' metrics, in order."""
        return [name for name in self.study.get("objectives", ()) if name in METRICS]

    def metric_names(self) -> list[str]:
        """The objectives in order, then the other metrics that were measured."""
        return [*self.objectives, *(name for name in METRICS if name in self._seen and name not in self.objectives)]

    def compared_metrics(self) -> list[str]:
        """The metrics of the trials that were compared, in the order of `metric_names`."""
        seen = {name for point in self.compared.values() for name in measured(point)}
        return [name for name in self.metric_names() if name in seen]

    def table(self) -> list[Data]:
        """What an overview lists: the front, picks that are not on it, and the baseline last."""
        shown = (*self.picks.values(), *self.front, *([self.baseline] if self.baseline else ()))
        found = {point["trial"]: point for point in shown}
        return sorted(found.values(), key=lambda point: (self.is_baseline(point), point["trial"]))

    @cached_property
    def points(self) -> dict[int, Data]:
        """The trials that yielded something, by number."""
        return {trial["trial"]: trial for trial in self.trials if measured(trial)}

    @cached_property
    def compared(self) -> dict[int, Data]:
        """The trials that were compared with one another: complete, within the constraints, not refused."""
        return {
            number: point for number, point in self.points.items()
            if point["outcome"] == "complete" and point.get("feasible") is not False
        }  # fmt: skip

    @cached_property
    def configurations(self) -> dict[int, str]:
        """Each trial's configuration in words, by trial."""
        return {trial["trial"]: words(trial["candidate"]) for trial in self.trials}

    def is_baseline(self, point: Data) -> bool:
        """Returns whether a point is the user's own configuration."""
        return self.baseline is not None and self.baseline["trial"] == point["trial"]

    @cached_property
    def marks(self) -> dict[int, list[str]]:
        """What each marked trial stands for, by trial: titles of its picks, and `baseline`."""
        found = {pick["trial"]: [title(name) for name in names] for names, pick in self.picks_by_trial()}
        if self.baseline:
            found.setdefault(self.baseline["trial"], []).append("baseline")
        return found

    def mark(self, trial: int) -> list[str]:
        """What is said beside a trial: what it stands for, or that it may not be recommended though it is on the front."""
        return self.marks.get(trial) or self.unchecked.get(trial) or []

    @cached_property
    def unchecked(self) -> dict[int, list[str]]:
        """The trials of the front that may not be recommended, with the words that say so in place of a mark."""
        return {point["trial"]: [trial_notes.checks(point)] for point in self.front if point.get("doubt")}

    @cached_property
    def effects(self) -> list[Effects]:
        """What the knobs do to each objective, where the trials tell."""
        # The user's own configuration is trial 0, even where it did not run.
        reference = self.trials[0]["candidate"] if self.trials else {}
        found = []
        for name in self.objectives:
            points = [point for point in self.points.values() if name in measured(point)]
            values = [(point["candidate"], measured(point)[name]) for point in points]
            found.append(effects(name, values, reference))
        return [each for each in found if each is not None]

    # With 1,000 trials these are asked for 1,000 times.
    @cached_property
    def _seen(self) -> set[str]:
        return {name for trial in self.trials for name in measured(trial)}

    def caveats(self) -> list[str]:
        """What the user should know: about the target, and about the trials that the answer rests on."""
        first = next((trial for trial in self.trials if trial.get("role") == "baseline"), None)
        found = [str(text) for text in (self.study.get("ended"), *(self.workload.get("caveats") or ())) if text]
        if first is not None and self.baseline is None:
            end = trial_notes.ended(first["outcome"]) + (f": {first['reason']}" if first.get("reason") else "")
            again = first["outcome"] == "crashed" and "complete" in self.outcomes
            remedy = "; the same command measures it once more, and --fresh begins anew" * again
            found.insert(0, f"the baseline did not complete ({end}), so no speed-up can be stated{remedy}")
        if first is not None and self.study.get("deepspeed_added"):
            found.append(
                "the script runs without DeepSpeed; the baseline is the same script with DeepSpeed at ZeRO stage 0"
            )
        damaged = "its row in the database cannot be read; restore a copy"
        found += [f"trial {number} is left out: {damaged}" for number in self.study.get("unreadable") or ()]
        found += [*(self.study.get("left_out") or ()), *trial_notes.of(self.trials)]
        said = {trial["trial"]: list(trial.get("caveats") or ()) for trial in self.trials}
        shown = {number: said[number] for number in sorted(self.marks.keys() & said.keys())}
        found += trial_notes.own(shown, self.workload.get("caveats") or ())
        if n := sum(any(BESIDE in text for text in texts) for texts in said.values()):
            alone = "(--overlap): their times are not those of a trial alone"
            found.append(f"{n} of {len(self.trials)} trials {BESIDE} as others {alone}")
        return list(dict.fromkeys(found))


def measured(point: Data) -> dict[str, float]:
    """The metrics that a trial or a pick yielded."""
    found = (point.get("metrics") or {}).items()
    return {name: float(value) for name, value in found if value is not None and math.isfinite(value)}


def interval(point: Data, metric: str, value: float) -> tuple[float, float]:
    """The 95 % interval of a metric's value; the value twice where there is none."""
    low, high = (point.get("ci95") or {}).get(metric) or (value, value)
    return (min(low, value), max(high, value)) if math.isfinite(low) and math.isfinite(high) else (value, value)


def metric_scale(metric: str, values: Iterable[float]) -> Scale:
    """How values of a metric are written when they are compared: one unit, one number of decimals."""
    return scale_for(METRICS[metric].unit if metric in METRICS else "", values)


def quantity(metric: str, value: float) -> str:
    """One value of a metric with its unit."""
    return metric_scale(metric, [value]).quantity(value)


def title(pick: str) -> str:
    """A pick's name for people: `lowest_latency` is `lowest latency`."""
    return TITLES.get(pick, pick.replace("_", " "))


def words(values: Data) -> str:
    """A candidate, given as flat knob values, in a few words."""
    return _words(tuple(values), *values.values())


@lru_cache(maxsize=20_000, typed=True)  # a page says them of each trial ten times; `True` and 1 are not the same words
def _words(names: tuple[str, ...], *knobs: Any) -> str:
    values = dict(zip(names, knobs, strict=True))
    try:
        return Candidate.of(values).describe()
    except UserError:  # written by another version
        return ", ".join(f"{name}={value}" for name, value in values.items())


def differences(values: Data, before: Data) -> list[tuple[str, Any, Any]]:
    """The knobs in which a candidate differs from another one: name, value before, value after."""
    return [(name, before.get(name), values.get(name)) for name in differing(before, values)]


def times(factor: float | None, sign: str = "x") -> str:
    """A factor in words: `2.31x`; empty for None."""
    return "" if factor is None else f"{factor:.2f}{sign}"


def titles(names: Sequence[str]) -> str:
    """What a pick was picked for, as the tables mark it."""
    return ", ".join(map(title, names))
