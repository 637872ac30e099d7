"""Leases on a real PostgreSQL: no trial is claimed or told twice, and a dead coordinator's trials are taken over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from optuna.trial import TrialState
from support.zoo import wait_until

from autotune.errors import UserError
from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study.storage import leases, records
from autotune.study.storage.database import open_storage
from autotune.study.storage.leases import Owner, StudyLeases
from autotune.system import processes as liveness

# Of a kernel that nobody here can ask whether the process lives.
ELSEWHERE = Owner("elsewhere", "another kernel", 1, "0", "x")


def ledger_of(url: str, owner: Owner | None = None) -> StudyLeases:
    return StudyLeases(open_storage(url), "s", owner)


def begun(url: str):
    """A study with no trial, and its database."""
    storage = open_storage(url)
    return records.create_study(storage, "s", ["minimize"], ["m"])


@pytest.mark.system
def test_who_was_taken_for_dead_cannot_tell_his_trial(url):
    study, dead, alive = begun(url), ledger_of(url, ELSEWHERE), ledger_of(url)
    asked = dead.claim(study)
    held = next(lease for lease in leases.leases(alive.storage, "s") if lease.trial == asked.number)
    assert alive.take_over(records.running(study)[0], held)
    assert not dead.tell(asked, TrialState.COMPLETE, [1.0], {"a": 1}, {})
    assert study.get_trials()[0].state is TrialState.RUNNING
    assert alive.tell(asked, TrialState.COMPLETE, [2.0], {"a": 2}, {"fits": 0.0})
    ended = study.get_trials()[0]
    assert (ended.state, ended.values, ended.user_attrs["a"], ended.constraints) == (
        TrialState.COMPLETE,
        [2.0],
        2,
        {"fits": 0.0},
    )


@pytest.mark.system
def test_a_trial_is_told_once_though_the_answer_was_lost(url):
    study, ledger = begun(url), ledger_of(url)
    asked = ledger.claim(study)
    assert ledger.tell(asked, TrialState.COMPLETE, [1.0], {}, {})
    assert ledger.tell(asked, TrialState.COMPLETE, [1.0], {}, {})  # the same call again, as after a lost connection
    assert not ledger_of(url).tell(asked, TrialState.COMPLETE, [3.0], {}, {})
    assert study.get_trials()[0].values == [1.0]


@pytest.mark.system
def test_of_two_who_take_over_a_trial_one_gets_it(url):
    study, dead = begun(url), ledger_of(url, ELSEWHERE)
    dead.claim(study)
    held, trial = leases.leases(dead.storage, "s")[0], records.running(study)[0]
    assert [ledger_of(url).take_over(trial, held) for _ in range(2)] == [True, False]


@pytest.mark.system
def test_one_that_stirs_in_the_last_moment_is_not_taken_over(url):
    study, slow = begun(url), ledger_of(url, ELSEWHERE)
    slow.claim(study)
    held, trial = leases.leases(slow.storage, "s")[0], records.running(study)[0]
    slow.look()
    assert not ledger_of(url).take_over(trial, held)


@pytest.mark.system
def test_a_coordinator_elsewhere_is_dead_when_its_beat_stands_still_for_long(url):
    study, other, ledger = begun(url), ledger_of(url, ELSEWHERE), ledger_of(url)
    other.claim(study)
    for _ in range(leases.STALE_LOOKS):
        ledger.look()
        assert ledger.abandoned(records.running(study)) == []
    other.look()
    ledger.look()
    for _ in range(leases.STALE_LOOKS - 1):
        ledger.look()
        assert ledger.abandoned(records.running(study)) == []
    ledger.look()
    assert [trial.number for trial, _ in ledger.abandoned(records.running(study))] == [0]


@pytest.mark.system
def test_a_dead_process_of_this_machine_is_known_at_once(url):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.here(), pid=child.pid, started=liveness.started(child.pid))
    study, other, ledger = begun(url), ledger_of(url, owner), ledger_of(url)
    other.claim(study)
    assert ledger.abandoned(records.running(study)) == []
    child.kill()
    assert wait_until(lambda: len(ledger.abandoned(records.running(study))) == 1)  # though nobody has waited for it yet
    child.communicate()


def test_a_clock_that_is_set_buries_nobody(monkeypatch):
    """The moment of the boot moves with the clock, and with it whatever is counted from there."""
    here = Owner.here()
    assert Owner.read(str(here)) == here and here.lives()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert here.lives() and Owner.here().started == here.started
    assert replace(here, started="1").lives() is False  # its number is used again


@pytest.mark.system
def test_a_running_trial_that_nobody_holds_is_abandoned(url):
    study = begun(url)
    study.ask()
    assert len(ledger_of(url).abandoned(records.running(study))) == 1


@pytest.mark.system
def test_while_one_decides_the_others_wait(url):
    begun(url)
    first, second, order = ledger_of(url), ledger_of(url), []

    def wait() -> None:
        with second.turn():
            order.append("second")

    with first.turn():
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.system
def test_what_was_decided_after_the_turn_was_lost_is_not_claimed(url):
    study, ledger = begun(url), ledger_of(url)
    asked = ledger.claim(study)
    with ledger.turn():
        ledger._turn.invalidate()
        ledger._turn.close()
        with pytest.raises(leases.TurnLost):
            ledger.describe(asked, {}, {CANDIDATE_ATTR: "x"})
    assert CANDIDATE_ATTR not in study.get_trials()[0].user_attrs


@pytest.mark.system
def test_a_second_leader_is_refused_and_told_how_to_help(url):
    refused = rf"run by process {os.getpid()}.*autotune worker s"
    with ledger_of(url).leading(print), pytest.raises(UserError, match=refused), ledger_of(url).leading(print):
        pass
    with ledger_of(url).leading(print):
        pass


@pytest.mark.system
def test_a_leader_elsewhere_is_waited_for_and_then_replaced(url, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    assert ledger_of(url, ELSEWHERE).acquire(leases.LEAD)
    said = []
    with ledger_of(url).leading(said.append):
        assert "process 1 on elsewhere ran this study" in said[0]


def test_in_a_file_that_one_process_uses_nobody_gives_a_beat(tmp_path):
    """A thread wrote to the database every 5 seconds what nobody reads there."""
    with ledger_of(records.default_url(tmp_path)).beating():
        assert "autotune-heartbeat" not in {thread.name for thread in threading.enumerate()}
