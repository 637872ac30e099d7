"""What a script changes itself of gradients and weights, which DeepSpeed heeds at some stages alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.space.legality import why_illegal
from autotune.worker import project
from autotune.worker.script import context
from autotune.worker.script.by_hand import ByHand, leave_clipping_out


class Engine:
    """Keeps gradients where its stage has them, and updates the weights by plain descent."""

    def __init__(self, stage, clipping):
        self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.stage, self.clipping = stage, clipping

    def _backward_prologue(self):
        """DeepSpeed's engine calls it in each pass, also in one past its `backward`."""

    def backward(self, loss):
        self._backward_prologue()
        loss.backward()
        self.gradients = [each.grad for each in self.module.parameters()]
        if self.stage:
            self.module.zero_grad()

    def step(self):
        self._take_model_step()
        self.module.zero_grad()

    def _take_model_step(self):
        with torch.no_grad():
            for each, gradient in zip(self.module.parameters(), self.gradients, strict=True):
                each.sub_(0.1 * gradient)

    def gradient_clipping(self):
        return self.clipping

    def zero_optimization_stage(self):
        return self.stage

    def is_gradient_accumulation_boundary(self):
        return True


@pytest.fixture
def trained(monkeypatch):
    """What is noted of three steps between which a script does something to a model's parameters."""
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", module.clip_grad_norm_)
        monkeypatch.setattr(module, "clip_grad_value_", module.clip_grad_value_)
    monkeypatch.setattr(project, "holds", lambda file: file == __file__)

    def train(
        stage=0, clipping=0.0, *, gradients=lambda _: None, weights=lambda _: None, ahead=lambda _: None, plain=False
    ):
        script = context.ScriptContext.__new__(context.ScriptContext)
        script.report, script.by_hand, script.clipping = SimpleNamespace(caveats=[]), [], None
        script.by_micro_batch = ""
        engine = Engine(stage, clipping)
        ByHand(script).install(lambda *_: None)(engine, None)
        for _ in range(3):
            ahead([*engine.module.parameters()])
            loss = engine.module(torch.ones(2, 4)).square().sum()
            Engine.backward(engine, loss) if plain else engine.backward(loss)
            gradients([*engine.module.parameters()])
            engine.step()
            weights([*engine.module.parameters()])
        return script

    return train


def clip(parameters, norm=0.05):
    torch.nn.utils.clip_grad_norm_(parameters, norm)


def test_a_norm_at_which_a_script_clips_is_stated_in_the_configuration(trained):
    """ZeRO 1 was called drop-in for a script whose own clipping it does not see."""
    found = trained(gradients=clip)
    assert found.clipping == 0.05 and not found.by_hand
    assert "`gradient_clipping: 0.05`" in found.report.caveats[0] and "test_by_hand.py:" in found.report.caveats[0]


@pytest.mark.parametrize(("stage", "gradients"), [(0, clip), (2, clip)])
def test_where_deepspeed_clips_at_a_lower_norm_there_is_nothing_to_say(trained, stage, gradients):
    found = trained(stage, 0.01, gradients=gradients)
    assert (found.clipping, found.by_hand, found.report.caveats) == (None, [], [])


def test_clipping_without_effect_is_said_and_keeps_the_stage_off_0(trained):
    found = trained(1, gradients=clip)
    assert found.by_hand == ["gradients"] and "has no effect at ZeRO 1" in found.report.caveats[0]


@pytest.mark.parametrize("stage", [0, 1])
def test_clipping_after_the_update_frees_the_stage(trained, stage):
    """Accelerate updates in its `backward`: only ZeRO 0 was tried for its scripts that clip by torch's function."""
    found = trained(stage, weights=clip)
    (said,) = found.report.caveats
    assert not found.by_hand and found.clipping is None and "has no effect: DeepSpeed has updated the weights" in said


@pytest.mark.parametrize(
    "gradients",
    [
        lambda them: torch.nn.utils.clip_grad_value_(them, 0.1),
        lambda them: clip(them[:1]),
        lambda them: them[0].grad.zero_(),
        lambda them: setattr(them[0], "grad", torch.ones_like(them[0])),
        lambda them: (them[1].grad.mul_(2), clip(them)),
    ],
    ids=["by value", "some of them", "in place", "others in their place", "scaled and clipped"],
)
def test_other_changes_of_gradients_are_noted(trained, gradients):
    found = trained(gradients=gradients)
    assert found.by_hand == ["gradients"] and found.clipping is None


def test_changed_weights_are_noted_and_those_put_back_are_not(trained):
    def for_an_evaluation(them):
        before = them[0].detach().clone()
        them[0].data.zero_()
        them[0].data.copy_(before)

    assert trained(weights=lambda them: them[0].data.clamp_(-0.01, 0.01)).by_hand == ["weights"]
    found = trained(weights=for_an_evaluation)
    assert not found.by_hand and not found.by_micro_batch


@pytest.mark.parametrize(
    ("stage", "back", "noted", "plain"),
    [
        (0, -0.1, True, False),
        (2, -0.1, True, False),
        (2, -0.1, True, True),
        (3, -0.1, False, False),
        (0, 0.1, False, False),
    ],
)
def test_weights_that_are_moved_for_a_micro_batch_and_put_back_make_it_count(trained, stage, back, noted, plain):
    """Sharpness-aware minimization was called drop-in at another micro-batch, whose perturbation is another one."""

    def sharpest(them):
        them[0].data.add_(0.1)

    found = trained(stage, ahead=sharpest, gradients=lambda them: them[0].data.add_(back), plain=plain)
    assert bool(found.by_micro_batch) is noted is (found.by_micro_batch in found.report.caveats)
    assert found.by_hand == ([] if back < 0 else ["weights"])


def test_frameworks_that_read_the_norm_by_clipping_change_nothing(trained, monkeypatch):
    monkeypatch.setattr(project, "holds", lambda _file: False)
    found = trained(2, gradients=clip)
    assert not found.by_hand and not found.report.caveats


def test_a_trial_whose_configuration_clips_leaves_the_scripts_own_clipping_out(monkeypatch):
    """At ZeRO 0 it clipped the sum of each micro-batch so far."""
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", module.clip_grad_norm_)
    monkeypatch.setattr(project, "holds", lambda file: file == __file__)
    own, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    leave_clipping_out(SimpleNamespace(meter=SimpleNamespace(engine=SimpleNamespace(module=own))))
    for module in (own, other):
        module.weight.grad = torch.ones(2, 2)
        assert float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)) == 2.0
    assert float(own.weight.grad.norm()) == 2.0 and float(other.weight.grad.norm()) == pytest.approx(0.5)


@pytest.mark.process
def test_a_script_that_clips_and_clamps_is_kept_where_that_takes_effect(bench, home):
    found = bench.plan("by_hand.py", global_batch="keep")
    assert found.workload.script.by_hand == ("weights",)
    assert found.ds_config(found.baseline)["gradient_clipping"] == 0.05
    why = why_illegal(bench.candidate(found, zero_stage=1), found.setting)
    assert "what the script changes itself" in why
    bench.applied(found, micro_batch_size=4, gradient_accumulation_steps=2)
