"""One knob of a search space: its values, and the values of other knobs it depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError, nearest
from autotune.space.candidate import BATCH, check_knob, check_value
from autotune.space.deepspeed import Scalar, check_setting, is_int
from autotune.space.degree import DEGREES
from autotune.space.retired import one_spelling

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, IntDistribution
    from optuna.trial import Trial


PARAMETER_KEYS = ("choices", "around_baseline", "range", "step", "power_of_two", "when")
LARGEST_EXPONENT = 62
# A range longer than this is not searched value by value for dead ones.
LONG_RANGE = 512
# What a person may mean; beyond, candidates could neither be counted nor walked through in the time that a study has.
MOST_CHOICES, MOST_AROUND, MOST_OF_A_RANGE, MOST_KNOBS = 1_000, 64, 1_000_000, 100
LARGEST_BOUND = 2**53


class SpaceError(UserError):
    """A search space that cannot be read or used."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One knob and the values it may take.

    Attributes:
        name: A field of `Candidate`, or the path of a DeepSpeed setting (`zero_optimization.overlap_comm`).
        choices: The values, if they are listed; None among them leaves the key out, so that DeepSpeed's default holds.
        around_baseline: Of the batch: values around the baseline's own belong to the choices, up to this many times it
            (`SearchSpace.around`); 0 for the choices alone.
        low: Lowest value of a range, or lowest exponent of a power-of-two range.
        high: Highest value or exponent, included.
        step: Distance between neighbours of a range (between exponents if `power_of_two`).
        power_of_two: The range is one of exponents: 16 to 29 means 2**16 to 2**29.
        when: The knob exists only while each parent named here has one of the values given for it.
    """

    name: str
    choices: tuple[Scalar, ...] = ()
    around_baseline: int = 0
    low: int = 0
    high: int = 0
    step: int = 1
    power_of_two: bool = False
    when: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict, hash=False)

    @property
    def optuna_name(self) -> str:
        """The parameter's name in an Optuna study; a power-of-two range is searched, and shown, by exponent."""
        return f"{self.name} (log2)" if self.power_of_two else self.name

    def distribution(self) -> "CategoricalDistribution | IntDistribution":
        """The Optuna distribution of the encoded values."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        return IntDistribution(self.low, self.high, step=self.step)

    def suggest(self, trial: "Trial") -> Scalar:
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
        return is_int(value) and value in self.all_values()

    def spelt(self, value: Scalar) -> Scalar:
        """A value as this parameter spells it: equal candidates have equal keys, and JSON may write 5e8 or 1 for its 500000000 or 1.0."""
        alike = (own for own in self.choices if own == value and isinstance(own, bool) == isinstance(value, bool))
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return next(alike, whole)

    def all_values(self) -> Sequence[Scalar]:
        """Every value, in order; a plain range is not spelled out in memory."""
        if self.choices:
            return self.choices
        numbers = range(self.low, self.high + 1, self.step)
        return tuple(2**exponent for exponent in numbers) if self.power_of_two else numbers

    def describe(self) -> str:
        """The values in a few words."""
        if self.choices:
            around = ["and around the baseline's"] * (self.around_baseline > 0)
            return ", ".join(["default" if value is None else str(value) for value in self.choices] + around)
        base = "2^" if self.power_of_two else ""
        return f"{base}{self.low}..{base}{self.high}" + (f" by {self.step}" if self.step > 1 else "")

    def to_data(self) -> dict[str, Any]:
        """The parameter as it stands in a YAML file; `parse_parameters` reads it back."""
        data: dict[str, Any] = {"choices": list(self.choices)} if self.choices else {"range": [self.low, self.high]}
        if self.around_baseline:
            data["around_baseline"] = self.around_baseline
        if self.step != 1:
            data["step"] = self.step
        if self.power_of_two:
            data["power_of_two"] = True
        if self.when:
            data["when"] = {parent: list(values) for parent, values in self.when.items()}
        return data


def parse_parameters(data: Any, where: str) -> tuple[Parameter, ...]:
    """Reads the knobs of one preset or inline space, in the order of the file.

    A knob's value is `{choices: [..]}` (of the batch with `around_baseline`), `{range: [low, high]}` (with `step`,
    `power_of_two`), or for short a list of choices or a single value; `when: {parent: [values]}` makes it conditional.
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
        raise SpaceError(f"{where}: {str(error).removeprefix(f'{name}: ')}") from None
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
        choices = _parse_choices(name, data, where)
        return Parameter(name=name, choices=choices, around_baseline=_parse_around(name, data, where), when=when)
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
    return _distinct(name, choices)


def _parse_around(name: str, data: Mapping[str, Any], where: str) -> int:
    around = data.get("around_baseline", 0)
    if around and name not in BATCH:
        raise SpaceError(f"{where}: `around_baseline` belongs to {' and '.join(BATCH)}")
    if not is_int(around) or not 0 <= around <= MOST_AROUND:
        raise SpaceError(f"{where}: around_baseline: {around!r} is not a whole number from 0 to {MOST_AROUND}")
    return int(around)


def _distinct(name: str, values: Sequence[Scalar]) -> tuple[Scalar, ...]:
    """The values, with one spelling of each: a degree of 0 or 1 is the same as none, a type has several names."""
    alike = (None if name in DEGREES and value in (0, 1) else one_spelling(name, value) for value in values)
    return tuple(dict.fromkeys(alike))


def _parse_range(name: str, data: Mapping[str, Any], when: dict[str, tuple[Scalar, ...]], where: str) -> Parameter:
    if "around_baseline" in data:
        raise SpaceError(f"{where}: `around_baseline` belongs to `choices`, not to a `range`")
    bounds, step, power = data["range"], data.get("step", 1), data.get("power_of_two", False)
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(is_int, bounds)) or bounds[0] > bounds[1]:
        raise SpaceError(f"{where}: range: two whole numbers are needed, [low, high], the lower first, not {bounds!r}")
    if not is_int(step) or not 1 <= step <= LARGEST_BOUND:
        raise SpaceError(f"{where}: step: {step!r} is not a whole number of at least 1")
    if max(map(abs, bounds)) > LARGEST_BOUND:
        raise SpaceError(f"{where}: range: no setting goes as far as {bounds!r}")
    if not isinstance(power, bool):
        raise SpaceError(f"{where}: power_of_two: true or false, not {power!r}")
    if power and not 0 <= bounds[0] <= bounds[1] <= LARGEST_EXPONENT:
        raise SpaceError(
            f"{where}: range: with power_of_two these are exponents, 0 to {LARGEST_EXPONENT};"
            " [16, 29] means 2^16 to 2^29"
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
    return Parameter(name=name, choices=_distinct(name, values), when=when) if name in DEGREES else parameter


def _parse_when(data: Any, where: str) -> dict[str, tuple[Scalar, ...]]:
    if not isinstance(data, dict):
        raise SpaceError(
            f"{where}: when: a mapping of parents to values is needed, as in `when: {{zero_stage: [1, 2]}}`,"
            f" not {data!r}"
        )
    when = {}
    for parent, said in data.items():
        allowed = said if isinstance(said, list) else [said]
        if not allowed:
            raise SpaceError(f"{where}: when: {parent}: no value given, so the knob would never exist")
        for value in allowed:
            _check(str(parent), value, f"{where}: when")
        when[str(parent)] = _distinct(str(parent), allowed)
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
