"""`docs/develop/sampler.md` and `truth.md` are run as they stand, on machines and tables that are not autotune's."""

import itertools
import re

import pytest
from support.paths import BENCHMARKS, ROOT

from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    from replay import COLUMNS, KNOB, Row, write_table

SAMPLER, TRUTH = (ROOT / "docs" / "develop" / name for name in ("sampler.md", "truth.md"))
OVERLAP = "zero_optimization.overlap_comm"
BEST_SAMPLES_PER_S = 64 / (0.042 * 0.6 * 1.1 * 0.95)  # 32, bf16, stage 1, overlapped


def executed(page, text):
    """What a page's blocks define, run one after the other."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.fixture(scope="module")
def sampler():
    return executed(SAMPLER, SAMPLER.read_text())


def fastest(names, key):
    fitting = [c for c in names["candidates"] if names["measure"](c) is not None]
    return min(key(c, names["measure"](c)[0]) for c in fitting)


def test_the_guide_finds_the_best_of_the_made_up_machine(sampler):
    told = sampler["told"]
    assert len({t.candidate for t in told}) == len(told) == 20
    assert sum(t.outcome == "oom" for t in told) <= 1
    assert min(t.metrics.get("step_time_s", 9) for t in told) <= 1.02 * fastest(sampler, lambda _, seconds: seconds)
    best = max(t.metrics.get("samples_per_s", 0) for t in told)
    assert best >= 0.97 / fastest(sampler, lambda c, seconds: seconds / c.global_batch_size(4))


def test_the_optuna_sampler_does_too(sampler):
    study, least = sampler["study"], fastest(sampler, lambda c, seconds: seconds / c.global_batch_size(4))
    assert len({str(t.params) for t in study.trials}) == 15
    assert max(t.values[1] for t in study.trials if t.values) >= 0.95 / least
    assert sum(t.state.name == "PRUNED" for t in study.trials) <= 2


def test_the_beliefs_are_about_every_candidate(sampler):
    beliefs = sampler["beliefs"]
    assert len(beliefs.fits) == len(sampler["candidates"]) == len(beliefs.log_step_time[0])
    fits = [sampler["measure"](c) is not None for c in sampler["candidates"]]
    assert sum((p > 0.5) == f for p, f in zip(beliefs.fits, fits, strict=True)) >= 0.9 * len(fits)


def made_up(micro, stage, precision, overlap, repeat):
    """A configuration whose throughput is known, scattered by a per cent; the largest do not fit."""
    knobs = {"micro_batch_size": micro, "zero_stage": stage, "precision": precision} | (
        {OVERLAP: True} if overlap else {}
    )
    row = {"candidate": Candidate.of(knobs), "repeat": repeat}
    if micro == 32 and stage == 0:
        return Row(**row, outcome=Outcome.OOM, reason="full", values={"wall_s": 1.0})
    step_s = (
        (0.01 + 0.001 * micro) * (0.6 if precision == "bf16" else 1.0) * (1 + 0.1 * stage) * (0.95 if overlap else 1.0)
    )
    values = {"samples_per_step": 2.0 * micro, "peak_memory_bytes": 1e8, "wall_s": 2.0}
    values["step_time_s"] = step_s * (1 + 0.01 * (repeat - 1))
    return Row(**row, outcome=Outcome.COMPLETE, values=values, losses=[3.0, 2.0])


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    every = itertools.product([2, 8, 32], [0, 1, 2], ["fp32", "bf16"], [False, True])
    legal = [each for each in every if each[1] or not each[3]]
    table = tmp_path_factory.mktemp("truth") / "table.csv.gz"
    write_table(table, [made_up(*each, repeat) for repeat in range(3) for each in legal])
    text, n = re.subn(r'TABLE = ".*"', f'TABLE = "{table}"', TRUTH.read_text())
    assert n == 1
    return executed(TRUTH, text)


def test_the_page_names_every_column():
    text = TRUTH.read_text()
    assert [name for name in COLUMNS if f"`{name}`" not in text] == [] and f"`{KNOB}KEY`" in text


def test_a_reader_of_csv_finds_the_best_configuration(truth):
    best = truth["medians"].sort_values("samples_per_s").iloc[-1]
    assert best["samples_per_s"] == pytest.approx(BEST_SAMPLES_PER_S)
    assert len(truth["medians"]) == 28  # 30 configurations, two of which do not fit


def test_a_foreign_sampler_is_answered_and_scored(truth):
    states = [trial.state.name for trial in truth["study"].trials]
    assert len(states) == 60 and states.count("COMPLETE") > 20 and set(states) == {"COMPLETE", "PRUNED"}
    assert 0.9 < truth["share"] <= 1 and 40 < truth["spent_s"] <= 120
    assert len(truth["measured"]) == 30 and max(truth["truth"].values()) == pytest.approx(BEST_SAMPLES_PER_S)
    # What does not fit and what is not legal is no answer.
    assert min(truth["truth"].values()) == 0.0
    assert "" in [t.user_attrs.get("key", "") for t in truth["study"].trials if t.state.name == "PRUNED"]
