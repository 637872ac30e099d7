"""What autotune costs beyond the training it measures: `python benchmarks/overhead.py NAME [--rounds N]`.

Each case writes `results/NAME.json`:

    startup    a warm 2-rank ZeRO-1 trial without its steps, against torchrun of the same trial, interleaved
    scripts    a warm trial of a training script beyond its own steps, and what a study of one costs once (goal: < 3 s)
    large      a warm trial of a model of 1.1 billion parameters from disk, beyond its steps and moving its weights
               (goal: <= 2 s), beside torchrun of the same script, interleaved; needs 2.2 GB of disk and 8 GB of memory
    executors  what local, Slurm, Ray and ssh cost a 2-rank trial on the loopback of one machine, interleaved
    terminal   processor time of `autotune --help` and of the help of each command, and when `autotune run` first shows something
    driver     driver CPU time per trial (propose, write, read, tell, print) in a study whose trials take no time
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pty
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, complete, engine, plain_environment, plain_trial, request_of, write
from rich.console import Console

from autotune.cli.app import COMMANDS
from autotune.executors.base import Executor
from autotune.executors.cluster import ClusterExecutor, settings_for
from autotune.executors.local import LocalExecutor
from autotune.executors.ray import Ray
from autotune.executors.slurm import Slurm
from autotune.executors.ssh import Hosts, read_hostfile
from autotune.report.progress import ProgressView
from autotune.search import SAMPLERS
from autotune.space.candidate import Candidate
from autotune.study.runner import Runner
from autotune.study.setup import capture
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import plan
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import records
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import TrialResult
from autotune.trial.workload import Probed, Script
from autotune.worker.measure.breakdown import LONG_STEP_SHARE

CODE_GPT, SMALL = ROOT / "studies" / "code-gpt" / "model.py", ROOT / "tests" / "models" / "ok.py"
LARGE, PLAIN_TRIAL = Path(__file__).parent / "large_model.py", Path(__file__).parent / "plain_trial.py"
RANKS, START_UP_STEPS = 2, 7
LARGE_WAYS = ("model.py", "script")
ZERO_1 = Candidate(micro_batch_size=8, zero_stage=1)
Figures = dict[str, Any]


def timed(executor: Executor, folder: Path, request: TrialRequest) -> tuple[float, TrialResult]:
    """Runs a trial; returns its wall seconds, seen from the driver, and its result."""
    start = time.perf_counter()
    result = complete(executor, folder, request)
    return time.perf_counter() - start, result


def compared(pairs: Sequence[tuple[float, float]], ours: str, theirs: str) -> Figures:
    """Medians of interleaved pairs, and the median of their ratios, the first over the second."""
    first, second = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return {ours: statistics.median(first), theirs: statistics.median(second), "ratio": ratio, "pairs": pairs}


def startup(folder: Path, rounds: int) -> Figures:
    pairs = []
    start = time.perf_counter()
    with engine("torch", "deepspeed") as (executor, _):
        server_s = time.perf_counter() - start
        for number in range(rounds + 1):  # the first round only warms up
            request = request_of(CODE_GPT, ZERO_1, world_size=RANKS, max_steps=START_UP_STEPS)
            wall_s, result = timed(executor, folder / str(number), request)
            plain_s, times = plain_trial(CODE_GPT, ZERO_1.to_deepspeed(), folder, START_UP_STEPS)
            pairs.append((plain_s - sum(times), wall_s - sum(result.step_times_s)))
    return compared(pairs[1:], "torchrun_s", "warm_s") | {"server_start_s": server_s}


def scripts(folder: Path, rounds: int) -> Figures:
    command = f"torchrun --standalone --nproc_per_node {RANKS} {PLAIN_TRIAL} {CODE_GPT} {{ds_config}} 100000"
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    invocation, _ = capture.capture(command, folder)
    once = {"launch_command_s": lap()}
    spec = StudySpec.of_command(invocation, {"base_config": {"train_micro_batch_size_per_gpu": 8}})
    trials = []
    with executor_for(spec, folder) as executor:
        once["server_start_s"] = lap()
        found = plan(spec, executor, folder)
        once["probe_and_second_run_s"] = lap()
        for number in range(rounds):
            candidate = replace(found.baseline, zero_stage=number % 4)
            request = request_of(
                spec.target, candidate, ds_config=found.ds_config(candidate), world_size=found.world_size,
                max_steps=START_UP_STEPS, script=found.script(candidate),
            )  # fmt: skip
            wall_s, result = timed(executor, folder / "trials" / str(number), request)
            beyond_s = wall_s - sum(result.step_times_s)
            trials.append({"zero_stage": candidate.zero_stage, "beyond_steps_s": beyond_s})
    return {
        "beyond_steps_s": statistics.median(each["beyond_steps_s"] for each in trials),
        "once": once,
        "trials": trials,
    }


def large(folder: Path, rounds: int) -> Figures:
    """`moving_s` is the time of `from_pretrained` and `deepspeed.initialize` in the ranks; torchrun's is `moved_s`."""
    weights, config = folder / "weights", folder / "plain.json"
    # In a process of its own: this one is to stay small.
    subprocess.run([sys.executable, "-c", f"import large_model; large_model.write({str(weights)!r})"],
                   cwd=LARGE.parent, env=plain_environment(), check=True)  # fmt: skip
    candidate = Candidate(micro_batch_size=1, zero_stage=1, precision="bf16")
    write_record(config, candidate.to_deepspeed())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(LARGE)]
    command += [str(weights), str(START_UP_STEPS), "--deepspeed_config", str(config)]
    probed = Probed(ds_config=candidate.to_deepspeed(), micro_batch_size=1, gradient_accumulation_steps=1)
    script = Script(
        arguments=(str(weights), "1000", "--deepspeed_config", "{ds_config}"), working_dir=str(folder), probed=probed
    )
    os.environ["LARGE_MODEL"] = str(weights)
    rows: list[Figures] = []
    with engine("torch", "deepspeed", "transformers:AutoModelForCausalLM,LlamaConfig") as (executor, _):
        for number in range(rounds + 1):  # the first round reads the file and imports
            start = time.perf_counter()
            done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)
            row: Figures = {"torchrun_s": time.perf_counter() - start}
            said = [line for line in done.stdout.splitlines() if line.startswith("LARGE")]
            if not said:
                raise RuntimeError(done.stderr[-2000:])
            row |= json.loads(said[0].removeprefix("LARGE"))
            for name, part in zip(LARGE_WAYS, (None, script), strict=True):
                request = request_of(LARGE, candidate, world_size=RANKS, max_steps=START_UP_STEPS, script=part)
                wall_s, result = timed(executor, folder / f"{name}-{number}", request)
                times = result.step_times_s
                # After the timed steps come those in which memory is read: two, or a long one.
                n_memory = 2 if times[-1] < LONG_STEP_SHARE * request.budget_s else 1
                steps_s = sum(times) + n_memory * statistics.median(times)
                moving_s = result.startup_s["build"] + result.startup_s["initialize"]
                beyond_s = wall_s - steps_s - moving_s
                row[name] = {"wall_s": wall_s, "steps_s": steps_s, "moving_s": moving_s, "beyond_s": beyond_s}
            rows.append(row)
    kept = rows[1:]
    ways = {way: {key: statistics.median(row[way][key] for row in kept) for key in kept[0][way]} for way in LARGE_WAYS}
    torchrun = {key: statistics.median(row[key] for row in kept) for key in ("torchrun_s", "moved_s", "steps_s")}
    return {"parameters": 1.1e9, "ways": ways, **torchrun, "first": rows[0], "rounds": kept}


@contextlib.contextmanager
def engines(root: Path) -> Iterator[dict[str, tuple[Executor, int]]]:
    """Every engine that is installed here, and the machines of a trial on it; what is left out is said."""
    from support.clusters import ray_cluster, slurm, two_hosts, why_no_hosts, why_no_ray, why_no_slurm

    settings = settings_for(["torch"], {}, 600.0)
    missing = {"slurm": why_no_slurm(), "ray": why_no_ray(), "ssh": why_no_hosts()}
    for name, why in missing.items():
        if why:
            print(f"left out: {name}: {why}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        found: dict[str, tuple[Executor, int]] = {"local": (LocalExecutor(["torch"], root / "server.log"), 1)}
        if not missing["slurm"]:
            stack.enter_context(slurm(root / "slurm"))
            found["slurm"] = ClusterExecutor(Slurm({}, 1, "autotune-benchmark"), root / "slurm-agents", settings, 2), 2
        if not missing["ray"]:
            stack.enter_context(ray_cluster())
            found["ray"] = ClusterExecutor(Ray({}, 1), root / "ray-agents", settings, 2), 2
            found["ray, files by ray"] = ClusterExecutor(Ray({"files": "ray"}, 1), root / "ray-files", settings, 2), 2
        if not missing["ssh"]:
            hosts = stack.enter_context(two_hosts(root / "hosts"))
            engine = Hosts({"ssh": hosts.ssh, "address": "10.203.0.1"}, list(read_hostfile(hosts.hostfile)))
            found["ssh"] = ClusterExecutor(engine, root / "ssh-agents", settings, 2), 2
        yield found


def executors(folder: Path, rounds: int) -> Figures:
    """`engine_s` is the wall time less the time that the ranks ran; `beyond_steps_s` less the training steps only."""
    figures: Figures = {}
    with engines(folder) as found:
        # One Ray group fits the cluster at a time, so the two ways of carrying files come one after the other.
        for carried in (False, True):
            part = [name for name in found if ("files" in name) == carried]
            trials: dict[str, list[dict[str, float]]] = {name: [] for name in part}
            try:
                for number in range(rounds + 1):
                    for name in part:
                        executor, nodes = found[name]
                        if number == 0:
                            executor.start()
                        request = request_of(CODE_GPT, ZERO_1, world_size=RANKS, nodes=nodes, max_steps=START_UP_STEPS)
                        wall_s, result = timed(executor, folder / f"{name}-{number}", request)
                        beyond_s = wall_s - sum(result.step_times_s)
                        trials[name].append({"engine_s": wall_s - result.wall_s, "beyond_steps_s": beyond_s})
            finally:
                for name in part:
                    found[name][0].close()
            for name, each in trials.items():
                # The first trial waits until the machines are there and have imported torch.
                figures[name] = {key: statistics.median(trial[key] for trial in each[1:]) for key in each[0]}
                figures[name] |= {"first_s": each[0]["engine_s"], "rounds": each[1:]}
    return {"engines": figures}


def driver(folder: Path, rounds: int, samplers: Sequence[str] = tuple(SAMPLERS)) -> Figures:
    from support.instant import Instant, plan_of

    class TimedInstant(Instant):
        spent_s = 0.0

        def submit(self, folder: TrialDir) -> Instant:
            start = time.process_time()
            super().submit(folder)
            self.spent_s += time.process_time() - start
            return self

    def per_trial(sampler: str) -> dict[str, float]:
        # Time to a loss needs no probe of the noise scale, and so leaves the global batch free.
        to_loss = {"name": "convergence", "metric": "time_to_loss_s"}
        objectives = ["latency", "throughput", to_loss, "memory"]
        settings = {"objectives": objectives, "finalists": 0, "stop_below": 0, "sampler": sampler, "trials": rounds}
        spec = StudySpec.of(CODE_GPT, {"name": sampler, **settings})
        executor, view = TimedInstant(), ProgressView(Console(file=io.StringIO()))
        runner = Runner(plan_of(spec), executor, folder / sampler, records.default_url(folder), view)
        start = time.process_time()
        runner.run()
        # The stub of an engine stands for the trial.
        spent_s = time.process_time() - start - executor.spent_s
        return {"mean_s": spent_s / rounds}

    return {"n_trials": rounds, "seconds_per_trial": {sampler: per_trial(sampler) for sampler in samplers}}


def terminal(folder: Path, rounds: int) -> Figures:
    """Medians; the first word of `run` is wall time, read from a terminal, the least of all rounds on a busy machine."""
    shutil.copyfile(SMALL, folder / "model.py")
    each = {
        path: statistics.median(_processor_s([*path.split(), "--help"], folder) for _ in range(rounds))
        for path in ("", *COMMANDS)
    }
    help_s = each.pop("")
    slowest = max(each, key=lambda path: each[path])
    first = [_first_word_s(["run", "model.py"], folder) for _ in range(rounds)]
    return {
        "rounds": rounds, "help_cpu_s": help_s, "command_help_cpu_s": statistics.median(each.values()),
        "slowest_command": slowest, "slowest_command_help_cpu_s": each[slowest],
        "first_word_s": statistics.median(first), "first_word_least_s": min(first),
    }  # fmt: skip


def _processor_s(arguments: Sequence[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "autotune", *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _first_word_s(arguments: Sequence[str], folder: Path) -> float:
    """Wall time until a command shows something in a terminal; it is stopped then."""
    began_s, (driver, terminal) = time.monotonic(), pty.openpty()
    command = [sys.executable, "-m", "autotune", *arguments]
    with subprocess.Popen(
        command, cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        while not os.read(driver, 4096).strip():
            pass
        shown_s = time.monotonic() - began_s
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(driver, 4096):  # a command that cannot write would not end
                pass
    os.close(driver)
    return shown_s


# The case, its rounds by default (for `driver`: trials), and the name of its results.
CASES: dict[str, tuple[Callable[[Path, int], Figures], int, str]] = {
    "startup": (startup, 5, "startup"),
    "scripts": (scripts, 5, "script_startup"),
    "large": (large, 3, "large_startup"),
    "executors": (executors, 5, "executor_overhead"),
    "terminal": (terminal, 5, "terminal"),
    "driver": (driver, 200, "driver_overhead"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--rounds", type=int, help="interleaved rounds; for `driver` the trials of each study")
    given = parser.parse_args()
    measure, rounds, results = CASES[given.name]
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), given.rounds or rounds)
    write(results, figures)


if __name__ == "__main__":
    main()
