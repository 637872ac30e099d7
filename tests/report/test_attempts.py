"""Machines, waits and lost attempts: where they show, and that a quiet machine says nothing of them."""

import dataclasses

from support.instant import Instant, Watcher, runner_of
from support.study_report import study_report
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.executors.base import MachinesGone
from autotune.report import attempts, load, readme
from autotune.report.page.render import render
from autotune.study.folder import trial_path
from autotune.trial.folder import TrialDir, read_record, result_in, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import RankReport

WHY = "slurm: job 7 ended as NODE_FAIL (a node failed)"


def test_a_study_on_one_machine_has_nothing_to_say():
    report = study_report()
    here = [{**row, "hosts": ["a"], "machine": "cpu", "waited_s": 0.1, "lost_attempts": []} for row in report.trials]
    quiet = dataclasses.replace(report, trials=here)
    assert attempts.lines(quiet) == attempts.rows(quiet) == []
    assert 'id="attempts"' not in render(quiet)


def test_machines_waits_and_lost_attempts_are_in_report_note_and_page():
    report = study_report()
    moved = [
        {
            **row,
            "hosts": ["b" if n % 2 else "a"],
            "machine": "<cpu>\x1b[1m",
            "waited_s": 3.0,
            "lost_attempts": [WHY] * (n == 1),
        }
        for n, row in enumerate(report.trials)
    ]
    found = dataclasses.replace(report, trials=moved, study={**report.study, "lost": [{"trial": 40, "reason": "gone"}]})
    assert [row[0] for row in attempts.rows(found)] == ["a", "b"] and "\x1b" not in str(attempts.rows(found))
    machines, first, second = attempts.lines(found)
    assert (
        machines.startswith("ran on a (15 trials); b (15 trials); waited 1 min 30 s")
        and WHY in first
        and "40" in second
    )
    page, note = render(found), readme.study_note(found, None)
    assert WHY in page and "&lt;cpu&gt;" in page and "trial 40: gone" in page and "NODE" in note
    many = dataclasses.replace(found, study={**found.study, "lost": [{"trial": n, "reason": "x"} for n in range(50)]})
    assert len(attempts.lines(many)) == 2 + attempts.MOST_LOST


class Outage(Instant):
    """Has no machines for the third trial."""

    def submit(self, folder: TrialDir) -> Instant:
        if len(self.ran) == 2 and not read_record(folder.request, TrialRequest).noise:
            raise MachinesGone(WHY)
        found = super().submit(folder)
        path = folder.report(0)
        write_record(path, dataclasses.replace(read_record(path, RankReport), host="n1", machine="cpu"))
        return found

    patience_s = 0.0


def test_status_tells_what_an_outage_took(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for executor in (Outage(), Instant()):
        try:
            runner_of(tmp_path / "studies", executor, watcher=Watcher(), trials=4, finalists=0).run()
        except MachinesGone:
            continue
    said = " ".join(CliRunner().invoke(app, ["status", "s", "--once"]).stdout.split())
    assert f"trial 2 lost an attempt, which is held against no configuration: {WHY}" in said
    assert "ran on n1 (2 trials)" in said


def test_the_dashboards_note_tells_machines_and_waits_as_the_stored_one_does(tmp_path):
    """It is made without the files of the trials, and lacked them."""
    runner = runner_of(tmp_path, Instant(), trials=3, finalists=0)
    runner.run()
    folder = runner.state.folder
    for n in range(3):
        path = trial_path(folder, n)
        found = dataclasses.replace(result_in(path), hosts=["ab"[n % 2]], machine="cpu", waited_s=60.0 * n)
        write_record(path / "result.json", dataclasses.replace(found, lost_attempts=[WHY] * n))
    shown, whole = (attempts.lines(load.read(runner.study, folder, series=series)) for series in (False, True))
    assert shown == whole and len(shown) > 1
