"""The loader of a `model.py`: micro-batches of one rank in one fixed order, in its process or by workers."""

import itertools
import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from autotune.space.data import OF_LOADER
from autotune.space.deepspeed import Scalar
from autotune.trial import token_budget
from autotune.worker.containers import map_tensors
from autotune.worker.data import worst
from autotune.worker.data.change import Collate, why_not
from autotune.worker.data.samples import is_map_style, length_in_batch
from autotune.worker.model.model_file import ModelFile, WorkloadError

# Micro-batches that a rank could never draw: the end of an endless order.
ENDLESS = 2**40


class Loader:
    """Micro-batches of one rank, in an order that depends on the seed alone.

    Optimizer step t of every candidate with global batch B trains on the samples [t B, (t + 1) B) of one fixed sequence
    (a new permutation each epoch), whatever the split into ranks, micro-batches and accumulation; so loss curves of
    candidates are paired.

    Args:
        rank: This rank among those that are fed different samples.
        world_size: Number of those.
        first_sample: Position in the order to start at.
        accumulation: Micro-batches of an optimizer step, within which samples may be grouped.
        changes: Settings of the data, by name; of a token budget its tokens.

    Attributes:
        token_budget: Tokens that a micro-batch holds at most, padding included; 0 where it holds a number of samples.
        workers: The iterator over what workers load; None where this process loads.
    """

    def __init__(
        self, target: ModelFile, *, micro_batch_size: int, rank: int, world_size: int, seed: int, first_sample: int = 0,
        accumulation: int = 1, changes: Mapping[str, Scalar] | None = None,
    ) -> None:  # fmt: skip
        self.micro_batch_size = micro_batch_size
        self.n_samples: int | None = None
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._changes = dict(changes or {})
        self._own: Any = target.collate or torch.utils.data.default_collate
        self.collate = Collate(self._own, self._changes) if self._changes else self._own
        self._first = self._next_sample = first_sample
        # Samples of a step are sorted only among those that the rank gets anyway.
        self.grouped = accumulation if self._changes.get("group_by_length") else 1
        self._orders: dict[int, Tensor] = {}
        self.token_budget = int(str(self._changes.get("token_budget", 0)))
        self._filled: Iterator[list[Any]] | None = None
        self._longest, self._n_passes = 1, 0
        self._batch = target.batch if target.data is None else None
        self._stream: Iterator[Any] | None = None
        self._largest: Any = None
        self._waiting: list[tuple[Any, int]] = []
        self.workers: Any = None
        self.dataset: Any = None
        if target.data is not None:
            self.dataset = _dataset(target)
            if is_map_style(self.dataset):
                self.n_samples = len(self.dataset)
                self.workers = self._started()
            else:
                self._stream = itertools.islice(self._endless(target), first_sample, None)
        else:
            # batch(n) draws at random: other samples on every rank.
            torch.manual_seed(seed * 1_000_003 + rank + first_sample)
        self._generator: Tensor | None = None

    def isolate(self) -> None:
        """Draws with a separate random generator, which the model does not advance.

        Ranks that are fed alike must draw alike, though their shares of the model draw different random numbers.
        """
        self._generator = torch.get_rng_state()

    def check(self, global_batch_size: int) -> None:
        """Refuses a data set that cannot fill one optimizer step."""
        if self.n_samples is not None and self.n_samples < global_batch_size:
            raise WorkloadError(
                f"data() has {self.n_samples} samples, but one optimizer step needs {global_batch_size}"
            )

    def next(self) -> tuple[Any, int | None]:
        """Returns the next micro-batch of this rank, and the samples drawn for it (None for `batch(n)`)."""
        if self._generator is None:
            return self._next()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generator)
            found = self._next()
            self._generator = torch.get_rng_state()
        return found

    def _next(self) -> tuple[Any, int | None]:
        if self._batch is not None:
            return self._kept(self._batch(self.micro_batch_size)), None
        if self._stream is not None and self.token_budget:
            batch, n = self._of_budget()
            return self._kept(batch), n
        if self._stream is not None:
            own = self._rank * self.micro_batch_size
            samples = list(itertools.islice(self._stream, self.micro_batch_size * self._world_size))
            return self._kept(self.collate(samples[own : own + self.micro_batch_size])), self.micro_batch_size
        if not self._waiting:
            chunk = self.grouped * self.micro_batch_size * self._world_size
            self._waiting = next(self.workers) if self.workers is not None else self._drawn(self._next_sample)
            self._next_sample += chunk
        return self._waiting.pop(0)

    def worst(self, positions: tuple[int, ...], length: int, fixed: Set[int] = frozenset()) -> Any:
        """Returns the worst micro-batch: of the longest samples, or the largest that a stream has yielded, stretched.

        With a token budget it holds as many of them as the budget does.

        Args:
            positions: Positions of the longest samples; empty for a stream.
            length: The length that samples are stated to reach; 0 if none is.
            fixed: As of `worst.stretched`.
        """
        if self.n_samples is not None and positions:
            n = self.micro_batch_size
            if self.token_budget:
                n = max(1, self.token_budget // max(self._width(self.dataset[positions[0]]), length))
            return worst.batch_of(self.dataset, self.collate, positions, n, length, fixed)
        if self._largest is None:
            self._largest = self.next()[0]
        if not self.token_budget:
            return worst.stretched(self._largest, self.micro_batch_size, length, fixed)
        longest, rows = max(self._longest, length), worst.rows_of(self._largest)
        n = min(rows, max(1, self.token_budget // longest))
        return worst.stretched(worst.first_rows(self._largest, rows, n), n, longest)

    def close(self) -> None:
        """Ends the workers."""
        if self.workers is not None:
            self.workers._shutdown_workers()

    def samples(self) -> Any:
        """Returns the samples: a data set, an iterator, or for `batch(n)` those of one small batch."""
        if self._batch is None:
            return self.dataset if self._stream is None else iter(self.dataset)
        batch = self._batch(2)

        def sample(index: int) -> Any:
            return map_tensors(batch, lambda tensor: tensor[index] if tensor.dim() else tensor)

        return map(sample, range(2))  # of fewer than were asked for, which trials will report, one cannot be read

    def cannot(self, model: Any) -> dict[str, str]:
        """Returns the settings of the data that the target cannot follow; see `change.why_not`."""
        return why_not(self.dataset, self._own, model, mapped=self.n_samples is not None, loader=False)

    def _kept(self, batch: Any) -> Any:
        """Keeps the largest batch of a stream."""
        if self._largest is None or worst.size_of(batch) > worst.size_of(self._largest):
            self._largest = batch
        return batch

    def _endless(self, target: ModelFile) -> Iterator[Any]:
        fresh = False
        while True:
            empty, once = True, isinstance(self.dataset, Iterator)
            for sample in self.dataset:
                empty = False
                yield sample
            if empty and (fresh or not once):
                raise WorkloadError(f"{target.path.name}: data() yields no sample")
            self._n_passes += 1
            if once:  # a generator, of which nothing is left
                self.dataset, fresh = _dataset(target), True

    def _started(self) -> Any:
        """Starts the workers, or the thread that pins, if there are to be any."""
        arguments: dict[str, Any] = {name: self._changes[name] for name in OF_LOADER if name in self._changes}
        if not arguments.get("num_workers") and not arguments.get("pin_memory"):
            return None
        arguments["collate_fn"] = list  # torch's default makes lists of a batch's tuples, and tensors of its arrays
        steps = _Draws(self)
        return iter(torch.utils.data.DataLoader(steps, batch_size=None, sampler=range(ENDLESS), **arguments))

    def _of_budget(self) -> tuple[Any, int]:
        """Returns the next micro-batch that the token budget fills, and its samples."""
        if self._filled is None:
            pool = token_budget.POOL_BATCHES * self.micro_batch_size
            # Those of several epochs together would put copies of a sample into one batch.
            epochs = (token_budget.fill(own, self.token_budget, pool) for own in self._epochs())
            self._filled = itertools.chain.from_iterable(epochs)
        samples = next(self._filled)
        return self.collate(samples), len(samples)

    def _epochs(self) -> Iterator[Iterator[tuple[int, Any]]]:
        """Yields for each epoch the samples of this rank, in a worker those of its share, with their padded lengths."""
        worker = torch.utils.data.get_worker_info()
        at, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        first, every = self._rank * of + at, self._world_size * of
        if self._stream is not None:
            own = itertools.islice(self._stream, first, None, every)
            for _, group in itertools.groupby(own, lambda _: self._n_passes):
                yield ((self._width(sample), sample) for sample in group)
            return
        assert self.n_samples is not None
        n, places = self.n_samples, itertools.count(self._first + first, every)
        for _, positions in itertools.groupby(places, lambda place: place // n):
            yield ((self._width(sample), sample) for sample in (self.dataset[self._index(at)] for at in positions))

    def _width(self, sample: Any) -> int:
        multiple = int(str(self._changes.get("pad_to_multiple_of", 1)))
        length = min(length_in_batch(sample, self._own), int(str(self._changes.get("max_length", ENDLESS))))
        self._longest = max(self._longest, width := math.ceil(length / multiple) * multiple)
        return width

    def _drawn(self, first: int) -> list[tuple[Any, int]]:
        """Returns the micro-batches of one draw that begins at a position, each with its samples: one, or a step's."""
        if self.token_budget:
            return [self._of_budget()]
        chunk, own = self.micro_batch_size * self._world_size, self._rank * self.micro_batch_size
        samples = [
            self.dataset[self._index(first + n * chunk + own + i)]
            for n in range(self.grouped)
            for i in range(self.micro_batch_size)
        ]
        if self.grouped > 1:
            samples.sort(key=lambda sample: length_in_batch(sample, self._own))
        size = self.micro_batch_size
        return [(self.collate(samples[n * size : (n + 1) * size]), size) for n in range(self.grouped)]

    def _index(self, position: int) -> int:
        assert self.n_samples is not None
        epoch, offset = divmod(position, self.n_samples)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._orders = {epoch: torch.randperm(self.n_samples, generator=generator, device="cpu")} | {
                known: order for known, order in self._orders.items() if known >= epoch - 1
            }
        return int(self._orders[epoch][offset])


class _Draws(torch.utils.data.Dataset[list[tuple[Any, int]]]):
    """The draws of a loader by number, for its workers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getitem__(self, number: int) -> list[tuple[Any, int]]:
        loader = self._loader
        chunk = loader.grouped * loader.micro_batch_size * loader._world_size
        return loader._drawn(loader._first + number * chunk)

    def __len__(self) -> int:
        return ENDLESS


def _dataset(target: ModelFile) -> Any:
    assert target.data is not None
    dataset = target.data()
    if isinstance(dataset, torch.utils.data.DataLoader):
        name = f"{target.path.name}: data() returned a DataLoader"
        raise WorkloadError(f"{name}; return its dataset, since the tuner chooses the batch size")
    # Without a length it is read in order, as Python iterates over what has positions.
    by_name = isinstance(dataset, Mapping) and 0 not in dataset  # columns or splits, as of a DatasetDict
    if by_name or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise WorkloadError(
            f"{target.path.name}: data() returned {type(dataset).__name__}; return a Dataset or a list of samples"
        )
    if is_map_style(dataset) and len(dataset) == 0:
        raise WorkloadError(f"{target.path.name}: data() is empty")
    return dataset
