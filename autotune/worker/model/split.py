"""Check whether a model can be split over ranks: facts of its shape, and a comparison of the split model with the whole."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.errors import UserError
from autotune.space.candidate import Candidate
from autotune.trial.request import TrialRequest
from autotune.trial.workload import Splitting
from autotune.worker.containers import to_device
from autotune.worker.data.loader import Loader
from autotune.worker.device import accelerator
from autotune.worker.measure import experts, groups
from autotune.worker.measure.ledger import NotApplied
from autotune.worker.measure.recorder import Recorder
from autotune.worker.model import model_file, sequence, staged
from autotune.worker.rank import connect, prepare_device, set_seed

# A split model sums in another order than the whole one, which fp32 shows in the fifth digit; a wrong split, in the
# first or second.
MOST_LOSS_ERROR, MOST_NORM_ERROR = 1e-3, 1e-2
SAY_WHICH = "say which layers by `tensor_parallel.partition_config` in the base config"


def splitting(target: model_file.ModelFile, model: nn.Module) -> Splitting:
    """Returns the facts of a model that decide over how many ranks it can be split."""
    if staged.is_staged(model):
        return Splitting(tensor=staged.SPLIT_BY_STAGES, sequence=staged.SPLIT_BY_STAGES)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = _number(text, "num_attention_heads", "n_head")
    return Splitting(
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads") or heads,
        tensor=_why_no_tensor(model),
        sequence=sequence.why_none(target, model),
    )


def _number(config: Any, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _why_no_tensor(model: nn.Module) -> str:
    """Returns why DeepSpeed finds no layers to split in a model by itself; empty if it does."""
    try:
        from deepspeed.module_inject.auto_tp import AutoTP
        from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
    except ImportError:
        return "the installed DeepSpeed has no AutoTP for training"
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        return "AutoTP does not split the Conv1D layers of transformers for training"
    plan = _get_hf_tp_plan(model)
    if plan:
        try:
            from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
        except ImportError:
            return ""
        unknown = sorted({style for style in plan.values() if style.lower() not in SUPPORTED_STYLES})
        named = ", ".join(unknown)
        return f"its transformers plan has styles that AutoTP does not know ({named}); {SAY_WHICH}" if unknown else ""
    try:
        AutoTP.tp_parser(model)
    except AssertionError:
        return f"AutoTP finds no pairs of layers to split in {type(model).__name__}; {SAY_WHICH}"
    return ""


def compare_split(recorder: Recorder, request: TrialRequest) -> None:
    """Splits the model of a request as its candidate says, and compares its loss and gradient with the whole model's.

    Raises:
        NotApplied: The split model computes something else, or nothing was split.
    """
    candidate = Candidate.of(request.candidate)
    prepare_device(request, recorder.report)
    target = model_file.load(Path(request.target), functools.partial(connect, request))
    set_seed(request.seed)
    model = model_file.build_model(target, seed=request.seed)
    _without_dropout()
    recorder.enter("build")
    loss_of = staged.whole_loss(model) if staged.is_staged(model) else model_file.make_loss(target, model)
    # All ranks take the same batch, so that the mean over them is that of one.
    loader = Loader(target, micro_batch_size=candidate.micro_batch_size, rank=0, world_size=1, seed=request.seed)
    batch, _ = loader.next()
    whole_loss, whole_norm = _whole(model, loss_of, batch, request.seed)
    recorder.enter("initialize")
    if candidate.pipeline_degree * candidate.expert_degree > 1:
        set_seed(request.seed)
        weights, model = model.state_dict(), model_file.build_model(target, candidate, request.seed)
        if candidate.expert_degree > 1:  # a layer with fewer experts may draw other random numbers
            model.load_state_dict(experts.of_this_rank(model, weights))
    from autotune.worker.model.loop import initialize, sequence_groups_of

    sequence_groups = sequence_groups_of(target, model, candidate)
    engine = initialize(request, target, model, sequence_groups)
    if sequence_groups is not None:
        loss_of = sequence.split_loss(sequence_groups)
    recorder.enter("warmup")
    set_seed(request.seed)
    batch = to_device(batch, torch.device(engine.device), None)
    if candidate.pipeline_degree > 1:
        loss = engine.train_batch(data_iter=iter([staged.pair(batch)]))
    else:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
    found = groups.observe(engine)
    if why := found.mismatch(candidate):
        raise NotApplied(why)
    _compare("loss", float(loss.detach()), whole_loss, MOST_LOSS_ERROR)
    norm = engine.get_global_grad_norm()
    if norm is not None:
        _compare("gradient norm", float(norm), whole_norm, MOST_NORM_ERROR)
    if drifted := groups.drifted(engine):
        raise NotApplied(f"{drifted} is not split, and differs between the ranks of a group after one step")


def _compare(what: str, split: float, whole: float, most: float) -> None:
    error = abs(split - whole) / max(abs(whole), 1e-6)
    if not error <= most:
        raise NotApplied(f"the split model's {what} is {split:.6g}, the whole model's {whole:.6g}: it is split wrongly")


def _whole(model: nn.Module, loss_of: Any, batch: Any, seed: int) -> tuple[float, float]:
    """Returns loss and gradient norm of the model before anything is split, on the device that it is trained on."""
    before, device = next(model.parameters()).device, torch.device(accelerator().current_device_name())
    model.to(device)
    set_seed(seed)
    loss = loss_of(model, to_device(batch, device, None))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        raise UserError("the loss reaches no parameter of the model, so that a split model cannot be compared")
    norm = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
    model.zero_grad(set_to_none=True)
    model.to(before)
    return float(loss.detach()), float(norm)


def _without_dropout() -> None:
    """Turns dropout off for the rest of this process, and leaves the model in training mode."""
    attention: Any = nn.functional.scaled_dot_product_attention

    def keep(*arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments else named["input"]

    def attend(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > 4:  # torch's MultiheadAttention names none of them
            return attention(*arguments[:4], 0.0, *arguments[5:], **named)
        return attention(*arguments, **named | {"dropout_p": 0.0})

    functional: Any = nn.functional
    functional.dropout, functional.scaled_dot_product_attention = keep, attend
