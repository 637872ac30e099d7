"""What autotune does on a GPU: forecasts, limits, search, overhead and honesty, each result written as it comes (see `gpu.sh`).

`python benchmarks/gpu.py --out DIR [--budget 490] [--parts grid,search] [--sizes gpt-125m] [--dry-run]` writes
`DIR/results.jsonl`, one line a result, `DIR/study.tar.gz`, and the records and logs of all trials (`DIR/logs.tar.gz`);
`gpu_results.py` makes figures of the first two. The parts come in order of what they tell for their time, so that
whoever stops the call has lost the least. Each has a limit of its own, and looks at the clock before each of its trials.
On a CPU a tiny model goes the same way (`--dry-run`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from common import complete, plain_trial, ran, request_of
from gpu_bench import SIZES, TINY, Bench, Output, Size, grid, larger, unseen, write_study

from autotune.executors import base
from autotune.space.candidate import Candidate
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import plan, profiled
from autotune.study.spec.spec import StudySpec
from autotune.trial.folder import TrialDir
from autotune.trial.result import Outcome

TRAINER = Path(__file__).parent / "gpu_trainer.py"
GIB = 1 << 30
# Cards that a cap on the allocator stands in for: what is left of them once CUDA has taken its part. The last is the card itself.
CARDS_GIB: dict[str, float | None] = {"24 GB": 23.0, "40 GB": 38.5, "80 GB": 78.0, "full": None}
DRY_CARDS_GIB: dict[str, float | None] = {"tiny": 0.06, "full": 0.12}
MOST_SAMPLES = 512
# Seconds after which a part begins nothing more; in the order in which they run.
PARTS = {
    "default": 130.0, "doctor": 60.0, "grid": 110.0, "search": 100.0, "honesty": 110.0, "trainer": 110.0, "forecast": 30.0,
    "limits": 80.0, "kill": 40.0, "segments": 70.0, "startup": 70.0, "larger": 150.0,
}  # fmt: skip
# Parts that are commands as a user types them, before anything else has touched the device.
COMMANDS = ("default", "doctor")
# A part, and a trial, is begun only if so much is left for it.
LEAST_S, LEAST_TRIAL_S = 30.0, 12.0
PLAIN_STEPS, SETTLING = 500, 5
# Torch's variable for its allocator.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# What a run leaves behind of its folder, file by file, so that what went wrong can be read where no GPU is.
LOGS, LARGEST_LOG_BYTES = (".json", ".jsonl", ".log", ".md", ".txt", ".yaml"), 200_000
# Share of the memory that the trial after a killed one takes.
NEARLY_FULL = 0.92


class Run:
    """The parts, in their order."""

    def __init__(self, output: Output, folder: Path, *, dry: bool, budget_s: float) -> None:
        self.output, self.folder, self.dry = output, folder, dry
        self.until = self.part_until = time.monotonic() + budget_s
        self.trial_budget_s = 0.2 if dry else 2.0
        self.largest: tuple[dict[str, Any], int | None] | None = None  # that `limits` saw running, and under which cap

    @property
    def left_s(self) -> float:
        return self.part_until - time.monotonic()

    def room(self, least_s: float = LEAST_TRIAL_S) -> bool:
        """Whether another trial is to be begun; a dry run leaves nothing out."""
        return self.dry or self.left_s > least_s

    def all(self, sizes: dict[str, Size], parts: list[str]) -> None:
        first, *others = sizes.items()
        for part in [part for part in COMMANDS if part in parts]:
            self.part(part, lambda part=part: getattr(self, part)(*first))  # type: ignore[misc]
        within = [part for part in PARTS if part in parts and part not in (*COMMANDS, "larger")]
        if within:
            with self.written("bench"), self.bench(*first) as bench:
                bench.executor.start()
                self.system(bench)
                for part in within:
                    self.part(part, lambda part=part: getattr(self, part)(bench))  # type: ignore[misc]
        for name, size in (others or [first]) if "larger" in parts else ():
            self.part("larger", lambda name=name, size=size: self.larger(name, size))  # type: ignore[misc]
        self.part_until = self.until
        self.output.write("end", left_s=self.left_s)

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Runs a part; what goes wrong in it is a result too, and the next part follows."""
        began = time.monotonic()
        self.part_until = self.until if self.dry else min(self.until, began + PARTS[name])
        if not self.dry and self.until - began < LEAST_S:
            self.output.write(name, error="not run: the time was over")
            return
        with self.written(name):
            run()
        self.output.write("clock", of=name, seconds=time.monotonic() - began)

    @contextlib.contextmanager
    def written(self, name: str) -> Iterator[None]:
        """Writes what goes wrong, and where, in place of ending the call."""
        try:
            yield
        except Exception as error:
            where = traceback.format_exc()[-4000:]
            self.output.write(name, error=f"{type(error).__name__}: {error}"[:2000], where=where)

    def default(self, name: str, size: Size) -> None:
        """The first thing that a user does: `autotune run model.py`, without a configuration or a toolkit."""
        target = write_study(self.folder / "default" / name, size, dry=self.dry).with_name("model.py")
        few = ["--trials", "2", "--quick"] if self.dry else ["--time-budget", f"{0.75 * self.left_s:.0f}s"]
        self.command("default", "run", str(target), *few)

    def doctor(self, _: str, __: Size) -> None:
        """What the machine is, and the rates that it reaches."""
        self.command("doctor", "doctor", "--json")
        self.command("doctor", "probe", "--json")

    def command(self, part: str, *arguments: str) -> int | None:
        """Runs a command of autotune, and writes how it ended and the last that it printed; returns its status."""
        began = time.monotonic()
        status, said = ran([sys.executable, "-m", "autotune", *arguments], max(5.0, self.left_s), cwd=self.folder)
        words = f"autotune {' '.join(arguments)}".replace(str(self.folder), ".").replace(
            f"{TRAINER.parent.parent}/", ""
        )
        self.output.write(
            part, words=words, outcome="stopped" if status is None else status, seconds=time.monotonic() - began,
            said=said[-4000:],
        )  # fmt: skip
        return status

    @contextlib.contextmanager
    def bench(self, name: str, size: Size) -> Iterator[Bench]:
        path = write_study(self.folder / "studies" / name, size, dry=self.dry)
        spec = StudySpec.load(path, {})
        scratch = self.folder / "scratch" / name
        with executor_for(spec, scratch) as executor:
            found = profiled(plan(spec, executor, scratch), executor, scratch)
            bench = Bench(name, size, found, executor, scratch)
            self.output.write(
                "model", model=name, size=asdict(size), notes=found.notes, profile=asdict(found.workload.profile),  # type: ignore[arg-type]
                machine=asdict(found.workload.machine), base_config=found.base_config,  # type: ignore[arg-type]
            )  # fmt: skip
            yield bench

    def system(self, bench: Bench) -> None:
        try:
            _, smi = ran(["nvidia-smi"], 10.0)
        except OSError:
            smi = ""
        self.output.write(
            "system", environment=asdict(bench.found.workload.environment), cold_reason=bench.executor.cold_reason,
            date=time.strftime("%Y-%m-%d"), nvidia_smi=smi[:4000], dry=self.dry,
        )  # fmt: skip

    def measure(self, bench: Bench, part: str, wanted: list[dict[str, Any]]) -> None:
        for knobs in wanted:
            if self.room():
                self.one(bench, part, knobs)

    def one(self, bench: Bench, part: str, knobs: dict[str, Any], **more: Any) -> Any:
        """A trial, which may take no longer than is left."""
        deadline_s = 90.0 if self.dry else max(LEAST_TRIAL_S, min(90.0, self.until - time.monotonic()))
        return bench.measure(self.output, part, knobs, budget_s=self.trial_budget_s, deadline_s=deadline_s, **more)

    def grid(self, bench: Bench) -> None:
        """Every stage, precision and way to save memory once, against its forecast."""
        self.measure(bench, "grid", grid(bench.size)[: 6 if self.dry else None])

    def search(self, bench: Bench) -> None:
        """A study as a user runs it."""
        folder, began = bench.found.spec.target.parent, time.time()
        budget = max(10.0, 0.7 * self.left_s)
        few = ["--trials", "4"] if self.dry else ["--time-budget", f"{budget:.0f}s"]
        status = self.command("search command", "run", str(folder / "study.yaml"), *few, "--fresh", "--json")
        same = ("candidate", "outcome", "reason", "samples_per_step", "peak_memory_bytes", "wall_s")
        for path in sorted(folder.glob("trials/[0-9]*/result.json")):
            result = json.loads(path.read_text())
            row = {name: result[name] for name in same} | {"step_time_s": (result["steps"] or {}).get("median_s")}
            self.output.write("search trial", trial=path.parent.name, ended_s=path.stat().st_mtime - began, **row)
        results = folder.glob("trials/**/result.json")
        ran_s = sum(json.loads(path.read_text())["wall_s"] for path in results)  # those measured again, too
        self.output.write(
            "search", model=bench.name, exit_status=status, wall_s=time.time() - began, trials_s=ran_s, budget_s=budget
        )
        with tarfile.open(self.output.folder / "study.tar.gz", "w:gz") as archive:
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.suffix in (".yaml", ".py", ".json", ".md") and path.name != "report.json":
                    archive.add(path, f"{bench.name}/{path.name}")

    def honesty(self, bench: Bench) -> None:
        """What trials claim, against the same configuration in a plain script that waits for the device at its ends only."""
        wanted = [{"micro_batch_size": bench.size.micro, "precision": "bf16", "zero_stage": 1}]
        recommended = bench.found.spec.target.parent / "recommended.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            wanted.insert(0, json.loads(recommended.read_text())["picks"]["recommended"]["candidate"])
        for knobs in wanted[: 1 if self.dry else None]:
            # The plain script knows nothing of recomputation.
            candidate = replace(Candidate.of(knobs), checkpoint_every=0)
            result = self.one(bench, "honesty trial", candidate.values()) if self.room() else None
            if result is None or result.steps is None:
                continue
            fit = int(0.4 * self.left_s / result.steps.median_s)
            steps = 20 if self.dry else max(20, min(PLAIN_STEPS, fit))
            _, times = plain_trial(
                bench.found.spec.target, bench.found.ds_config(candidate), bench.folder, steps + SETTLING, ranks=1,
                timeout_s=60.0 if self.dry else max(20.0, self.left_s),
            )  # fmt: skip
            plain_s, timed = float(np.mean(times[SETTLING:])), result.step_times_s[result.steps.n_warmup :]
            claimed_s = float(np.mean(timed))
            row = {"candidate": candidate.values(), "claimed_s": claimed_s, "plain_s": plain_s, "plain_steps": steps}
            self.output.write("honesty", **row, ratio=plain_s / claimed_s)

    def trainer(self, bench: Bench) -> None:
        """A script under transformers' Trainer, started as its user starts it."""
        if missing := [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]:
            self.output.write("trainer", error=f"not run: {', '.join(missing)} is not installed")
            return
        size, folder = bench.size, self.folder / "trainer"
        folder.mkdir(exist_ok=True)
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 1}}  # fmt: skip
        (folder / "ds.json").write_text(json.dumps(auto))
        flags = {
            "layers": size.layers, "width": size.width, "heads": size.heads, "context": size.context,
            "vocabulary": size.vocabulary, "per_device_train_batch_size": size.micro, "max_steps": 1000, "deepspeed": folder / "ds.json",
            "output_dir": folder / "out", "save_strategy": "no", "report_to": "none", "bf16": True,
        }  # fmt: skip
        words = [
            "torchrun",
            "--nproc_per_node",
            "1",
            str(TRAINER),
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        few = (
            ["--trials", "3", "--quick"]
            if self.dry
            else ["--trials", "8", "--time-budget", f"{0.75 * self.left_s:.0f}s"]
        )
        self.command("trainer", "run", " ".join(words), "--ranks", "1", *few)

    def forecast(self, bench: Bench) -> None:
        """Configurations that nothing measured before, against what the forecast says of them by now."""
        self.measure(bench, "forecast", unseen(bench.size)[: 2 if self.dry else None])

    def limits(self, bench: Bench) -> None:
        """The largest micro-batch that really runs under each cap, beside the one that was foretold; above it memory really ends."""
        share = bench.found.workload.environment.share_bytes(1)
        cards = DRY_CARDS_GIB if self.dry else CARDS_GIB
        for card, gib in sorted(cards.items(), key=lambda each: each[0] != "full"):  # the card itself first
            cap = None if gib is None else int(gib * GIB)
            if cap is not None and cap > share:
                self.output.write("limits", card=card, error="this device is smaller")
                continue
            for knobs in ({"precision": "bf16"}, {"precision": "bf16", "checkpoint_every": 1})[: 1 if self.dry else 2]:
                if self.room():
                    self.limit(bench, card, cap, share, knobs)

    def limit(self, bench: Bench, card: str, cap: int | None, share: float, knobs: dict[str, Any]) -> None:
        sizes, limit = range(1, MOST_SAMPLES + 1), np.log(cap or share)
        mean, sd = bench.predictors["after"].log_memory([Candidate.of({**knobs, "micro_batch_size": n}) for n in sizes])
        surely, likely = (int(np.searchsorted(edge, limit, side="right")) for edge in (mean + 1.2816 * sd, mean))
        worked, failed = 0, MOST_SAMPLES + 1
        outcomes: list[str] = []
        micro = max(1, surely)
        while failed - worked > max(1, worked // 16) and len(outcomes) < (3 if self.dry else 6) and self.room():
            result = self.one(bench, "limit trial", {**knobs, "micro_batch_size": micro}, cap_bytes=cap, max_steps=4)
            if result is None:
                return
            outcomes.append(str(result.outcome))
            if result.outcome is Outcome.COMPLETE:
                worked = micro
            elif result.outcome is Outcome.OOM:
                failed = micro
            else:
                break
            # From what surely fits to what likely fits, then by an eighth until it fails; then between the two.
            upwards = max(worked + 1, likely if likely > worked else round(1.125 * worked))
            micro = min(upwards, MOST_SAMPLES) if failed > MOST_SAMPLES else (worked + failed) // 2
            if micro in (worked, 0):
                break
        if card == "full" and worked and self.largest is None:
            self.largest = {**knobs, "micro_batch_size": worked}, cap
        self.output.write(
            "limits", model=bench.name, card=card, cap_bytes=cap, candidate=knobs, surely_fits=surely, likely_fits=likely,
            ran=worked, out_of_memory=failed if failed <= MOST_SAMPLES else None, outcomes=outcomes,
        )  # fmt: skip

    def kill(self, bench: Bench) -> None:
        """A rank that dies in the middle of a step on a nearly full device, and whether the next such trial finds it free."""
        knobs, cap = self.largest or ({"precision": "bf16", "micro_batch_size": self._fitting(bench)}, None)
        path = bench.folder / "killed"
        request = bench.request(Candidate.of(knobs), budget_s=60.0, device_memory_bytes=cap)
        killer = threading.Thread(target=self._kill_in_mid_step, args=(path, bench), daemon=True)
        killer.start()
        began = time.monotonic()
        killed = base.run(bench.executor, path, request)
        ended_s = time.monotonic() - began
        killer.join(5.0)
        after = self.one(bench, "kill trial", knobs, cap_bytes=cap, max_steps=4)
        self.output.write(
            "kill", candidate=knobs, killed=killed.outcome, reason=killed.reason, ended_s=ended_s,
            next_trial=after and after.outcome, why=after and after.reason,
        )  # fmt: skip

    def _fitting(self, bench: Bench) -> int:
        """The micro-batch that is expected to take nearly all memory."""
        sizes = range(1, MOST_SAMPLES + 1)
        mean, _ = bench.predictors["after"].log_memory(
            [Candidate.of({"precision": "bf16", "micro_batch_size": n}) for n in sizes]
        )
        share = NEARLY_FULL * bench.found.workload.environment.share_bytes(1)
        return max(1, int(np.searchsorted(mean, np.log(share), side="right")))

    @staticmethod
    def _kill_in_mid_step(path: Path, bench: Bench) -> None:
        """Waits until a trial has made some steps, and kills the ranks."""
        server, until = bench.executor._server, time.monotonic() + 60.0
        assert server is not None
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if TrialDir(path).events.read_text().count('"step"') >= 3:
                    break
            time.sleep(0.01)
        for rank in psutil.Process(server.pid).children():
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGKILL)

    def segments(self, bench: Bench) -> None:
        """The same configurations under torch's allocator as it is and with segments that grow, each from a server of its own."""
        micro = 4 * bench.size.micro
        wanted = [{"precision": "bf16", "micro_batch_size": n} for n in (micro, 9 * bench.size.micro + 2)]
        for setting in ("", "expandable_segments:True"):
            folder = self.folder / "segments" / (setting.partition(":")[0] or "usual")
            with (
                mock.patch.dict(os.environ, {ALLOCATOR: setting} if setting else {}),
                executor_for(bench.found.spec, folder) as executor,
            ):
                other = Bench(bench.name, bench.size, bench.found, executor, folder)
                for knobs in wanted[: 1 if self.dry else None]:
                    result = self.one(other, "segments trial", knobs, max_steps=6) if self.room() else None
                    if result is not None:
                        row = {"candidate": knobs, "allocator": setting, "outcome": result.outcome}
                        row["allocated_bytes"] = (result.memory_by_phase_bytes or {}).get("steady")
                        row["step_time_s"] = result.steps and result.steps.median_s
                        self.output.write("segments", **row, reserved_bytes=result.reserved_memory_bytes)

    def startup(self, bench: Bench) -> None:
        """What a trial takes beyond its steps, warm and as torchrun starts it: the model of the grid, and a large one on the device."""
        large = {"gpt-small": TINY["gpt-small"]} if self.dry else {"gpt-1.3b": SIZES["gpt-1.3b"]}
        for name, size in {bench.name: bench.size, **large}.items():
            target = write_study(self.folder / "startup" / name, size, dry=self.dry).with_name("model.py")
            candidate = Candidate(micro_batch_size=size.micro, zero_stage=1, precision="bf16")
            for number in range(1 if self.dry else 2):
                if not self.room(25.0):
                    return
                request = request_of(target, candidate, ds_config=bench.found.ds_config(candidate), max_steps=7)
                began = time.perf_counter()
                result = complete(bench.executor, bench.folder / f"startup-{name}-{number}", request)
                warm_s = time.perf_counter() - began - sum(result.step_times_s)
                wall_s, times = plain_trial(target, request.ds_config, bench.folder, 7, ranks=1, timeout_s=90.0)
                row = {"warm_s": warm_s, "torchrun_s": wall_s - sum(times), "startup_s": result.startup_s}
                self.output.write("startup", model=name, **row)

    def larger(self, name: str, size: Size) -> None:
        """A few configurations of a larger model, those that save most memory too."""
        with self.bench(name, size) as bench:
            self.measure(bench, "larger", larger(size)[: 2 if self.dry else None])


def pack_logs(folder: Path, path: Path) -> None:
    """Archives the records and logs below a run's folder, which goes with the machine."""
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.suffix in LOGS and file.stat().st_size <= LARGEST_LOG_BYTES:
                archive.add(file, file.relative_to(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=490.0, help="seconds, after which nothing is begun")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sizes", default="", help=f"of {', '.join(SIZES)}; the first is the one that is searched")
    parser.add_argument("--dry-run", action="store_true", help="the same with tiny models, on a CPU or a stand-in")
    arguments = parser.parse_args()
    known = TINY if arguments.dry_run else SIZES
    parts, names = arguments.parts.split(","), [name for name in arguments.sizes.split(",") if name]
    for flag, wrong, right in (("parts", set(parts) - set(PARTS), PARTS), ("sizes", set(names) - set(known), known)):
        if wrong:
            parser.error(f"--{flag}: unknown {', '.join(sorted(wrong))}; known: {', '.join(right)}")
    output = Output(arguments.out)
    with tempfile.TemporaryDirectory(prefix="autotune-gpu-") as name:
        # Nothing that this machine found out earlier: the profile is part of what is measured.
        os.environ["AUTOTUNE_CACHE"] = os.environ.get("AUTOTUNE_GPU_CACHE") or str(Path(name) / "cache")
        sizes = {name: known[name] for name in names} or known
        try:
            Run(output, Path(name), dry=arguments.dry_run, budget_s=arguments.budget).all(sizes, parts)
        finally:
            pack_logs(Path(name), output.folder / "logs.tar.gz")


if __name__ == "__main__":
    main()
