"""The evaluation that a script may do before it trains: no part of its steps, but of each trial's time."""

import time

from autotune.worker.measure.ledger import Window
from autotune.worker.script.context import ScriptContext

# An evaluation that takes longer is worth leaving out.
LONG_S = 5.0


class FirstEvaluation:
    """Notes an evaluation before the first training forward, and starts the clock of the steps after it."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._began: float | None = None
        self._over = False

    def forward(self, window: Window | None, *, trains: bool) -> None:
        """Notes a forward call of the engine, in a window of steps."""
        if self._over:
            return
        self._over = trains
        if not trains and self._began is None:
            self._began = time.monotonic()
            self._context.recorder.enter("first_evaluation")
        elif trains and self._began is not None:
            took_s = time.monotonic() - self._began
            self._context.recorder.enter("warmup")
            if window is not None:
                window.restart()
            if took_s > LONG_S and self._context.candidate is None:
                self._context.once(
                    f"the script evaluates for {took_s:.0f} s before it trains, and so does each trial: leave that out while"
                    " it is tuned"
                )
