"""Trials as the analysis takes them, read again and again while a study runs."""

from support.instant import Instant, runner_of

from autotune.study.storage import analysed


def test_a_set_of_trials_is_foretold_once_and_each_of_them_anew_with_one_more(tmp_path, monkeypatch):
    runner, taught = runner_of(tmp_path, Instant(), trials=5, finalists=0), []
    original = analysed.CandidateOptimizer

    def counted(candidates, *arguments, **options):
        taught.append(len(candidates))
        return original(candidates, *arguments, **options)

    monkeypatch.setattr(analysed, "CandidateOptimizer", counted)
    runner.run()
    again = runner.state.measured()
    assert taught == sorted(set(taught)) and taught[-1] == len(again) == 5
    fresh = analysed.measured(runner.study, tmp_path / "s", runner.state.record())
    assert fresh == again and all(each.forecast is not None for each in again)
