"""Measurements of real trials: phases, traces, the slowest rank, memory."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.paths import MODELS
from support.zoo import STEPS

from autotune.system.machine import boot_id
from autotune.trial import folder
from autotune.trial.result import Outcome, RankReport
from autotune.worker.measure import meter as meter_module
from autotune.worker.measure.ledger import NotApplied
from autotune.worker.measure.meter import GROWS, Meter
from autotune.worker.measure.witness import Verdict
from autotune.worker.measure.witnesses import Idle

pytestmark = pytest.mark.process

MIB = 1 << 20


def test_a_step_is_taken_apart(measured):
    result = measured("gpt_tiny", gradient_accumulation_steps=2)
    assert set(result.phase_times_s) == {"data", "forward", "backward", "step", "reduce", "gather", "wait"}
    assert all(seconds > 0 for seconds in result.phase_times_s.values())
    assert set(result.startup_s) == {"import", "build", "initialize"}


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.system) for stage in (0, 1, 2))])
@pytest.mark.alone
def test_collectives_and_recomputation_have_phases_of_their_own_at_every_stage(measured, stage):
    kept, again = (measured("gpt_tiny", zero_stage=stage, checkpoint_every=every).phase_times_s for every in (0, 1))
    assert kept["reduce"] > 0 and kept["gather"] > 0 and kept["wait"] > 0
    assert "recompute" not in kept and again["recompute"] > 0 and again["forward"] > 0


@pytest.mark.alone
def test_waiting_for_a_slow_rank_is_no_communication(zoo, write_model):
    """The rank sleeps for longer than a busy machine may hold the other one up."""
    zoo.run(write_model((MODELS / "slow_rank.py").read_text().replace("0.03", "0.3")), **{**STEPS, "max_steps": 2})
    quick, slow = (report.phase_times_s for report in folder.reports(zoo.folder, 2).values())
    assert quick["wait"] > max(slow["wait"], quick["reduce"]) and slow["forward"] > 0.3


@pytest.mark.system
def test_what_a_process_beside_a_trial_takes_of_the_cores_is_told_with_what_that_does(zoo):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as beside:
        try:
            result = zoo.run("gpt_tiny", budget_s=1.0)
        finally:
            beside.kill()
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.other_cores > 0.3 and result.log_slowdown > 0 and "other processes used" in result.disturbed


@pytest.mark.system
def test_traced_steps_follow_the_measurement_and_are_not_of_it(zoo):
    result = zoo.run("gpt_tiny", zero_stage=2, traced_steps=2, **STEPS)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert len(result.step_times_s) == STEPS["max_steps"]
    for rank, report in folder.reports(zoo.folder, 2).items():
        traced = report.traced
        assert traced is not None and (zoo.folder.path / traced.file).stat().st_size > 10_000, rank
        assert set(traced.spans_s) == {"data", "forward", "backward", "step"}
        for phase in ("forward", "backward"):  # the products of so small a model may all be short
            assert traced.kinds_s[phase]["products"] + traced.kinds_s[phase]["short"] > 0
        assert 0 <= traced.hidden_s <= traced.messages_s < sum(traced.spans_s.values())
        assert traced.operations[0].seconds >= traced.operations[-1].seconds > 0


@pytest.mark.alone
def test_a_step_lasts_as_long_as_its_slowest_rank(zoo, write_model):
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


def test_memory_is_reported_by_phase_and_grows_with_the_activations(measured):
    small, large = (measured("oom", micro=micro, world_size=1, max_steps=2) for micro in (2, 8))
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
def wide(zoo, write_model):
    """A model whose eight blocks keep two activations of 4 MiB each: the C library would not hand those back."""
    target = write_model(WIDE)
    return lambda **what: zoo.run(target, micro=1024, world_size=1, budget_s=0.0, max_steps=5, **what)


@pytest.mark.system
def test_checkpointing_lowers_the_peak(wide):
    kept, recomputed = (wide(checkpoint_every=every) for every in (0, 1))
    assert kept.peak_memory_bytes is not None and recomputed.peak_memory_bytes is not None
    assert kept.peak_memory_bytes - recomputed.peak_memory_bytes > 6 * 2 * 4 * MIB
    assert kept.losses == recomputed.losses


@pytest.mark.system
def test_a_trial_fits_a_limit_just_above_the_peak_that_it_reports(wide):
    """Memory that the C library keeps in the timed steps counts neither as the peak nor against the limit."""
    peak = wide(checkpoint_every=1).peak_memory_bytes
    assert peak is not None
    assert wide(checkpoint_every=1, device_memory_bytes=int(1.2 * peak)).outcome is Outcome.COMPLETE
    assert wide(checkpoint_every=1, device_memory_bytes=int(0.7 * peak)).outcome is Outcome.OOM


@pytest.mark.unit
@pytest.mark.parametrize(
    ("mismatch", "refusals", "error"),
    [("4 ran", 0, NotApplied), ("4 ran", 1, torch.OutOfMemoryError), (None, 0, AttributeError)],
)
def test_another_batch_than_asked_for_is_memory_that_ran_out_where_it_did_since_training_began(
    monkeypatch, mismatch, refusals, error
):
    """A rank that ran what was asked for takes part in finding out: one with another batch waited for it for ever."""
    meter, asked = Meter.__new__(Meter), []
    meter.memory, meter._refusals_before = SimpleNamespace(refusals=2 + refusals), 2
    meter.request = meter.candidate = meter.data_parallel = None
    monkeypatch.setattr(Meter, "observe", lambda _: SimpleNamespace(mismatch=lambda *_: mismatch))
    monkeypatch.setattr(Meter, "_highest", lambda _, value: asked.append(value) or float(value))
    with pytest.raises(error, match=mismatch):  # without one it goes on to the request, which is none here
        meter.check_applied()
    assert asked == [refusals]


@pytest.mark.unit
def test_a_learning_rate_that_follows_the_batch_has_acted(monkeypatch):
    """At another global batch each trial of another rate ended as not applied."""
    meter, rate = Meter.__new__(Meter), "optimizer.params.lr"
    config, candidate = {"optimizer": {"params": {"lr": 0.003}}}, {rate: 0.002, "zero_stage": 2}
    meter.request = SimpleNamespace(ds_config=config, candidate=candidate, changed_from={rate: 0.001, "zero_stage": 1})
    meter.engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.003}]))
    meter.report, meter.memory = RankReport(rank=0), SimpleNamespace(refusals=0)
    meter._refusals_before, meter.candidate, meter.data_parallel = 0, None, 1
    monkeypatch.setattr(Meter, "observe", lambda _: SimpleNamespace(mismatch=lambda *_: None))
    monkeypatch.setattr(Meter, "_highest", lambda _, value: float(value))
    monkeypatch.setattr("autotune.worker.measure.meter.replace", lambda _, **found: found)
    meter.check_applied()
    assert meter.report.observed == {"unwitnessed": ()}
    # Nothing but Idle here, as where another stage of a pipeline has the larger weights.
    idle = Verdict(inert={rate: Idle("the same")}, unwitnessed=())
    monkeypatch.setattr("autotune.worker.measure.witness.judge", lambda *_: idle)
    with pytest.raises(NotApplied, match="the same"):
        meter.check_applied()
    monkeypatch.setattr(Meter, "_highest", lambda *_: 1.0)  # of all ranks
    meter.check_applied()


@pytest.fixture
def concluded(monkeypatch):
    """The caveats of a trial that ends, on busy cores."""

    def conclude(*, alloc_retries, on_cpu=False, taken_in=None):
        meter = Meter.__new__(Meter)
        meter.report, meter.noise = RankReport(rank=0, taken_in=taken_in or {}), None
        meter.memory = SimpleNamespace(device_watch=None, on_cpu=on_cpu, alloc_retries=alloc_retries)
        for name in ("check_applied", "_note_expected"):
            monkeypatch.setattr(Meter, name, lambda *_: None)
        monkeypatch.setattr(Meter, "_load", lambda _: (7.0, 0.0))
        meter.conclude()
        return meter.report.caveats

    return conclude


@pytest.mark.unit
@pytest.mark.parametrize(("retries", "busy"), [(0, False), (None, True)])
def test_busy_cores_disturb_ranks_on_a_cpu_and_not_on_a_device_whose_use_nobody_tells(concluded, retries, busy):
    """Without NVIDIA's library; only the device's allocator has retries to tell."""
    caveats = concluded(alloc_retries=retries, on_cpu=retries is None)
    assert any("7.0 cores" in caveat for caveat in caveats) is busy


@pytest.mark.unit
@pytest.mark.parametrize(("limit", "waited", "factor"), [(math.inf, 1.0, 2.0), (2.0, 1.0, 1.0), (math.inf, 0.2, 1.25)])
def test_others_slow_no_trial_down_that_may_not_use_what_they_take_or_does_not_wait_for_it(
    monkeypatch, limit, waited, factor
):
    """What sleeps leaves its cores to others: half of what it gained over another that slept three times as long was put down to them."""
    meter = Meter.__new__(Meter)
    own = [(boot_id(), 0.0, 8, waited)]
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda rows, _: rows.__setitem__(slice(None), own))
    monkeypatch.setattr(Meter, "_highest", lambda _, value: float(value))
    monkeypatch.setattr(meter_module, "cpu_limit", lambda: limit)
    meter.memory, meter._cpu_before = SimpleNamespace(on_cpu=True), 0.0
    meter._busyness = SimpleNamespace(cores_used_by_others=lambda _: 4.1, n_cores=8, waited=lambda: waited)
    assert meter._load() == (4.1, pytest.approx(math.log(factor)))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("apart", "coalesced", "passes", "unsynced"),
    [(False, False, 3, False), (True, False, 1, True), (True, True, 1, False)],
)
def test_passes_without_reduction_are_none_of_those_that_deepspeed_loses(apart, coalesced, passes, unsynced):
    """In `engine.no_sync()`, and in `coalesce_grad_reduction`, which has the same mark: a loss as at ZeRO 0 was said to lack gradients."""
    meter = Meter.__new__(Meter)
    meter.batches, meter._rates = SimpleNamespace(backward=lambda: None), [0.0] * 9
    meter.noise = meter.gradients = meter._others = None
    meter.passes_at_boundary, meter._n_at_boundary, meter.unsynced = 0, 0, False
    optimizer = SimpleNamespace(_coalesce_grad_reduction=coalesced)
    meter.engine = engine = SimpleNamespace(
        is_gradient_accumulation_boundary=lambda: True, optimizer=optimizer, global_steps=0
    )
    for inside in (apart, apart, False):
        engine.inside_no_sync_ctxt = inside
        meter.backward()
    meter.update(lambda: vars(engine).update(global_steps=1))
    assert (meter.passes_at_boundary, meter.unsynced) == (passes, unsynced)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([64 + 16 * (i // 2) for i in range(10)], True),
        ([64] * 10, False),
        ([64, 96] * 5, False),
        ([64, 80, 96], False),
        ([100, *[101] * 9], False),
        ([448, *[512] * 9], False),  # padded to a multiple of 64, and mostly cut
    ],
)
def test_batches_that_grow_step_by_step_are_told(concluded, sizes, told):
    """As in a curriculum of the script's own: a faster trial timed longer sequences, and nothing said so."""
    assert (GROWS in concluded(alloc_retries=0, taken_in={"elements": sizes})) is told
