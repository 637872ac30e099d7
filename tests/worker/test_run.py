"""Trials of `model.py` files on real DeepSpeed engines: what trains, how it is fed, when it ends, how it fails."""

import itertools
import json
import math
from pathlib import Path

import pytest
from support.zoo import STEPS, Zoo

from autotune.executors import conclude
from autotune.executors.local import LocalExecutor
from autotune.scoring import step_times
from autotune.trial import folder
from autotune.trial.result import Outcome, RankReport

pytestmark = pytest.mark.process

MIB = 1 << 20
STAGES = (0, 1, 2, 3)
NOW = [("fp32", 1), ("bf16", 3), ("torch_autocast", 2)]


@pytest.mark.cells(len(NOW))
@pytest.mark.parametrize(
    ("precision", "stage"),
    [*NOW, *(each for each in itertools.product(("fp32", "bf16", "torch_autocast"), STAGES) if each not in NOW)],
)
def test_the_configuration_that_ran_is_read_from_the_engine_and_recomputing_changes_no_digit(
    measured, precision, stage
):
    kept, recomputed = (
        measured("gpt_tiny", precision=precision, zero_stage=stage, checkpoint_every=every) for every in (0, 1)
    )
    for result, n_blocks in ((kept, 0), (recomputed, 2)):
        assert result.outcome is Outcome.COMPLETE, result.reason
        seen = result.observed
        assert (seen.micro_batch_size, seen.loader_batch_size, seen.gradient_accumulation_steps) == (4, 4, 1)
        assert (seen.samples_per_step, seen.tokens_per_step, seen.zero_stage) == (8, 8 * 16, stage)
        assert seen.dtype == ("bfloat16" if precision == "bf16" else "float32")
        assert seen.autocast == ("bfloat16" if precision == "torch_autocast" else None)
        assert seen.checkpointed_blocks == n_blocks
    assert kept.losses == recomputed.losses and None not in kept.losses


def test_every_second_block_is_checkpointed_if_asked(measured):
    seen = measured("ok", checkpoint_every=2).observed
    assert seen is not None and seen.checkpointed_blocks == 2


SPLITS = [(2, 8, 1), (2, 4, 2), (2, 1, 8), (1, 16, 1), (1, 4, 4)]


@pytest.mark.cells(3)
@pytest.mark.parametrize("split", [SPLITS[1], *SPLITS[3:], SPLITS[2]])
@pytest.mark.parametrize("stage", [2, 0])
def test_the_loss_curve_does_not_depend_on_how_a_global_batch_is_split(measured, split, stage):
    whole, divided = (
        measured("gpt_tiny", world_size=ranks, micro=micro, gradient_accumulation_steps=steps, zero_stage=stage)
        for ranks, micro, steps in (SPLITS[0], split)
    )
    assert divided.samples_per_step == whole.samples_per_step == 16
    assert divided.observed is not None and divided.observed.gradient_accumulation_steps == split[2]
    assert divided.losses == pytest.approx(whole.losses, rel=1e-5)


LOGGING = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import default_collate

def model():
    return nn.Linear(4, 1)

def data():
    return [(torch.full((4,), float(i)), torch.zeros(1), i) for i in range(40)]

def collate(samples):
    with open(Path(__file__).parent / f"drawn-{os.environ['RANK']}", "a") as log:
        log.write("".join(f"{sample[2]}\\n" for sample in samples))
    return default_collate([sample[:2] for sample in samples])
"""


def drawn(zoo, target, ranks, micro, steps, **what):
    """The samples of each optimizer step, in order of their numbers."""
    for log in target.parent.glob("drawn-*"):
        log.unlink()
    request = {"world_size": ranks, "micro": micro, "gradient_accumulation_steps": steps, **STEPS, **what}
    assert zoo.run(target, **request).outcome is Outcome.COMPLETE
    by_rank = [[int(line) for line in (target.parent / f"drawn-{rank}").read_text().split()] for rank in range(ranks)]
    return [
        sorted(sample for samples in by_rank for sample in samples[step * micro * steps : (step + 1) * micro * steps])
        for step in range(STEPS["max_steps"])
    ]


@pytest.mark.system
def test_every_split_of_a_global_batch_trains_on_the_same_samples(zoo, write_model):
    target = write_model(LOGGING)
    whole = drawn(zoo, target, 1, 8, 1)
    assert drawn(zoo, target, 2, 2, 2) == whole
    assert drawn(zoo, target, 2, 4, 1) == whole
    first_epoch = [sample for step in whole[:5] for sample in step]
    assert sorted(first_epoch) == list(range(40))  # each sample once an epoch
    assert whole[5] != whole[0]  # another order in the next one
    assert drawn(zoo, target, 1, 8, 1, seed=1) != whole


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """An executor that starts a new Python for each rank, because Python itself starts a thread there."""
    root = tmp_path_factory.mktemp("cold")
    (root / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='busy').start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        executor = LocalExecutor([], root / "server.log")
        executor.start()
    yield Zoo(executor, root / "trials")
    executor.close()


# A rank in a fresh process imports torch and DeepSpeed, for seconds.
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 1), (2, 1), (3, 2)])
@pytest.mark.system
@pytest.mark.smoke
def test_a_forked_trial_equals_one_in_a_fresh_process_to_the_last_digit(cold, measured, stage, ranks):
    assert cold.executor.cold_reason.endswith("Python itself, as it is set up here, started the thread `busy`")
    what = {"zero_stage": stage, "world_size": ranks}
    fresh, forked = cold.run("gpt_tiny", **what, **STEPS), measured("gpt_tiny", **what)
    assert fresh.outcome is Outcome.COMPLETE, fresh.reason
    assert fresh.losses == forked.losses
    assert fresh.observed == forked.observed
    # What DeepSpeed imports on the way is no memory of the trial's.
    assert fresh.peak_memory_bytes is not None and forked.peak_memory_bytes is not None
    print(fresh.memory_by_phase_bytes, forked.memory_by_phase_bytes)
    assert abs(fresh.peak_memory_bytes - forked.peak_memory_bytes) < 32 * MIB
    assert not cold.server.children(recursive=True)


COMPLETE = {
    "batch_fn": {},
    "custom_loss": {"checkpoint_every": 1},
    "frozen": {"zero_stage": 1},
    "hf": {"zero_stage": 2, "checkpoint_every": 1, "precision": "bf16"},
    "iterable": {"gradient_accumulation_steps": 2},
    "list_data": {"zero_stage": 2},
    "bf16_unsafe": {},
    "giant_layer": {"zero_stage": 3},
    "no_blocks": {"precision": "bf16"},
    "noisy": {},
    "seq2seq": {"checkpoint_every": 2, "zero_stage": 1},
    "tied": {"zero_stage": 1, "precision": "bf16"},
    "vision": {"checkpoint_every": 1},
}
TOKENS = {"hf": 32, "giant_layer": 12, "tied": 9, "seq2seq": 10, "gpt_tiny": 16}


@pytest.mark.cells(6)
@pytest.mark.parametrize("model", COMPLETE)
def test_the_zoo_trains(measured, model):
    result = measured(model, **COMPLETE[model])
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert len(result.losses) == len(result.step_times_s) == STEPS["max_steps"]
    per_step = 4 * 2 * COMPLETE[model].get("gradient_accumulation_steps", 1)
    assert result.samples_per_step == per_step
    assert result.tokens_per_step == (per_step * TOKENS[model] if model in TOKENS else None)


@pytest.mark.parametrize("model", ["mixed_types", "bf16_unsafe"])
def test_numbers_of_two_types_are_told_from_other_crashes(measured, model):
    assert conclude.is_dtype_mismatch(measured(model, precision="bf16")), measured(model, precision="bf16").reason
    assert not conclude.is_dtype_mismatch(measured("raises"))
    if model == "mixed_types":
        assert measured(model, precision="torch_autocast").outcome is Outcome.COMPLETE


@pytest.mark.parametrize(
    "model", ["custom_loss", *(pytest.param(name, marks=pytest.mark.system) for name in ("ok", "gpt_tiny"))]
)
def test_the_loss_really_falls(zoo, model):
    losses = zoo.run(model, max_steps=60, budget_s=20.0, min_samples=10**9, micro=16).losses
    early, late = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    assert late < 0.95 * early


def test_a_trial_repeats_to_the_last_digit(zoo, measured):
    again = zoo.run("gpt_tiny", **STEPS)
    assert again.losses == measured("gpt_tiny").losses
    assert zoo.run("gpt_tiny", seed=1, **STEPS).losses != again.losses


def test_enough_is_measured_whatever_the_budget(zoo):
    result = zoo.run("ok", budget_s=0.0)
    assert len(result.step_times_s) == step_times.SETUP_STEPS + step_times.LEAST_TIMED_STEPS
    assert result.steps is not None and result.steps.n_steps == step_times.LEAST_TIMED_STEPS
    assert 0 < result.steps.ci95_s < math.inf  # how wide is up to the machine


@pytest.mark.system
def test_training_goes_on_to_the_samples_asked_for(zoo):
    result = zoo.run("ok", budget_s=60.0, min_samples=8 * 50, max_steps=60)
    assert 50 <= len(result.step_times_s) <= 60


def test_the_budget_comes_before_the_samples(zoo):
    result = zoo.run("noisy", budget_s=0.2, min_samples=10**9)
    assert result.outcome is Outcome.COMPLETE
    assert len(result.step_times_s) < 100  # each takes at least 5 ms; the budget is looked at every tenth


def test_a_checkpointed_model_without_blocks_is_not_applied(zoo):
    result = zoo.run("no_blocks", checkpoint_every=1)
    assert (result.outcome, result.reason) == (Outcome.NOT_APPLIED, "checkpoint_every: no block was checkpointed")


def test_progress_is_told_while_it_runs(zoo):
    zoo.run("ok", **STEPS)
    events = [json.loads(line) for line in zoo.folder.events.read_text().splitlines()]
    for rank in (0, 1):
        told = [event["phase"] for event in events if event["rank"] == rank and "phase" in event]
        assert told == ["import", "build", "initialize", "warmup", "measure", "done"]
    # The ranks tell of their steps where they compare clocks: after each while a step's length is unknown, then after
    # several short ones.
    steps = [event["step"] for event in events if "step" in event]
    assert steps[0] == 1 and steps[-1] == STEPS["max_steps"] and steps == sorted(set(steps))


def test_a_failed_rank_reports_how_far_it_came(zoo):
    zoo.run("crash_rank1")
    report = folder.read_record(zoo.folder.report(1), RankReport)
    assert (report.outcome, report.phase, report.failed_at is not None) == (Outcome.CRASHED, "measure", True)
    assert len(report.losses) == 2
    assert "ValueError: rank 1 dislikes this batch" in zoo.log(1)  # with its traceback


STRANGER = """
import torch
from torch import nn

def model():
    return nn.Linear(2, 2)

def batch(n):
    return torch.randn(n, 2), torch.randn(n, 2)

def optimizer(params):
    return torch.optim.SGD(model().parameters(), lr=0.1)
"""


def test_an_optimizer_without_a_parameter_of_the_model_is_refused(zoo, write_model):
    result = zoo.run(write_model(STRANGER), **STEPS)
    assert result.outcome is Outcome.CRASHED and not result.losses
    assert result.reason.startswith("own_model.py: optimizer() holds none of the model's parameters, so nothing would")


TEMPORARY = """
import os, tempfile
from multiprocessing import util
import torch

def model():
    print("temporary", tempfile.gettempdir(), util.get_temp_dir(), os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return torch.nn.Linear(2, 2)

def batch(n):
    return torch.randn(n, 2), torch.randn(n, 2)
"""


@pytest.mark.system
def test_temporary_files_of_a_trial_are_removed_and_caches_are_shared(zoo, cold, write_model):
    """Ranks end without multiprocessing's finalizers, which remove the folders of DataLoader workers."""
    target = write_model(TEMPORARY)
    for started in (zoo, cold):
        assert started.run(target, **STEPS).outcome is Outcome.COMPLETE
        printed = [started.log(rank).partition("temporary ")[2].split()[:3] for rank in (0, 1)]
        (folder_of_trial, sockets, cache), other = printed
        assert other[0] == folder_of_trial and not Path(folder_of_trial).exists()
        assert Path(folder_of_trial).name.startswith("autotune-") and sockets.startswith(f"{folder_of_trial}/pymp-")
        assert Path(cache).parent == Path(folder_of_trial).parent


def test_a_target_may_import_its_neighbours(zoo, write_model):
    target = write_model("""
        from neighbour import Net
        import torch
        def model():
            return Net()
        def batch(n):
            return torch.randn(n, 2), torch.randn(n, 2)
        """)
    target.with_name("neighbour.py").write_text("from torch import nn\n\ndef Net():\n    return nn.Linear(2, 2)\n")
    assert zoo.run(target, **STEPS).outcome is Outcome.COMPLETE


def test_a_token_that_an_error_quotes_stays_in_the_log(zoo, write_model):
    token = "hf_abcdefghijklmnopqrstuvwxyz"
    target = write_model(f"""
        def model():
            raise RuntimeError("401 for {token}")

        def batch(n): ...
    """)
    result = zoo.run(target, world_size=1)
    assert result.reason == "RuntimeError: 401 for ***"
    kept = [
        path.name for path in zoo.folder.path.iterdir() if path.is_file() and token in path.read_text(errors="replace")
    ]
    assert kept == ["rank-0.log"]
