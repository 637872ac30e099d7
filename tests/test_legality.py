"""What the rules let through, DeepSpeed really initialises and trains; what they refuse carries a reason."""

import random
from pathlib import Path

import pytest

from autotune import spec
from autotune.candidate import Candidate, Setting
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.space import SearchSpace, parse_parameters
from autotune.trial import Outcome, TrialRequest

SAMPLES = 4000
BASE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
# ok.py has four blocks and 2,048 samples.
HERE = Setting(world_size=2, ranks_per_node=2, n_blocks=4, n_samples=2048, global_batch=(1, 64))


def every_preset() -> SearchSpace:
    parts = []
    for name in spec.presets("search_spaces"):
        place, data = spec.load_preset("search_spaces", name, Path(), "test")
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
    refused = [reason for candidate in drawn if (reason := candidate.illegal(HERE)) is not None]
    assert len(refused) > SAMPLES / 10
    assert all(len(reason) > 10 and "{" not in reason for reason in refused)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kind_of_legal_candidate_initialises_and_trains(drawn, models, tmp_path):
    kinds: dict[tuple[object, ...], Candidate] = {}
    space, rng, baseline = (
        every_preset().pruned(Candidate(micro_batch_size=8), HERE),
        random.Random(1),
        Candidate(micro_batch_size=8),
    )
    for candidate in [*drawn, *space.draw(rng, baseline, SAMPLES)]:
        if candidate.illegal(HERE) is None:
            kinds.setdefault(structure(candidate), candidate)
    # A few hundred kinds; each costs a quarter of a second. More are drawn than run, so that other seeds run others.
    chosen = rng.sample(list(kinds.values()), min(240, len(kinds)))
    failed = []
    executor = LocalExecutor(["torch"], tmp_path / "server.log")
    try:
        executor.start()
        for number, candidate in enumerate(chosen):
            request = TrialRequest(
                target=str(models / "ok.py"),
                candidate=candidate.values(),
                ds_config=candidate.to_deepspeed(BASE),
                world_size=2,
                max_steps=2,
            )
            result = base.run(executor, tmp_path / str(number), request)
            if result.outcome is not Outcome.COMPLETE:
                failed.append((candidate.describe(), str(result.outcome), result.reason))
    finally:
        executor.close()
    assert not failed
