"""One coordinator of a study whose trials do nothing: for tests and benchmarks to run in processes, and to kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.study.events import Event, EventSink, Kind
from autotune.study.parallel import ClaimedTrial
from autotune.study.proposals import Proposer
from autotune.study.runner import Runner
from autotune.study.storage import records
from autotune.study.storage.database import failing_in_words, open_storage
from autotune.study.storage.leases import StudyLeases
from autotune.study.tell import Teller
from support.instant import Instant, plan_of, report, spec_of

# 2,560 candidates, all of which run.
SPACE = {
    "micro_batch_size": list(range(1, 41)),
    "gradient_accumulation_steps": list(range(1, 17)),
    "precision": ["fp32", "bf16"],
    "checkpoint_every": [0, 1],
}


class Timed:
    """Notes how long a coordinator waited for its turn, decided, and told."""

    times: Any
    waited_s = asked_s = 0.0


@contextmanager
def _timed() -> Iterator[None]:
    claim, decide, tell = Proposer.claim, Proposer.next, Teller.tell

    def timed_claim(self: Proposer) -> Any:
        start = time.perf_counter()
        claimed = claim(self)
        Timed.asked_s = time.perf_counter() - start
        return claimed

    def timed_next(self: Proposer) -> Any:
        start = time.perf_counter()
        found = decide(self)
        if isinstance(found, ClaimedTrial):
            times = {"wait_s": Timed.waited_s, "decide_s": time.perf_counter() - start, "claim_s": Timed.asked_s}
            Timed.times.write(json.dumps(times | {"n": found.asked.number}) + "\n")
        return found

    def timed_tell(self: Teller, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        tell(self, *args, **kwargs)
        Timed.times.write(json.dumps({"tell_s": time.perf_counter() - start, "n": args[0].number}) + "\n")
        Timed.times.flush()

    Proposer.claim, Proposer.next, Teller.tell = timed_claim, timed_next, timed_tell  # type: ignore[method-assign]
    try:
        yield
    finally:
        Proposer.claim, Proposer.next, Teller.tell = claim, decide, tell  # type: ignore[method-assign]


class Printed(EventSink):
    """Prints notes, and the number of each trial that starts or ends."""

    def emit(self, event: Event) -> None:
        if event.kind is Kind.NOTE:
            print(event.text, flush=True)
        elif event.kind is Kind.TRIAL_STARTED:
            print(f"began {event.trial}", flush=True)
        elif event.progress is not None:
            print(f"ended {event.progress.number} {event.progress.outcome}", flush=True)


def coordinate(
    role: str, folder: Path, trials: int, seconds: float, sampler: str, url: str, finalists: int = 1
) -> None:
    """Leads or helps the study `s` in a folder and a database; each trial takes so many seconds.

    What asking and telling took goes to `times-PID.jsonl` in the folder.
    """
    storage = open_storage(url)
    ledger = StudyLeases(storage, "s")

    def behaviour(candidate: Any) -> Any:
        time.sleep(seconds)
        return report(candidate)

    plain = {"memory_filter": False, "stop_trials": False, "stop_below": 0}
    spec = spec_of(trials=trials, finalists=finalists, repeats=1, sampler=sampler, space=[SPACE], **plain)
    with (
        open(folder / f"times-{os.getpid()}.jsonl", "w") as times,
        failing_in_words(url),
        _timed_turns(ledger),
        _timed(),
    ):
        Timed.times = times
        if role == "lead":
            with ledger.leading(lambda text: print(text, flush=True)):
                Runner(plan_of(spec), Instant(behaviour), folder / "s", ledger, Printed()).run()
        else:
            while "s" not in records.study_names(storage) or not records.told_trials(records.load_study(storage, "s")):
                time.sleep(0.2)
            Runner(plan_of(spec), Instant(behaviour), folder / "s", ledger, Printed(), leads=False).help()


@contextmanager
def _timed_turns(ledger: StudyLeases) -> Iterator[None]:
    original = ledger._take_turn

    def take() -> Any:
        start = time.perf_counter()
        connection = original()
        Timed.waited_s = time.perf_counter() - start
        return connection

    ledger._take_turn = take  # type: ignore[method-assign]
    yield
