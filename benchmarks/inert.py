"""Settings that do nothing, planted in studies of five families: `python benchmarks/inert.py [--only FAMILY]`.

Each of 30 settings is asked for at a stage where DeepSpeed takes it and does nothing with it, or what it does anyway, as the
only difference from the baseline, in two of the families: a model.py, a raw script, Trainer, Accelerate and Lightning. It
must be refused, illegal, `not_applied`, or crash; a trial that completes and may become a pick is `scored`.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, write

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar, at_path
from autotune.space.legality import why_illegal
from autotune.study.setup import capture
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import Plan, plan
from autotune.study.spec.spec import StudySpec
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

SCRIPTS = ROOT / "tests" / "models" / "scripts"
TORCHRUN = "torchrun --standalone --nproc_per_node 2"
TRAINER = "hf_trainer.py --output_dir out --report_to none --per_device_train_batch_size 8 --max_steps 200 --use_cpu --deepspeed ds.json"
FAMILIES = {
    "model.py": str(ROOT / "tests" / "models" / "gpt_tiny.py"),
    "raw": f"{TORCHRUN} {SCRIPTS / 'dict_config.py'}",
    "Trainer": f"{TORCHRUN} {SCRIPTS / TRAINER}",
    "Accelerate": f"{TORCHRUN} {SCRIPTS / 'accelerate_loop.py'}",
    "Lightning": f"{TORCHRUN} {SCRIPTS / 'lightning_fit.py'} --strategy deepspeed",
}
# What Trainer's script reads; its own values are `auto`.
DS_JSON = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 1},
}
ZERO = "zero_optimization."
# Stage, setting, value; all at fp32 on two ranks.
PLANTED: list[tuple[int, str, Scalar]] = [
    (1, "sequence_parallel_size", 2),
    (2, "compile.deepcompile", True),
    (1, "activation_checkpointing.partition_activations", True),
    (2, "activation_checkpointing.cpu_checkpointing", True),
    (0, f"{ZERO}overlap_comm", True),
    (2, f"{ZERO}overlap_comm", True),
    (2, f"{ZERO}overlap_comm", False),
    (0, f"{ZERO}reduce_bucket_size", 1 << 20),
    (1, f"{ZERO}reduce_bucket_size", 1 << 30),
    (2, f"{ZERO}allgather_bucket_size", 1 << 20),
    (3, f"{ZERO}zero_hpz_partition_size", 1),
    (3, f"{ZERO}stage3_prefetch_bucket_size", 1 << 29),
    (3, f"{ZERO}stage3_max_live_parameters", 1 << 31),
    (3, f"{ZERO}sub_group_size", 1 << 31),
    (2, f"{ZERO}sub_group_size", 1 << 20),
    (3, f"{ZERO}round_robin_gradients", True),
    (1, f"{ZERO}contiguous_gradients", True),
    (2, f"{ZERO}offload_optimizer.pin_memory", True),
    (2, f"{ZERO}allgather_partitions", False),
    (1, f"{ZERO}stage3_gather_16bit_weights_on_model_save", True),
    (3, "communication_data_type", "fp32"),
    (1, "prescale_gradients", False),
    (1, "sparse_gradients", True),
    (1, "aio.block_size", 1 << 20),
    (1, "flops_profiler.enabled", True),
    (2, "wall_clock_breakdown", True),
    (1, "data_efficiency.enabled", True),
    (1, "data_types.grad_accum_dtype", "fp32"),
    (1, "hybrid_engine.enabled", False),
    (1, "optimizer.parms.lr", 0.1),
]


def planted_in(family: int) -> Iterator[tuple[int, str, Scalar]]:
    """The settings of a family: each setting is planted in two of the five."""
    n = len(FAMILIES)
    yield from (each for i, each in enumerate(PLANTED) if family in (i % n, (i + 2) % n))


def spec_of(how: str, folder: Path) -> StudySpec:
    """The study of a family; its scripts run in a folder of their own."""
    if not how.startswith(TORCHRUN):
        return StudySpec.of(Path(how), {"ranks": 2})
    (folder / "ds.json").write_text(json.dumps(DS_JSON))
    invocation, _ = capture.capture(how, folder)
    return StudySpec.of_command(invocation)


def end_of(found: Plan, executor: Executor, folder: Path, stage: int, name: str, value: Scalar) -> tuple[str, str]:
    """How a trial ends whose only difference from the baseline is one setting, and why."""
    knobs: dict[str, Any] = {**found.baseline.values(), "zero_stage": stage, "precision": "fp32"}
    try:
        candidate = Candidate.of({**knobs, name: value})
    except UserError as error:
        return "refused", str(error)
    if why := why_illegal(candidate, found.setting):
        return "illegal", why
    request = TrialRequest(
        target=str(found.spec.target), candidate=candidate.values(), ds_config=found.ds_config(candidate),
        world_size=2, script=found.script(candidate), max_steps=8, budget_s=2.0, deadline_s=120.0,
        changed_from={name: at_path(found.base_config, name)},
    )  # fmt: skip
    result = base.run(executor, folder, request)
    if result.outcome is Outcome.COMPLETE:
        doubts = result.observed.unwitnessed if result.observed is not None else ()
        return ("unwitnessed" if doubts else "scored"), ""
    return str(result.outcome.value), result.reason


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FAMILIES, help="one family; the others' results stay")
    only, stored = parser.parse_args().only, RESULTS / "inert.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    for number, (family, how) in enumerate(FAMILIES.items()):
        if only not in (None, family):
            continue
        rows = [row for row in rows if row["family"] != family]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spec = spec_of(how, folder)
            with executor_for(spec, folder) as executor:
                found = plan(spec, executor, folder)
                for n, (stage, setting, value) in enumerate(planted_in(number)):
                    end, why = end_of(found, executor, folder / "trials" / str(n), stage, setting, value)
                    rows.append(
                        {"family": family, "stage": stage, "setting": setting, "value": value, "end": end, "why": why}
                    )
                    print(f"{family}, stage {stage}, {setting}={value}: {end}: {why}", file=sys.stderr, flush=True)
    ends = collections.Counter(row["end"] for row in rows)
    scored = [f"{row['family']}: {row['setting']} at stage {row['stage']}" for row in rows if row["end"] == "scored"]
    write("inert", {"settings": len(PLANTED), "planted": len(rows), "scored": scored, "ends": dict(ends), "rows": rows})


if __name__ == "__main__":
    main()
