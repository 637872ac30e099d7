"""`docs/develop/truth.md` is run as it stands, on a made-up table: a reader of CSV, a foreign sampler, a table of one's own."""

import itertools
import re

import pytest
from support.paths import ROOT

from autotune.executors.replay import COLUMNS, KNOB, Row, write_table
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

PAGE = ROOT / "docs" / "develop" / "truth.md"
OVERLAP = "zero_optimization.overlap_comm"


def made_up(micro, stage, precision, overlap, repeat):
    """A configuration whose throughput is known, scattered by a per cent; the largest do not fit."""
    knobs = {
        "micro_batch_size": micro,
        "zero_stage": stage,
        "precision": precision,
        **({OVERLAP: True} if overlap else {}),
    }
    if micro == 32 and stage == 0:
        return Row(
            candidate=Candidate.of(knobs), repeat=repeat, outcome=Outcome.OOM, reason="full", values={"wall_s": 1.0}
        )
    step = (
        (0.01 + 0.001 * micro) * (0.6 if precision == "bf16" else 1.0) * (1 + 0.1 * stage) * (0.95 if overlap else 1.0)
    )
    values = {
        "step_time_s": step * (1 + 0.01 * (repeat - 1)),
        "samples_per_step": 2.0 * micro,
        "peak_memory_bytes": 1e8,
        "wall_s": 2.0,
    }
    return Row(candidate=Candidate.of(knobs), repeat=repeat, outcome=Outcome.COMPLETE, values=values, losses=[3.0, 2.0])


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the page's blocks define, run one after the other."""
    legal = [
        c for c in itertools.product([2, 8, 32], [0, 1, 2], ["fp32", "bf16"], [False, True]) if not (c[3] and c[1] == 0)
    ]
    table = tmp_path_factory.mktemp("truth") / "table.csv.gz"
    write_table(table, [made_up(*each, repeat) for repeat in range(3) for each in legal])
    text, n = re.subn(r'TABLE = ".*"', f'TABLE = "{table}"', PAGE.read_text())
    assert n == 1
    space = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), space)
    return space


def test_the_page_names_every_column():
    text = PAGE.read_text()
    assert [name for name in COLUMNS if f"`{name}`" not in text] == [] and f"`{KNOB}KEY`" in text


def test_a_reader_of_csv_finds_the_best_configuration(names):
    best = names["medians"].sort_values("samples_per_s").iloc[-1]
    assert best["samples_per_s"] == pytest.approx(64 / (0.042 * 0.6 * 1.1 * 0.95))  # 32, bf16, stage 1, overlapped
    assert len(names["medians"]) == 28  # 30 configurations, two of which do not fit


def test_a_foreign_sampler_is_answered_and_scored(names):
    states = [trial.state.name for trial in names["study"].trials]
    assert len(states) == 60 and states.count("COMPLETE") > 20 and set(states) == {"COMPLETE", "PRUNED"}
    assert 0.9 < names["share"] <= 1 and 40 < names["spent_s"] <= 120
    assert len(names["measured"]) == 30 and max(names["truth"].values()) == pytest.approx(
        64 / (0.042 * 0.6 * 1.1 * 0.95)
    )


def test_what_does_not_fit_and_what_is_not_legal_are_no_answers(names):
    assert min(names["truth"].values()) == 0.0
    attributes = [trial.user_attrs.get("key", "") for trial in names["study"].trials if trial.state.name == "PRUNED"]
    assert "" in attributes
