"""What the checks of a study may cost."""

from types import SimpleNamespace

import pytest
from support.instant import Clock, plan_of, spec_of

from autotune.study.budget import CHECK_BUDGETS, CHECK_SHARE, Budget


@pytest.mark.parametrize(
    ("time_budget_s", "trial_budget_s", "spent_s", "room_s", "decisive_s"),
    [
        (None, 4.0, 1000.0, 1000 * CHECK_SHARE, 2000 * CHECK_SHARE),
        (None, 4.0, 10.0, 10 * CHECK_SHARE, 4 * CHECK_BUDGETS),
        (2000.0, 4.0, 1000.0, 2000 * CHECK_SHARE, 4000 * CHECK_SHARE),
        (2000.0, 4.0, 1990.0, 10.0, 10.0),
        (2000.0, 4.0, 2001.0, 0.0, 0.0),
    ],
)
def test_checks_have_a_share_of_the_study_and_no_more_than_its_time_budget_leaves(
    monkeypatch, tmp_path, time_budget_s, trial_budget_s, spent_s, room_s, decisive_s
):
    clock = Clock(monkeypatch)
    spec = spec_of(time_budget_s=time_budget_s, trial_budget_s=trial_budget_s)
    budget = Budget(SimpleNamespace(spec=spec, plan=plan_of(spec), exists=False, folder=tmp_path))
    clock.now_s = spent_s
    for decides, expected_s in ((False, room_s), (True, decisive_s)):
        assert budget.check_room_s(decides=decides) == pytest.approx(expected_s)
        assert budget.affords_check(0.999 * expected_s, decides=decides)
        assert not budget.affords_check(1.001 * expected_s + 0.001, decides=decides)
    budget.checked(CHECK_SHARE * max(spent_s, time_budget_s or 0.0))
    assert budget.check_room_s() == 0.0
