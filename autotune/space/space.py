"""Search spaces: the knobs to tune, their conditions, and the candidates that they span."""

import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from autotune.errors import nearest
from autotune.space.candidate import BATCH, FIELDS, Candidate
from autotune.space.deepspeed import Scalar, is_int
from autotune.space.degree import REPLICA_DEGREES
from autotune.space.parameter import MOST_KNOBS, Parameter, SpaceError, parse_parameters

# What a field is set to while its condition does not hold; the batch has no neutral value and stays the baseline's.
NEUTRAL = {
    f.name: f.default for f in fields(Candidate) if f.default is not MISSING and f.name not in (*BATCH, "config")
}
MOST_STRUCTURES = 100_000
# Why a search ends that has no candidate left.
EXHAUSTED = "every candidate that can run here has been measured"
MOST_CANDIDATES = 10**100


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Knobs in an order in which parents come before the knobs that depend on them.

    Made by `parse` or `compose`, which check and order; a default candidate (the baseline) fills in what is not tuned.

    Attributes:
        samples_per_rank: Samples that each rank sees per optimizer step, if the global batch is kept: then the
            accumulation is not tuned but follows from the micro-batch. None if the global batch is free.
    """

    parameters: tuple[Parameter, ...]
    samples_per_rank: float | None = None

    @classmethod
    def parse(cls, data: Any, where: str) -> "SearchSpace":
        """Reads one search space, as in a preset file.

        Args:
            data: Mapping of knobs to their values (parsed YAML).
            where: What to call it in an error, usually its path.
        """
        return cls.compose([(where, parse_parameters(data, where))])

    @classmethod
    def compose(cls, parts: Iterable[tuple[str, Sequence[Parameter]]]) -> "SearchSpace":
        """The union of search spaces, each with the place it came from.

        Raises:
            SpaceError: Two parts define one knob, a condition names an unknown knob, or conditions form a circle.
        """
        origin: dict[str, str] = {}
        parameters: list[Parameter] = []
        for where, part in parts:
            for parameter in part:
                if parameter.name in origin:
                    place = f"{where}: {parameter.name}"
                    raise SpaceError(f"{place}: already defined by {origin[parameter.name]}; leave out one of the two")
                origin[parameter.name] = where
                parameters.append(parameter)
        by_name = {parameter.name: parameter for parameter in parameters}
        _check_size(parameters, ", ".join(dict.fromkeys(origin.values())))
        for parameter in parameters:
            _check_parents(parameter, by_name, origin[parameter.name])
        return cls(parameters=_ordered(parameters, origin))

    @classmethod
    def stored(cls, data: Any, where: str) -> "SearchSpace":
        """Reads what `to_data` gave of a space whose knobs may have lost values that conditions of others name."""
        return cls(parameters=parse_parameters(data, where))

    def __getitem__(self, name: str) -> Parameter:
        """The parameter of that name; a KeyError if the knob is not tuned."""
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def to_data(self) -> dict[str, Any]:
        """The space as it stands in a YAML file; `stored` reads it back (a kept global batch is not part of it)."""
        return {parameter.name: parameter.to_data() for parameter in self.parameters}

    def pinned(self, values: Mapping[str, Scalar]) -> "SearchSpace":
        """The part of the space in which the named knobs have the given values."""
        kept = (
            Parameter(name=p.name, choices=(values[p.name],), when=p.when) if p.name in values else p
            for p in self.parameters
        )
        return replace(self, parameters=tuple(kept))

    def around(self, baseline: Candidate) -> "SearchSpace":
        """The space with all values of knobs that are to lie around a baseline's own.

        These are, beside their choices, the baseline's own, twice, four times it and so on as far as `around_baseline`
        goes, and what divides the samples of a rank, from the least choice to the largest of these: the same global batch
        in other micro-batches.
        """
        kept = (_around(p, baseline) if p.around_baseline else p for p in self.parameters)
        return replace(self, parameters=tuple(kept))

    def keeping(self, baseline: Candidate, world_size: int) -> "SearchSpace":
        """The part of the space that trains on the global batch of a baseline, which can run on this many ranks.

        The accumulation is derived, `global_batch / (micro_batch_size * world_size)`, so it is no longer a parameter;
        micro-batches that do not divide leave the space, and the baseline's own belongs to it.
        """
        samples = baseline.global_batch_size(world_size) / world_size
        most = max(baseline.ranks_per_replica, math.prod(_largest(self, name) for name in REPLICA_DEGREES))
        kept = []
        for parameter in self.parameters:
            if parameter.name == "micro_batch_size":
                kept.append(_dividing(parameter, samples, most, baseline.micro_batch_size))
            elif parameter.name != "gradient_accumulation_steps":
                kept.append(parameter)
        return SearchSpace(parameters=_ordered(kept, {}), samples_per_rank=samples)

    def active(self, values: Mapping[str, Scalar], default: Candidate) -> list[Parameter]:
        """The parameters whose conditions hold, given the values; one whose parent is not decided yet is not active."""
        known: dict[str, Scalar] = {}
        found = []
        for parameter in self.parameters:
            if self.holds(parameter, known, default):
                found.append(parameter)
                if parameter.name in values:
                    known[parameter.name] = values[parameter.name]
            else:
                known[parameter.name] = self.inactive(parameter.name, default)
        return found

    def suggest(self, ask: Callable[[Parameter], Scalar], default: Candidate) -> dict[str, Scalar]:
        """Chooses a value for every parameter, in order, asking only for those whose conditions hold.

        Args:
            ask: Gives the (decoded) value of a parameter, as `lambda parameter: parameter.suggest(trial)` does.
        """
        known: dict[str, Scalar] = {}
        chosen: dict[str, Scalar] = {}
        for parameter in self.parameters:
            if self.holds(parameter, known, default):
                known[parameter.name] = chosen[parameter.name] = ask(parameter)
            else:
                known[parameter.name] = self.inactive(parameter.name, default)
        return chosen

    def candidate(self, values: Mapping[str, Scalar], default: Candidate) -> Candidate:
        """The candidate that a choice of values means.

        A knob that is not in the space is the baseline's. One whose condition does not hold is switched off: a
        DeepSpeed path is left out, a field takes its neutral value (`NEUTRAL`), whatever the baseline says; so is a
        value given for it ignored.
        """
        on = {p.name: values[p.name] for p in self.active(values, default) if p.name in values}
        return self.build(on, *self.template(default))

    def values_of(self, candidate: Candidate) -> dict[str, Scalar]:
        """The values of the active parameters that give this candidate, whether or not the parameters contain them."""
        values = candidate.values()
        values = {parameter.name: values.get(parameter.name) for parameter in self.parameters}
        return {parameter.name: values[parameter.name] for parameter in self.active(values, candidate)}

    def contains(self, candidate: Candidate, default: Candidate | None = None) -> bool:
        """Whether the candidate is one of the space; knobs that are not tuned are the default's, without one whatever they are."""
        values = self.values_of(candidate)
        inside = all(self[name].contains(value) for name, value in values.items())
        return inside and self.candidate(values, default or candidate) == candidate

    def size(self, default: Candidate) -> int:
        """How many candidates there are, legal or not."""
        return sum(_product(leaves) for _, leaves in _structures(self, default))

    def assignments(self, default: Candidate) -> Iterator[dict[str, Scalar]]:
        """Every choice of values for the active parameters, each once."""
        for chosen, leaves in _structures(self, default):
            names = [leaf.name for leaf in leaves]
            for values in itertools.product(*(leaf.all_values() for leaf in leaves)):
                yield {**chosen, **dict(zip(names, values, strict=True))}

    def candidates(self, default: Candidate) -> Iterator[Candidate]:
        """Every candidate, legal or not, each once."""
        template = self.template(default)
        return (self.build(values, *template) for values in self.assignments(default))

    def draw(self, rng: random.Random, default: Candidate, n: int) -> Iterator[Candidate]:
        """`n` random candidates, legal or not, each candidate of the space equally likely (with repetition)."""
        template = self.template(default)
        structures = list(_structures(self, default))
        weights = [_product(leaves) for _, leaves in structures]
        for chosen, leaves in rng.choices(structures, weights, k=n):
            yield self.build({**chosen, **{leaf.name: rng.choice(leaf.all_values()) for leaf in leaves}}, *template)

    @functools.cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def holds(self, parameter: Parameter, known: Mapping[str, Scalar], default: Candidate) -> bool:
        """Whether the conditions of a parameter hold, given the values of those before it."""
        return all(
            all(knob in known for knob in self.knobs(parent)) and self._value(parent, known, default) in allowed
            for parent, allowed in parameter.when.items()
        )

    def knobs(self, name: str) -> tuple[str, ...]:
        """The knobs of the space that decide one: of the accumulation micro-batch and degrees, where the global batch is kept."""
        derived = name == "gradient_accumulation_steps" and self.samples_per_rank is not None
        return tuple(knob for knob in (("micro_batch_size", *REPLICA_DEGREES) if derived else (name,)) if knob in self)

    def _value(self, name: str, known: Mapping[str, Scalar], default: Candidate) -> Scalar:
        if name == "gradient_accumulation_steps" and self.samples_per_rank is not None:
            micro = int(known.get("micro_batch_size", default.micro_batch_size) or 1)
            return _accumulation(self.samples_per_rank, micro, {**dict(default.config), **known})
        value: Scalar = known[name] if name in known else getattr(default, name)
        return value

    def inactive(self, name: str, default: Candidate) -> Scalar:
        """The value of a knob whose conditions do not hold."""
        if name not in FIELDS:
            return None
        value: Scalar = NEUTRAL.get(name, getattr(default, name))
        return value

    def template(self, default: Candidate) -> tuple[dict[str, Any], list[tuple[str, Scalar]]]:
        """What `build` lays values over: fields, and the DeepSpeed settings that are not tuned."""
        own = {name: self.inactive(name, default) if name in self else getattr(default, name) for name in FIELDS}
        return own, [(name, value) for name, value in default.config if name not in self]

    def build(self, values: Mapping[str, Scalar], own: dict[str, Any], config: list[tuple[str, Scalar]]) -> Candidate:
        """The candidate with these values of active parameters, over a `template`."""
        own = own | {name: value for name, value in values.items() if name in _FIELD_SET}
        if self.samples_per_rank is not None:
            degrees = {**dict(config), **values}
            micro = own["micro_batch_size"]
            own["gradient_accumulation_steps"] = _accumulation(self.samples_per_rank, micro, degrees)
        config = config + [
            (name, value) for name, value in values.items() if value is not None and name not in _FIELD_SET
        ]
        return Candidate(**own, config=tuple(sorted(config, key=operator.itemgetter(0))))


_FIELD_SET = frozenset(FIELDS)


def _largest(space: SearchSpace, name: str) -> int:
    """The largest value of a degree in a space."""
    values = space[name].all_values() if name in space else ()
    return max([value for value in values if isinstance(value, int)], default=1)


def global_batches(space: SearchSpace, default: Candidate, world_size: int) -> set[int]:
    """The global batches of a space's micro-batches and numbers of micro-steps, legal or not."""
    sizes = tuple(p for p in space.parameters if p.name in BATCH and not p.when)
    return {each.global_batch_size(world_size) for each in replace(space, parameters=sizes).candidates(default)}


def _accumulation(samples_per_rank: float, micro_batch_size: int, values: Mapping[str, Scalar]) -> int:
    """The accumulation that keeps the global batch: ranks that share a copy of the model share its samples."""
    degrees = (values.get(name) for name in REPLICA_DEGREES)
    per_replica = samples_per_rank * math.prod(max(1, n) for n in degrees if isinstance(n, int))
    return max(1, int(per_replica) // micro_batch_size)


def _structures(space: SearchSpace, default: Candidate) -> Iterator[tuple[dict[str, Scalar], list[Parameter]]]:
    """Every choice for the parameters that others depend on, with the active ones that nothing depends on."""
    parents = {knob for parameter in space.parameters for parent in parameter.when for knob in space.knobs(parent)}
    branches = [parameter for parameter in space.parameters if parameter.name in parents]
    leaves = [parameter for parameter in space.parameters if parameter.name not in parents]

    def walk(
        depth: int, known: dict[str, Scalar], chosen: dict[str, Scalar]
    ) -> Iterator[tuple[dict[str, Scalar], list[Parameter]]]:
        if depth == len(branches):
            yield chosen, [leaf for leaf in leaves if space.holds(leaf, known, default)]
            return
        branch = branches[depth]
        if not space.holds(branch, known, default):
            yield from walk(depth + 1, {**known, branch.name: space.inactive(branch.name, default)}, chosen)
            return
        for value in branch.all_values():
            yield from walk(depth + 1, {**known, branch.name: value}, {**chosen, branch.name: value})

    return walk(0, {}, {})


def _around(parameter: Parameter, baseline: Candidate) -> Parameter:
    """The parameter with the values around a baseline's among its choices (`SearchSpace.around`)."""
    own: int = getattr(baseline, parameter.name)
    samples = baseline.micro_batch_size * baseline.gradient_accumulation_steps
    listed = set(filter(is_int, parameter.choices))
    values = listed | {own << n for n in range(parameter.around_baseline.bit_length())}
    values |= {n for n in range(min(listed), min(max(values), samples) + 1) if samples % n == 0}
    return Parameter(name=parameter.name, choices=tuple(sorted(values)), when=parameter.when)


def _dividing(micro_batch: Parameter, samples: float, most: int, always: int) -> Parameter:
    """The micro-batches that divide the samples of a rank, or of as many as `most` ranks that share them."""
    divisors = {n for n in micro_batch.all_values() if isinstance(n, int) and samples * most % n == 0}
    return Parameter(name=micro_batch.name, choices=tuple(sorted(divisors | {always})), when=micro_batch.when)


def _product(leaves: Iterable[Parameter]) -> int:
    return math.prod(len(leaf.all_values()) for leaf in leaves)


def _check_size(parameters: Sequence[Parameter], where: str) -> None:
    """Refuses more knobs, or conditions of more combinations, than can be walked through."""
    if len(parameters) > MOST_KNOBS or _product(parameters) > MOST_CANDIDATES:
        raise SpaceError(
            f"{where}: {len(parameters)} knobs are more than can be tuned at once (at most {MOST_KNOBS});"
            " leave some out"
        )
    parents = [parameter for parameter in parameters if any(parameter.name in other.when for other in parameters)]
    if _product(parents) > MOST_STRUCTURES:
        names = ", ".join(parameter.name for parameter in parents)
        raise SpaceError(
            f"{where}: when: conditions on {names} have more than {MOST_STRUCTURES:,} combinations;"
            " give these knobs fewer values, or fewer conditions"
        )


def _check_parents(parameter: Parameter, by_name: Mapping[str, Parameter], where: str) -> None:
    for parent, allowed in parameter.when.items():
        place = f"{where}: {parameter.name}: when: {parent}"
        if parent not in by_name and parent not in FIELDS:
            known = list(dict.fromkeys([*by_name, *FIELDS]))
            raise SpaceError(
                f"{place}: is not a knob of this search space.{nearest(parent, known)} Known: {', '.join(known)}"
            )
        if parent in FIELDS:
            continue
        for value in allowed:
            if not by_name[parent].contains(value):
                raise SpaceError(f"{place}: {value!r} is not one of its values ({by_name[parent].describe()})")


def _ordered(parameters: Sequence[Parameter], origin: Mapping[str, str]) -> tuple[Parameter, ...]:
    """Parents first, otherwise in the given order."""
    names = {parameter.name for parameter in parameters}
    # With a kept global batch the accumulation follows from the micro-batch, so that is its dependants' parent.
    derived = ("micro_batch_size", *(name for name in REPLICA_DEGREES if name in names))
    stands_in = {} if "gradient_accumulation_steps" in names else {"gradient_accumulation_steps": derived}
    waiting = list(parameters)
    done: list[Parameter] = []
    while waiting:
        placed = {parameter.name for parameter in done}
        ready = next(
            (p for p in waiting if placed >= {n for each in p.when for n in stands_in.get(each, (each,))} & names), None
        )
        if ready is None:
            circle = ", ".join(parameter.name for parameter in waiting)
            where = origin.get(waiting[0].name, "search space")
            raise SpaceError(f"{where}: when: the conditions of {circle} depend on each other in a circle")
        waiting.remove(ready)
        done.append(ready)
    return tuple(done)
