"""The quality gate on real trials: bf16 at every stage passes, injected faults do not."""

import pytest
from support.paths import MODELS
from support.zoo import Zoo

from autotune.scoring.convergence.quality_gate import judge, judge_gradient
from autotune.trial.result import Outcome

pytestmark = pytest.mark.process

RUN = {"micro": 16, "check_gradient": True, "max_steps": 30, "min_samples": 10**9, "budget_s": 60.0}


@pytest.fixture(scope="module")
def references(executor, tmp_path_factory):
    zoo = Zoo(executor, tmp_path_factory.mktemp("references"))
    return [zoo.run("ok", replicate=n, **RUN) for n in range(3)]


def refusal(own, references):
    assert own.outcome is Outcome.COMPLETE, own.reason
    reference, *others = references
    wrong = judge_gradient(own.gradient, reference.gradient, {})
    return wrong or judge(own.losses, reference.losses, [each.losses for each in others]).reason


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "knobs",
    [
        {"precision": "bf16", "zero_stage": 0},
        {"precision": "torch_autocast"},
        {"communication_data_type": "bf16", "zero_stage": 1},
        *({"precision": "bf16", "zero_stage": stage} for stage in (1, 2, 3)),
    ],
)
def test_16_bits_pass_also_where_the_first_step_is_a_quarter_short(zoo, references, knobs):
    assert refusal(zoo.run("ok", **knobs, **RUN), references) == ""


MADE = """

def made(params, lr):
    return torch.optim.AdamW(params, lr=lr)


def sign(optimizer, *_):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad.sign() * p.grad.abs().mean()


class Signed(torch.optim.AdamW):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.register_step_pre_hook(sign)
"""


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lr = 300 * lr", "trains "),
        ("for p in params: p.register_hook(lambda g: 1024 * g)", " is off by "),
        ("return Signed(params, lr)", "trains "),
    ],
)
def test_an_injected_fault_is_refused(zoo, references, tmp_path, line, said):
    path, own = tmp_path / "faulty.py", "    return torch.optim.AdamW(params, lr=3e-3)"
    changed = f"    lr = 3e-3\n    {line}\n    return made(params, lr)"
    path.write_text((MODELS / "ok.py").read_text().replace(own, changed) + MADE)
    assert said in refusal(zoo.run(path, **RUN), references)
