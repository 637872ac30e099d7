"""What `optuna_tables` relies on inside Optuna and optuna-dashboard, checked against the installed releases.

Runs with any release that `pyproject.toml` allows: put it first on PYTHONPATH.
"""

import inspect
from datetime import datetime

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.study.storage import database, notes, optuna_tables, records
from autotune.study.storage.leases import StudyLeases
from autotune.study.storage.optuna_tables import CachedStorage

MINOR = ".".join(optuna.__version__.split(".")[:2])
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture(params=[MINOR], ids=lambda minor: f"optuna-{minor}")
def study(request, tmp_path):
    return records.create_study(database.open_storage(records.default_url(tmp_path)), "s", ["minimize"], ["m"])


def ended(study, value=1.0, constraints=(("fits", 0.0),)):
    """A trial that went through a coordinator."""
    storage = optuna_tables.storage_of(study)
    leases = StudyLeases(storage._backend, "s")
    trial, knob = leases.claim(study), optuna.distributions.IntDistribution(1, 8)
    leases.describe(trial, {"x": (2, knob)}, {"candidate": "{}", "role": "search"})
    assert leases.tell(trial, TrialState.COMPLETE, [value], {"outcome": "complete"}, dict(constraints))
    return storage.get_trial(optuna_tables.trial_id(trial))


def test_the_cache_has_every_method_that_is_overridden():
    for name in optuna_tables.PATIENT:
        assert name in vars(_CachedStorage) or name in vars(RDBStorage), name
        assert getattr(CachedStorage, name) is not getattr(_CachedStorage, name)
    assert list(inspect.signature(_CachedStorage.get_all_trials).parameters) == [
        "self",
        "study_id",
        "deepcopy",
        "states",
    ]


def test_studies_and_trials_have_their_ids_and_their_storage(study):
    storage = optuna_tables.storage_of(study)
    assert isinstance(storage, CachedStorage)
    assert storage.get_study_name_from_id(optuna_tables.study_id(study)) == "s"
    asked = study.ask()
    assert isinstance(asked, Trial) and storage.get_trial(optuna_tables.trial_id(asked)).number == asked.number
    (frozen,) = study.get_trials()
    assert isinstance(frozen, FrozenTrial) and optuna_tables.trial_id(frozen) == optuna_tables.trial_id(asked)


def test_a_snapshot_shows_the_same_trials_until_it_ends(study):
    ended(study)
    with records.snapshot(study):
        ended(study, 0.5)
        assert len(study.get_trials()) == len(study.get_trials(states=(TrialState.COMPLETE,))) == 1
    assert len(study.get_trials()) == 2
    with records.snapshot(study, news=False):
        assert len(study.get_trials(deepcopy=False)) == 2


def test_trials_are_read_again_where_one_runs_or_was_added(study, monkeypatch):
    other, read, reads = records.load_study(optuna_tables.storage_of(study)._backend, "s"), RDBStorage._get_trials, []
    monkeypatch.setattr(RDBStorage, "_get_trials", lambda *given, **more: reads.append(more) or read(*given, **more))

    def looked():
        reads.clear()
        return [trial.state for trial in other.get_trials()], len(reads)

    ended(study)
    complete, runs = TrialState.COMPLETE, TrialState.RUNNING
    assert [looked() for _ in range(2)] == [([complete], 1), ([complete], 0)]
    asked = study.ask()
    assert [looked() for _ in range(2)] == [([complete, runs], 1)] * 2
    study.tell(asked, 2.0)
    assert [looked() for _ in range(2)] == [([complete] * 2, 1), ([complete] * 2, 0)]
    optuna.delete_study(study_name="s", storage=optuna_tables.storage_of(study)._backend)
    with pytest.raises(KeyError, match=optuna_tables.GONE):
        other.get_trials()


def test_an_attribute_of_a_study_is_replaced_and_of_one_that_was_deleted_refused(study):
    other = records.create_study(optuna_tables.storage_of(study)._backend, "other", ["minimize"], ["m"])
    for value in (1.5, {"a": [None]}):
        for each in (study, other):
            optuna_tables.set_study_attr(each, "own", value if each is study else 0)
        storage, number = optuna_tables.storage_of(study), optuna_tables.study_id(study)
        assert storage.get_study_system_attrs(number)["own"] == value == optuna_tables.study_attr(study, "own")
    assert optuna_tables.study_attr(other, "own") == 0
    optuna.delete_study(study_name="s", storage=storage._backend)
    with pytest.raises(KeyError, match=optuna_tables.GONE):
        optuna_tables.set_study_attr(study, "own", 2)


def test_a_trial_is_read_back_as_it_was_told(study):
    trial = ended(study)
    assert (trial.state, trial.values, trial.params) == (TrialState.COMPLETE, [1.0], {"x": 2})
    assert trial.user_attrs["outcome"] == "complete" and trial.user_attrs["role"] == "search"
    assert trial.datetime_start <= trial.datetime_complete
    assert study.best_trial.number == trial.number


def test_a_trial_written_at_once_is_the_one_that_optunas_interface_writes(study):
    """`write_trial` against `set_trial_param`, `set_trial_user_attr` and `set_trial_system_attr`, which it replaces."""
    storage, distributions = optuna_tables.storage_of(study), optuna.distributions
    params = {
        "category": ("b", distributions.CategoricalDistribution(["a", "b", None, 2.5])),
        "steps": (6, distributions.IntDistribution(2, 10, step=2)),
        "size": (10**9, distributions.IntDistribution(1, 2**40, log=True)),
        "rate": (0.1, distributions.FloatDistribution(1e-5, 1.0, log=True)),
    }
    user = {"text": "3 × \U0001f600", "number": 1.5, "none": None, "list": [1, "a"], "long": "x" * 10_000}
    system = {"autotune:measured": "{}", **optuna_tables.constraint_attrs({"fits": -1.0})}
    by_interface, at_once = storage.create_new_trial(study._study_id), storage.create_new_trial(study._study_id)
    for name, (value, distribution) in params.items():
        storage.set_trial_param(by_interface, name, distribution.to_internal_repr(value), distribution)
    for key, value in user.items():
        storage.set_trial_user_attr(by_interface, key, value)
    for key, value in system.items():
        storage.set_trial_system_attr(by_interface, key, value)
    stale = {"text": "before", "kept": 1}
    for attrs in stale, user:  # what was there under the same name is replaced, and the rest kept
        with storage._backend.engine.begin() as connection:
            optuna_tables.write_trial(connection, at_once, params=params, user_attrs=attrs, system_attrs=system)
    expected, found = storage.get_trial(by_interface), storage.get_trial(at_once)
    assert (found.params, found.distributions, found.system_attrs) == (
        expected.params, expected.distributions, expected.system_attrs,
    )  # fmt: skip
    assert found.user_attrs == expected.user_attrs | {"kept": 1}
    assert found.state is TrialState.RUNNING


def test_the_dates_of_a_trial_are_those_that_are_written_when_it_has_ended(study):
    dates = datetime(2026, 11, 21, 12), datetime(2026, 11, 21, 12, 0, 1, 500)
    leases = StudyLeases(optuna_tables.storage_of(study)._backend, "s")
    asked = leases.claim(study)
    leases.tell(asked, TrialState.COMPLETE, [1.0], {}, {})
    with leases.engine.begin() as connection:
        optuna_tables.write_dates(connection, optuna_tables.trial_id(asked), *dates)
    (told,) = study.get_trials()
    assert (told.datetime_start, told.datetime_complete) == dates


def test_a_trial_that_has_ended_or_was_deleted_is_not_written(study):
    trial, engine = ended(study), optuna_tables.storage_of(study)._backend.engine
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError), engine.begin() as connection:
        optuna_tables.write_trial(connection, optuna_tables.trial_id(trial), user_attrs={"outcome": "lost"})
    with pytest.raises(KeyError) as ours, engine.begin() as connection:
        optuna_tables.write_trial(connection, 10**6, user_attrs={"outcome": "lost"})
    with pytest.raises(KeyError) as optunas:
        optuna_tables.storage_of(study).get_all_trials(10**6)
    assert ours.value.args == optunas.value.args == (optuna_tables.GONE,)
    assert study.get_trials()[0].user_attrs["outcome"] == "complete"


def test_an_ended_trial_cannot_be_ended_again(study):
    trial, storage = ended(study), optuna_tables.storage_of(study)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        storage.set_trial_state_values(optuna_tables.trial_id(trial), TrialState.COMPLETE, [2.0])


def test_optuna_reads_our_constraints(study):
    ended(study, 1.0, [("fits", 1.0), ("quality", -1.0)])
    feasible = ended(study, 2.0, [("fits", 0.0), ("quality", -1.0)])
    from optuna.study._constrained_optimization import _get_feasible_trials

    assert [trial.number for trial in _get_feasible_trials(study.get_trials())] == [feasible.number]


def test_optuna_dashboard_shows_our_notes(study):
    dashboard = pytest.importorskip("optuna_dashboard")
    trial = ended(study)
    notes.write_notes(study, "a" * 5000, {trial.number: "**fast**"})
    asked = Trial(study, optuna_tables.trial_id(trial))
    assert dashboard.get_note(study) == "a" * 5000 and dashboard.get_note(asked) == "**fast**"
    notes.write_notes(study, "shorter", {trial.number: "**fast**"})
    assert dashboard.get_note(study) == "shorter"


def test_a_note_that_the_user_edited_stays(study):
    dashboard = pytest.importorskip("optuna_dashboard")
    notes.write_notes(study, "ours", {})
    dashboard.save_note(study, "the user's")
    notes.write_notes(study, "ours again", {})
    assert dashboard.get_note(study) == "the user's"
    attrs = optuna_tables.storage_of(study).get_study_system_attrs(optuna_tables.study_id(study))
    assert notes.without_written_notes(attrs) == attrs
