"""Measurements of two configurations in turns, one round after another; complete rounds survive an interruption."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.retune.comparison import Reading
from autotune.scoring import metrics
from autotune.space.candidate import Candidate
from autotune.study.runner import Runner
from autotune.study.warm_start import HistoryRecorder
from autotune.trial.folder import result_in
from autotune.trial.result import Outcome, TrialResult


@dataclass(frozen=True)
class Rounds:
    """Measures two configurations once per round.

    Attributes:
        role: Role of the measurements in the history: `check` or `duel`.
        sides: The configurations, by name.
        check_alive: Raises if the study was deleted meanwhile.
    """

    folder: Path
    role: str
    sides: Mapping[str, Candidate]
    runner: Runner
    recorder: HistoryRecorder
    check_alive: Callable[[], None]

    def __call__(self, n: int) -> dict[str, Reading]:
        """Measure round n, or read it if an interrupted run completed it."""
        self.check_alive()
        paths = {name: self.folder / f"{n:02d}" / name for name in self.sides}
        results = {name: result for name, path in paths.items() if (result := result_in(path)) is not None}
        if len(results) < len(paths):
            # The order alternates, so that drift affects both alike.
            for name in list(self.sides) if n % 2 else list(self.sides)[::-1]:
                result = results[name] = self.runner.measure_again(self.sides[name], paths[name])
                measured = self._metrics(result)
                self.recorder.keep(n, self.role, self.sides[name], str(result.outcome), measured, result.wall_s)
        return {name: Reading.of(result, self._metrics(result)) for name, result in results.items()}

    def _metrics(self, result: TrialResult) -> dict[str, float]:
        if result.outcome is not Outcome.COMPLETE:
            return {}
        # A round is too short for a loss curve.
        reference = (
            replace(self.runner.state.reference, loss_target=None) if self.runner.state.reference is not None else None
        )
        return {name: estimate.value for name, estimate in metrics.measure(result, reference).items()}
