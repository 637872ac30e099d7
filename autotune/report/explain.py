"""The evidence for a study's answer in words: measurements near it, predictions, and the effect of single changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.study import Study

from autotune.errors import UserError
from autotune.report.data import StudyReport, metric_scale, quantity
from autotune.scoring.metrics import GOODPUT, METRICS
from autotune.scoring.recommend import PICKS
from autotune.search.model import RAN, Observation
from autotune.search.optimizer import chance_needed
from autotune.search.physics import PhysicsSampler, generic_prior
from autotune.space.candidate import Candidate, check_knob, check_value
from autotune.space.deepspeed import Scalar, check_setting
from autotune.space.legality import why_illegal
from autotune.space.space import SearchSpace
from autotune.study.spec.yaml_file import read_value
from autotune.study.storage import records
from autotune.study.storage.records import StoreError, StudyRecord
from autotune.system.units import format_bytes
from autotune.trial.result import Outcome

INTERVAL = 1.645
NEAREST = 3
# Predicted gains closer to 1 than this are no reason for anything.
NOTHING = 0.01
SURE = 0.99
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """An answer with its evidence; its JSON has the same fields.

    Attributes:
        question: The question in words.
        answer: The answer in a sentence.
        candidate: The configuration in question, if there is one.
        predicted: For each metric `value`, `low`, `high` (90 % interval), and `ratio` to the recommended configuration.
        fits: Probability that it fits the memory.
        measured: Trials of it, or near it: `trial`, `outcome`, `metrics`, `differs` (knobs in which it does).
        reasons: Further evidence, a sentence each.
    """

    question: str
    answer: str
    candidate: dict[str, Scalar] | None = None
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    fits: float | None = None
    measured: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        """The explanation for programs."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The explanation for people."""
        found = [self.question, "", self.answer]
        if self.predicted:
            found += ["", "predicted (90 % interval):"]
            for metric, said in self.predicted.items():
                scale = metric_scale(metric, [said["value"]])
                ratio = f", {said['ratio']:.2f}x the recommended one's" if "ratio" in said else ""
                label = METRICS[metric].label
                found.append(
                    f"  {label}: {scale.quantity(said['value'])} ({scale.number(said['low'])} to"
                    f" {scale.number(said['high'])}){ratio}"
                )
        if self.measured:
            found += ["", "measured:"]
            for m in self.measured:
                found.append(
                    f"  trial {m['trial']}: {m['outcome']}{_figures(m['metrics'])};"
                    f" {', '.join(m['differs']) or 'the same'}"
                )
        return found + ([""] + [f"- {reason}" for reason in self.reasons] if self.reasons else [])


def read_setting(text: str) -> tuple[str, Scalar]:
    """A knob and a value from `KEY=VALUE`.

    Raises:
        UserError: It is not of that form, or there is no such knob or value.
    """
    name, equals, given = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"{text!r}: KEY=VALUE is needed, as in zero_stage=3")
    value: Scalar = read_value(given)
    if isinstance(value, dict | list):
        raise UserError(f"{text!r}: a single value is needed, as in zero_stage=3")
    check_knob(name)
    if value is None or given.strip() == "default":
        return name, None
    check_value(name, value)
    check_setting(name, value, name)
    return name, value


class Evidence:
    """A study and the expectations that its trials justify for any configuration.

    Args:
        study: The Optuna study.
        report: Its report.

    Raises:
        StoreError: An earlier version made the study and kept too little of it.
    """

    def __init__(self, study: Study, report: StudyReport) -> None:
        kept = records.record(study)
        if kept is None or kept.search is None:
            raise StoreError(
                f"study {study.study_name!r} was made by an earlier version, which kept too little to explain it"
            )
        self.kept: StudyRecord = kept
        self.report, self.setting = report, kept.search.setting
        space = SearchSpace.parse(kept.search.space, f"study {study.study_name}")
        self.space = replace(space, samples_per_rank=kept.search.samples_per_rank)
        self.baseline = Candidate.from_key(kept.baseline)
        self.sampler = PhysicsSampler(
            self.space,
            self.baseline,
            self.setting,
            0,
            prior=generic_prior(kept.workload, self.setting),
            metrics=[o.metric for o in kept.objectives],
            memory_limit_bytes=kept.search.memory_limit_bytes,
            bounds=kept.search.bounds,
        )
        self.told: list[Observation] = self.sampler.told(study)
        self.trials = [trial for trial in report.trials if trial["metrics"] or trial["outcome"] != Outcome.COMPLETE]
        pick = report.picks.get("recommended")
        self.recommended = Candidate.of(pick["candidate"]) if pick else None
        self.best: Mapping[str, float] = pick["metrics"] if pick else {}

    # Questions

    def choice(self) -> Explanation:
        """Why the recommended configuration, knob by knob."""
        if self.recommended is None:
            return Explanation(
                question="Why is nothing recommended?",
                answer=f"{self.report.why_nothing.capitalize()}.",
                reasons=self._scope(),
            )
        pick = self.report.picks["recommended"]
        now, before = self.recommended.values(), self.baseline.values()
        changed = [name for name in dict.fromkeys([*before, *now]) if now.get(name) != before.get(name)]
        reasons = [self._without(name, now.get(name), before.get(name)) for name in changed]
        return Explanation(
            question=f"Why is {self.recommended.describe()} (trial {pick['trial']}) recommended?",
            answer=f"It is {pick['reasons'][0]}."
            if pick["reasons"]
            else "It is the best compromise of the objectives.",
            candidate=self.recommended.values(),
            predicted=self._predicted(self.recommended),
            measured=_nearest(self.trials, self.recommended),
            reasons=[*reasons, *self._scope()],
        )

    def what_if(self, name: str, value: Scalar) -> Explanation:
        """The recommended configuration (the baseline where there is none) with one knob changed."""
        start = self.recommended or self.baseline
        changed = _changed(self.space, start, name, value)
        what = "the recommended configuration" if self.recommended else "the baseline"
        question = f"What if {name} were {_said(value)} in {what}?"
        if changed == start:
            return Explanation(
                question=question,
                answer=f"It is: {start.describe()}.",
                candidate=start.values(),
                measured=_nearest(self.trials, start),
            )
        reason = why_illegal(changed, self.setting)
        if reason is not None:
            return Explanation(question=question, answer=f"It cannot run here: {reason}.", candidate=changed.values())
        return self._judged(question, changed)

    def why_not(self, name: str, value: Scalar) -> Explanation:
        """Why nothing with that value is recommended: the best configuration that has it."""
        question = f"Why not {name} = {_said(value)}?"
        if self.recommended is not None and self.recommended.values().get(name) == value:
            return Explanation(
                question=question,
                answer=f"It is recommended: {self.recommended.describe()}.",
                candidate=self.recommended.values(),
            )
        guide = self.sampler.guide
        pool = [
            c
            for c in guide.catalogue.candidates
            if c.values().get(name) == value and why_illegal(c, self.setting) is None
        ]
        if not pool:
            alone = _changed(self.space, self.recommended or self.baseline, name, value)
            reason = why_illegal(alone, self.setting)
            if reason is not None:
                return Explanation(question=question, answer=f"It cannot run here: {reason}.", candidate=alone.values())
            said = self._judged(question, alone)
            return replace(said, answer=f"The space of this study does not hold it. {said.answer}")
        believed = self.sampler.guide.beliefs(self.told, pool)
        fits = [c for c, chance in zip(pool, believed.fits, strict=True) if chance >= chance_needed(self.told)]
        if not fits:
            least = format_bytes(math.exp(float(believed.log_memory[0].min())))
            answer = (
                f"No candidate with it fits: the smallest is predicted to need {least}, a rank has {self._limit()}."
            )
            return Explanation(question=question, answer=answer)
        ended = {Candidate.of(trial["candidate"]): trial["outcome"] for trial in self.trials}
        hopeful = [c for c in fits if ended.get(c, Outcome.COMPLETE) in RAN]
        if not hopeful:
            ends = ", ".join(sorted({str(ended[c]) for c in fits}))
            return Explanation(
                question=question,
                answer=f"No candidate with it completed: {ends}.",
                measured=_nearest(self.trials, fits[0]),
            )
        said = self._judged(question, hopeful[int(np.argmax(self._gains(hopeful)))])
        ran = [trial for trial in self.trials if trial["outcome"] in RAN]
        n_with = sum(trial["candidate"].get(name) == value for trial in ran)
        return replace(
            said,
            reasons=[
                f"{n_with} of the {len(ran)} trials that ran had it; this is the best that is expected of it",
                *said.reasons,
            ],
        )

    # Evidence

    def _judged(self, question: str, candidate: Candidate) -> Explanation:
        """A configuration that can run, against the recommended one."""
        believed, near = self.sampler.guide.beliefs(self.told, [candidate]), _nearest(self.trials, candidate)
        predicted, fits, words = self._predicted(candidate), float(believed.fits[0]), candidate.describe()
        exact = next((m for m in near if not m["differs"]), None)
        if exact is not None and exact["outcome"] not in RAN:
            answer = (
                f"{words} was tried in trial {exact['trial']} and ended with {exact['outcome']}: {exact['reason']}."
            )
        elif exact is not None:
            ratios = {
                m: exact["metrics"][m] / value for m, value in self.best.items() if exact["metrics"].get(m) and value
            }
            answer = f"{words} was measured in trial {exact['trial']}: {self._verdict(ratios)}."
        elif fits < chance_needed(self.told):
            low, high = (format_bytes(predicted["peak_memory_bytes"][end]) for end in ("low", "high"))
            answer = f"{words} would not fit: predicted to need {low} to {high}, a rank has {self._limit()}."
        else:
            ratios = {m: said["ratio"] for m, said in predicted.items() if "ratio" in said}
            answer = f"{words} was not run; predicted: {self._verdict(ratios)}."
        return Explanation(
            question=question,
            answer=answer,
            candidate=candidate.values(),
            predicted=predicted,
            fits=fits,
            measured=near,
            reasons=[] if fits > SURE else [f"it fits the memory with a probability of {fits:.0%}"],
        )

    def _verdict(self, ratios: Mapping[str, float]) -> str:
        """A configuration's metrics, as multiples of the recommended one's, in words."""
        if self.recommended is None or not ratios:
            return "there is no recommendation to compare it with"
        gain = self._compromise(ratios)
        objectives = [o.metric for o in self.kept.objectives if o.metric in ratios]
        better = [METRICS[m].label for m in objectives if _better(m, ratios[m]) > NOTHING]
        worse = [METRICS[m].label for m in objectives if _better(m, ratios[m]) < -NOTHING]
        parts = [f"{word} {' and '.join(names)}" for names, word in ((better, "better"), (worse, "worse")) if names]
        return (
            f"{math.exp(gain):.2f}x the recommended one as a compromise of the objectives"
            f" ({', '.join(parts) or 'all about equal'})"
        )

    def _compromise(self, ratios: Mapping[str, float]) -> float:
        """Logarithm of the weighted geometric mean of the gains over the recommended configuration."""
        weighed = [(o.weight, _better(o.metric, ratios[o.metric])) for o in self.kept.objectives if o.metric in ratios]
        return sum(weight * gain for weight, gain in weighed) / sum(weight for weight, _ in weighed) if weighed else 0.0

    def _gains(self, candidates: Sequence[Candidate]) -> Floats:
        """The predicted gain of many candidates, up to a constant."""
        logs = self._logs(candidates)
        total = np.zeros(len(candidates))
        for o in self.kept.objectives:
            if o.metric in logs:
                total += o.weight * (
                    logs[o.metric][0] if METRICS[o.metric].direction == "maximize" else -logs[o.metric][0]
                )
        return total

    def _logs(self, candidates: Sequence[Candidate]) -> dict[str, tuple[Floats, Floats]]:
        """Logarithms of the metrics of candidates, as means and standard deviations."""
        said = self.sampler.guide.beliefs(self.told, candidates)
        batch = np.log([c.global_batch_size(self.setting.world_size) for c in candidates])
        (time, time_sd), (samples, samples_sd) = said.log_step_time, said.log_samples
        logs = {
            "step_time_s": (time, time_sd),
            "samples_per_s": (batch - time, time_sd),
            "peak_memory_bytes": said.log_memory,
        }
        if any(o.metric == "time_to_loss_s" for o in self.kept.objectives):
            logs["time_to_loss_s"] = time + samples - batch, np.hypot(time_sd, samples_sd)
        if any(o.metric == GOODPUT for o in self.kept.objectives):
            logs[GOODPUT] = batch - time - said.log_useful[0], np.hypot(time_sd, said.log_useful[1])
        return logs

    def _predicted(self, candidate: Candidate) -> dict[str, dict[str, float]]:
        found = {}
        for metric, (means, sds) in self._logs([candidate]).items():
            mean, sd = float(means[0]), float(sds[0])
            low, high = (math.exp(mean + sign * INTERVAL * sd) for sign in (-1, 1))
            found[metric] = {"value": math.exp(mean), "low": low, "high": high}
            if self.best.get(metric):
                found[metric]["ratio"] = math.exp(mean) / self.best[metric]
        return found

    def _limit(self) -> str:
        assert self.kept.search is not None
        return format_bytes(self.kept.search.memory_limit_bytes or 0.0)

    def _without(self, name: str, now: Scalar, before: Scalar) -> str:
        """The effect of one of the recommended configuration's changes, as the loss without it."""
        assert self.recommended is not None
        other = _changed(self.space, self.recommended, name, before)
        change = f"{name} {_said(now)} instead of {_said(before)}"
        reason = why_illegal(other, self.setting)
        if other == self.recommended or reason is not None:
            return f"{change}: goes with the others" + (f" ({reason})" if reason else "")
        ratios = {m: said["ratio"] for m, said in self._predicted(other).items() if "ratio" in said}
        gain = self._compromise(ratios)
        n_with, n_other = (
            sum(trial["candidate"].get(name) == value and trial["outcome"] in RAN for trial in self.trials)
            for value in (now, before)
        )
        effect = (
            "undone it is predicted to be as good"
            if abs(gain) < NOTHING
            else f"undone it is predicted to be {math.exp(gain):.2f}x as good"
        )
        figures = ", ".join(
            f"{METRICS[m].label} {ratio:.2f}x" for m, ratio in ratios.items() if abs(math.log(ratio)) >= NOTHING
        )
        return (
            f"{change}: {effect}{f' ({figures})' if figures else ''}; {n_with} trials had it, {n_other} {_said(before)}"
        )

    def _scope(self) -> list[str]:
        """The number of trials behind the answer, and how well they predict each other."""
        outlook = self.sampler.guide.outlook(self.told)
        ran = sum(trial["outcome"] in RAN for trial in self.trials)
        said = [
            f"{ran} configurations ran, of {len(self.sampler.guide.catalogue.candidates):,} that the search looked at"
        ]
        if outlook.covered > 0:
            said.append(
                f"{outlook.covered:.0%} of the step times lie in the 90 % interval in which the other trials"
                " foretell them"
            )
        if all(map(math.isfinite, outlook.gains.values())) and outlook.gains:
            gains = ", ".join(f"{METRICS[m].label} {gain:.1%}" for m, gain in outlook.gains.items())
            said.append(f"the largest improvement that is still expected of a candidate: {gains}")
        return said


def _changed(space: SearchSpace, start: Candidate, name: str, value: Scalar) -> Candidate:
    """A configuration with one knob set; None removes the knob."""
    values = start.values()
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value
    if space.samples_per_rank is not None and name == "micro_batch_size" and isinstance(value, int):
        values["gradient_accumulation_steps"] = max(1, space.samples_per_rank // value)
    changed = Candidate.of(values)
    # Knobs whose condition no longer holds are dropped.
    return space.candidate(space.values_of(changed), changed)


def _nearest(trials: Sequence[Mapping[str, Any]], candidate: Candidate) -> list[dict[str, Any]]:
    """The trials of a configuration, or else those that differ least from it."""
    values = candidate.values()

    def differs(trial: Mapping[str, Any]) -> list[str]:
        other = trial["candidate"]
        names = dict.fromkeys([*values, *other])
        return [f"{n} {_said(other.get(n))}" for n in names if values.get(n) != other.get(n)]

    def distance(trial: Mapping[str, Any]) -> float:
        batches = [
            abs(math.log2(trial["candidate"][n] / getattr(candidate, n)))
            for n in ("micro_batch_size", "gradient_accumulation_steps")
        ]
        return len(differs(trial)) + 0.5 * sum(batches)

    ordered = sorted(trials, key=lambda trial: (distance(trial), trial["trial"]))
    exact = [trial for trial in ordered if not differs(trial)]
    return [
        {
            "trial": t["trial"],
            "outcome": t["outcome"],
            "reason": t["reason"],
            "metrics": t["metrics"],
            "differs": differs(t),
        }
        for t in (exact or ordered)[:NEAREST]
    ]


def _better(metric: str, ratio: float) -> float:
    """Logarithm of the gain; above 0 is better."""
    return -math.log(ratio) if METRICS[metric].direction == "minimize" else math.log(ratio)


def _said(value: Any) -> str:
    return "the default" if value is None else str(value)


def _figures(metrics: Mapping[str, float]) -> str:
    shown = [m for m in dict.fromkeys([*PICKS.values()]) if m in metrics]
    return "".join(f", {quantity(m, metrics[m])}" for m in shown)
