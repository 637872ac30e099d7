"""A small study that is killed three times ends like an undisturbed one; the long test is `tests/support/chaos.py`."""

import itertools
from pathlib import Path

import pytest
from support import chaos
from support.chaos import Kill


@pytest.mark.system
def test_a_study_outlives_the_death_of_a_rank_its_server_and_its_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "TRIALS", 4)
    monkeypatch.setattr(
        chaos, "STUDY", chaos.STUDY.replace("trials: 8", "trials: 4").replace("finalists: 1", "finalists: 0")
    )
    kills = [Kill(number=n, victim=victim, after_s=0.3) for n, victim in enumerate(("rank", "server", "driver"))]
    struck, found = chaos.play(kills, tmp_path / "play", "small", None, "0")
    assert [kill.outcome for kill in struck] == ["rank killed", "server killed", "driver ended with -9"]
    assert found["told"] == 4 and found["run_again"] <= 2


def test_the_same_seed_strikes_the_same_and_another_one_does_not():
    plans = [[chaos.plan(seed, n, ["sqlite"])[1] for n in range(50)] for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert {kill.victim for kills in plans[0] for kill in kills} == set(chaos.VICTIMS)
    assert [kill.number for kill in sorted(itertools.chain(*plans[0]), key=lambda kill: kill.number)] == list(
        range(200)
    )


def test_what_is_broken_is_seen(tmp_path):
    (tmp_path / "s").mkdir()
    assert chaos.broken_files(tmp_path) == []
    for name, text in (
        ("a.json", '{"half'),
        ("b.jsonl", '{"x": 1}\n{"torn\n{}\n'),
        (".front.json.4711", "{}"),
        ("c.jsonl", '{"x": 1}\n{"la'),
    ):
        (tmp_path / "s" / name).write_text(text)
    assert [Path(path).name for path in chaos.broken_files(tmp_path)] == [".front.json.4711", "a.json", "b.jsonl"]
