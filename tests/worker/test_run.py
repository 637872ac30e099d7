"""What a rank measures and observes, on real DeepSpeed engines."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.zoo import Zoo

from autotune.errors import UserError
from autotune.executors import conclude
from autotune.executors.local import LocalExecutor
from autotune.scoring import step_times
from autotune.trial import folder
from autotune.trial.result import Outcome, RankReport, TrialResult
from autotune.trial.workload import Workload

pytestmark = pytest.mark.process

MIB = 1 << 20
STEPS = {"max_steps": 6, "min_samples": 10**9, "budget_s": 60.0}
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def measured(executor: LocalExecutor, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrialResult]:
    """Runs a cell once, however many tests look at it."""
    zoo = Zoo(executor, tmp_path_factory.mktemp("cells"))

    @functools.cache
    def run(model: str, **what: Any) -> TrialResult:
        return zoo.run(model, **{**STEPS, **what})

    return run


CELLS = list(itertools.product(("fp32", "bf16", "torch_autocast"), STAGES, (0, 1)))


@pytest.mark.parametrize(("precision", "stage", "every"), CELLS)
def test_what_ran_is_read_from_the_engine(
    measured: Callable[..., TrialResult], precision: str, stage: int, every: int
) -> None:
    result = measured("gpt_tiny", precision=precision, zero_stage=stage, checkpoint_every=every)
    assert result.outcome is Outcome.COMPLETE, result.reason
    seen = result.observed
    assert seen is not None
    assert (seen.micro_batch_size, seen.loader_batch_size, seen.gradient_accumulation_steps) == (4, 4, 1)
    assert (seen.samples_per_step, seen.tokens_per_step) == (8, 8 * 16)
    assert seen.zero_stage == stage
    assert seen.dtype == ("bfloat16" if precision == "bf16" else "float32")
    assert seen.autocast == ("bfloat16" if precision == "torch_autocast" else None)
    assert seen.checkpointed_blocks == 2 * every


@pytest.mark.parametrize(("precision", "stage"), list(itertools.product(("fp32", "bf16", "torch_autocast"), STAGES)))
def test_checkpointing_changes_no_digit_of_the_loss(
    measured: Callable[..., TrialResult], precision: str, stage: int
) -> None:
    kept, recomputed = (
        measured("gpt_tiny", precision=precision, zero_stage=stage, checkpoint_every=every).losses for every in (0, 1)
    )
    assert kept == recomputed and None not in kept


def test_every_second_block_is_checkpointed_if_asked(measured: Callable[..., TrialResult]) -> None:
    seen = measured("ok", checkpoint_every=2).observed
    assert seen is not None and seen.checkpointed_blocks == 2


SPLITS = [(2, 8, 1), (2, 4, 2), (2, 1, 8), (1, 16, 1), (1, 4, 4)]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("split", SPLITS[1:])
def test_the_loss_curve_does_not_depend_on_how_a_global_batch_is_split(
    measured: Callable[..., TrialResult], split: tuple[int, int, int], stage: int
) -> None:
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


def drawn(zoo: Zoo, target: Path, ranks: int, micro: int, steps: int, **what: Any) -> list[list[int]]:
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


def test_every_split_of_a_global_batch_trains_on_the_same_samples(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
    target = write_model(LOGGING)
    whole = drawn(zoo, target, 1, 8, 1)
    assert drawn(zoo, target, 2, 2, 2) == whole
    assert drawn(zoo, target, 2, 4, 1) == whole
    first_epoch = [sample for step in whole[:5] for sample in step]
    assert sorted(first_epoch) == list(range(40))  # each sample once an epoch
    assert whole[5] != whole[0]  # another order in the next one
    assert drawn(zoo, target, 1, 8, 1, seed=1) != whole


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    """An executor that starts a new Python for each rank, because a module that its server imports starts a thread."""
    root = tmp_path_factory.mktemp("cold")
    (root / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='busy').start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        executor = LocalExecutor(["starts_a_thread"], root / "server.log")
        executor.start()
    yield Zoo(executor, root / "trials")
    executor.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_forked_trial_equals_one_in_a_fresh_process_to_the_last_digit(
    cold: Zoo, measured: Callable[..., TrialResult], stage: int
) -> None:
    assert cold.executor.cold_reason == "an imported module started threads: busy"
    fresh, forked = cold.run("gpt_tiny", zero_stage=stage, **STEPS), measured("gpt_tiny", zero_stage=stage)
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
    "bf16_unsafe": {},
    "custom_loss": {"checkpoint_every": 1},
    "frozen": {"zero_stage": 1},
    "giant_layer": {"zero_stage": 3},
    "hf": {"zero_stage": 2, "checkpoint_every": 1, "precision": "bf16"},
    "iterable": {"gradient_accumulation_steps": 2},
    "list_data": {"zero_stage": 2},
    "no_blocks": {"precision": "bf16"},
    "noisy": {},
    "seq2seq": {"checkpoint_every": 2, "zero_stage": 1},
    "tied": {"zero_stage": 1, "precision": "bf16"},
    "vision": {"checkpoint_every": 1},
}
TOKENS = {"hf": 32, "giant_layer": 12, "tied": 9, "seq2seq": 10, "gpt_tiny": 16}


@pytest.mark.parametrize("model", COMPLETE)
def test_the_zoo_trains(measured: Callable[..., TrialResult], model: str) -> None:
    result = measured(model, **COMPLETE[model])
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert len(result.losses) == len(result.step_times_s) == STEPS["max_steps"]
    per_step = 4 * 2 * COMPLETE[model].get("gradient_accumulation_steps", 1)
    assert result.samples_per_step == per_step
    assert result.tokens_per_step == (per_step * TOKENS[model] if model in TOKENS else None)


@pytest.mark.parametrize("model", ["mixed_types", "bf16_unsafe"])
def test_numbers_of_two_types_are_told_from_other_crashes(measured: Callable[..., TrialResult], model: str) -> None:
    assert conclude.is_dtype_mismatch(measured(model, precision="bf16")), measured(model, precision="bf16").reason
    assert not conclude.is_dtype_mismatch(measured("raises"))
    if model == "mixed_types":
        assert measured(model, precision="torch_autocast").outcome is Outcome.COMPLETE


@pytest.mark.parametrize("model", ["ok", "gpt_tiny", "custom_loss"])
def test_the_loss_really_falls(zoo: Zoo, model: str) -> None:
    losses = zoo.run(model, max_steps=60, budget_s=20.0, min_samples=10**9, micro=16).losses
    early, late = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    assert late < 0.95 * early


def test_a_trial_repeats_to_the_last_digit(zoo: Zoo, measured: Callable[..., TrialResult]) -> None:
    again = zoo.run("gpt_tiny", **STEPS)
    assert again.losses == measured("gpt_tiny").losses
    assert zoo.run("gpt_tiny", seed=1, **STEPS).losses != again.losses


def test_enough_is_measured_whatever_the_budget(zoo: Zoo) -> None:
    result = zoo.run("ok", budget_s=0.0)
    assert len(result.step_times_s) == step_times.SETUP_STEPS + step_times.LEAST_TIMED_STEPS
    assert result.steps is not None and 0 < result.steps.ci95_s < result.steps.median_s


def test_training_goes_on_to_the_samples_asked_for(zoo: Zoo) -> None:
    result = zoo.run("ok", budget_s=60.0, min_samples=8 * 50, max_steps=60)
    assert 50 <= len(result.step_times_s) <= 60


def test_the_budget_comes_before_the_samples(zoo: Zoo) -> None:
    result = zoo.run("noisy", budget_s=0.2, min_samples=10**9)
    assert result.outcome is Outcome.COMPLETE
    assert len(result.step_times_s) < 100  # each takes at least 5 ms; the budget is looked at every tenth


@pytest.mark.alone
def test_a_step_is_taken_apart(measured: Callable[..., TrialResult]) -> None:
    result = measured("gpt_tiny", gradient_accumulation_steps=2)
    assert set(result.phase_times_s) == {"data", "forward", "backward", "step", "reduce", "gather", "wait"}
    assert all(seconds > 0 for seconds in result.phase_times_s.values())
    assert set(result.startup_s) == {"import", "build", "initialize"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.alone
def test_what_collectives_take_is_told_apart_at_every_stage(measured: Callable[..., TrialResult], stage: int) -> None:
    phases = measured("gpt_tiny", precision="fp32", zero_stage=stage, checkpoint_every=0).phase_times_s
    assert phases["reduce"] > 0 and phases["gather"] > 0 and phases["wait"] > 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.alone
def test_what_is_recomputed_is_told_apart_from_backward(measured: Callable[..., TrialResult], stage: int) -> None:
    phases = measured("gpt_tiny", precision="fp32", zero_stage=stage, checkpoint_every=1).phase_times_s
    assert 0 < phases["recompute"] < 2 * phases["backward"] and phases["forward"] > 0


@pytest.mark.alone
def test_waiting_for_a_slow_rank_is_no_communication(zoo: Zoo) -> None:
    zoo.run("slow_rank", **STEPS)
    quick, slow = (report.phase_times_s for report in folder.reports(zoo.folder, 2).values())
    assert quick["wait"] > 0.02 > slow["wait"] and slow["forward"] > 0.03 > quick["reduce"]


def test_traced_steps_follow_the_measurement_and_are_not_of_it(zoo: Zoo) -> None:
    result = zoo.run("gpt_tiny", zero_stage=2, traced_steps=2, **STEPS)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert len(result.step_times_s) == STEPS["max_steps"]
    for rank, report in folder.reports(zoo.folder, 2).items():
        traced = report.traced
        assert traced is not None and (zoo.folder.path / traced.file).stat().st_size > 10_000, rank
        assert set(traced.spans_s) == {"data", "forward", "backward", "step"}
        assert traced.kinds_s["forward"]["products"] > 0 and traced.kinds_s["backward"]["products"] > 0
        assert 0 <= traced.hidden_s <= traced.messages_s < sum(traced.spans_s.values())
        assert traced.operations[0].seconds >= traced.operations[-1].seconds > 0


@pytest.mark.alone
def test_a_step_lasts_as_long_as_its_slowest_rank(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
    """Rank 1 sleeps after its gradients are reduced, so that only its own clock sees it."""
    target = write_model("""
        import os, time
        import torch
        from torch import nn

        class Late(torch.optim.SGD):
            def step(self, *args, **kwargs):
                time.sleep(0.05 if os.environ["RANK"] == "1" else 0.0)
                return super().step(*args, **kwargs)

        def model():
            return nn.Linear(8, 1)

        def batch(n):
            return torch.randn(n, 8), torch.randn(n, 1)

        def optimizer(params):
            return Late(params, lr=0.1)
        """)
    result = zoo.run(target, **STEPS)
    assert min(result.step_times_s) >= 0.05
    reports = folder.reports(zoo.folder, 2)
    assert reports[0].step_times_s == reports[1].step_times_s
    assert reports[0].losses == reports[1].losses


def test_memory_is_reported_by_phase_and_grows_with_the_activations(measured: Callable[..., TrialResult]) -> None:
    small, large = (measured("oom", micro=micro) for micro in (2, 8))
    assert set(small.memory_by_phase_bytes) == {"initialize", "first_step", "forward", "backward", "step"}
    assert small.peak_memory_bytes == max(small.memory_by_phase_bytes.values())
    for phase in ("first_step", "backward"):
        assert large.memory_by_phase_bytes[phase] - small.memory_by_phase_bytes[phase] > 5 * 16 * MIB
    assert large.memory_by_phase_bytes["initialize"] == pytest.approx(
        small.memory_by_phase_bytes["initialize"], abs=16 * MIB
    )


WIDE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 8))

    def forward(self, x):
        return x + self.net(x)

def model():
    return nn.Sequential(*(Block() for _ in range(8)))

def batch(n):
    return torch.randn(n, 8), torch.randn(n, 8)
"""


@pytest.fixture
def wide(zoo: Zoo, write_model: Callable[[str], Path]) -> Callable[..., TrialResult]:
    """A model whose eight blocks keep two activations of 4 MiB each: far below what the C library would hand back by itself."""
    target = write_model(WIDE)
    return lambda **what: zoo.run(target, micro=1024, budget_s=0.0, max_steps=10, **what)


def test_checkpointing_lowers_the_peak(wide: Callable[..., TrialResult]) -> None:
    kept, recomputed = (wide(checkpoint_every=every) for every in (0, 1))
    assert kept.peak_memory_bytes is not None and recomputed.peak_memory_bytes is not None
    assert kept.peak_memory_bytes - recomputed.peak_memory_bytes > 6 * 2 * 4 * MIB
    assert kept.losses == recomputed.losses


def test_a_trial_fits_a_limit_just_above_the_peak_that_it_reports(wide: Callable[..., TrialResult]) -> None:
    """In the timed steps the C library keeps more than is in use; that counts neither as the peak nor against the limit."""
    peak = wide(checkpoint_every=1).peak_memory_bytes
    assert peak is not None
    assert wide(checkpoint_every=1, device_memory_bytes=int(1.2 * peak)).outcome is Outcome.COMPLETE
    assert wide(checkpoint_every=1, device_memory_bytes=int(0.7 * peak)).outcome is Outcome.OOM


def test_a_checkpointed_model_without_blocks_is_not_applied(zoo: Zoo) -> None:
    result = zoo.run("no_blocks", checkpoint_every=1)
    assert (result.outcome, result.reason) == (Outcome.NOT_APPLIED, "checkpoint_every: no block was checkpointed")


def test_progress_is_told_while_it_runs(zoo: Zoo) -> None:
    zoo.run("ok", **STEPS)
    events = [json.loads(line) for line in zoo.folder.events.read_text().splitlines()]
    for rank in (0, 1):
        told = [event["phase"] for event in events if event["rank"] == rank and "phase" in event]
        assert told == ["import", "build", "initialize", "warmup", "measure", "done"]
    # The ranks tell of their steps where they compare clocks: after each while a step's length is unknown, then after
    # several short ones.
    steps = [event["step"] for event in events if "step" in event]
    assert steps[0] == 1 and steps[-1] == STEPS["max_steps"] and steps == sorted(set(steps))


def test_a_failed_rank_reports_how_far_it_came(zoo: Zoo) -> None:
    zoo.run("crash_rank1")
    report = folder.read_record(zoo.folder.report(1), RankReport)
    assert (report.outcome, report.phase, report.failed_at is not None) == (Outcome.CRASHED, "measure", True)
    assert len(report.losses) == 2
    assert "ValueError: rank 1 dislikes this batch" in zoo.log(1)  # with its traceback


def inspected(zoo: Zoo, model: str | Path) -> Workload:
    """What `inspect` finds of a target."""
    result = zoo.run(model, mode="inspect", world_size=1)
    assert result.outcome is Outcome.COMPLETE, result.reason
    return folder.read_record(zoo.folder.workload, Workload)


def test_inspection_counts_blocks_and_samples(zoo: Zoo) -> None:
    found = inspected(zoo, "ok")
    assert (found.n_blocks, found.block_class, found.n_samples, found.client_optimizer) == (4, "Block", 2048, True)
    assert 0.9 < found.block_share < 1
    assert inspected(zoo, "vision").n_blocks == 3
    seq2seq = inspected(zoo, "seq2seq")
    assert (seq2seq.n_blocks, seq2seq.block_class) == (4, "TransformerDecoderLayer, TransformerEncoderLayer")


def test_inspection_counts_parameters(zoo: Zoo) -> None:
    assert inspected(zoo, "tied").n_parameters == 50 * 16 + 16 * 16 + 16  # the tied tensor once
    frozen = inspected(zoo, "frozen")
    assert (frozen.n_parameters - frozen.n_trainable, frozen.n_trainable) == (16 * 64 + 64 + 64 * 64 + 64, 65)
    assert inspected(zoo, "giant_layer").n_parameters > 4_000_000


def test_inspection_says_what_cannot_be_tuned(zoo: Zoo) -> None:
    found = inspected(zoo, "no_blocks")
    assert found.n_blocks == 0 and "no repeated block" in found.caveats[0]
    assert inspected(zoo, "iterable").n_samples is None
    assert inspected(zoo, "batch_fn").n_samples is None


def test_inspection_refuses_a_model_with_nothing_to_train(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
    target = write_model("""
        import torch
        def model():
            return torch.nn.Linear(2, 2).requires_grad_(False)
        def batch(n):
            return torch.randn(n, 2), torch.randn(n, 2)
        """)
    result = zoo.run(target, mode="inspect", world_size=1)
    assert (result.outcome, result.reason) == (Outcome.CRASHED, "own_model.py: model() has no trainable parameter")


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


def test_an_optimizer_without_a_parameter_of_the_model_is_refused(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
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


def test_temporary_files_of_a_trial_are_removed_and_caches_are_shared(
    zoo: Zoo, cold: Zoo, write_model: Callable[[str], Path]
) -> None:
    """Ranks end without multiprocessing's finalizers, which remove the folders of DataLoader workers."""
    target = write_model(TEMPORARY)
    for started in (zoo, cold):
        assert started.run(target, **STEPS).outcome is Outcome.COMPLETE
        printed = [started.log(rank).partition("temporary ")[2].split()[:3] for rank in (0, 1)]
        (folder_of_trial, sockets, cache), other = printed
        assert other[0] == folder_of_trial and not Path(folder_of_trial).exists()
        assert Path(folder_of_trial).name.startswith("autotune-") and sockets.startswith(f"{folder_of_trial}/pymp-")
        assert Path(cache).parent == Path(folder_of_trial).parent


def test_a_target_may_import_its_neighbours(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
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


def test_failures_are_classified() -> None:
    classify, torch = importlib.import_module("autotune.worker.rank")._classify, importlib.import_module("torch")
    assert classify(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nsecond line")) == (
        Outcome.OOM,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    )
    assert classify(MemoryError())[0] is Outcome.OOM
    assert classify(OSError(12, "Cannot allocate memory"))[0] is Outcome.OOM
    assert (
        classify(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))[0]
        is Outcome.OOM
    )
    assert classify(ValueError("a\nb")) == (Outcome.CRASHED, "ValueError: a")
    assert classify(SystemExit(3)) == (Outcome.CRASHED, "SystemExit: 3")
    assert classify(UserError("model.py: define model()")) == (Outcome.CRASHED, "model.py: define model()")


def test_a_token_that_an_error_quotes_stays_in_the_log(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
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
