"""Which forward calls of an engine a script trains on: it may skip batches, as one whose loss is not finite."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autotune.worker.containers import tensors_in


@dataclass
class Call:
    """A forward call.

    Attributes:
        shape: Of the tensor that counts its samples.
        rows: Its samples by that.
        tokens: Tokens with and without padding.
        reached: A backward pass came to its output, as far as is known.
    """

    shape: tuple[int, ...]
    rows: int
    tokens: tuple[int, Tensor | float]
    reached: bool = True

    def reach(self, _gradient: Any) -> None:
        """Notes that a backward pass came to the output."""
        self.reached = True


class Calls:
    """The forward calls of a step, and which of them a backward pass came to.

    A loss may take several of them, and so may a batch before it that the script has skipped: only what goes backward tells
    the two apart.

    Attributes:
        tokens: Tokens of the step, by the first call of each micro-batch and by all calls.
        real_tokens: The same without padding.
    """

    def __init__(self, engine: Any) -> None:
        self._calls: list[Call] = []  # of the micro-batch under way
        self._latest: Call | None = None
        self.restart()
        engine.register_forward_hook(self._on_output)

    def restart(self) -> None:
        """Begins another step."""
        self.tokens: list[int] = [0, 0]
        self.real_tokens: list[Tensor | float] = [0, 0]

    def add(self, call: Call) -> None:
        """Adds a call that begins."""
        self._count(1, [call], 1)
        if not self._calls:
            self._count(0, [call], 1)
        self._calls.append(call)
        self._latest = call

    def _count(self, way: int, calls: list[Call], sign: int) -> None:
        for call in calls:
            self.tokens[way] += sign * call.tokens[0]
            self.real_tokens[way] = self.real_tokens[way] + sign * call.tokens[1]

    def _on_output(self, _engine: Any, _args: Any, output: Any) -> None:
        call, self._latest = self._latest, None
        if call is None:
            return
        for tensor in tensors_in(output, objects=True):
            if tensor.requires_grad and not tensor.is_leaf:  # a parameter that the model returns would keep each hook
                call.reached = False
                tensor.register_hook(call.reach)

    def settle(self) -> tuple[list[Call], int]:
        """Ends a micro-batch, and takes the tokens of batches that were skipped before it out.

        Returns:
            For each skipped batch the first call of the one that followed it; and the samples of the micro-batch's own calls.
        """
        calls, self._calls = self._calls, []
        n_skipped = next((i for i, call in enumerate(calls) if call.reached), 0)
        skipped, own = calls[:n_skipped], calls[n_skipped:]
        if skipped:
            self._count(0, calls[:1], -1)
            self._count(0, own[:1], 1)
            self._count(1, skipped, -1)
        # As many calls make a batch that is skipped as one that is not.
        followed = [*skipped[len(own) :: len(own)], *own[:1]] if skipped else []
        return followed, sum(call.rows for call in own)
