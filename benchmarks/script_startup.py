"""What a trial of a training script costs beyond its own steps, warm; and what finding out about the script costs, once a study.

`python benchmarks/script_startup.py [ROUNDS]`. The target is below 3 s a trial on two cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from common import write

from autotune import launch
from autotune.executors import base
from autotune.plan import executor_for, plan
from autotune.spec import StudySpec
from autotune.trial import Outcome, TrialRequest

TARGET = Path(__file__).parent.parent / "studies" / "code-gpt" / "model.py"
SCRIPT = Path(__file__).parent / "plain_trial.py"
COMMAND = f"torchrun --standalone --nproc_per_node 2 {SCRIPT} {TARGET} {{ds_config}} 100000"
STEPS = 7


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    beyond = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        invocation, _ = launch.capture(COMMAND, folder)
        capture_s = time.perf_counter() - start
        spec = StudySpec.of_command(invocation, {"base_config": {"train_micro_batch_size_per_gpu": 8}})
        start = time.perf_counter()
        with executor_for(spec, folder) as executor:
            server_s = time.perf_counter() - start
            start = time.perf_counter()
            found = plan(spec, executor, folder)
            plan_s = time.perf_counter() - start
            for number in range(rounds):
                candidate = replace(found.baseline, zero_stage=number % 4)
                request = TrialRequest(
                    target=str(spec.target), candidate=candidate.values(), ds_config=found.ds_config(candidate),
                    world_size=found.world_size, max_steps=STEPS, budget_s=1e6, script=found.script(candidate),
                )  # fmt: skip
                start = time.perf_counter()
                result = base.run(executor, folder / "trials" / str(number), request)
                wall = time.perf_counter() - start
                assert result.outcome is Outcome.COMPLETE, result.reason
                beyond.append({"zero_stage": candidate.zero_stage, "beyond_steps_s": wall - sum(result.step_times_s)})
    write(
        "script_startup",
        {
            "beyond_steps_s": statistics.median(each["beyond_steps_s"] for each in beyond),
            "once": {"launch_command_s": capture_s, "server_start_s": server_s, "probe_and_second_run_s": plan_s},
            "trials": beyond,
        },
    )


if __name__ == "__main__":
    main()
