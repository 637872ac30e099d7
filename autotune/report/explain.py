"""The evidence for a study's answer in words: measurements near it, predictions, and the effect of single changes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna.study import Study

from autotune.errors import printable
from autotune.report.data import Data, StudyReport, differences, metric_scale, quantity, times
from autotune.report.expectations import Expectations
from autotune.report.trial_notes import counted, ended
from autotune.scoring.estimates import WITHIN_NOISE
from autotune.scoring.measured import improvement, weighted_gain
from autotune.scoring.metrics import METRICS
from autotune.scoring.recommend import PICKS
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.system.units import format_bytes
from autotune.trial.result import RAN, Outcome

NEAREST = 3  # trials shown beside a configuration that was not run
NOTHING = 0.01  # a predicted gain of 1 % is no reason for anything
SURE = 0.99
SHOWN = tuple(dict.fromkeys(PICKS.values()))  # metrics of a trial that are shown, in order, after those predicted
# What an explanation takes from a trial's row; the last ones say why it may not be recommended, or is no better.
OF_TRIAL = "trial outcome reason metrics measurements feasible doubt gate unreproducible tied".split()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """An answer with its evidence; its JSON has the same fields.

    Attributes:
        candidate: The configuration in question, if there is one.
        predicted: For each metric `value`, `low`, `high` (90 % interval), and `ratio` to `reference`.
        fits: Probability that it fits the memory.
        measured: Trials of it, or near it: `differs` (knobs in which it does), and of the report's row `OF_TRIAL`.
        reasons: Further evidence, a sentence each.
        reference: What `ratio` is to, in words.
    """

    question: str
    answer: str
    candidate: dict[str, Scalar] | None = None
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    fits: float | None = None
    measured: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    reference: str = "what is predicted for the recommended one"

    def to_data(self) -> dict[str, Any]:
        """The explanation for programs."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The explanation for people."""
        found = [self.question, "", self.answer]
        if self.predicted:
            found += ["", "predicted from all trials (90 % interval):"]
        for metric, said in self.predicted.items():
            scale = metric_scale(metric, [said["value"]])
            ratio = f", {times(said['ratio'])} {self.reference}" if "ratio" in said else ""
            span = scale.interval(said["low"], said["high"], " to ")
            found.append(f"  {METRICS[metric].label}: {scale.quantity(said['value'])} ({span}){ratio}")
        if self.measured:
            found += ["", "measured:"]
        for m in self.measured:
            shown = [name for name in dict.fromkeys([*self.predicted, *SHOWN]) if name in m["metrics"]]
            figures = [f"{METRICS[name].label} {quantity(name, m['metrics'][name])}" for name in shown]
            end = ", ".join([f"trial {m['trial']}: {_end(m)}", *figures])
            found.append(f"  {end}{'; it has ' + ', '.join(m['differs']) if m['differs'] else ''}")
        return found + ([""] + [f"- {reason}" for reason in self.reasons] if self.reasons else [])


class Evidence:
    """Answers questions about a study's recommendation, from its trials and from what the search model expects.

    Raises:
        StoreError: autotune did not make the study, or died while it did.
    """

    def __init__(self, study: Study, report: StudyReport) -> None:
        timed = {Candidate.of(row["candidate"]): row["metrics"].get("step_time_s") for row in report.trials}
        known = {candidate: step_s for candidate, step_s in timed.items() if step_s}
        self.expected = Expectations(study, Path(report.study["stored_in"]), known)
        self.report = report
        self.trials = [trial for trial in report.trials if trial["metrics"] or trial["outcome"] != Outcome.COMPLETE]
        pick = report.picks.get("recommended")
        self.recommended = Candidate.of(pick["candidate"]) if pick else None
        self.best: Mapping[str, float] = pick["metrics"] if pick else {}
        # A prediction is compared with a prediction: what was measured may lie off what the model makes of all trials.
        said = self.expected.predicted(self.recommended, self.best) if self.recommended else {}
        self.predicted_best = {metric: each["value"] for metric, each in said.items() if metric in self.best}

    def choice(self) -> Explanation:
        """Why the recommended configuration, knob by knob."""
        if self.recommended is None:
            answer = f"{self.report.why_nothing.capitalize()}."
            return Explanation(question="Why is nothing recommended?", answer=answer, reasons=self._scope())
        pick = self.report.picks["recommended"]
        changed = differences(self.recommended.values(), self.expected.baseline.values())
        return Explanation(
            question=f"Why is {self.recommended.describe()} (trial {pick['trial']}) recommended?",
            answer=f"It is {pick['reasons'][0]}.",
            candidate=self.recommended.values(),
            predicted=self.expected.predicted(self.recommended, self.best),
            reference="what the recommended trial measured",
            measured=_nearest(self.trials, self.recommended),
            reasons=[
                *pick["reasons"][1:],
                *(self._without(self.recommended, *change) for change in changed),
                *self._scope(),
            ],
        )

    def what_if(self, changes: Mapping[str, Scalar]) -> Explanation:
        """The recommended configuration (the baseline where there is none) with knobs changed, all of them at once."""
        start = self.recommended or self.expected.baseline
        changed = self.expected.changed(start, changes)
        what = "the recommended configuration" if self.recommended else "the baseline"
        said = " and ".join(f"{name} were {_said(value)}" for name, value in changes.items())
        question = f"What if {said} in {what}?"
        if changed == start:
            answer, near = f"It is: {start.describe()}.", _nearest(self.trials, start)
            return Explanation(question=question, answer=answer, candidate=start.values(), measured=near)
        return self._illegal(question, changed) or self._judged(question, changed)

    def why_not(self, name: str, value: Scalar) -> Explanation:
        """Why nothing with that value is recommended: the best configuration that has it."""
        question = f"Why not {name} = {_said(value)}?"
        best = self.recommended
        if value is None:  # a field's default is one of its values
            value = self.expected.changed(best or self.expected.baseline, {name: value}).values().get(name)
        if best is not None and best.values().get(name) == value:
            answer = f"It is recommended: {best.describe()}."
            return Explanation(question=question, answer=answer, candidate=best.values())
        left_out = self.report.study.get("left_out") or ()
        having = [candidate for candidate in self.expected.candidates if candidate.values().get(name) == value]
        pool = [candidate for candidate in having if self.expected.why_illegal(candidate) is None]
        if not pool:
            alone = self.expected.changed(best or self.expected.baseline, {name: value})
            if (refused := self._illegal(question, alone)) is not None:
                return refused
            said = self._judged(question, alone)
            answer = f"The space of this study does not hold it. {said.answer}"
            return replace(said, answer=answer, reasons=[*left_out, *said.reasons])
        fitting, least = self.expected.fitting(pool)
        if not fitting:
            needed = f"predicted to need {least}, a rank has {self.expected.memory_limit}"
            return Explanation(question=question, answer=f"No candidate with it fits: the smallest is {needed}.")
        ends = {Candidate.of(trial["candidate"]): trial["outcome"] for trial in self.trials}
        hopeful = [candidate for candidate in fitting if ends.get(candidate, Outcome.COMPLETE) in RAN]
        if not hopeful:
            words, near = {ended(ends[candidate]) for candidate in fitting}, _nearest(self.trials, fitting[0])
            answer = f"No candidate with it completed: {', '.join(sorted(words))}."
            return Explanation(question=question, answer=answer, measured=near)
        said = self._judged(question, self.expected.most_promising(hopeful))
        own = [trial for trial in self.trials if trial["candidate"].get(name) == value]
        bad = [trial for trial in own if trial["outcome"] not in RAN]
        scope = f"{len(own)} of the {len(self.trials)} trials had it; the configuration above is expected to be the best with it"
        if bad:
            scope += f"; {len(bad)} of them did not run to the end, as trial {bad[0]['trial']}: {_end(bad[0])}"
        return replace(said, reasons=[scope, *left_out, *said.reasons])

    def _illegal(self, question: str, candidate: Candidate) -> Explanation | None:
        if (reason := self.expected.why_illegal(candidate)) is None:
            return None
        answer = f"It cannot run here: {reason}."
        return Explanation(question=question, answer=answer, candidate=candidate.values())

    def _judged(self, question: str, candidate: Candidate) -> Explanation:
        """A configuration that can run, against the recommended one."""
        near, fits = _nearest(self.trials, candidate), self.expected.fits(candidate)
        predicted, words = self.expected.predicted(candidate, self.predicted_best), candidate.describe()
        exact = next((m for m in near if not m["differs"]), None)
        if exact is not None and exact["outcome"] not in RAN:
            answer = f"was tried in trial {exact['trial']} and ended with {ended(exact['outcome'])}: {_speaks_against(exact)}"
        elif exact is not None:
            answer = f"was measured in trial {exact['trial']}{self._compared(exact)}"
        elif fits < self.expected.least_chance:
            low, high = (format_bytes(predicted["peak_memory_bytes"][end]) for end in ("low", "high"))
            answer = f"would not fit: predicted to need {low} to {high}, a rank has {self.expected.memory_limit}"
        else:
            answer = (
                f"was not run; predicted{self._breaks(predicted)}: {self._verdict(_ratios(predicted), 'predicted')}"
            )
        return Explanation(
            question=question,
            answer=f"{words} {answer}.",
            candidate=candidate.values(),
            predicted=predicted,
            fits=fits,
            measured=near,
            reasons=[] if fits > SURE else [f"it fits the memory with a probability of {fits:.0%}"],
        )

    def _breaks(self, predicted: Mapping[str, Mapping[str, float]]) -> str:
        """That a configuration is predicted to break constraints, and which; empty if it keeps all."""
        over = self.expected.broken({name: said["value"] for name, said in predicted.items()})
        return f" to break a constraint ({', '.join(over)})" if over else ""

    def _compared(self, trial: Data) -> str:
        """A trial that ran against the recommended one, in words: first what keeps it from being recommended."""
        own, ratios = trial["metrics"], self._measured_ratios(trial)
        said, why = self._verdict(ratios, "measured", tied=bool(trial.get("tied"))), _speaks_against(trial)
        if trial.get("feasible") is False and (over := self.expected.broken(own)):
            why += f" ({', '.join(over)})"
        elif not why and not trial.get("tied") and self._compromise(ratios) > 0 and self._only_once(trial):
            why = "it was measured once, and only what was measured again is recommended"
        return f", but it cannot be recommended: {why}; {said}" if why else f": {said}"

    def _measured_ratios(self, trial: Data) -> dict[str, float]:
        """A trial's metrics as multiples of the recommended one's."""
        own = trial["metrics"]
        return {name: own[name] / value for name, value in self.best.items() if own.get(name) and value}

    def _only_once(self, trial: Data) -> bool:
        """Whether a trial was measured once, and the recommended one again."""
        pick = self.report.picks.get("recommended") or {}
        return trial.get("measurements") == 1 and pick.get("measurements") != 1

    def _verdict(self, ratios: Mapping[str, float], how: str, *, tied: bool = False) -> str:
        """A configuration's metrics, as multiples of the recommended one's, in words.

        Args:
            how: How they are known: `measured` or `predicted`.
            tied: Whether the two cannot be told apart.
        """
        if self.recommended is None:
            return "there is no recommendation to compare it with"
        gains = {
            o.metric: improvement(math.log(ratios[o.metric]), o.metric)
            for o in self.expected.objectives
            if o.metric in ratios
        }
        unknown = [METRICS[o.metric].label for o in self.expected.objectives if o.metric not in gains]
        without = f"{' and '.join(unknown)} not {how}"
        if not gains:
            return f"{without}, so it cannot be compared"
        better = [METRICS[metric].label for metric, gain in gains.items() if gain > NOTHING]
        worse = [METRICS[metric].label for metric, gain in gains.items() if gain < -NOTHING]
        parts = [f"{word} {' and '.join(names)}" for names, word in ((better, "better"), (worse, "worse")) if names]
        factor, said = times(math.exp(self._compromise(ratios))), parts or ["all about equal"]
        noise = f", {WITHIN_NOISE}" if tied else ""
        whole = ", ".join([*said, *([without] if unknown else [])])
        by = " as a compromise of the objectives" if len(self.expected.objectives) > 1 else ""
        return f"{factor} the recommended one{by}{noise} ({whole})"

    def _compromise(self, ratios: Mapping[str, float]) -> float:
        """Logarithm of the weighted geometric mean of the gains over the recommended configuration."""
        objectives = self.expected.objectives
        shown = {each.metric: math.log(ratios[each.metric]) for each in objectives if each.metric in ratios}
        return weighted_gain(shown, objectives)

    def _without(self, best: Candidate, name: str, before: Scalar, now: Scalar) -> str:
        """The effect of one of the recommended configuration's changes, as the loss without it."""
        other = self.expected.changed(best, {name: before})
        change = f"{name} {_said(now)} instead of {_said(before)}"
        reason = self.expected.why_illegal(other)
        if other == best or reason is not None:
            return f"{change}: belongs to the other changes" + (f" ({reason})" if reason else "")
        predicted = self.expected.predicted(other, self.predicted_best)
        ratios, how, tied = _ratios(predicted), "it is predicted", ""
        ran = (each for each in self.trials if each["outcome"] == Outcome.COMPLETE)
        if own := next((each for each in ran if Candidate.of(each["candidate"]) == other), None):
            ratios = {name: ratio for name, ratio in self._measured_ratios(own).items() if name in predicted}
            how, tied = f"it was measured in trial {own['trial']}", f", {WITHIN_NOISE}" if own.get("tied") else ""
        gain = self._compromise(ratios)
        good = "as good" if abs(gain) < NOTHING else f"{times(math.exp(gain))} as good"
        moved = [
            f"{METRICS[name].label} {times(ratio)}" for name, ratio in ratios.items() if abs(math.log(ratio)) >= NOTHING
        ]
        figures = f" ({', '.join(moved)})" if moved else ""
        n_now, n_before = self._n_ran(name, now), self._n_ran(name, before)
        tried = f"tried {n_now} x with {_said(now)}, {n_before} x with {_said(before)}"
        return f"{change}: with {_said(before)} {how} to be {good}{tied}{figures}{self._but(other, predicted)}; {tried}"

    def _but(self, candidate: Candidate, predicted: Mapping[str, Mapping[str, float]]) -> str:
        """What keeps a configuration from being the answer, however good it is predicted to be; empty if nothing does."""
        own = [trial for trial in self.trials if Candidate.of(trial["candidate"]) == candidate]
        if own and (why := _speaks_against(own[0])):
            return f", but trial {own[0]['trial']} of it cannot be recommended: {why}"
        if not own and self.expected.fits(candidate) < self.expected.least_chance:
            return ", but not to fit the memory"
        breaks = "" if own else self._breaks(predicted)
        return f", but{breaks}" if breaks else ""

    def _n_ran(self, name: str, value: Scalar) -> int:
        return sum(trial["candidate"].get(name) == value and trial["outcome"] in RAN for trial in self.trials)

    def _scope(self) -> list[str]:
        """The number of trials behind the answer, and how well they predict each other."""
        outlook, n_seen = self.expected.outlook, len(self.expected.candidates)
        tried = counted(trial["outcome"] for trial in self.trials)
        said = [f"{len(self.trials)} of {n_seen:,} configurations were tried: {tried}"]
        if outlook.covered > 0 and outlook.n_ran > 1:
            where = "within the 90 % interval that the other trials predict for them"
            said.append(f"{outlook.covered:.0%} of the measured step times lie {where}")
        reason = str(self.report.study.get("ended") or "")
        if "expected to improve" in reason:  # by the search, which left things out and may have known other studies
            said.append(reason)
        elif math.isfinite(outlook.loss) and outlook.n_left:
            left_out = "; what the run leaves out counts here" if self.report.study.get("left_out") else ""
            said.append(
                f"the best of all that was not measured, whichever it is, is expected to be {outlook.loss:.1%} better; one more trial is"
                f" expected to gain {outlook.next_gain:.2%}{left_out}"
            )
        return said


def _ratios(predicted: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {metric: said["ratio"] for metric, said in predicted.items() if "ratio" in said}


def _end(trial: Data) -> str:
    """How a trial ended, with the reason where it did not run to the end or may not be recommended."""
    end, why = ended(trial["outcome"]), _speaks_against(trial)
    return f"{end} ({why})" if why else end


def _speaks_against(trial: Data) -> str:
    """Why a trial may not be recommended, whatever it measured; empty if it may."""
    if trial["outcome"] != Outcome.COMPLETE:
        return printable(trial["reason"])
    if trial.get("feasible") is False:
        return "it breaks a constraint"
    alone = trial.get("unreproducible") or ()
    return f"only a trial can run it: {', '.join(alone)}" if alone else str(trial.get("doubt") or "")


def _nearest(trials: Sequence[Data], candidate: Candidate) -> list[dict[str, Any]]:
    """The trials of a configuration, or else those that differ least from it."""
    values, found = candidate.values(), []
    for trial in trials:
        other = trial["candidate"]
        differs = [f"{name} {_said(own)}" for name, _, own in differences(other, values)]
        steps = sum(abs(math.log2(other[n] / values[n])) for n in ("micro_batch_size", "gradient_accumulation_steps"))
        data = {name: trial.get(name) for name in OF_TRIAL} | {"differs": differs}
        found.append((len(differs) + 0.5 * steps, data))
    found.sort(key=lambda each: (each[0], each[1]["trial"]))
    exact = [data for distance, data in found if distance == 0]
    return (exact or [data for _, data in found])[:NEAREST]


def _said(value: Any) -> str:
    return "the default" if value is None else str(value)
