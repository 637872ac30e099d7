"""`docs/develop/sampler.md` is run as it stands: the search on a space, a prior and a machine that are not autotune's."""

import re

import pytest
from support.paths import ROOT

PAGE = ROOT / "docs" / "develop" / "sampler.md"


@pytest.fixture(scope="module")
def names():
    """What the page's blocks define, run one after the other."""
    space = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), space)
    return space


def fastest(names, key):
    fitting = [c for c in names["candidates"] if names["measure"](c) is not None]
    return min(key(c, names["measure"](c)[0]) for c in fitting)


def test_the_guide_finds_the_best_of_the_made_up_machine(names):
    told = names["told"]
    assert len({t.candidate for t in told}) == len(told) == 20
    assert sum(t.outcome == "oom" for t in told) <= 1
    assert min(t.metrics.get("step_time_s", 9) for t in told) <= 1.02 * fastest(names, lambda _, seconds: seconds)
    best = max(t.metrics.get("samples_per_s", 0) for t in told)
    assert best >= 0.97 / fastest(names, lambda c, seconds: seconds / c.global_batch_size(4))


def test_the_optuna_sampler_does_too(names):
    study = names["study"]
    assert len({str(t.params) for t in study.trials}) == 15
    assert max(t.values[1] for t in study.trials if t.values) >= 0.95 / fastest(
        names, lambda c, s: s / c.global_batch_size(4)
    )
    assert sum(t.state.name == "PRUNED" for t in study.trials) <= 2


def test_the_beliefs_are_about_every_candidate(names):
    beliefs = names["beliefs"]
    assert len(beliefs.fits) == len(names["candidates"]) == len(beliefs.log_step_time[0])
    fits = [names["measure"](c) is not None for c in names["candidates"]]
    assert sum((p > 0.5) == f for p, f in zip(beliefs.fits, fits, strict=True)) >= 0.9 * len(fits)
