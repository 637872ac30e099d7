"""What people read in a terminal, and what a pipe carries."""

import sys

import pytest

from autotune.cli.terminal import fitted

WORDS = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize(
    ("line", "wrapped"),
    [
        (WORDS, ["one two three four five six", "seven eight nine ten"]),
        (f"- {WORDS}", ["- one two three four five six", "  seven eight nine ten"]),
        (f"ok    a b  {WORDS}", ["ok    a b  one two three four", " " * 11 + "five six seven", " " * 11 + "eight nine ten"]),
        (f"  trial 1: {WORDS}", ["  trial 1: one two three four", "  five six seven eight nine", "  ten"]),
        (f"{'k' * 20}  {WORDS}", [f"{'k' * 20}  one two", "  three four five six seven", "  eight nine ten"]),
        (f"see /{'long' * 9}", ["see", f"/{'long' * 9}"]),
        ("starts     `torchrun train.py --epochs 3` here", ["starts", " " * 11 + "`torchrun train.py --epochs 3`", " " * 11 + "here"]),
    ],
)  # fmt: skip
def test_a_terminal_gets_lines_wrapped_at_words_below_their_text_and_a_pipe_gets_them_whole(monkeypatch, line, wrapped):
    """`check`, `explain`, `changes`, `doctor` and `diagnose` left it to the terminal, which cuts words."""
    monkeypatch.setenv("COLUMNS", "30")
    assert fitted(line) == line
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert fitted(line).split("\n") == wrapped
