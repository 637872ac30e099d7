"""The training loop of a `model.py` trial."""

from pathlib import Path
from typing import Any

import torch

from autotune.space import data, torch_settings
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import SIDE_EFFECT_KEYS, Scalar
from autotune.trial import token_budget
from autotune.trial.request import TrialRequest
from autotune.worker import random_fills
from autotune.worker.containers import coarse_dtype, number_in, to_device
from autotune.worker.data import worst
from autotune.worker.data.loader import Loader
from autotune.worker.data.samples import fixed_sizes
from autotune.worker.data.witness import watch as loader_watch
from autotune.worker.measure import batches, experts, recompute
from autotune.worker.measure.gradient_check import REPLICATE_SEEDS, GradientWatch, perturb
from autotune.worker.measure.laps import Laps, synchronize
from autotune.worker.measure.ledger import NotApplied, Window
from autotune.worker.measure.meter import Meter
from autotune.worker.measure.noise import NoiseMeter
from autotune.worker.measure.recorder import Recorder
from autotune.worker.measure.tail import Tail
from autotune.worker.model import model_file, sequence, staged, weights
from autotune.worker.rank import connect, prepare_device, set_seed


def train_and_measure(recorder: Recorder, request: TrialRequest) -> None:
    """Trains the model of a request as its candidate says, and measures it."""
    candidate, rank = Candidate.of(request.candidate), recorder.report.rank
    memory = prepare_device(request, recorder.report)

    def join() -> None:  # where ranks wait for one another, they are past their imports
        recorder.enter("build")
        connect(request)

    target = model_file.load(Path(request.target), join)
    set_seed(request.seed)
    model, checkpointer = _built(request, target, candidate)
    in_stages = staged.is_staged(model)
    # Ranks that share a copy of the model or a sequence are neighbours, and are fed alike.
    replica, n_replicas = rank // candidate.ranks_per_replica, request.world_size // candidate.ranks_per_replica
    if in_stages:  # those of a pipeline are not: a stage of all copies comes before the next
        replica = rank % n_replicas
    changes = _data_changes(candidate, request)
    loader = _loader(request, target, candidate, changes, replica, n_replicas)
    recorder.report.side_changes += [data.in_words(*each) for each in changes.items()]
    recorder.report.side_changes += torch_settings.in_words(dict(candidate.config))
    loader.check(candidate.global_batch_size(request.world_size))
    recorder.enter("initialize")
    noise = NoiseMeter(model, request.world_size, candidate.gradient_accumulation_steps) if request.noise else None
    gradients = GradientWatch(model, request.world_size) if request.check_gradient else None
    sequence_groups = sequence_groups_of(target, model, candidate)
    engine = initialize(request, target, model, sequence_groups)
    # Dropout differs between copies of the model, not within one, and is the same in every trial.
    set_seed(request.seed + 1 + replica + REPLICATE_SEEDS * request.replicate)
    random_fills.flush()
    recorder.enter("warmup")
    observer = batches.BatchObserver(engine, uneven=loader.token_budget > 0, shards=candidate.sequence_degree)
    meter = Meter(recorder, request, engine, observer, memory, checkpointer, noise, gradients)
    loss = model_file.make_loss(target, model) if sequence_groups is None else sequence.split_loss(sequence_groups)
    _Trainer(meter, loader, loss, in_stages=in_stages).train()


def _built(request: TrialRequest, target: model_file.ModelFile, candidate: Candidate) -> tuple[torch.nn.Module, Any]:
    """Returns the model with the weights to start from, and what recomputes its blocks; None where nothing does."""
    model = model_file.build_model(target, candidate, request.seed)
    if request.weights is not None:
        weights.load(model, Path(request.weights))
    if request.replicate:
        perturb(model, request.replicate)
    if staged.is_staged(model):
        return model, staged.recompute(model, candidate.checkpoint_every)
    if not candidate.checkpoint_every:
        return model, None
    blocks = model_file.find_blocks(model, target.blocks)
    model_file.turn_off_cache(model)
    return model, recompute.Checkpointer(blocks, candidate.checkpoint_every)


def _loader(
    request: TrialRequest, target: model_file.ModelFile, candidate: Candidate, changes: dict[str, Scalar], replica: int,
    n_replicas: int,
) -> Loader:  # fmt: skip
    """Returns the loader of a copy of the model, known to the witnesses of the data."""
    # The samples of batch(n) depend on how the batch is split, so their loss curves are not paired; replicates show
    # how much that matters.
    seed = request.seed + (request.replicate if target.data is None else 0)
    loader = Loader(
        target, micro_batch_size=candidate.micro_batch_size, rank=replica, world_size=n_replicas, seed=seed,
        first_sample=request.first_sample, accumulation=candidate.gradient_accumulation_steps, changes=changes,
    )  # fmt: skip
    if candidate.ranks_per_replica > 1:
        loader.isolate()
    loader_watch.loader, loader_watch.grouped = loader, loader.grouped
    return loader


def _data_changes(candidate: Candidate, request: TrialRequest) -> dict[str, Scalar]:
    """Returns a candidate's settings of the data, with the tokens of its budget."""
    changes = candidate.data_changes
    if "token_budget" not in changes:
        return changes
    known = token_budget.padded(request.lengths, changes)
    return changes | {"token_budget": token_budget.tokens_for(known, candidate.micro_batch_size)}


def sequence_groups_of(target: model_file.ModelFile, model: torch.nn.Module, candidate: Candidate) -> Any:
    """Makes a model split its sequences over ranks, and returns the groups of these ranks.

    Returns:
        The groups; None if the candidate does not split sequences.

    Raises:
        NotApplied: The sequences of this model cannot be split.
    """
    if candidate.sequence_degree == 1:
        return None
    if why := sequence.why_none(target, model):
        raise NotApplied(f"sequence_parallel_size: {why}")
    return sequence.join(model, candidate.sequence_degree, candidate.micro_batch_size)


def initialize(request: TrialRequest, target: model_file.ModelFile, model: torch.nn.Module, mpu: Any = None) -> Any:
    """Returns the DeepSpeed engine of a model, with the target's optimizer if it makes one.

    Args:
        mpu: Groups over which sequences are split; None if they are not split.
    """
    import deepspeed

    config = {key: value for key, value in request.ds_config.items() if key not in SIDE_EFFECT_KEYS}
    config["steps_per_print"] = 10**9
    if (mixed := experts.facts(model)) is not None:
        config = mixed.completed(config)
    deepspeed.init_distributed(dist_init_required=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if target.optimizer is not None and "optimizer" not in config:
        optimizer = model_file.make_optimizer(target, parameters)
        if partly := model_file.check_optimizer(model, optimizer, f"{target.path.name}: optimizer()"):
            raise model_file.WorkloadError(partly)
        for group in optimizer.param_groups:
            for key in {"lr", "initial_lr"} & group.keys():
                group[key] *= request.learning_rate_factor
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    else:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, mpu=mpu)
    experts.watch(engine.module)
    return engine


class _Trainer:
    """Trains and times the steps of a `model.py`."""

    def __init__(self, meter: Meter, loader: Loader, loss: Any, *, in_stages: bool) -> None:
        self.meter, self.engine, self.loader, self.loss = meter, meter.engine, loader, loss
        self.micro_clock = Laps(meter.device)
        # 16-bit weights need 16-bit inputs; autocast and fp32 take them as they come.
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(meter.candidate.precision)
        self.stages = staged.StagedSteps(meter, self._draw) if in_stages else None

    def train(self) -> None:
        """Trains until the step time is known well enough, the budget is spent, or something ends it."""
        meter = self.meter
        self._train_window(1)
        self._train_window(1, apart=True)
        while meter.ledger.skipped:  # while fp16 looks for its loss scale, no optimizer step is made to take apart
            self._train_window(1, apart=True)
        meter.begin()
        self.micro_clock = Laps(meter.device)  # without the laps of the warm-up
        while not meter.ledger.done():
            self._train_window(meter.ledger.window_steps())
        meter.report.micro_step_s = self.micro_clock.medians_s()
        for _ in meter.afterwards():
            self._step()
        self._check_tail()
        meter.finish()
        self.loader.close()
        if meter.request.save_weights is not None:
            weights.save(self.engine, Path(meter.request.save_weights))

    def _train_window(self, n_steps: int, *, apart: bool = False) -> None:
        """Trains some steps, with one synchronization and one comparison of the ranks' clocks at the end.

        Args:
            apart: Whether to stop the clock after each phase, and on a device the memory counters, too.
        """
        synchronize(self.meter.device)
        if apart:
            self.meter.take_apart()
        window = Window(self.engine, self.meter.ledger)
        for _ in range(n_steps):
            loss = self._step()
            if apart:
                self.meter.enter("")
            window.add(loss, self.meter.batches.last)
        window.gather(n_steps)

    def _step(self) -> torch.Tensor | float:
        """Trains one optimizer step; returns its mean loss."""
        if self.stages is not None:
            return self.stages.step()
        meter = self.meter
        total: torch.Tensor | float = 0.0
        self.micro_clock.start()
        while True:
            meter.enter("data")
            batch = self._draw()
            meter.enter("forward")
            loss = self.loss(self.engine, batch)
            total = number_in(loss.float()) + total
            self.meter.recorder.report.loss_dtype = coarse_dtype(loss)
            meter.enter("backward")
            self.engine.backward(loss)
            meter.backward()
            meter.enter("step")
            meter.update(self.engine.step)
            boundary = meter.batches.step()
            self.micro_clock.lap("boundary" if boundary else "inner")
            if boundary:
                return total / meter.candidate.gradient_accumulation_steps

    def _draw(self) -> Any:
        batch, n_drawn = self.loader.next()
        if self.meter.candidate.sequence_degree > 1:
            sequence.check(batch)
        self.meter.batches.drew(n_drawn, batch)
        return to_device(batch, self.meter.device, self.dtype)

    def _check_tail(self) -> None:
        """Trains on the worst micro-batch, while the gradients of an earlier one are held if the candidate accumulates."""
        meter, tail = self.meter, Tail.of(self.meter)
        if tail is None:
            return
        if self.stages is not None:
            tail.finish(lambda: self.engine.eval_batch(data_iter=self.stages))
            return
        for _ in range(tail.n_micro - 1):
            self.engine.backward(self.loss(self.engine, self._draw()))
            self.engine.step()
        fixed = fixed_sizes(meter.batches.noted.shapes)
        batch = to_device(self.loader.worst(tail.check.longest_at, tail.check.length, fixed), meter.device, self.dtype)
        tail.note(batch, worst.rows_of(batch) if self.loader.token_budget else self.loader.micro_batch_size)
        self.engine.backward(self.loss(self.engine, batch))
        tail.finish(lambda: self.loss(self.engine, batch))
