"""The ledger of steps: what loss scaling skips and what the end of an epoch cuts short, in windows of several steps."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils.config import get_timers_config
from deepspeed.utils.timer import ThroughputTimer

from autotune.trial.folder import TrialDir
from autotune.trial.request import TrialRequest
from autotune.worker.measure import ledger as ledgers
from autotune.worker.measure.batches import Ragged, StepCount
from autotune.worker.measure.ledger import Diverged, NotApplied, StepLedger
from autotune.worker.measure.recorder import Recorder

ONE = torch.tensor(1.0)


@pytest.fixture
def ledger(monkeypatch, tmp_path):
    """The ledger of one rank."""
    return made(monkeypatch, tmp_path)


def made(monkeypatch, folder, others=lambda own: [], candidate=None):
    """The ledger of rank 1, beside ranks that see what `others` makes of what it sees; for no candidate a probe's."""

    def gathered(rows, own):
        for row, seen in zip(rows, [own, *others(own)], strict=True):
            row.copy_(seen)

    monkeypatch.setattr(ledgers.dist, "all_gather", gathered)
    config = {"micro_batch_size": 1} if candidate is None else candidate
    world_size = 1 + len(others(torch.zeros(4)))
    request = TrialRequest(target="model.py", budget_s=1e6, world_size=world_size, candidate=config)
    return StepLedger(Recorder(TrialDir(folder), 1), request, torch.device("cpu"), request.world_size)


def add(ledger, *laps_s, skipped=(), ragged=(), losses=None, unlike=(), same_end=()):
    """Gathers steps that took so long, of which those with the given numbers were skipped, or smaller or unlike."""
    n = range(len(laps_s))
    kinds = dict.fromkeys(ragged, Ragged.END) | dict.fromkeys(unlike, Ragged.VARIES)
    kinds |= dict.fromkeys(same_end, Ragged.SAME_END)
    ledger.gather(
        laps_s,
        sum(laps_s),
        losses or [ONE] * len(laps_s),
        skipped=[i in skipped for i in n],
        counts=[StepCount(samples=8, elements=16, ragged=kinds.get(i, Ragged.NO)) for i in n],
    )


def test_a_skipped_update_in_a_long_window_costs_itself_and_neither_the_window_nor_the_trial(ledger):
    for _ in range(3):  # the scale grows again and again, and is halved each time
        add(ledger, *[0.001] * 100, skipped={50})
    assert len(ledger.report.step_times_s) == len(ledger.report.losses) == 297 and ledger.skipped == 0


def test_steps_are_added_up_whatever_default_device_a_script_has_set(ledger):
    with torch.device("meta"):
        add(ledger, 0.1, 0.2)
    assert ledger.report.step_times_s == pytest.approx([0.1, 0.2])


def test_updates_that_are_skipped_without_end_diverge(ledger):
    add(ledger, *[0.1] * ledgers.MAX_SKIPPED_UPDATES, skipped=range(100))
    with pytest.raises(Diverged, match="31 updates were skipped"):
        add(ledger, 0.1, skipped={0})


@pytest.mark.parametrize(("stage", "said"), [(0, False), (1, True)])
def test_a_scale_that_deepspeed_never_lowers_is_named(monkeypatch, tmp_path, stage, said):
    candidate = {"micro_batch_size": 1, "precision": "torch_autocast_fp16", "zero_stage": stage}
    with pytest.raises(Diverged) as caught:
        add(made(monkeypatch, tmp_path, candidate=candidate), *[0.1] * 40, skipped=range(40))
    assert ("never lowers the loss scale" in str(caught.value)) is said


def test_a_budget_that_goes_by_before_the_scale_is_found_is_no_divergence(ledger):
    """Under --quick the first step may take longer than the budget, and fp16 skips it nearly always."""
    add(ledger, 2e6, skipped={0})
    add(ledger, 1.0)
    assert len(ledger.report.step_times_s) == 1 and ledger.skipped == 0


def test_a_skip_after_the_budget_is_no_divergence(ledger):
    add(ledger, *[1e6] * 6)
    add(ledger, 0.1, skipped={0})
    assert len(ledger.report.step_times_s) == 6


def test_a_loss_that_is_not_finite_ends_the_trial_at_its_step(ledger):
    with pytest.raises(Diverged, match="not finite at step 2"):
        add(ledger, 0.1, 0.1, 0.1, losses=[ONE, torch.tensor(float("nan")), ONE])
    assert ledger.report.losses == [1.0, None]


def test_ranks_compare_their_clocks_often_enough_and_not_after_each_short_step(ledger):
    add(ledger, 1.0)
    assert ledger.window_steps() == 1  # of the first steps each is another thing
    for step_s, n_steps in ((0.002, 100), (0.02, 10), (0.4, 2), (3.0, 1)):
        add(ledger, step_s)
        assert ledger.window_steps() == n_steps


def test_a_device_is_stopped_for_a_comparison_less_often(ledger):
    """Its queue is empty afterwards, which a training that goes on does not see."""
    on_device = ledgers.StepLedger(ledger.recorder, ledger.request, torch.device("cuda"), 2)
    on_device.report.step_times_s = [0.1] * 3
    assert (on_device.window_steps(), ledger.window_steps()) == (5, 2)


@pytest.mark.parametrize(
    ("device", "timers", "ahead"),
    [
        ("cuda:0", {}, False),
        ("cuda:0", {"timers": {"throughput": {"enabled": False}}}, True),
        ("cuda:0", {"timers": {"throughput": {"synchronized": False}}}, True),
        ("cpu", {"timers": {"throughput": {"enabled": False}}}, False),
    ],
)
def test_a_device_is_empty_between_steps_unless_the_throughput_timer_is_told_not_to_wait(device, timers, ahead):
    timer = ThroughputTimer(get_timers_config(timers), batch_size=1)
    assert ledgers.runs_ahead(SimpleNamespace(device=device, tput_timer=timer)) is ahead


def test_what_the_budget_leaves_is_no_more_than_an_interval_needs(ledger):
    add(ledger, 9e5, 0.001)
    assert ledger.window_steps() == ledgers.MAX_WINDOW_STEPS
    ledger.elapsed_s = 1e6
    assert ledger.window_steps() == ledgers.MIN_STEPS - 2


@pytest.mark.parametrize(("passed_s", "ends"), [(100.0, False), (200.0, True)])
def test_a_trial_of_long_steps_ends_before_its_deadline_with_what_it_has(ledger, passed_s, ends):
    """It was killed at its deadline, and its steps, of a minute each, told nothing."""
    ledger.recorder.began_s -= passed_s
    add(ledger, 1.0)
    for _ in range(2):
        assert not ledger.done()  # nothing is timed yet
        add(ledger, 60.0)
    assert ledger.done() is ends
    assert any("fewer steps were timed" in caveat for caveat in ledger.report.caveats) is ends


def test_a_pause_in_a_window_is_one_steps_and_not_the_others_and_the_first_step_is_not_of_the_budget(ledger):
    add(ledger, 2.5)  # the first, in which kernels are loaded, takes nothing of the budget
    assert ledger.elapsed_s == 0.0
    add(ledger, 0.004, 0.004, 0.5, 0.004)
    assert ledger.report.step_times_s == pytest.approx([2.5, 0.004, 0.004, 0.5, 0.004])
    assert ledger.elapsed_s == pytest.approx(0.512)


def test_who_watches_is_told_once_a_window(ledger):
    told = []
    ledger.report.rank, ledger.recorder.event = 0, lambda **what: told.append(what)
    add(ledger, 0.01, 0.02, 0.03, ragged={2})
    add(ledger, 0.01, ragged={0})
    assert [each["step"] for each in told] == [2] and told[0]["step_time_s"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("own", "others", "steps"),
    [
        ([0.01, 0.03, 0.01], [0.03, 0.01, 0.02], [0.03, 0.01, 0.02]),
        # The first rank waits for the second one's work of the step before: each step takes as long as the second's.
        ([0.01, 0.05, 0.05], [0.05, 0.05, 0.05], [0.05, 0.05, 0.05]),
        ([0.02, 0.02, 0.02], [0.01, 0.01, 0.05], [0.02, 0.02, 0.03]),
    ],
)
def test_a_step_ends_when_its_last_rank_has_ended_it(monkeypatch, tmp_path, own, others, steps):
    def slower(sent):
        seen = sent.clone()
        seen[:3] = torch.tensor(others)
        return [seen]

    ledger = made(monkeypatch, tmp_path, slower)
    ledger._began = True
    add(ledger, *own)
    assert ledger.report.step_times_s == pytest.approx(steps) and ledger.elapsed_s == pytest.approx(sum(steps))


def test_the_end_of_an_epoch_costs_its_own_step_only(ledger):
    for _ in range(3):
        add(ledger, *[0.01] * 8, ragged={7})
    assert ledger.report.step_times_s == pytest.approx([0.01] * 21) and len(ledger.report.losses) == 21


def test_many_smaller_steps_in_a_row_are_no_ends_of_epochs_and_count(ledger):
    add(ledger, *[0.01] * 10, ragged={4, 5, 6, 7})
    assert len(ledger.report.step_times_s) == 7 and ledger.report.caveats == [ledgers.FEWER]


def test_the_many_small_steps_of_an_epochs_last_draw_are_one_end(ledger):
    for _ in range(3):
        add(ledger, *[0.01] * 16, ragged={8}, same_end=range(9, 16))
    assert len(ledger.report.step_times_s) == 24


def test_a_smaller_step_that_ends_no_epoch_counts_as_it_comes(ledger):
    add(ledger, *[0.01] * 8, ragged={6})
    add(ledger, 0.01, unlike={0})
    assert len(ledger.report.step_times_s) == 8 and ledger.report.caveats == [ledgers.FEWER]


def test_smaller_steps_are_never_the_majority(ledger):
    add(ledger, 0.01, 0.01)
    for _ in range(2):
        add(ledger, 0.01, 0.01, 0.01, ragged={0, 1})
    with pytest.raises(NotApplied, match=r"most optimizer steps \(6 of 10\).*more data"):
        add(ledger, 0.01, 0.01, ragged={0, 1})


def test_a_probe_finds_out_that_the_samples_of_a_step_vary(monkeypatch, tmp_path):
    ledger = made(monkeypatch, tmp_path, candidate={})
    add(ledger, 0.01, 0.01, ragged={1})
    assert not ledger.uneven
    add(ledger, 0.01, unlike={0})
    assert ledger.uneven and len(ledger.report.step_times_s) == 1


def test_what_all_ranks_took_in_is_added_up_step_by_step(monkeypatch, tmp_path):
    ledger = made(monkeypatch, tmp_path, lambda own: [own.clone()])
    add(ledger, 0.01, 0.01, 0.01, ragged={1})
    assert ledger.report.taken_in == {
        "samples": [16, 16],
        "tokens": [0, 0],
        "real_tokens": [0, 0],
        "elements": [32, 32],
    }


@pytest.mark.parametrize(("kind", "norm"), [("FP16_UnfusedOptimizer", 2.0**16 * 3), ("FP16_Optimizer", 3.0)])
def test_the_norm_of_a_step_is_without_the_loss_scale_whatever_deepspeed_divides_it_by(kind, norm):
    from autotune.worker.measure.noise import NoiseMeter

    meter = NoiseMeter(torch.nn.Linear(2, 2), world_size=1, accumulation=1)
    meter._in_step = [torch.tensor((2.0**16 * 5) ** 2)]
    optimizer = type(kind, (), {"cur_scale": 2.0**16})()
    engine = SimpleNamespace(
        optimizer=optimizer, device="cpu", get_global_grad_norm=lambda: norm, zero_optimization_stage=lambda: 1,
        is_gradient_accumulation_boundary=lambda: True,
    )  # fmt: skip
    assert meter.before_step(engine) is None
    optimizer.cur_scale *= 2  # at the end of a step, once enough of them have not overflowed
    meter.after_step(engine, None, skipped=False)
    assert [float(each) for each in meter._steps[0]] == pytest.approx([25.0, 9.0])


def test_noise_is_not_taken_from_what_is_left_out(ledger, monkeypatch):
    from autotune.worker.measure.noise import NoiseMeter

    noise = NoiseMeter(torch.nn.Linear(2, 2), world_size=1, accumulation=2)
    noise._steps = [(torch.tensor(float(i)), torch.tensor(0.0)) for i in range(6)]
    noise._steps[1] = None
    ledger.noise = noise
    monkeypatch.setattr("autotune.worker.measure.noise.dist.all_reduce", lambda table: None)
    add(ledger, *[0.01] * 3, ragged={2})
    add(ledger, *[0.01] * 2, skipped={0})
    assert noise.terms(4).micro_sq == [0.0, 4.0]  # the last one was not gathered


@pytest.mark.parametrize("stage", [0, 1])
def test_an_update_that_torchs_own_scaler_skips_is_seen_though_deepspeed_counts_none(stage):
    """Under autocast to fp16; at stage 0 the engine holds the scaler, from stage 1 on its optimizer."""
    weight, scaler = torch.nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    engine = SimpleNamespace(
        skipped_steps=0,
        optimizer=SimpleNamespace(torch_autocast_gradscaler=scaler if stage else None),
        torch_autocast_z0_gradscaler=None if stage else scaler,
    )
    seen = [ledgers.skips_of(engine)]
    for factor in (float("inf"), 1.0, float("inf"), 1.0):
        scaler.scale((factor * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(ledgers.skips_of(engine))
    assert [after > before for before, after in itertools.pairwise(seen)] == [True, False, True, False]


def test_what_one_rank_finds_to_be_played_is_no_evaluation_of_any_step(ledger):
    """The first of such calls pass for evaluations until a sample of them is trained on."""
    counts = [StepCount(samples=8)] * 3
    ledger.gather([0.3, 0.1, 0.1], 0.1, [ONE] * 3, skipped=[False] * 3, counts=counts, aside_s=[0.2, 0.0, 0.0])
    assert ledgers.EVALUATES in ledger.report.caveats
    ledger.plays = True
    ledger.gather([0.3, 0.1, 0.1], 0.1, [ONE] * 3, skipped=[False] * 3, counts=counts, aside_s=[0.2, 0.0, 0.0])
    assert ledger.report.step_times_s == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.1, 0.1])
    assert ledgers.EVALUATES not in ledger.report.caveats
