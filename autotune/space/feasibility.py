"""Dead values and the number of legal candidates of a search space, from the knobs that rules read."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.space.legality import RULES, first_broken, in_words
from autotune.space.parameter import LONG_RANGE, Parameter
from autotune.space.rule import Rule, Setting
from autotune.space.space import SearchSpace

# Draws behind an estimate: a share of 1 % is then known to a tenth of itself.
DRAWS = 10_000
# Partial candidates that are looked at before a value counts as alive because the opposite is not proven.
MOST_STEPS = 20_000
NEVER = "its conditions never hold together"


def count_legal(space: SearchSpace, default: Candidate, setting: Setting, limit: int = 100_000) -> tuple[int, bool]:
    """How many candidates can run in a setting.

    Values that all rules treat alike are counted as one group; knobs that share no rule are counted separately.

    Returns:
        The number, and whether it is exact; it is estimated from `DRAWS` random candidates where the exact count takes
        more than `limit` partial candidates.
    """
    found = _Search(space, default, setting).count(limit)
    if found is not None:
        return found, True
    alive = pruned(space, default, setting)
    drawn = alive.draw(random.Random(0), default, DRAWS)
    legal = sum(first_broken(candidate, setting, RULES) is None for candidate in drawn)
    return round(alive.size(default) * legal / DRAWS), False


def holds_another(space: SearchSpace, default: Candidate, setting: Setting) -> bool:
    """Whether a space holds anything besides the default that can run, or the opposite is not proven in `MOST_STEPS`."""
    search = _Search(space, default, setting)
    if search.why_nothing() is not None:
        return False
    search.steps = 0
    try:
        return any(search.varies(group) for group in search.groups())
    except _TooManyError:
        return True


def dead_values(space: SearchSpace, default: Candidate, setting: Setting) -> dict[tuple[str, Scalar], str]:
    """The values that are illegal in every combination, with the reason.

    What is dead is proven by trying every combination of the knobs that rules and conditions connect with the value; a
    value that takes more than `MOST_STEPS` counts as alive. Ranges of more than `LONG_RANGE` values are left alone.
    """
    search = _Search(space, default, setting)
    whole = search.why_nothing()
    dead: dict[tuple[str, Scalar], str] = {}
    for parameter in space.parameters:
        if len(parameter.all_values()) > LONG_RANGE:
            continue
        for alike in search.alike[parameter.name]:
            reason = whole or search.refusal(parameter, alike[0])
            if reason is not None:
                dead |= {(parameter.name, value): reason for value in alike}
    return {(p.name, v): dead[p.name, v] for p in space.parameters for v in _short(p) if (p.name, v) in dead}


def pruned(space: SearchSpace, default: Candidate, setting: Setting) -> SearchSpace:
    """The space without its dead values: the same legal candidates among fewer."""
    dead = dead_values(space, default, setting)
    kept = []
    for parameter in space.parameters:
        alive = tuple(value for value in _short(parameter) if (parameter.name, value) not in dead)
        # Without any value the knob would count as absent, and candidates would appear that the space does not have.
        shorter = 0 < len(alive) < len(_short(parameter))
        kept.append(Parameter(name=parameter.name, choices=alive, when=parameter.when) if shorter else parameter)
    return replace(space, parameters=tuple(kept))


@dataclass
class _Refusals:
    """The rules that refused partial candidates, by how many knobs were decided then, each with one such candidate."""

    counts: dict[int, Counter[int]] = field(default_factory=dict)
    example: dict[int, Candidate] = field(default_factory=dict)

    def note(self, depth: int, rule: Rule, candidate: Candidate) -> None:
        """Note that a rule refused a candidate."""
        number = RULES.index(rule)
        self.counts.setdefault(depth, Counter())[number] += 1
        self.example.setdefault(number, candidate)

    def reason(self, about: str, depth: int, setting: Setting) -> str:
        """The most frequent reason, of rules that read the knob if any, else of rules broken after it was decided."""
        found = [
            (about not in RULES[number].reads, each < depth, each, -n, number)
            for each, counts in self.counts.items()
            for number, n in counts.items()
        ]
        return in_words(RULES[number := min(found)[-1]], self.example[number], setting) if found else NEVER


class _TooManyError(Exception):
    """A search has taken more steps than it may."""


class _Search:
    """A depth-first search for legal candidates, knob by knob; each rule is checked once its knobs are decided."""

    def __init__(self, space: SearchSpace, default: Candidate, setting: Setting) -> None:
        self.space, self.default, self.setting = space, default, setting
        self.template = space.template(default)
        self.rules = [(rule, *_scope(space, rule)) for rule in RULES]
        self.alike = _alike(space)
        self.parents = {p.name: [knob for name in p.when for knob in space.knobs(name)] for p in space.parameters}
        # Knobs that a rule reads together, or that a condition connects.
        tied = [named | some for _, named, some in self.rules]
        tied += [{name, *parents} for name, parents in self.parents.items()]
        self.near = {
            name: [n for n in self.parents if any({name, n} <= each for each in tied)] for name in self.parents
        }
        self.n_alike = {(name, each[0]): len(each) for name, parts in self.alike.items() for each in parts}
        self.steps = 0
        self.alive: set[tuple[str, Scalar]] = set()

    def groups(self) -> list[list[str]]:
        """The knobs in groups that no rule and no condition connects with each other."""
        found: list[list[str]] = []
        for parameter in self.space.parameters:
            if not any(parameter.name in group for group in found):
                found.append(self._order(parameter.name))
        return found

    def why_nothing(self) -> str | None:
        """Why no candidate at all is legal; None if one is, as far as is known."""
        nothing = self.space.build({}, *self.template)
        fixed = first_broken(nothing, self.setting, [rule for rule, named, some in self.rules if not named | some])
        if fixed is not None:
            return in_words(fixed, nothing, self.setting)
        for group in self.groups():
            refused = _Refusals()
            if self._proven_dead(group, {}, refused):
                return refused.reason(group[0], 0, self.setting)
        return None

    def count(self, most_steps: int) -> int | None:
        """How many candidates are legal; None if that takes more steps."""
        self.steps = 0
        if self.why_nothing() is not None:
            return 0
        self.steps = 0
        try:
            each = [sum(n for _, n in self._legal(group, {}, _Refusals(), most_steps)) for group in self.groups()]
        except _TooManyError:
            return None
        return math.prod(each)

    def varies(self, group: Sequence[str]) -> bool:
        """Whether a legal choice for the knobs of a group is another one than the default's; may raise `_TooManyError`."""
        own = self.default.values()
        for chosen, n in self._legal(group, {}, _Refusals(), MOST_STEPS):
            values = self.space.build(chosen, *self.template).values()
            if n > 1 or any(values.get(name) != own.get(name) for name in group):
                return True
        return False

    def refusal(self, parameter: Parameter, value: Scalar) -> str | None:
        """Why no legal candidate has this value of the parameter; None unless that is proven."""
        if (parameter.name, value) in self.alive:
            return None
        missing = self._missing(parameter)
        if missing is not None:
            return missing
        name, refused = parameter.name, _Refusals()
        order = self._order(name)
        dead = self._proven_dead(order, self._needed(parameter) | {name: [value]}, refused)
        return refused.reason(name, order.index(name), self.setting) if dead else None

    def _needed(self, parameter: Parameter) -> dict[str, list[Scalar]]:
        """The values of a parameter's parents, and theirs, with which it is active; without parents that may be off."""
        found: dict[str, list[Scalar]] = {}
        for name, allowed in parameter.when.items():
            if self.space.knobs(name) == (name,):
                parent = self.space[name]
                if not (parent.when and self.space.inactive(name, self.default) in allowed):
                    found |= self._needed(parent) | {name: [value for value in allowed if parent.contains(value)]}
        return found

    def _order(self, target: str) -> list[str]:
        """The target and the knobs that rules or conditions connect with it, nearest first, parents before children."""
        order: list[str] = []

        def add(name: str) -> None:
            if name not in order:
                for parent in self.parents[name]:
                    add(parent)
                order.append(name)

        add(target)
        for name in order:  # which grows
            for other in self.near[name]:
                add(other)
        return order

    def _legal(
        self, order: Sequence[str], fixed: Mapping[str, Sequence[Scalar]], refused: _Refusals, most_steps: int
    ) -> Iterator[tuple[dict[str, Scalar], int]]:
        """Legal choices for some knobs, within the fixed values, each with the number of choices that are legal alike.

        Raises:
            _TooManyError: More than `most_steps` partial candidates would have to be looked at.
        """
        checks = []
        for i, name in enumerate(order):
            decided = set(order[: i + 1])
            checks.append([r for r, named, some in self.rules if name in named | some and named <= decided])

        def walk(
            i: int, known: dict[str, Scalar], chosen: dict[str, Scalar], n: int
        ) -> Iterator[tuple[dict[str, Scalar], int]]:
            if i == len(order):
                yield chosen, n
                return
            name = order[i]
            active = self.space.holds(self.space[name], known, self.default)
            for value in self._options(name, fixed, active=active):
                self.steps += 1
                if self.steps > most_steps:
                    raise _TooManyError
                values = {**chosen, name: value} if active else chosen
                candidate = self.space.build(values, *self.template)
                broken = first_broken(candidate, self.setting, checks[i]) if checks[i] else None
                if broken is not None:
                    refused.note(i, broken, candidate)
                else:
                    n_alike = self.n_alike.get((name, value), 1) if active else 1
                    yield from walk(i + 1, {**known, name: value}, values, n * n_alike)

        yield from walk(0, {}, {}, 1)

    def _proven_dead(self, order: Sequence[str], fixed: Mapping[str, Sequence[Scalar]], refused: _Refusals) -> bool:
        """Whether no legal choice for some knobs is within the fixed values; False also after `MOST_STEPS`."""
        self.steps = 0
        try:
            chosen, _ = next(self._legal(order, fixed, refused, MOST_STEPS), (None, 0))
        except _TooManyError:
            return False
        if chosen is not None:
            self.alive |= chosen.items()
        return chosen is None

    def _options(self, name: str, fixed: Mapping[str, Sequence[Scalar]], *, active: bool) -> Sequence[Scalar]:
        if not active:
            return [] if name in fixed else [self.space.inactive(name, self.default)]
        if name in fixed:
            return fixed[name]
        if name not in self.alike:
            return self.space[name].all_values()
        usual = self.default.values().get(name)
        return sorted((alike[0] for alike in self.alike[name]), key=lambda value: value != usual)

    def _missing(self, parameter: Parameter) -> str | None:
        """The condition of a parameter that the space cannot fulfil, in words."""
        for parent, allowed in parameter.when.items():
            if parent == "gradient_accumulation_steps" and self.space.samples_per_rank is not None:
                continue
            needed = f"needs {parent} {' or '.join('default' if value is None else str(value) for value in allowed)}"
            if parent not in self.space:
                is_now = getattr(self.default, parent)
                if is_now not in allowed:
                    return f"{needed}; it is {is_now} and not tuned"
                continue
            if self.space[parent].when and self.space.inactive(parent, self.default) in allowed:
                continue  # a parent that is switched off is all that it needs
            if not any(self.space[parent].contains(value) for value in allowed):
                return f"{needed}, which the search space does not contain"
            above = self._missing(self.space[parent])
            if above is not None:
                return above
        return None


def _short(parameter: Parameter) -> Sequence[Scalar]:
    """The values of a parameter; none of a long range, which is not looked through."""
    values = parameter.all_values()
    return values if len(values) <= LONG_RANGE else ()


def _scope(space: SearchSpace, rule: Rule) -> tuple[set[str], set[str]]:
    """The knobs of a space that a rule names, and those of which it only asks whether they are set."""
    named = {knob for name in rule.reads if not name.endswith("*") for knob in space.knobs(name)}
    prefixes = tuple(name[:-1] for name in rule.reads if name.endswith("*"))
    some = {p.name for p in space.parameters if prefixes and p.name.startswith(prefixes)}
    return named, some


def _alike(space: SearchSpace) -> dict[str, list[Sequence[Scalar]]]:
    """The values of each knob in groups that no rule or condition tells apart; without long ranges that rules read."""
    scopes = [_scope(space, rule) for rule in RULES]
    named = {name for scope, _ in scopes for name in scope}
    named |= {knob for p in space.parameters for parent in p.when for knob in space.knobs(parent)}
    some = {name for _, scope in scopes for name in scope}
    found: dict[str, list[Sequence[Scalar]]] = {}
    for parameter in space.parameters:
        name, values = parameter.name, parameter.all_values()
        if name in named:
            if len(values) <= LONG_RANGE:
                found[name] = [[value] for value in values]
        elif name in some and None in values:  # rules ask whether it is set
            found[name] = [part for part in ([None], [value for value in values if value is not None]) if part]
        else:
            found[name] = [values]
    return found
