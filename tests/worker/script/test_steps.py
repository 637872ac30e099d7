"""What is noted of a script's steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.instant import WORKLOAD

from autotune.trial.result import Observed
from autotune.worker.measure.batches import BatchObserver
from autotune.worker.script import evaluation, probe, steps
from autotune.worker.script.context import ScriptContext, ScriptError


def test_a_loss_that_a_script_reduces_in_place_counts_as_it_went_backward(monkeypatch):
    """A device's is read at the end of a window only, long after the script has summed it over ranks to print it."""
    monkeypatch.setattr(steps, "number_in", lambda tensor: tensor.detach().reshape(()))
    hooks = steps.StepHooks(SimpleNamespace(report=SimpleNamespace()))
    for value in (2.0, 4.0):
        loss = torch.tensor(value)
        hooks._note_loss(loss)
        loss.mul_(8)
    assert float(hooks._total) == 6.0


def test_a_leading_dimension_that_is_not_the_batch_of_the_configuration_is_said():
    """A model of sequences first, fed without a DataLoader, had its length for its batch, and no word on it."""
    seen = Observed(
        micro_batch_size=35, loader_batch_size=None, gradient_accumulation_steps=1, samples_per_step=35,
        tokens_per_step=None, zero_stage=0, dtype="fp32",
    )  # fmt: skip
    batches = SimpleNamespace(flattened=False, draw_size=0)
    said = probe._how_counted(seen, 20, batches)
    assert "counts as 35 samples" in said and "states 20" in said
    assert probe._how_counted(seen, 35, batches) == ""
    assert "states" not in probe._how_counted(replace(seen, loader_batch_size=20), 35, batches)


def test_steps_without_a_backward_pass_that_was_seen_are_refused_with_the_remedy():
    """It read "the loss was not finite"."""
    hooks = steps.StepHooks(SimpleNamespace(meter=object()))
    hooks._window = object()
    with pytest.raises(ScriptError, match=r"after no backward pass .*engine.backward\(loss\)"):
        hooks._boundary()


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_that_a_script_takes_itself_of_the_engines_output_make_the_micro_batch_count(inside):
    """DeepSpeed divides them by the accumulation, so a gradient penalty weighs less with more of it: such trials were drop-in."""
    script = ScriptContext.__new__(ScriptContext)
    script.report, script.by_micro_batch, script.in_backward = SimpleNamespace(caveats=[]), "", inside
    engine = SimpleNamespace(_running_engine_backward=inside, fp16_enabled=bool)
    script.meter, script.candidate = SimpleNamespace(engine=engine), None
    hooks = steps.StepHooks(script)
    script.meter.batches = SimpleNamespace(may_go_backward=False)
    hooks._autograd_backward(lambda _: hooks._on_prologue(list), [])  # `loss.backward()` through a graph that was kept
    assert not script.by_micro_batch
    hooks._plain.clear()
    hooks._on_prologue(list)
    assert script.by_micro_batch == ("" if inside else steps.DIFFERENTIATES)
    assert script.report.caveats == [script.by_micro_batch] * (not inside) and bool(hooks._plain) is not inside


@pytest.mark.parametrize(
    ("trained_on", "is_rollout"),
    [(torch.arange(78, 90), True), (torch.arange(78, 83), False), (torch.arange(70, 90), False)],
    ids=["as generated", "cut short", "another"],
)
def test_generated_samples_are_known_by_their_prompt_of_which_no_more_are_kept_than_are_looked_for(
    monkeypatch, trained_on, is_rollout
):
    """Comparing the rows of a large batch one by one took most of a minute, and all batches were copied from the device."""
    found, kept = evaluation.Evaluations(SimpleNamespace(recorder=SimpleNamespace(enter=str))), []
    batches = SimpleNamespace(went_forward=False, trains=False, trains_in_evaluation_mode=True, in_training_mode=False)
    monkeypatch.setattr(evaluation, "N_ROWS", 100)
    of = evaluation._rows_of
    monkeypatch.setattr(evaluation, "_rows_of", lambda *given: kept.append(of(*given)) or kept[-1])
    for start in (0, 480):
        found.forward(None, batches, (torch.arange(start, start + 480).view(80, 6),), {})
    batches.trains = True
    found.forward(SimpleNamespace(plays=list, restart=list, cut=dict), batches, (trained_on[None],), {})
    assert found._rollouts == is_rollout and sum(map(len, kept[:2])) == evaluation.N_ROWS


@pytest.mark.parametrize(("shared", "n_aside"), [(4, 0), (3, 8)])
def test_a_batch_whose_first_output_is_taken_at_times_is_not_evaluated(shared, n_aside):
    """As in self-conditioning: which trials left that time out depended on how often it fell into one step."""
    found = evaluation.Evaluations(SimpleNamespace(recorder=SimpleNamespace(enter=str)))
    cuts: list[bool] = []
    window = SimpleNamespace(cut=lambda *, aside: cuts.append(aside), plays=list)
    for i in range(16):
        batch = torch.arange(i * 100, i * 100 + 40).view(4, 10)
        batches = SimpleNamespace(
            went_forward=False, trains=False, trains_in_evaluation_mode=False, in_training_mode=False, n_backward=0
        )
        if i % 2:
            found.forward(window, batches, (batch,), {})
        batches.trains = True
        found.forward(window, batches, (torch.cat([batch[:shared], batch[shared:] + 7]),), {})
    assert sum(cuts) == n_aside


@pytest.mark.parametrize(("in_training_mode", "plays"), [(True, True), (False, False)])
def test_what_is_played_into_a_buffer_and_comes_back_at_times_is_not_evaluated(in_training_mode, plays):
    """As in Q-learning, where few moves are the model's at first: the time from each of these to the next update was left out."""
    found = evaluation.Evaluations(SimpleNamespace(recorder=SimpleNamespace(enter=str)))
    noted: list[int] = []
    window = SimpleNamespace(cut=lambda *, aside: None, plays=lambda: noted.append(1), restart=list)
    for i in range(8):
        batches = SimpleNamespace(
            went_forward=False,
            trains=False,
            trains_in_evaluation_mode=False,
            in_training_mode=in_training_mode,
            n_backward=0,
        )
        for move in range(3 * i, 3 * i + 3):
            found.forward(window, batches, (torch.full((1, 6), move),), {})
        batches.trains = True
        replayed = [3 * i - 4 if i > 1 else -1, *range(1000, 1007)]  # one of an earlier turn
        found.forward(window, batches, (torch.tensor(replayed)[:, None].expand(8, 6).contiguous(),), {})
    assert bool(noted) == plays


def test_lengths_of_wide_features_are_told_from_a_streams_batches_too():
    """`max_length` cut the features of a stream's samples, where these are more than the sequences are long."""
    noted = SimpleNamespace(shapes=[[torch.empty(n, 80)] for n in (20, 30)])
    loader = SimpleNamespace(_dataset=iter([]), _collate_fn=list, _auto_collation=True, _pin_memory=False)
    texts, engine = SimpleNamespace(lengths=[]), SimpleNamespace(module=torch.nn.Identity())
    batches = SimpleNamespace(noted=noted, flattened=False, texts=texts)
    context = SimpleNamespace(
        loaders=SimpleNamespace(trained=loader), trains_on_draws=True, report=SimpleNamespace(rank=0), steps_grouped=1,
        data_limits=lambda found, _: found,
    )  # fmt: skip
    assert "features" in probe._data(context, SimpleNamespace(batches=batches, engine=engine)).cannot["max_length"]


def test_a_loop_that_trains_several_times_on_each_batch_is_not_drop_in_at_another_micro_batch():
    """Half the sequences in chunks twice as long, in truncated backpropagation through time, were called drop-in."""
    engine = torch.nn.Identity()
    engine.global_steps, engine.module = 0, torch.nn.Identity()
    found = {}
    for n_times in (1, 4):
        batches, engine.global_steps = BatchObserver(engine, forgiving=True), 0
        for _ in range(3):
            batches.drew(8, torch.zeros(8, 12))
            for _ in range(n_times):
                batches.micro_batch((torch.zeros(8, 12 // n_times),), {})
                batches.backward()
                engine.global_steps += 1
                batches.step()
        found[n_times] = probe._with_repeats(WORKLOAD, batches)
    assert found[1] is WORKLOAD
    assert found[4].by_micro_batch == found[4].caveats[-1] and "truncated" in found[4].by_micro_batch


def test_ranks_that_split_sequences_take_in_one_anothers_batches():
    """Half the batches come from no draw of the rank's own: these passed for repetitions, and tokens counted half."""
    engine = torch.nn.Identity()
    engine.global_steps, engine.module = 0, torch.nn.Identity()
    batches = BatchObserver(engine, forgiving=True, shards=2)
    for _ in range(3):
        batches.drew(8, torch.zeros(8, 12, dtype=torch.long))
        for _ in range(2):
            batches.micro_batch((torch.zeros(8, 6, dtype=torch.long),), {})
            batches.backward()
            engine.global_steps += 1
            batches.step()
    assert batches.last.tokens == 8 * 12
    assert probe._with_repeats(WORKLOAD, batches) is WORKLOAD
