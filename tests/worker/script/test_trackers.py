"""Trials log no runs at the trackers that a script names."""

from types import ModuleType, SimpleNamespace

import pytest

from autotune.worker.script import trackers
from autotune.worker.script.context import ScriptContext


def client():
    """Returns a class of experiments or clients, as trackers have them."""

    def init(self, address=None, **settings):
        self.given = (address, settings)

    return type("Client", (), {"__init__": init})


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Makes a tracker's module, as after its import; and what the trial has noted."""
    script = ScriptContext.__new__(ScriptContext)
    script.report, script.scratch = SimpleNamespace(caveats=[]), tmp_path
    callbacks = {}
    monkeypatch.setattr(trackers, "after_import", callbacks.__setitem__)
    monkeypatch.setattr(trackers.os, "environ", {})
    trackers.install(script)

    def make(name, **members):
        module = ModuleType(name)
        vars(module).update(members)
        callbacks[name](module)
        return module

    return make, script.report.caveats


def test_no_run_is_logged_where_the_script_names_a_server_or_a_mode(imported):
    """The variables that keep runs from there are of no effect then."""
    make, said = imported
    mlflow = make(
        "mlflow", set_tracking_uri=lambda _: pytest.fail("each trial logs its run there"), MlflowClient=client()
    )
    mlflow.set_tracking_uri("http://tracking:5000")
    assert said == ["mlflow.set_tracking_uri is not carried out in trials"]
    for made in (mlflow.MlflowClient("http://tracking:5000"), mlflow.MlflowClient(tracking_uri="http://tracking:5000")):
        assert made.given == (None, {})
    wandb = make("wandb", init=lambda project, **settings: (project, settings))
    assert wandb.init("mine", mode="online", tags=["a"]) == ("mine", {"mode": "disabled", "tags": ["a"]})


def test_no_experiment_is_started_at_comet_where_the_script_says_online(imported):
    comet = imported[0]("comet_ml", start=lambda key, **settings: settings, Experiment=client())
    assert comet.start("key", online=True) == {"online": False}
    assert comet.Experiment("key", disabled=False).given == ("key", {"disabled": True})


def test_a_tracker_of_another_version_may_lack_what_is_replaced(imported):
    for name in ("mlflow", "comet_ml", "wandb"):
        imported[0](name)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("runs", "mine", 7), {}),
        (("runs",), {"comment": "mine", "purge_step": 7}),
        ((), {"log_dir": "runs", "comment": "mine", "purge_step": 7}),
    ],
)
def test_tensorboards_writer_gets_its_other_arguments_by_position_or_name(tmp_path, args, kwargs):
    class Writer:
        def __init__(self, log_dir=None, comment="", purge_step=None):
            self.given = log_dir, comment, purge_step

    trackers.on_tensorboard(str(tmp_path), SimpleNamespace(SummaryWriter=Writer))
    assert Writer(*args, **kwargs).given == (str(tmp_path), "mine", 7)
