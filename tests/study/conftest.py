"""Fixtures of whole studies whose trials take no time."""

import pytest


@pytest.fixture
def unhurried(monkeypatch):
    """No trial takes time here, so that checks may cost any share of it."""
    monkeypatch.setattr("autotune.study.budget.CHECK_SHARE", 1e9)
