"""One coordinator of a study whose trials do nothing: for tests and benchmarks to run in processes, and to kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instant import Instant, plan_of, report, spec_of

from autotune import store
from autotune.claims import Ledger
from autotune.flights import Claim
from autotune.study import Runner

# 2,560 candidates, all of which run.
SPACE = {
    "micro_batch_size": list(range(1, 41)),
    "gradient_accumulation_steps": list(range(1, 17)),
    "precision": ["fp32", "bf16"],
    "checkpoint_every": [0, 1],
}


class Timed(Runner):
    """A runner that notes how long it waited for its turn, decided, and told."""

    times: Any
    waited_s = asked_s = 0.0

    def _claim(self) -> Any:
        start = time.perf_counter()
        claim = super()._claim()
        self.asked_s = time.perf_counter() - start
        return claim

    def _next(self) -> Any:
        start = time.perf_counter()
        found = super()._next()
        if isinstance(found, Claim):
            times = {"wait_s": self.waited_s, "decide_s": time.perf_counter() - start, "claim_s": self.asked_s}
            self.times.write(json.dumps(times | {"n": found.asked.number}) + "\n")
        return found

    def _tell(self, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        super()._tell(*args, **kwargs)
        self.times.write(json.dumps({"tell_s": time.perf_counter() - start, "n": args[0].number}) + "\n")
        self.times.flush()


class Silent:
    """Prints what is said, and nothing for a trial."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def ended(self, progress: Any) -> None:
        print(f"ended {progress.number} {progress.outcome}", flush=True)

    def began(self, number: int, *_: object) -> None:
        print(f"began {number}", flush=True)

    def waiting(self) -> None: ...

    def tick(self) -> None: ...


def coordinate(
    role: str, folder: Path, trials: int, seconds: float, sampler: str, url: str, finalists: int = 1
) -> None:
    """Leads or helps the study `s` in a folder and a database; each trial takes so many seconds.

    What asking and telling took goes to `times-PID.jsonl` in the folder.
    """
    storage = store.open_storage(url)
    ledger = Ledger(storage, "s")

    def behaviour(candidate: Any) -> Any:
        time.sleep(seconds)
        return report(candidate)

    plain = {"memory_filter": False, "stop_trials": False, "stop_below": 0}
    spec = spec_of(trials=trials, finalists=finalists, repeats=1, sampler=sampler, space=[SPACE], **plain)
    with open(folder / f"times-{os.getpid()}.jsonl", "w") as times, store.failing_in_words(url), _timed_turns(ledger):
        Timed.times = times
        if role == "lead":
            with ledger.leading(lambda text: print(text, flush=True)):
                Timed(plan_of(spec), Instant(behaviour), folder / "s", ledger, Silent()).run()
        else:
            while "s" not in store.study_names(storage) or not store.told_trials(store.load_study(storage, "s")):
                time.sleep(0.2)
            Timed(plan_of(spec), Instant(behaviour), folder / "s", ledger, Silent()).help()


@contextmanager
def _timed_turns(ledger: Ledger) -> Iterator[None]:
    original = ledger._take_turn

    def take() -> Any:
        start = time.perf_counter()
        connection = original()
        Timed.waited_s = time.perf_counter() - start
        return connection

    ledger._take_turn = take  # type: ignore[method-assign]
    yield
