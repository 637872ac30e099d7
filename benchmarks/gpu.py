"""What autotune does on a GPU: forecasts, limits, search, overhead and honesty, each result written as it comes (see `gpu.sh`).

`python benchmarks/gpu.py --out DIR [--budget 540] [--parts grid,search] [--sizes gpt-125m] [--dry-run]` writes
`DIR/results.jsonl`, one line a result, and `DIR/study.tar.gz`; `gpu_results.py` makes figures of them. The parts come
in order of what they tell for their time, so that whoever stops the call has lost the least. On a CPU a tiny model goes
the same way (`--dry-run`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import complete, plain_trial, request_of

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.forecast.predictor import Predictor, settings_of
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import Plan, plan, profiled
from autotune.study.spec.spec import StudySpec
from autotune.trial.folder import TrialDir
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult

MODEL = Path(__file__).parent / "gpu_model.py"
GIB = 1 << 30
# Cards that a cap on the allocator stands in for: what is left of them once CUDA has taken its part.
CARDS_GIB = {"24 GB": 23.0, "40 GB": 38.5, "80 GB": 78.0}
DRY_CARDS_GIB = {"tiny": 0.06, "small": 0.12}
MOST_SAMPLES = 512
# A part is begun only if so much is left for it.
LEAST_S = 30.0
PARTS = ("default", "doctor", "grid", "search", "honesty", "limits", "startup", "larger")
# Parts that are commands as a user types them, before anything else has touched the device.
COMMANDS = ("default", "doctor")


@dataclass(frozen=True)
class Size:
    """A model: its shape, and a micro-batch that any card takes."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    micro: int

    @property
    def line(self) -> str:
        shape = (self.layers, self.width, self.heads, self.context, self.vocabulary)
        return f"LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = {', '.join(map(str, shape))}"


SIZES = {
    "gpt-125m": Size(12, 768, 12, 1024, 50304, 8),
    "gpt-350m": Size(24, 1024, 16, 1024, 50304, 4),
    "gpt-760m": Size(24, 1536, 16, 2048, 50304, 2),
    "gpt-1.3b": Size(24, 2048, 16, 2048, 50304, 1),
}
TINY = {"gpt-tiny": Size(2, 32, 2, 16, 64, 2), "gpt-small": Size(2, 64, 2, 32, 64, 2)}


class Output:
    """The results, one line each, on the disk as soon as they are there."""

    SHOWN = ("model", "words", "outcome", "step_time_s", "reason", "error")

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path, self.start = folder, folder / "results.jsonl", time.monotonic()
        self.path.unlink(missing_ok=True)

    def write(self, part: str, **what: Any) -> None:
        at_s = round(time.monotonic() - self.start, 2)
        with self.path.open("a") as file:
            file.write(json.dumps({"part": part, "at_s": at_s, **what}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shown = {key: value for key, value in what.items() if key in self.SHOWN}
        print(f"{at_s:7.1f} s  {part}  {json.dumps(shown)}", flush=True)


class Energy:
    """Joules that the device has taken, read from NVML all the while; nothing where there is none.

    Args:
        read: The counter in joules; found by NVML if not given.
    """

    EVERY_S = 0.02

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        self.times, self.joules = list[float](), list[float]()
        self._read, self._stopped = read or self._nvml(), threading.Event()
        if self._read is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def between(self, start: float, end: float) -> float | None:
        """Joules between two instants of `time.time()`, interpolated linearly; None where they were not all seen."""
        n = len(self.joules)
        if n < 2 or start < self.times[0] or end > self.times[n - 1]:
            return None
        first, last = np.interp([start, end], self.times[:n], self.joules[:n])
        return float(last - first)

    def close(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        assert self._read is not None
        while not self._stopped.is_set():
            self.times.append(time.time())
            self.joules.append(self._read())  # last, so that each reading has a time
            self._stopped.wait(self.EVERY_S)

    @staticmethod
    def _nvml() -> Callable[[], float] | None:
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
            device = pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
            return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
        return None


class Bench:
    """One model with its study's plan, an engine, and what was learned of it so far."""

    def __init__(self, name: str, size: Size, found: Plan, executor: LocalExecutor, folder: Path, run: Run) -> None:
        self.name, self.size, self.found, self.executor, self.folder = name, size, found, executor, folder
        self.output, self.energy, self.trial_budget_s, self.n = run.output, run.energy, run.trial_budget_s, 0
        workload = found.workload
        assert workload.profile is not None and workload.machine is not None, found.notes
        self.predictors = {  # before and after any trial
            name: Predictor(workload.profile, workload.machine, settings_of(found.base_config))
            for name in ("before", "after")
        }

    def measure(
        self, part: str, knobs: dict[str, Any], *, cap_bytes: int | None = None, max_steps: int = 1000
    ) -> TrialResult | None:
        """One trial, written with what was expected of it; None where the configuration cannot run here."""
        candidate = Candidate.of(knobs)
        row = {
            "model": self.name,
            "words": candidate.describe(),
            "candidate": candidate.values(),
            "cap_bytes": cap_bytes,
        }
        if reason := why_illegal(candidate, replace(self.found.setting, global_batch=None)):
            self.output.write(part, **row, outcome="illegal", reason=reason)
            return None
        self.n += 1
        path = self.folder / "measured" / f"{self.n:04d}"
        request = self.request(
            candidate, budget_s=self.trial_budget_s, max_steps=max_steps, device_memory_bytes=cap_bytes
        )
        row["expected"] = {name: self.expected(name, candidate) for name in self.predictors}
        result = base.run(self.executor, path, request)
        row |= {name: getattr(result, name) for name in ("outcome", "reason", "wall_s", "startup_s")}
        if result.outcome is Outcome.COMPLETE and result.steps is not None:
            row |= self.figures(result, path)
            seen = {"peak_memory_bytes": result.peak_memory_bytes, "step_time_s": result.steps.median_s}
            self.predictors["after"].learn(candidate, **seen)
        self.output.write(part, **row)
        return result

    def request(self, candidate: Candidate, **fields: Any) -> TrialRequest:
        config = self.found.ds_config(candidate)
        return request_of(self.found.spec.target, candidate, ds_config=config, deadline_s=90.0, **fields)

    def expected(self, name: str, candidate: Candidate) -> dict[str, Any]:
        predictor, found = self.predictors[name], {}
        for metric, said in (
            ("peak_memory_bytes", predictor.memory(candidate).total), ("step_time_s", predictor.step_time(candidate).total),
        ):  # fmt: skip
            found[metric] = {"value": said.value, "low": said.low, "high": said.high}
        return found

    def figures(self, result: TrialResult, path: Path) -> dict[str, Any]:
        assert result.steps is not None
        same = ("samples_per_step", "tokens_per_step", "micro_step_s", "phase_times_s", "peak_memory_bytes")
        found = {name: getattr(result, name) for name in (*same, "memory_by_phase_bytes", "alloc_retries")}
        report = json.loads(TrialDir(path).report(0).read_text())
        return found | {
            "step_time_s": result.steps.median_s, "ci95_s": result.steps.ci95_s, "n_steps": result.steps.n_steps,
            "reserved_memory_bytes": report.get("reserved_memory_bytes"),
            "final_loss": result.losses[-1] if result.losses else None, "joules_per_step": self.joules_per_step(path),
        }  # fmt: skip

    def joules_per_step(self, path: Path) -> float | None:
        """From the instants at which steps were reported, while the counter ran."""
        lines = [json.loads(line) for line in TrialDir(path).events.read_text().splitlines()]
        steps = [(line["step"], line["time"]) for line in lines if "step" in line][2:]
        if len(steps) < 2 or steps[-1][0] == steps[0][0]:
            return None
        time.sleep(2 * Energy.EVERY_S)
        joules = self.energy.between(steps[0][1], steps[-1][1])
        return joules / (steps[-1][0] - steps[0][0]) if joules is not None else None


class Run:
    """The parts, in their order."""

    def __init__(self, output: Output, folder: Path, *, dry: bool, budget_s: float) -> None:
        self.output, self.folder, self.dry = output, folder, dry
        self.until = time.monotonic() + budget_s
        self.energy = Energy()
        self.trial_budget_s = 0.2 if dry else 2.0

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def all(self, sizes: dict[str, Size], parts: list[str]) -> None:
        first, *others = sizes.items()
        for part in [part for part in COMMANDS if part in parts]:
            self.part(part, lambda part=part: getattr(self, part)(*first))  # type: ignore[misc]
        with self.bench(*first) as bench:
            bench.executor.start()
            self.system(bench)
            for part in [part for part in PARTS if part in parts and part not in (*COMMANDS, "larger")]:
                self.part(part, lambda part=part: getattr(self, part)(bench))  # type: ignore[misc]
        if "larger" in parts:
            for name, size in others:
                self.part("larger", lambda name=name, size=size: self.larger(name, size))  # type: ignore[misc]
        self.output.write("end", left_s=self.left_s)

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Runs a part; what goes wrong in it is a result too, and the next part follows."""
        if self.left_s < (2 if self.dry else LEAST_S):
            self.output.write(name, error="not run: the time was over")
            return
        try:
            run()
        except Exception as error:
            self.output.write(name, error=f"{type(error).__name__}: {error}"[:2000])

    def default(self, name: str, size: Size) -> None:
        """The first thing that a user does: `autotune run model.py`, without a configuration or a toolkit."""
        target = write_study(self.folder / "default" / name, size, dry=self.dry).with_name("model.py")
        seconds = round(min(90.0, self.left_s / 4))
        few = ["--trials", "2"] if self.dry else ["--trials", "12", "--time-budget", f"{seconds}s"]
        self.command("default", "run", str(target), *few, most_s=3 * seconds)

    def doctor(self, _: str, __: Size) -> None:
        """What the machine is, and the rates that it reaches."""
        self.command("doctor", "doctor", "--json", most_s=60.0)
        self.command("doctor", "probe", "--json", most_s=90.0)

    def command(self, part: str, *arguments: str, most_s: float) -> None:
        """Runs a command of autotune in a process of its own, and writes how it ended and the last that it printed."""
        began = time.monotonic()
        command, most_s = [sys.executable, "-m", "autotune", *arguments], min(most_s, self.left_s)
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, cwd=self.folder, stdout=said, stderr=said, start_new_session=True)
            try:
                status: int | None = process.wait(most_s)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(process.pid, signal.SIGINT)  # it ends its ranks and writes what it has
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            words = f"autotune {' '.join(arguments)}".replace(str(self.folder), ".")
            tail = said.read()[-4000:]
        seconds = time.monotonic() - began
        self.output.write(
            part, words=words, outcome="stopped" if status is None else status, seconds=seconds, said=tail
        )

    @contextlib.contextmanager
    def bench(self, name: str, size: Size) -> Iterator[Bench]:
        path = write_study(self.folder / "studies" / name, size, dry=self.dry)
        spec = StudySpec.load(path, {})
        scratch = self.folder / "scratch" / name
        with executor_for(spec, scratch) as executor:
            found = profiled(plan(spec, executor, scratch), executor, scratch)
            bench = Bench(name, size, found, executor, scratch, self)
            self.output.write(
                "model", model=name, size=asdict(size), notes=found.notes, profile=asdict(found.workload.profile),  # type: ignore[arg-type]
                machine=asdict(found.workload.machine), base_config=found.base_config,  # type: ignore[arg-type]
            )  # fmt: skip
            yield bench

    def system(self, bench: Bench) -> None:
        environment = asdict(bench.found.workload.environment)
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout if not self.dry else ""
        self.output.write(
            "system", environment=environment, cold_reason=bench.executor.cold_reason, energy=bool(self.energy.joules),
            date=time.strftime("%Y-%m-%d"), nvidia_smi=smi[:4000], dry=self.dry,
        )  # fmt: skip

    def grid(self, bench: Bench) -> None:
        """Every stage, precision and way to save memory once, against its forecast."""
        self.measure(bench, "grid", grid(bench.size)[: 6 if self.dry else None])

    def measure(self, bench: Bench, part: str, wanted: list[dict[str, Any]]) -> None:
        for knobs in wanted:
            if self.dry or self.left_s > 20:
                bench.measure(part, knobs)

    def startup(self, bench: Bench) -> None:
        """What a trial takes beyond its steps: warm, and as torchrun starts it."""
        candidate, target = Candidate(micro_batch_size=bench.size.micro, zero_stage=1), bench.found.spec.target
        request = bench.request(candidate, max_steps=7)
        for number in range(1 if self.dry else 3):
            began = time.perf_counter()
            result = complete(bench.executor, bench.folder / f"startup-{number}", request)
            warm_s = time.perf_counter() - began - sum(result.step_times_s)
            wall_s, times = plain_trial(target, request.ds_config, bench.folder, 7, ranks=1)
            self.output.write("startup", warm_s=warm_s, torchrun_s=wall_s - sum(times), startup_s=result.startup_s)

    def limits(self, bench: Bench) -> None:
        """The largest micro-batch that really runs under each cap, beside the one that was foretold; above it memory really ends."""
        environment = bench.found.workload.environment
        for card, gib in (DRY_CARDS_GIB if self.dry else CARDS_GIB).items():
            cap = int(gib * GIB)
            if cap > environment.share_bytes(1):
                self.output.write("limits", card=card, error="this device is smaller")
                continue
            for knobs in ({"precision": "bf16"}, {"precision": "bf16", "checkpoint_every": 1})[: 1 if self.dry else 2]:
                if self.left_s < 20 and not self.dry:
                    return
                self.limit(bench, card, cap, knobs)

    def limit(self, bench: Bench, card: str, cap: int, knobs: dict[str, Any]) -> None:
        sizes = range(1, MOST_SAMPLES + 1)
        mean, sd = bench.predictors["after"].log_memory([Candidate.of({**knobs, "micro_batch_size": n}) for n in sizes])
        surely, likely = (int(np.searchsorted(edge, np.log(cap), side="right")) for edge in (mean + 1.2816 * sd, mean))
        ran, failed = 0, MOST_SAMPLES + 1
        outcomes: list[str] = []
        micro = max(1, surely)
        while failed - ran > max(1, ran // 16) and len(outcomes) < (3 if self.dry else 6):
            result = bench.measure("limit trial", {**knobs, "micro_batch_size": micro}, cap_bytes=cap, max_steps=4)
            if result is None:
                return
            outcomes.append(str(result.outcome))
            if result.outcome is Outcome.COMPLETE:
                ran = micro
            elif result.outcome is Outcome.OOM:
                failed = micro
            else:
                break
            # From what surely fits to what likely fits, then by an eighth until it fails; then between the two.
            upwards = max(ran + 1, likely if likely > ran else round(1.125 * ran))
            micro = min(upwards, MOST_SAMPLES) if failed > MOST_SAMPLES else (ran + failed) // 2
            if micro in (ran, 0):
                break
        self.output.write(
            "limits", model=bench.name, card=card, cap_bytes=cap, candidate=knobs, surely_fits=surely, likely_fits=likely, ran=ran,
            out_of_memory=failed if failed <= MOST_SAMPLES else None, outcomes=outcomes,
        )  # fmt: skip

    def search(self, bench: Bench) -> None:
        """A study as a user runs it."""
        folder = bench.found.spec.target.parent
        budget = max(10.0, min(150.0, self.left_s - 20))
        trials = ["--trials", "4"] if self.dry else []
        command = [sys.executable, "-m", "autotune.cli", "run", str(folder / "study.yaml"), *trials]
        began = time.time()
        command += ["--time-budget", f"{budget:.0f}s", "--fresh", "--json"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        print(done.stderr[-3000:], flush=True)
        same = ("candidate", "outcome", "reason", "samples_per_step", "peak_memory_bytes", "wall_s")
        for path in sorted(folder.glob("trials/[0-9]*/result.json")):
            result = json.loads(path.read_text())
            row = {name: result[name] for name in same} | {"step_time_s": (result["steps"] or {}).get("median_s")}
            self.output.write("search trial", trial=path.parent.name, ended_s=path.stat().st_mtime - began, **row)
        results = folder.glob("trials/**/result.json")
        ran_s = sum(json.loads(path.read_text())["wall_s"] for path in results)  # those measured again, too
        self.output.write(
            "search", model=bench.name, exit_status=done.returncode, wall_s=time.time() - began, trials_s=ran_s,
            budget_s=budget,
        )  # fmt: skip
        with tarfile.open(self.output.folder / "study.tar.gz", "w:gz") as archive:
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.suffix in (".yaml", ".py", ".json", ".md") and path.name != "report.json":
                    archive.add(path, f"{bench.name}/{path.name}")

    def honesty(self, bench: Bench) -> None:
        """What trials claim, against the same configuration in a plain script, in turns."""
        wanted = [{"micro_batch_size": bench.size.micro, "precision": "bf16", "zero_stage": 1}]
        recommended = bench.found.spec.target.parent / "recommended.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            wanted.insert(0, json.loads(recommended.read_text())["picks"]["recommended"]["candidate"])
        for knobs in wanted[: 1 if self.dry else None]:
            candidate = Candidate.of(knobs)
            if candidate.checkpoint_every:
                candidate = replace(candidate, checkpoint_every=0)  # the plain script knows nothing of it
            config = bench.found.ds_config(candidate)
            for _ in range(1 if self.dry else 2):
                result = bench.measure("honesty trial", candidate.values())
                if result is None or result.steps is None:
                    break
                steps = min(60, len(result.step_times_s) + 5)
                _, times = plain_trial(bench.found.spec.target, config, bench.folder, steps, ranks=1)
                plain_s, claimed_s = float(np.median(times[5:] or times)), result.steps.median_s
                row = {"candidate": candidate.values(), "claimed_s": claimed_s, "plain_s": plain_s}
                self.output.write("honesty", **row, ratio=plain_s / claimed_s)

    def larger(self, name: str, size: Size) -> None:
        """A few configurations of a larger model, those that save most memory too."""
        with self.bench(name, size) as bench:
            self.measure(bench, "larger", larger(size)[: 2 if self.dry else None])


def grid(size: Size) -> list[dict[str, Any]]:
    """The configurations of the first model, what tells most first."""
    plain = {"micro_batch_size": size.micro, "precision": "bf16"}
    many = {"micro_batch_size": 4 * size.micro}
    changes: list[dict[str, Any]] = [
        {}, {"zero_stage": 1}, {"precision": "fp16", "zero_stage": 1}, {"precision": "fp32"}, {"zero_stage": 3}, {"checkpoint_every": 1},
        {"zero_stage": 2}, {"precision": "torch_autocast"}, {"zero_stage": 2, "offload_optimizer": "cpu"},
        {"micro_batch_size": 1}, {"micro_batch_size": 2 * size.micro}, {"zero_stage": 1, "gradient_accumulation_steps": 4},
        {"zero_stage": 2, "gradient_accumulation_steps": 4}, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"precision": "fp16"}, {"precision": "fp16", "zero_stage": 3},
    ]  # fmt: skip
    sixteen = {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    changes += [
        {"zero_stage": 1, **sixteen}, many, {**many, "checkpoint_every": 1}, {**many, "checkpoint_every": 2},
    ]  # fmt: skip
    return [{**plain, **change} for change in changes]


def larger(size: Size) -> list[dict[str, Any]]:
    plain = {"micro_batch_size": size.micro, "precision": "bf16"}
    twice = {**plain, "micro_batch_size": 2 * size.micro}
    return [
        {**plain, "zero_stage": 1}, {**plain, "checkpoint_every": 1}, {**twice, "zero_stage": 1, "checkpoint_every": 1},
        {**plain, "zero_stage": 2, "offload_optimizer": "cpu"}, {**plain, "zero_stage": 3}, plain,
    ]  # fmt: skip


def write_study(folder: Path, size: Size, *, dry: bool) -> Path:
    """A study's folder with the model of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    text, n = re.subn(r"^LAYERS, WIDTH.*$", size.line, MODEL.read_text(), flags=re.MULTILINE)
    assert n == 1, "gpu_model.py has no line of sizes"
    (folder / "model.py").write_text(text)
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": size.micro, "bf16": {"enabled": True}, "optimizer": optimizer}
    study = {
        "target": "model.py", "ranks": 1, "base_config": config, "global_batch": "free", "seed": 0,
        "space": ["batch", "zero", "precision", "checkpointing", "offload"],
        "objectives": ["latency", "throughput", "memory"], "trial_deadline_s": 90,
        **({"trials": 4, "trial_budget_s": 0.2, "finalists": 1, "repeats": 1} if dry else
           {"trials": 40, "trial_budget_s": 2, "finalists": 3, "repeats": 2}),
    }  # fmt: skip
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds, after which no part is begun")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sizes", default="", help=f"of {', '.join(SIZES)}; the first is the one that is searched")
    parser.add_argument("--dry-run", action="store_true", help="the same with tiny models, on a CPU")
    arguments = parser.parse_args()
    known = TINY if arguments.dry_run else SIZES
    sizes = {name: known[name] for name in arguments.sizes.split(",") if name} or known
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    output = Output(arguments.out)
    with tempfile.TemporaryDirectory(prefix="autotune-gpu-") as name:
        # Nothing that this machine found out earlier: the profile is part of what is measured.
        os.environ["AUTOTUNE_CACHE"] = os.environ.get("AUTOTUNE_GPU_CACHE") or str(Path(name) / "cache")
        Run(output, Path(name), dry=arguments.dry_run, budget_s=arguments.budget).all(sizes, parts)


if __name__ == "__main__":
    main()
