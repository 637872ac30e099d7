"""What `study.storage.optuna_tables` relies on inside Optuna and optuna-dashboard, checked against the installed releases.

Runs with any release that `pyproject.toml` allows: put another one first on PYTHONPATH.
"""

import inspect

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.study.storage import notes, optuna_tables, records
from autotune.study.storage.leases import StudyLeases
from autotune.study.storage.optuna_tables import CachedStorage

MINOR = ".".join(optuna.__version__.split(".")[:2])
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture(params=[MINOR], ids=lambda minor: f"optuna-{minor}")
def study(request, tmp_path):
    return records.create_study(records.open_storage(records.default_url(tmp_path)), "s", ["minimize"], ["m"])


def ended(study, value=1.0, constraints=(("fits", 0.0),)):
    """A trial that went through a coordinator."""
    storage = optuna_tables.storage_of(study)
    leases = StudyLeases(storage._backend, "s")
    trial, knob = leases.claim(study, "search"), optuna.distributions.IntDistribution(1, 8)
    leases.describe(trial, {"x": 2}, {"x": knob}, {"candidate": "{}"})
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


def test_a_trial_is_read_back_as_it_was_told(study):
    trial = ended(study)
    assert (trial.state, trial.values, trial.params) == (TrialState.COMPLETE, [1.0], {"x": 2})
    assert trial.user_attrs["outcome"] == "complete" and trial.user_attrs["role"] == "search"
    assert trial.datetime_start <= trial.datetime_complete
    assert study.best_trial.number == trial.number


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
