"""What may be varied: tunable knobs, their conditions, and every candidate that they span."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autotune import UserError
from autotune.candidate import (
    FIELDS,
    RULES,
    SECTION_KEYS,
    Candidate,
    Rule,
    Scalar,
    Setting,
    check_knob,
    check_value,
    nearest,
)
from autotune.ds_json import check_setting

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, IntDistribution
    from optuna.trial import Trial

PARAMETER_KEYS = ("choices", "range", "step", "power_of_two", "when")
BATCH_FIELDS = ("micro_batch_size", "gradient_accumulation_steps")
# What a field is set to while its condition does not hold; the batch has no neutral value and stays the baseline's.
NEUTRAL = {
    f.name: f.default for f in fields(Candidate) if f.default is not MISSING and f.name not in (*BATCH_FIELDS, "config")
}
LARGEST_EXPONENT = 62
# Draws behind an estimate: a share of 1 % is then known to a tenth of itself.
DRAWS = 10_000
# Candidates that are looked at before a value is called dead.
CONFIRMING = 5_000
# A range longer than this is not searched value by value for dead ones.
LONG_RANGE = 512
# What a person may mean; beyond, candidates could neither be counted nor walked through in the time that a study has.
MOST_CHOICES, MOST_OF_A_RANGE, MOST_KNOBS = 1_000, 1_000_000, 100
MOST_STRUCTURES, MOST_CANDIDATES, LARGEST_BOUND = 100_000, 10**100, 2**53


class SpaceError(UserError):
    """A search space that cannot be read or used."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One knob and the values it may take.

    Attributes:
        name: A field of `Candidate`, or the path of a DeepSpeed setting (`zero_optimization.overlap_comm`).
        choices: The values, if they are listed; None among them leaves the key out, so that DeepSpeed's default holds.
        low: Lowest value of a range, or lowest exponent of a power-of-two range.
        high: Highest value or exponent, included.
        step: Distance between neighbours of a range (between exponents if `power_of_two`).
        power_of_two: The range is one of exponents: 16 to 29 means 2**16 to 2**29.
        when: The knob exists only while each parent named here has one of the values given for it.
    """

    name: str
    choices: tuple[Scalar, ...] = ()
    low: int = 0
    high: int = 0
    step: int = 1
    power_of_two: bool = False
    when: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict, hash=False)

    @property
    def optuna_name(self) -> str:
        """The parameter's name in an Optuna study; a power-of-two range is searched, and shown, by exponent."""
        return f"{self.name} (log2)" if self.power_of_two else self.name

    def distribution(self) -> CategoricalDistribution | IntDistribution:
        """The Optuna distribution of the encoded values."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        return IntDistribution(self.low, self.high, step=self.step)

    def suggest(self, trial: Trial) -> Scalar:
        """Asks an Optuna trial for a value, decoded."""
        if self.choices:
            return self.decode(trial.suggest_categorical(self.optuna_name, self.choices))
        return self.decode(trial.suggest_int(self.optuna_name, self.low, self.high, step=self.step))

    def decode(self, value: Any) -> Scalar:
        """The knob's value for an Optuna value."""
        if self.choices:
            scalar: Scalar = value
            return scalar
        return 2 ** int(value) if self.power_of_two else int(value)

    def encode(self, value: Scalar) -> Scalar:
        """The Optuna value for a knob's value.

        Raises:
            SpaceError: The parameter does not contain the value; `contains` asks first.
        """
        if not self.contains(value):
            raise SpaceError(f"{self.name}: {value!r} is not among {self.describe()}")
        return int(value).bit_length() - 1 if self.power_of_two and isinstance(value, int) else value

    def contains(self, value: Scalar) -> bool:
        """Whether the value is one of the parameter's."""
        if self.choices:
            return value in self.choices
        return isinstance(value, int) and not isinstance(value, bool) and value in self.all_values()

    def all_values(self) -> Sequence[Scalar]:
        """Every value, in order; a plain range is not spelled out in memory."""
        if self.choices:
            return self.choices
        numbers = range(self.low, self.high + 1, self.step)
        return tuple(2**exponent for exponent in numbers) if self.power_of_two else numbers

    def describe(self) -> str:
        """The values in a few words."""
        if self.choices:
            return ", ".join("default" if value is None else str(value) for value in self.choices)
        base = "2^" if self.power_of_two else ""
        return f"{base}{self.low}..{base}{self.high}" + (f" by {self.step}" if self.step > 1 else "")

    def to_data(self) -> dict[str, Any]:
        """The parameter as it stands in a YAML file; `parse_parameters` reads it back."""
        data: dict[str, Any] = {"choices": list(self.choices)} if self.choices else {"range": [self.low, self.high]}
        if self.step != 1:
            data["step"] = self.step
        if self.power_of_two:
            data["power_of_two"] = True
        if self.when:
            data["when"] = {parent: list(values) for parent, values in self.when.items()}
        return data


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Knobs in an order in which parents come before the knobs that depend on them.

    Made by `parse` or `compose`, which check and order; a default candidate (the baseline) fills in what is not tuned.

    Attributes:
        parameters: The knobs.
        samples_per_rank: Samples that each rank sees per optimizer step, if the global batch is kept: then the
            accumulation is not tuned but follows from the micro-batch. None if the global batch is free.
    """

    parameters: tuple[Parameter, ...]
    samples_per_rank: int | None = None

    @classmethod
    def parse(cls, data: Any, where: str) -> SearchSpace:
        """Reads one search space, as in a preset file.

        Args:
            data: Mapping of knobs to their values (parsed YAML).
            where: What to call it in an error, usually its path.

        Raises:
            SpaceError: It names the place, the knob and what is known.
        """
        return cls.compose([(where, parse_parameters(data, where))])

    @classmethod
    def compose(cls, parts: Iterable[tuple[str, Sequence[Parameter]]]) -> SearchSpace:
        """The union of search spaces, each with the place it came from.

        Raises:
            SpaceError: Two parts define one knob, a condition names an unknown knob, or conditions form a circle.
        """
        origin: dict[str, str] = {}
        parameters: list[Parameter] = []
        for where, part in parts:
            for parameter in part:
                if parameter.name in origin:
                    raise SpaceError(
                        f"{where}: {parameter.name}: already defined by {origin[parameter.name]}; leave out one of the two"
                    )
                origin[parameter.name] = where
                parameters.append(parameter)
        by_name = {parameter.name: parameter for parameter in parameters}
        _check_size(parameters, ", ".join(dict.fromkeys(origin.values())))
        for parameter in parameters:
            _check_parents(parameter, by_name, origin[parameter.name])
        return cls(parameters=_ordered(parameters, origin))

    def __getitem__(self, name: str) -> Parameter:
        """The parameter of that name.

        Raises:
            KeyError: The knob is not tuned.
        """
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def to_data(self) -> dict[str, Any]:
        """The space as it stands in a YAML file; `parse` reads it back (a kept global batch is not part of it)."""
        return {parameter.name: parameter.to_data() for parameter in self.parameters}

    def pinned(self, values: Mapping[str, Scalar]) -> SearchSpace:
        """The part of the space in which the named knobs have the given values."""
        kept = [
            Parameter(name=p.name, choices=(values[p.name],), when=p.when) if p.name in values else p
            for p in self.parameters
        ]
        return SearchSpace(parameters=tuple(kept), samples_per_rank=self.samples_per_rank)

    def keeping(self, global_batch: int, world_size: int, micro_batch_size: int | None = None) -> SearchSpace:
        """The part of the space that trains on the same global batch.

        The accumulation is derived, `global_batch / (micro_batch_size * world_size)`, so it is no longer a parameter;
        micro-batches that do not divide leave the space.

        Args:
            global_batch: Samples per optimizer step, over all ranks.
            world_size: Ranks.
            micro_batch_size: The baseline's, which always belongs to the space.

        Raises:
            SpaceError: The ranks do not divide the global batch, or no micro-batch does.
        """
        if global_batch % world_size:
            raise SpaceError(
                f"a global batch of {global_batch} does not divide by {world_size} ranks;"
                " choose other --ranks, or let it vary with --global-batch free"
            )
        samples = global_batch // world_size
        if micro_batch_size is not None and samples % micro_batch_size:
            raise SpaceError(
                f"the baseline's micro-batch of {micro_batch_size} does not divide the {samples} samples of a rank"
            )
        kept = []
        for parameter in self.parameters:
            if parameter.name == "micro_batch_size":
                divisors = {n for n in parameter.all_values() if isinstance(n, int) and samples % n == 0}
                divisors |= {micro_batch_size} if micro_batch_size is not None else set()
                if not divisors:
                    raise SpaceError(
                        f"micro_batch_size: none of {parameter.describe()} divides the {samples} samples of a rank"
                    )
                kept.append(Parameter(name=parameter.name, choices=tuple(sorted(divisors)), when=parameter.when))
            elif parameter.name != "gradient_accumulation_steps":
                kept.append(parameter)
        return SearchSpace(parameters=_ordered(kept, {}), samples_per_rank=samples)

    def active(self, values: Mapping[str, Scalar], default: Candidate) -> list[Parameter]:
        """The parameters whose conditions hold, given the values; one whose parent is not decided yet is not active."""
        known: dict[str, Scalar] = {}
        found = []
        for parameter in self.parameters:
            if self._holds(parameter, known, default):
                found.append(parameter)
                if parameter.name in values:
                    known[parameter.name] = values[parameter.name]
            else:
                known[parameter.name] = self._inactive(parameter.name, default)
        return found

    def next_parameter(self, values: Mapping[str, Scalar], default: Candidate) -> Parameter | None:
        """The next parameter to choose a value for, given those chosen so far; None when all are chosen."""
        return next((parameter for parameter in self.active(values, default) if parameter.name not in values), None)

    def suggest(self, ask: Callable[[Parameter], Scalar], default: Candidate) -> dict[str, Scalar]:
        """Chooses a value for every parameter, in order, asking only for those whose conditions hold.

        Args:
            ask: Gives the (decoded) value of a parameter, as `lambda parameter: parameter.suggest(trial)` does.
            default: The baseline.
        """
        known: dict[str, Scalar] = {}
        chosen: dict[str, Scalar] = {}
        for parameter in self.parameters:
            if self._holds(parameter, known, default):
                known[parameter.name] = chosen[parameter.name] = ask(parameter)
            else:
                known[parameter.name] = self._inactive(parameter.name, default)
        return chosen

    def candidate(self, values: Mapping[str, Scalar], default: Candidate) -> Candidate:
        """The candidate that a choice of values means.

        A knob that is not in the space is the baseline's. One whose condition does not hold is switched off: a
        DeepSpeed path is left out, a field takes its neutral value (`NEUTRAL`), whatever the baseline says; so is a
        value given for it ignored.

        Args:
            values: Knob values by name.
            default: The baseline.
        """
        on = {
            parameter.name: values[parameter.name]
            for parameter in self.active(values, default)
            if parameter.name in values
        }
        return self._build(on, *self._template(default))

    def values_of(self, candidate: Candidate) -> dict[str, Scalar]:
        """The values of the active parameters that give this candidate, whether or not the parameters contain them."""
        values = candidate.values()
        values = {parameter.name: values.get(parameter.name) for parameter in self.parameters}
        return {parameter.name: values[parameter.name] for parameter in self.active(values, candidate)}

    def contains(self, candidate: Candidate) -> bool:
        """Whether the candidate is one of the space, whatever its knobs that are not tuned."""
        values = self.values_of(candidate)
        return (
            all(self[name].contains(value) for name, value in values.items())
            and self.candidate(values, candidate) == candidate
        )

    def encode(self, candidate: Candidate) -> dict[str, Scalar]:
        """The candidate as Optuna parameters.

        Raises:
            SpaceError: The candidate is not in the space.
        """
        return {self[name].optuna_name: self[name].encode(value) for name, value in self.values_of(candidate).items()}

    def size(self, default: Candidate) -> int:
        """How many candidates there are, legal or not."""
        return sum(_product(leaves) for _, leaves in self._structures(default))

    def candidates(self, default: Candidate) -> Iterator[Candidate]:
        """Every candidate, legal or not, each once."""
        template = self._template(default)
        for chosen, leaves in self._structures(default):
            names = [leaf.name for leaf in leaves]
            for values in itertools.product(*(leaf.all_values() for leaf in leaves)):
                yield self._build({**chosen, **dict(zip(names, values, strict=True))}, *template)

    def sample(self, rng: random.Random, default: Candidate) -> Candidate:
        """A random candidate, legal or not: each active parameter uniformly."""
        return self._build(
            self.suggest(lambda parameter: rng.choice(parameter.all_values()), default), *self._template(default)
        )

    def draw(self, rng: random.Random, default: Candidate, n: int) -> Iterator[Candidate]:
        """`n` random candidates, legal or not, each candidate of the space equally likely (with repetition)."""
        template = self._template(default)
        structures = list(self._structures(default))
        weights = [_product(leaves) for _, leaves in structures]
        for chosen, leaves in rng.choices(structures, weights, k=n):
            yield self._build({**chosen, **{leaf.name: rng.choice(leaf.all_values()) for leaf in leaves}}, *template)

    def count_legal(self, default: Candidate, setting: Setting, limit: int = 100_000) -> tuple[int, bool]:
        """How many candidates can run in a setting.

        Returns:
            The number, and whether it is exact; above `limit` candidates it is estimated from random ones.
        """
        pruned = self.pruned(default, setting)
        size = pruned.size(default)
        if size <= limit:
            return sum(candidate.illegal(setting) is None for candidate in pruned.candidates(default)), True
        legal = sum(candidate.illegal(setting) is None for candidate in pruned.draw(random.Random(0), default, DRAWS))
        return round(size * legal / DRAWS), False

    def refusals(self, default: Candidate, setting: Setting, limit: int = DRAWS) -> dict[str, float]:
        """Why candidates are not proposed: each reason's share of all candidates, largest first.

        A candidate counts for the first rule that it breaks; the reason is worded for one of those candidates. Above
        `limit` candidates the shares are estimated from `DRAWS` random ones.
        """
        every = self.candidates(default) if self.size(default) <= limit else self.draw(random.Random(0), default, DRAWS)
        counts: Counter[str] = Counter()
        wording: dict[int, str] = {}
        total = 0
        for candidate in every:
            total += 1
            broken = _first_broken(candidate, setting)
            if broken is not None:
                counts[wording.setdefault(id(broken), candidate.illegal(setting) or broken.why)] += 1
        return {reason: count / total for reason, count in counts.most_common()}

    def dead_values(self, default: Candidate, setting: Setting) -> dict[tuple[str, Scalar], str]:
        """The values that are illegal in every combination, with the reason.

        A value is cleared by one legal candidate that has it: first sought by changing other knobs as long as that breaks
        no more rules, from the baseline and from random starts, which finds nearly all; then, for what is left, among
        all candidates with the value, or among `CONFIRMING` random ones where there are more. So in a large space a
        value that runs only in very rare combinations could be called dead.
        """
        rng = random.Random(0)
        dead = {}
        for parameter in self.parameters:
            if len(values := parameter.all_values()) > LONG_RANGE:
                continue
            for value in values:
                reason = self._refusal(parameter, value, default, setting, rng)
                if reason is not None:
                    dead[parameter.name, value] = reason
        return dead

    def pruned(self, default: Candidate, setting: Setting) -> SearchSpace:
        """The space without its dead values: the same legal candidates among fewer."""
        dead = self.dead_values(default, setting)
        kept = []
        for parameter in self.parameters:
            alive = (
                tuple(value for value in parameter.all_values() if (parameter.name, value) not in dead) if dead else ()
            )
            # Without any value the knob would count as absent, and candidates would appear that the space does not have.
            shorter = 0 < len(alive) < len(parameter.all_values())
            kept.append(Parameter(name=parameter.name, choices=alive, when=parameter.when) if shorter else parameter)
        return replace(self, parameters=tuple(kept))

    @functools.cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def _holds(self, parameter: Parameter, known: Mapping[str, Scalar], default: Candidate) -> bool:
        when = parameter.when.items()
        return all(
            self._decided(parent, known) and self._value(parent, known, default) in allowed for parent, allowed in when
        )

    def _decided(self, name: str, known: Mapping[str, Scalar]) -> bool:
        if name == "gradient_accumulation_steps" and self.samples_per_rank is not None:
            name = "micro_batch_size"
        return name in known or name not in self._by_name

    def _value(self, name: str, known: Mapping[str, Scalar], default: Candidate) -> Scalar:
        if name == "gradient_accumulation_steps" and self.samples_per_rank is not None:
            micro = known.get("micro_batch_size", default.micro_batch_size)
            return self.samples_per_rank // int(micro or 1)
        if name in known:
            return known[name]
        value: Scalar = getattr(default, name)
        return value

    def _inactive(self, name: str, default: Candidate) -> Scalar:
        if name not in FIELDS:
            return None
        value: Scalar = NEUTRAL.get(name, getattr(default, name))
        return value

    def _template(self, default: Candidate) -> tuple[dict[str, Any], list[tuple[str, Scalar]]]:
        own = {name: self._inactive(name, default) if name in self else getattr(default, name) for name in FIELDS}
        return own, [(name, value) for name, value in default.config if name not in self]

    def _build(self, values: Mapping[str, Scalar], own: dict[str, Any], config: list[tuple[str, Scalar]]) -> Candidate:
        own = own | {name: value for name, value in values.items() if name in _FIELD_SET}
        if self.samples_per_rank is not None:
            own["gradient_accumulation_steps"] = self.samples_per_rank // own["micro_batch_size"]
        config = config + [
            (name, value) for name, value in values.items() if value is not None and name not in _FIELD_SET
        ]
        return Candidate(**own, config=tuple(sorted(config, key=_first)))

    def _structures(self, default: Candidate) -> Iterator[tuple[dict[str, Scalar], list[Parameter]]]:
        """Every choice for the parameters that others depend on, with the active ones that nothing depends on."""
        parents = {parent for parameter in self.parameters for parent in parameter.when}
        if self.samples_per_rank is not None and "gradient_accumulation_steps" in parents:
            parents.add("micro_batch_size")
        branches = [parameter for parameter in self.parameters if parameter.name in parents]
        leaves = [parameter for parameter in self.parameters if parameter.name not in parents]

        def walk(
            depth: int, known: dict[str, Scalar], chosen: dict[str, Scalar]
        ) -> Iterator[tuple[dict[str, Scalar], list[Parameter]]]:
            if depth == len(branches):
                yield chosen, [leaf for leaf in leaves if self._holds(leaf, known, default)]
                return
            branch = branches[depth]
            if not self._holds(branch, known, default):
                yield from walk(depth + 1, {**known, branch.name: self._inactive(branch.name, default)}, chosen)
                return
            for value in branch.all_values():
                yield from walk(depth + 1, {**known, branch.name: value}, {**chosen, branch.name: value})

        return walk(0, {}, {})

    def _refusal(
        self, parameter: Parameter, value: Scalar, default: Candidate, setting: Setting, rng: random.Random
    ) -> str | None:
        """Why no legal candidate has this value of the parameter; None if one was found."""
        known = default.values()
        start = {
            p.name: known[p.name] if p.name in known and p.contains(known[p.name]) else p.all_values()[0]
            for p in self.parameters
        }
        reasons: list[tuple[int, str]] = []
        for attempt in range(4):
            pins = self._pins(parameter, value, default, rng)
            if isinstance(pins, str):
                return pins
            current = (start if attempt == 0 else {p.name: rng.choice(p.all_values()) for p in self.parameters}) | pins
            broken = self._faults(current, parameter, default, setting)
            # Ancestors are free to move too: the value may run under one of its parents' values and not under another.
            free = [p for p in self.parameters if p.name != parameter.name]
            for _ in range(80 if free else 0):
                if broken == 0:
                    break
                moved = rng.choice(free)
                changed = current | {moved.name: rng.choice(moved.all_values())}
                if (count := self._faults(changed, parameter, default, setting)) <= broken:
                    current, broken = changed, count
            if broken == 0:
                return None
            reasons.append(
                (broken, self.candidate(current, default).illegal(setting) or "its conditions never hold together")
            )
        return None if self._runs(parameter, value, default, setting, rng) else min(reasons)[1]

    def _runs(
        self, parameter: Parameter, value: Scalar, default: Candidate, setting: Setting, rng: random.Random
    ) -> bool:
        """Whether a legal candidate with this value is among all of them, or among random ones if they are many."""
        fixed = Parameter(name=parameter.name, choices=(value,), when=parameter.when)
        whole = replace(self, parameters=tuple(fixed if p.name == fixed.name else p for p in self.parameters))
        template = whole._template(default)
        structures = [
            (chosen, leaves) for chosen, leaves in whole._structures(default) if fixed.name in chosen or fixed in leaves
        ]
        weights = [_product(leaves) for _, leaves in structures]
        if not structures:
            return False
        if sum(weights) <= CONFIRMING:
            found = (
                {**chosen, **dict(zip((leaf.name for leaf in leaves), values, strict=True))}
                for chosen, leaves in structures
                for values in itertools.product(*(leaf.all_values() for leaf in leaves))
            )
        else:
            drawn = rng.choices(structures, weights, k=CONFIRMING)
            found = (
                {**chosen, **{leaf.name: rng.choice(leaf.all_values()) for leaf in leaves}} for chosen, leaves in drawn
            )
        return any(_first_broken(whole._build(values, *template), setting) is None for values in found)

    def _faults(self, values: Mapping[str, Scalar], needed: Parameter, default: Candidate, setting: Setting) -> int:
        """How many rules the candidate breaks; more than there are rules if the needed parameter is not active in it."""
        on = {parameter.name: values[parameter.name] for parameter in self.active(values, default)}
        if needed.name not in on:
            return len(RULES) + 1
        return _count_broken(self._build(on, *self._template(default)), setting)

    def _pins(
        self, parameter: Parameter, value: Scalar, default: Candidate, rng: random.Random
    ) -> dict[str, Scalar] | str:
        """Values for the parameter and its ancestors that make it active, or why there are none."""
        pins = {parameter.name: value}
        for parent, allowed in parameter.when.items():
            if parent == "gradient_accumulation_steps" and self.samples_per_rank is not None:
                continue
            if parent not in self:
                if self._value(parent, {}, default) not in allowed:
                    return f"needs {parent} {_any_of(allowed)}; it is {self._value(parent, {}, default)} and not tuned"
                continue
            options = [option for option in allowed if self[parent].contains(option)]
            # A parent that is itself switched off has its neutral value; that may be all that the child asks for.
            if self._inactive(parent, default) in allowed and self[parent].when and (not options or rng.random() < 0.5):
                continue
            if not options:
                return f"needs {parent} {_any_of(allowed)}, which the search space does not contain"
            above = self._pins(self[parent], rng.choice(options), default, rng)
            if isinstance(above, str):
                return above
            pins = above | pins
        return pins


_FIELD_SET = frozenset(FIELDS)


def _first(pair: tuple[str, Scalar]) -> str:
    return pair[0]


def _any_of(values: Sequence[Scalar]) -> str:
    return " or ".join("default" if value is None else str(value) for value in values)


def _product(leaves: Iterable[Parameter]) -> int:
    return math.prod(len(leaf.all_values()) for leaf in leaves)


def _first_broken(candidate: Candidate, setting: Setting) -> Rule | None:
    return next(candidate.broken_rules(setting), None)


def _count_broken(candidate: Candidate, setting: Setting) -> int:
    return sum(1 for _ in candidate.broken_rules(setting))


def parse_parameters(data: Any, where: str) -> tuple[Parameter, ...]:
    """Reads the knobs of one preset or inline space, in the order of the file.

    A knob's value is `{choices: [..]}`, `{range: [low, high]}` (with `step`, `power_of_two`), or for short a list of
    choices or a single value; `when: {parent: [values]}` makes it conditional.

    Raises:
        SpaceError: It names the place, the knob and what is known.
    """
    if not isinstance(data, dict):
        raise SpaceError(
            f"{where}: a search space is a mapping of knobs to their values, as in `zero_stage: {{choices: [0, 1]}}`"
        )
    return tuple(_parse_parameter(name, value, where) for name, value in data.items())


def _parse_parameter(name: Any, data: Any, where: str) -> Parameter:
    if not isinstance(name, str):
        raise SpaceError(f"{where}: {name!r} is not the name of a knob")
    where = f"{where}: {name}"
    try:
        check_knob(name)
    except UserError as error:
        raise SpaceError(f"{where}: {error}") from None
    if name in SECTION_KEYS:
        raise SpaceError(
            f"{where}: is a section of settings; name one of them, as in `{name}.{min(SECTION_KEYS[name])}`"
        )
    if not isinstance(data, dict):
        data = {"choices": data if isinstance(data, list) else [data]}
    for key in data:
        if key not in PARAMETER_KEYS:
            raise SpaceError(
                f"{where}: unknown key {key!r}.{nearest(str(key), PARAMETER_KEYS)} Known: {', '.join(PARAMETER_KEYS)}"
            )
    if ("choices" in data) == ("range" in data):
        raise SpaceError(f"{where}: give either `choices: [..]` or `range: [low, high]`")
    when = _parse_when(data.get("when", {}), where)
    if "choices" in data:
        return Parameter(name=name, choices=_parse_choices(name, data, where), when=when)
    return _parse_range(name, data, when, where)


def _parse_choices(name: str, data: Mapping[str, Any], where: str) -> tuple[Scalar, ...]:
    for key in ("step", "power_of_two"):
        if key in data:
            raise SpaceError(f"{where}: `{key}` belongs to a `range`, not to `choices`")
    choices = data["choices"]
    if not isinstance(choices, list) or not choices:
        raise SpaceError(f"{where}: choices: a list of at least one value is needed, not {choices!r}")
    if len(choices) > MOST_CHOICES:
        raise SpaceError(
            f"{where}: choices: {len(choices):,} values, and at most {MOST_CHOICES:,} can be listed; give a `range`"
        )
    for index, value in enumerate(choices):
        _check(name, value, f"{where}: choices")
        if value in choices[:index]:
            raise SpaceError(f"{where}: choices: {value!r} is there twice")
    return tuple(choices)


def _parse_range(name: str, data: Mapping[str, Any], when: dict[str, tuple[Scalar, ...]], where: str) -> Parameter:
    bounds, step, power = data["range"], data.get("step", 1), data.get("power_of_two", False)
    if (
        not isinstance(bounds, list)
        or len(bounds) != 2
        or not all(_is_int(bound) for bound in bounds)
        or bounds[0] > bounds[1]
    ):
        raise SpaceError(f"{where}: range: two whole numbers are needed, [low, high], not {bounds!r}")
    if not _is_int(step) or not 1 <= step <= LARGEST_BOUND:
        raise SpaceError(f"{where}: step: {step!r} is not a whole number of at least 1")
    if max(map(abs, bounds)) > LARGEST_BOUND:
        raise SpaceError(f"{where}: range: no setting goes as far as {bounds!r}")
    if not isinstance(power, bool):
        raise SpaceError(f"{where}: power_of_two: true or false, not {power!r}")
    if power and not 0 <= bounds[0] <= bounds[1] <= LARGEST_EXPONENT:
        raise SpaceError(
            f"{where}: range: with power_of_two these are exponents, 0 to {LARGEST_EXPONENT}: [16, 29] means 2^16 to 2^29"
        )
    if (bounds[1] - bounds[0]) // step >= MOST_OF_A_RANGE:
        raise SpaceError(
            f"{where}: range: {bounds!r} are more than {MOST_OF_A_RANGE:,} values; give a larger `step`, or exponents:"
            " {range: [16, 29], power_of_two: true} means 2^16 to 2^29"
        )
    # The highest value is one that the steps reach, so that Optuna and we agree on the range.
    high = bounds[0] + (bounds[1] - bounds[0]) // step * step
    parameter = Parameter(name=name, low=bounds[0], high=high, step=step, power_of_two=power, when=when)
    values = parameter.all_values()
    for value in values if len(values) <= LONG_RANGE else (values[0], values[-1]):
        _check(name, value, f"{where}: range")
    return parameter


def _parse_when(data: Any, where: str) -> dict[str, tuple[Scalar, ...]]:
    if not isinstance(data, dict):
        raise SpaceError(
            f"{where}: when: a mapping of parents to values is needed, as in `when: {{zero_stage: [1, 2]}}`, not {data!r}"
        )
    when = {}
    for parent, said in data.items():
        allowed = said if isinstance(said, list) else [said]
        if not allowed:
            raise SpaceError(f"{where}: when: {parent}: no value given, so the knob would never exist")
        for value in allowed:
            _check(str(parent), value, f"{where}: when")
        when[str(parent)] = tuple(allowed)
    return when


def _check(name: str, value: Any, where: str) -> None:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise SpaceError(f"{where}: {value!r} is not a single value")
    try:
        check_value(name, value)
        check_setting(name, value, name)
    except UserError as error:
        said = str(error).removeprefix(f"{name}: ") if name in where.split(": ") else str(error)
        raise SpaceError(f"{where}: {said}") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_size(parameters: Sequence[Parameter], where: str) -> None:
    """Refuses more knobs, or conditions of more combinations, than can be walked through."""
    if len(parameters) > MOST_KNOBS or _product(parameters) > MOST_CANDIDATES:
        raise SpaceError(
            f"{where}: {len(parameters)} knobs are more than can be tuned at once (at most {MOST_KNOBS}); leave some out"
        )
    parents = [parameter for parameter in parameters if any(parameter.name in other.when for other in parameters)]
    if _product(parents) > MOST_STRUCTURES:
        names = ", ".join(parameter.name for parameter in parents)
        raise SpaceError(
            f"{where}: when: conditions on {names} have more than {MOST_STRUCTURES:,} combinations; give these knobs fewer values,"
            " or fewer conditions"
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
    stands_in = {} if "gradient_accumulation_steps" in names else {"gradient_accumulation_steps": "micro_batch_size"}
    waiting = list(parameters)
    done: list[Parameter] = []
    while waiting:
        placed = {parameter.name for parameter in done}
        ready = next(
            (p for p in waiting if placed >= {stands_in.get(parent, parent) for parent in p.when} & names), None
        )
        if ready is None:
            circle = ", ".join(parameter.name for parameter in waiting)
            where = origin.get(waiting[0].name, "search space")
            raise SpaceError(f"{where}: when: the conditions of {circle} depend on each other in a circle")
        waiting.remove(ready)
        done.append(ready)
    return tuple(done)
