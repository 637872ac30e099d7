"""What the rules let through, DeepSpeed really initialises and trains; what they refuse carries a reason."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.space import feasibility
from autotune.space.candidate import Candidate
from autotune.space.legality import RULES, Setting, why_illegal
from autotune.space.parameter import parse_parameters
from autotune.space.space import SearchSpace
from autotune.study.spec import presets
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

SAMPLES = 4000
BASE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
# ok.py has four blocks and 2,048 samples.
HERE = Setting(world_size=2, ranks_per_node=2, n_blocks=4, n_samples=2048, global_batch=(1, 64))


def every_preset() -> SearchSpace:
    parts = []
    for name in presets.presets("search_spaces"):
        place, data = presets.load_preset("search_spaces", name, Path(), "test")
        parts.append((place, parse_parameters(data, place)))
    return SearchSpace.compose(parts)


def structure(candidate: Candidate) -> tuple[object, ...]:
    """What DeepSpeed branches on: everything but how large batches and buckets are."""
    plain = {name: value for name, value in candidate.values().items() if name not in ("micro_batch_size",)}
    plain["gradient_accumulation_steps"] = candidate.gradient_accumulation_steps > 1
    plain["checkpoint_every"] = candidate.checkpoint_every > 0
    return tuple(sorted((name, str(name.endswith("_size") or value)) for name, value in plain.items()))


@pytest.fixture(scope="module")
def drawn() -> list[Candidate]:
    space, rng = every_preset(), random.Random(0)
    baseline = Candidate(micro_batch_size=8)
    return [space.sample(rng, baseline) for _ in range(SAMPLES)]


def test_every_refusal_has_a_reason(drawn):
    refused = [reason for candidate in drawn if (reason := why_illegal(candidate, HERE)) is not None]
    assert len(refused) > SAMPLES / 10
    assert all(len(reason) > 10 and "{" not in reason for reason in refused)


class Recorder:
    """A candidate that notes which fields are read."""

    def __init__(self, candidate: Candidate, seen: set[str]) -> None:
        self.candidate, self.seen = candidate, seen

    def __getattr__(self, name):
        if name == "global_batch_size":
            return lambda world_size: Candidate.global_batch_size(self, world_size)
        if name == "config":
            return RecordedSettings(dict(self.candidate.config), self.seen).items()
        self.seen.add(name)
        return getattr(self.candidate, name)


class RecordedSettings(dict):
    """DeepSpeed settings that note which paths are read; to walk through them reads all."""

    def __init__(self, settings, seen: set[str]) -> None:
        super().__init__(settings)
        self.seen = seen

    def get(self, name, default=None):
        self.seen.add(name)
        return super().get(name, default)

    def __iter__(self):
        self.seen.add("*")
        return super().__iter__()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why[:40])
def test_a_rule_names_what_it_reads(rule, drawn):
    base = (("bf16.bf16_master_weights_and_grads", True), ("data_types.grad_accum_dtype", "fp32"))
    settings = [
        HERE, replace(HERE, accelerator="cuda", fp16=True, base=base, plain_backward=True, deepspeed_version="0.18.0"),
        replace(HERE, world_size=1, pipeline_stages=2, n_blocks=0, bf16=False, unsafe_precisions=("bf16",)),
    ]  # fmt: skip
    named = {name for name in rule.reads if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in rule.reads if name.endswith("*"))
    seen: set[str] = set()
    for candidate, setting in itertools.product(drawn[:1500], settings):
        config = dict(candidate.config)
        broken = rule.broken(Recorder(candidate, seen), RecordedSettings(config, seen), setting)
        if broken and prefixes:  # more of what it reads by prefix does not heal it
            more = {f"{prefix}more": True for prefix in prefixes}
            assert rule.broken(
                replace(candidate, config=tuple({**config, **more}.items())), {**config, **more}, setting
            )
        unread = {path: value for path, value in config.items() if path in named or path.startswith(prefixes)}
        assert rule.broken(replace(candidate, config=tuple(unread.items())), unread, setting) == broken
    assert seen - {"*"} <= named and ("*" not in seen or prefixes)


@pytest.fixture(scope="module")
def kinds(drawn) -> list[Candidate]:
    """Of each structure that is legal one candidate."""
    space, baseline = (
        feasibility.pruned(every_preset(), Candidate(micro_batch_size=8), HERE),
        Candidate(micro_batch_size=8),
    )
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in [*drawn, *space.draw(random.Random(1), baseline, SAMPLES)]:
        if why_illegal(candidate, HERE) is None:
            found.setdefault(structure(candidate), candidate)
    return list(found.values())


def every_pair(kinds: list[Candidate], rng: random.Random) -> list[Candidate]:
    """Few candidates in which any two settings meet that meet in one of the kinds."""
    pairs = {id(kind): set(itertools.combinations(structure(kind), 2)) for kind in kinds}
    left, chosen = set().union(*pairs.values()), []
    while left:
        useful = [kind for kind in kinds if pairs[id(kind)] & left]
        best = max(rng.sample(useful, min(100, len(useful))), key=lambda kind: len(pairs[id(kind)] & left))
        left -= pairs[id(best)]
        chosen.append(best)
    return chosen


def assert_all_train(chosen: list[Candidate], models: Path, folder: Path) -> None:
    failed = []
    executor = LocalExecutor(["torch"], folder / "server.log")
    try:
        executor.start()
        for number, candidate in enumerate(chosen):
            request = TrialRequest(
                target=str(models / "ok.py"), candidate=candidate.values(), ds_config=candidate.to_deepspeed(BASE),
                world_size=2, max_steps=2,
            )  # fmt: skip
            result = base.run(executor, folder / str(number), request)
            if result.outcome is not Outcome.COMPLETE:
                failed.append((candidate.describe(), str(result.outcome), result.reason))
    finally:
        executor.close()
    assert not failed


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_every_pair_of_settings_that_is_legal_initialises_and_trains(kinds, models, tmp_path):
    assert_all_train(every_pair(kinds, random.Random(1)), models, tmp_path)


@pytest.mark.system
@pytest.mark.timeout(1200)
def test_hundreds_of_legal_candidates_initialise_and_train(kinds, models, tmp_path):
    # More are drawn than run, so that other seeds run others.
    assert_all_train(random.Random(1).sample(kinds, min(240, len(kinds))), models, tmp_path)
