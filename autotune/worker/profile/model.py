"""Profile of a `model.py`: its parameters, its data, and a counted pass for each arithmetic and recomputation."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.errors import UserError, shortened
from autotune.space.deepspeed import precision_of
from autotune.trial.lengths import Table, cut, longest
from autotune.trial.profile import ACTIVATION_SCALE, ARITHMETIC, Pass, Profile
from autotune.trial.request import TrialRequest
from autotune.trial.workload import Experts
from autotune.worker.containers import map_tensors, n_elements, to_device
from autotune.worker.data import samples, worst
from autotune.worker.data.loader import Loader
from autotune.worker.measure import buffers, experts, malloc, memory
from autotune.worker.measure.batches import are_tokens, counted_tensor
from autotune.worker.measure.stages import join
from autotune.worker.model import model_file, staged
from autotune.worker.model.inspect import shares_of
from autotune.worker.profile import op_counter

# Every k-th block recomputed, as the presets propose; forecasts interpolate other values.
EVERY = (1, 2, 4)
# Two micro-batches, on fake and on real tensors. Many operations treat a batch of one as a special case, and batch norms refuse it.
SIZES, SMALL_SIZES = (2, 4), (1, 2)
ATTEMPTS = ((True, SIZES), (False, SMALL_SIZES), (False, SIZES))
DRAWS = 4
# State bytes per parameter (fp32) of DeepSpeed's fused optimizers, which need no scratch; torch's are run.
FUSED_STATES = {
    **dict.fromkeys(("adam", "adamw", "lamb"), 8.0),
    **dict.fromkeys(("lion", "muon", "adagrad"), 4.0),
    "sgd": 0.0,
}


def profile(request: TrialRequest, accelerator: str) -> Profile:
    """Profiles the `model.py` of a request."""
    malloc.hand_back()
    start_bytes = memory.resident_bytes()
    target = model_file.load(Path(request.target), join)
    loader = Loader(target, micro_batch_size=1, rank=0, world_size=1, seed=request.seed)
    loader.next()  # the first draw may load files or start workers
    began = time.perf_counter()
    for _ in range(DRAWS):
        loader.next()
    input_s = (time.perf_counter() - began) / DRAWS
    malloc.hand_back()
    data_bytes = max(0, memory.resident_bytes() - start_bytes)
    subject = _subject(target, loader, torch.device(accelerator))
    passes = subject.passes(ARITHMETIC.get(precision_of(request.ds_config), "fp32"), request.budget_s)
    state, scratch, for_all = _optimizer(subject, request.ds_config)
    return _assemble(
        subject, passes, optimizer_bytes=state, optimizer_scratch=scratch, scratch_for_all=for_all,
        data_bytes=float(data_bytes) if accelerator == "cpu" else 0.0, input_s_per_sample=input_s,
    )  # fmt: skip


class _Batches(NamedTuple):
    """A batch of a smaller and one of a larger number of samples.

    Attributes:
        sizes: Their samples.
        lengths: Lengths of the data set's samples, where batches are padded to their longest.
        sequence: That of a sample in these batches.
        of_tokens: As of `Profile`.
    """

    both: list[Any]
    sizes: tuple[int, int]
    lengths: Table
    sequence: int
    of_tokens: bool


class _Subject:
    """The model to profile, on fake or real tensors, with a smaller and a larger batch."""

    def __init__(self, target: model_file.ModelFile, drawn: _Batches, device: torch.device, *, fake: bool) -> None:
        self.target, self.drawn, self.device = target, drawn, device
        self.caveats: list[str] = []
        self.cut_short = False
        self.updating: set[nn.Module] = set()  # that change a buffer as they go forward; of them, those of floats
        self.moving: set[nn.Module] = set()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self._dtype: torch.dtype | None = None
        with self._tensors():
            self.model = model_file.build_model(target)
            self.blocks = model_file.find_blocks(self.model, target.blocks)
            self.built_bytes = built_bytes(self.model)
            self._convert(None)
            own = self._fake.from_tensor if self._fake is not None else lambda tensor: tensor
            self.batches = [to_device(map_tensors(b, own, objects=True), device, None) for b in drawn.both]
        model_file.turn_off_cache(self.model)
        self.first = self._followed_first()  # a model that cannot be followed fails here

    def passes(self, asked: str, budget_s: float) -> dict[str, Pass]:
        """Counts passes in every arithmetic, with and without recomputation, within the time budget.

        Args:
            asked: The arithmetic of the baseline, whose passes come first.
            budget_s: Seconds of this process's computing time; what is not counted in time follows from the others.
        """
        until = time.process_time() + budget_s  # not wall time: a busy machine must not change the forecasts
        first, known = self.first
        found = {f"{first}/0": known, "fp32/0": known.scaled(1.0 / ACTIVATION_SCALE[first])}
        several = [0, *(k for k in EVERY if k <= len(self.blocks))]
        # Last come those with some blocks recomputed, which can be interpolated.
        order = [(a, k) for a in dict.fromkeys((asked, "fp32", "autocast", "bf16")) for k in several[:2]]
        order += [(a, k) for k in several[2:] for a in ("bf16", "fp32", "autocast")]
        order = [(a, k) for a, k in order if (a, k) != (first, 0) and (a != "fp32" or first == "fp32")]
        for arithmetic, every in order:
            if time.process_time() > until:
                self.cut_short = True
                n = f"{len(found)} of {len(order) + 1} passes were followed"
                self.caveats.append(
                    f"profiling stopped after {budget_s:.0f} s of computing: {n}, the others are estimated"
                )
                break
            try:
                found[f"{arithmetic}/{every}"] = self._follow(arithmetic, every)
            except Exception as error:
                if not any(key.startswith(f"{arithmetic}/") for key in found) and every == 0:
                    self.caveats.append(f"no pass in {arithmetic}, scaled from fp32: {_first_line(error)}")
        return found

    def _followed_first(self) -> tuple[str, Pass]:
        """Returns a pass in fp32, or where the model has none, as with flash attention, in 16 bits, and its arithmetic."""
        try:
            return "fp32", self._follow("fp32", 0)
        except Exception as error:
            for arithmetic in ("bf16", "autocast"):
                with contextlib.suppress(Exception):
                    found = self._follow(arithmetic, 0)
                    self.caveats.append(f"no pass in fp32, scaled from {arithmetic}: {_first_line(error)}")
                    return arithmetic, found
            raise

    def _follow(self, arithmetic: str, every: int) -> Pass:
        dtype = torch.bfloat16 if arithmetic == "bf16" else None
        autocast = _autocast(self.model, self.device) if arithmetic == "autocast" else contextlib.nullcontext()
        with self._tensors(), op_counter.recomputing(self.blocks, every), autocast:
            if dtype is not self._dtype:
                self._convert(dtype or torch.float32)
                self._dtype = dtype
            in_stages = staged.is_staged(self.model)
            loss = staged.whole_loss(self.model) if in_stages else model_file.make_loss(self.target, self.model)
            traces = []
            for batch in self.batches:
                before = buffers.of(self.model)  # the first forward may make some, as masks
                traces.append(op_counter.follow(self.model, loss, to_device(batch, self.device, dtype)))
        changed = list(buffers.changed(self.model, before, traces[1].written))
        self.updating |= {module for module, _ in changed}
        self.moving |= {module for module, buffer in changed if buffer.is_floating_point()}
        return op_counter.combine(traces[0], traces[1], self.drawn.sizes)

    @contextlib.contextmanager
    def _tensors(self) -> Iterator[None]:
        """Has tensors be fake ones within the context, if the subject's are."""
        if self._fake is None:
            yield
            return
        with self._fake, converted_anew():
            yield

    def _convert(self, dtype: torch.dtype | None) -> None:
        """Moves the model to the device and a floating type; None keeps each tensor's."""

        def changed(tensor: Tensor) -> Tensor:
            moved = tensor.to(device=self.device, dtype=dtype if tensor.is_floating_point() else None)
            # Views of a deep-copied fake tensor do not share its storage.
            return moved if self._fake is None else torch.empty_like(moved)

        self.model._apply(changed)


def _batches(loader: Loader, sizes: tuple[int, int]) -> _Batches:
    """Returns a batch of each size.

    Where lengths vary they are of the longest samples, or of a stream one and a part of it: two of other lengths would tell
    nothing of a sample's share.
    """
    drawn = []
    for loader.micro_batch_size in sizes:
        drawn.append(loader.next()[0])
    data = samples.describe(loader.samples(), collate=loader.collate)
    known = data.table if data is not None and data.varies else ()
    part = worst.first_rows(drawn[1], sizes[1], sizes[0])
    part = part if worst.size_of(part) < worst.size_of(drawn[1]) else drawn[0]  # samples are not its rows
    high = [part, drawn[1]]
    if data is not None and data.longest_at:
        high = []
        for loader.micro_batch_size in sizes:
            high.append(loader.worst(data.longest_at, 0))
    differ = len({worst.size_of(batch) for batch in (drawn[0], part, high[0])}) > 1
    known, both = (known, high) if differ else ((), drawn)
    counted = counted_tensor((both[0],), {})
    shape = tuple(counted.shape) if counted is not None else ()
    sequence = worst.length_in(shape[:2], sizes[0]) or 1
    mapped = data is not None and bool(data.longest_at)
    of_tokens = counted is not None and are_tokens(counted)
    if of_tokens:
        known = cut(known, sequence) if mapped else known  # the collate function may cut samples
    elif known:
        sequence = longest(known) if mapped else max(shape[1:], default=1)
    return _Batches(both, sizes, known, sequence, of_tokens)


@contextlib.contextmanager
def _autocast(model: Any, device: torch.device) -> Iterator[None]:
    """Has a model run as DeepSpeed runs it with `torch_autocast`: forward in bfloat16, the loss outside."""
    own = model.forward
    model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(own)
    try:
        yield
    finally:
        model.forward = own


def _subject(target: model_file.ModelFile, loader: Loader, device: torch.device) -> _Subject:
    """Returns the model on fake tensors, or on real ones if that fails."""
    torch.manual_seed(0)
    whys: list[str] = []
    for fake, sizes in ATTEMPTS:
        few = loader.n_samples is not None and loader.n_samples < sizes[1]
        drawn = _batches(loader, SMALL_SIZES if few else sizes)
        try:
            found = _Subject(target, drawn, device, fake=fake)
        except UserError:
            raise
        except Exception as error:
            whys.append(_first_line(error))
            if len(whys) == len(ATTEMPTS):
                raise model_file.WorkloadError(f"{target.path.name}: no forward and backward: {whys[-1]}") from error
            continue
        found.caveats += [f"profiled by real steps, not on fake tensors: {whys[0]}"] if whys else []
        return found
    raise AssertionError


@contextlib.contextmanager
def converted_anew() -> Iterator[None]:
    """Has `Module.to` and its like make parameters anew within the context: torch swaps fake ones, and refuses that."""
    original: Any = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, ...]] = {}  # which holds what it knows by its address

    def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(change)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            known = id(change), id(parameter)
            if known not in made:
                with torch.no_grad():
                    new = nn.Parameter(change(parameter), requires_grad=parameter.requires_grad)
                # A module with several names comes once for each.
                made[known] = made[id(change), id(new)] = new, parameter, change
            module._parameters[name] = made[known][0]
        module._buffers.update({name: change(each) for name, each in module._buffers.items() if each is not None})
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def built_bytes(model: nn.Module) -> float | None:
    """Returns what devices hold of a model before `deepspeed.initialize`; see `Profile.built_bytes`."""
    parameters = list(dict.fromkeys(model.parameters()))
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return None
    there = sum(p.numel() * p.element_size() for p in parameters if p.device.type not in ("cpu", "meta"))
    return there / max(1, sum(p.numel() for p in parameters))


def _optimizer(subject: _Subject, ds_config: Mapping[str, Any]) -> tuple[float, float, bool]:
    """Returns state and scratch of the optimizer; see `op_counter.optimizer_needs`."""
    named = ds_config.get("optimizer") or {}
    kind, params = str(named.get("type", "")), dict(named.get("params") or {})
    try:
        if named:
            ours = params.pop("torch_adam", False)
            if kind.lower() in FUSED_STATES and not ours and kind.lower() != "sgd":
                of_adam = 4.0 * _share_of_adam(subject.model) if kind.lower() == "muon" else 0.0
                return FUSED_STATES[kind.lower()] + of_adam, 0.0, False
            decoupled = params.pop("adam_w_mode", True)
            name = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW", "sgd": "SGD"}.get(kind.lower(), kind)
            made = getattr(torch.optim, name)
            return op_counter.optimizer_needs(lambda parameters: made(parameters, **params), subject.device)
        if subject.target.optimizer is not None:
            return op_counter.optimizer_needs(
                functools.partial(model_file.make_optimizer, subject.target), subject.device
            )
    except Exception as error:
        subject.caveats.append(f"the optimizer's states are taken for Adam's: {_first_line(error)}")
    return 8.0, 8.0, False


def _share_of_adam(model: nn.Module) -> float:
    """Returns the share of the trained elements that DeepSpeed's Muon leaves to Adam (deepspeed/__init__.py, `set_optimizer_flags`)."""
    trained = [(name.lower(), p) for name, p in model.named_parameters() if p.requires_grad]
    others = sum(p.numel() for name, p in trained if p.dim() < 2 or "embed" in name or "lm_head" in name)
    return others / max(1, sum(p.numel() for _, p in trained))


def _assemble(subject: _Subject, passes: dict[str, Pass], **found: Any) -> Profile:
    model, blocks, drawn = subject.model, subject.blocks, subject.drawn
    plain = passes["fp32/0"]
    again = passes.get("fp32/1", plain)
    changing = buffers.classes(subject.updating & {module for block in blocks for module in block.modules()})
    moving = buffers.classes(subject.moving)
    longest_only = f"memory is forecast for the longest samples ({longest(drawn.lengths):,}), time for average ones"
    return Profile(
        flops_per_sample=max(1.0, plain.flops[0] / drawn.sizes[1] + plain.flops[1]),
        activation_bytes_per_sample=plain.kept_bytes[1],
        checkpointed_bytes_per_sample=again.kept_bytes[1],
        sequence=drawn.sequence,
        of_tokens=drawn.of_tokens,
        passes=passes,
        lengths=drawn.lengths,
        built_bytes=subject.built_bytes,
        cut_short=subject.cut_short,
        updates=changing,
        by_micro_batch=moving,
        caveats=(*subject.caveats, *([longest_only] if drawn.lengths else []), *buffers.said(changing, moving)),
        **shares_of(model, blocks),
        **of_parameters(model, experts.facts(model) or Experts()),
        **found,
    )


def of_parameters(model: nn.Module, mixed: Experts) -> dict[str, Any]:
    """Returns the fields of a profile that tell how a model's parameters are cut up, whatever the target."""
    parameters = list(dict.fromkeys(model.parameters()))
    named = sum(n_elements(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        "n_tied": named - sum(map(n_elements, parameters)),
        "sizes": tuple(sorted(Counter(map(n_elements, parameters)).items())),
        "n_frozen": sum(not p.requires_grad for p in parameters),
        "largest_module": max(sum(map(n_elements, each.parameters(recurse=False))) for each in model.modules()),
        "n_expert": mixed.parameters, "expert_layers": mixed.layers, "experts_per_token": mixed.per_token,
    }  # fmt: skip


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shortened(f"{type(error).__name__}: {lines[0] if lines else ''}", 300)
