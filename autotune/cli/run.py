"""`autotune run`: tunes a target and prints the answer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from autotune.cli.answer import _print_answer
from autotune.report.progress import ProgressView
from autotune.session import tune
from autotune.system import redaction
from autotune.system.files import shown
from autotune.system.signals import status_of


def run(target: str, overrides: Mapping[str, Any], *, fresh: bool, as_json: bool, learn: bool = True) -> int:
    """`autotune run`: tunes the target and writes the answer.

    Returns:
        Exit status: 0 a configuration can be recommended, 1 none can, 130 the user stopped it, 143 SIGTERM did.
    """
    with ProgressView() as view:
        tuned = tune(target, overrides, fresh=fresh, learn=learn, view=view)
    if tuned.report is None:
        print("autotune: stopped before the first trial ended; nothing to keep", file=sys.stderr)
        assert tuned.stopped is not None
        return status_of(tuned.stopped)
    _print_answer(tuned.report, [shown(path) for path in tuned.written], as_json=as_json)
    if tuned.refused is not None:
        raise tuned.refused
    if tuned.stopped is not None:
        arguments = [argument for argument in sys.argv[1:] if argument != "--fresh"]
        again = shlex.join(["autotune", *redaction.redact(arguments)])
        print(f"autotune: stopped; this is the best so far. To go on, run: {again}", file=sys.stderr)
        return status_of(tuned.stopped)
    if not tuned.report.recommended["picks"]:
        print(f"autotune: {tuned.report.why_nothing}, so there is nothing to recommend", file=sys.stderr)
        return 1
    return 0
