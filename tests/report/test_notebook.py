"""A study in a notebook: its answer as HTML, its figures, and one display that is updated."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import plotly.graph_objects as go
import pytest
from support.instant import Instant, runner_of
from support.study_report import EVIL, Tags, study_report

from autotune.errors import UserError
from autotune.report import notebook
from autotune.report.gains import pick_words
from autotune.report.progress import ProgressView
from autotune.report.results import StudyResult
from autotune.study.events import EventSink, Kind


@pytest.fixture(scope="module")
def study():
    return StudyResult(study_report())


class Display:
    """What `IPython.display.display` shows, one entry for each output below a cell."""

    def __init__(self):
        self.outputs = []

    def __call__(self, shown, display_id):
        assert display_id is True
        self.outputs.append(shown._repr_html_())
        return SimpleNamespace(update=lambda new: self.outputs.__setitem__(-1, new._repr_html_()))


@pytest.fixture
def kernel(monkeypatch):
    """IPython as it is in the kernel of a notebook."""
    shell, module, shown = SimpleNamespace(kernel=object()), ModuleType("IPython"), Display()
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown))
    return shown


def test_the_answer_of_a_study_is_html_with_its_price_and_its_front(study):
    page, found = study._repr_html_(), study._report
    assert pick_words(found, ["recommended"], found.picks["recommended"]) in page.replace("&#39;", "'")
    assert page.count("<tr>") == 1 + len(found.table()) and "<th>speed-up</th>" in page


def test_a_study_without_an_answer_says_why(study):
    nothing = replace(study._report, recommended={}, front=[], trials=[study._report.trials[5]])
    assert "Nothing to recommend: no configuration fits the device memory" in StudyResult(nothing)._repr_html_()


def test_a_name_with_html_in_it_is_inert(study):
    evil = replace(study._report, study={**study._report.study, "name": EVIL})
    assert {tag for tag, _ in Tags(StudyResult(evil)._repr_html_()).found}.isdisjoint({"img", "script"})


def test_a_run_has_one_output_that_holds_the_last_state(kernel, tmp_path):
    with notebook.viewer(True) as view:
        runner_of(tmp_path, Instant(), watcher=view, trials=4).run()
    assert len(kernel.outputs) == 1
    assert "4 of 4 trials" in kernel.outputs[0] and "3</td>" in kernel.outputs[0] and " left" not in kernel.outputs[0]


def test_between_two_trials_the_profiling_before_the_first_is_not_said_to_go_on(kernel, tmp_path):
    seen = []

    class Journal(EventSink):
        def emit(self, event):
            view.emit(event)
            if event.kind is Kind.TRIAL_ENDED:
                seen.append(view._repr_html_())

    with notebook.viewer(True) as view:
        view.doing("profiling the model and the machine, once")
        runner_of(tmp_path, Instant(), watcher=Journal(), trials=2, finalists=0).run()
    assert len(seen) == 2 and not any("profiling" in page for page in seen)


def test_a_run_that_waits_for_its_turn_says_so_once(kernel):
    """Nothing moved in the display while another study measured, and nothing said why."""
    with notebook.viewer(True) as view:
        view.waiting()
        view.waiting()
    assert kernel.outputs[0].count("the two take turns") == 1


def test_outside_of_a_notebook_progress_is_told_to_standard_error(study):
    assert isinstance(notebook.viewer(True), ProgressView)


def test_the_figures_are_those_of_the_page(study):
    front = study.plot_front("peak_memory_bytes", "samples_per_s")
    assert isinstance(front, go.Figure) and front.layout.xaxis.title.text.startswith("peak memory")
    assert front.layout.yaxis.title.text.startswith("throughput")
    assert study.plot_front().layout.xaxis.title.text.startswith("step time")
    for drawn in (study.plot_parallel(), study.plot_losses("seconds"), study.plot_forecast("peak_memory_bytes")):
        assert drawn.data
    with pytest.raises(UserError, match="unknown metric 'latency'"):
        study.plot_front("latency")
    with pytest.raises(UserError, match=r"unknown axis 'sample'\. Did you mean 'samples'"):
        study.plot_losses("sample")
    with pytest.raises(
        UserError, match="metric 'joules_per_sample' has no values here; metrics that have: step_time_s"
    ):
        study.plot_front("joules_per_sample")


def test_objectives_that_no_trial_has_both_of_are_drawn_each_by_its_own_trials(study):
    """The page of such a study was an error of autotune itself."""
    trials = [
        {**trial, "metrics": {name: value for name, value in trial["metrics"].items() if name != left_out}}
        for trial, left_out in zip(study._report.trials, ("time_to_loss_s", "peak_memory_bytes"), strict=False)
    ]
    found = StudyResult(replace(study._report, recommended={}, front=[], trials=trials))
    assert found.plot_parallel("time_to_loss_s").data and found.plot_parallel("peak_memory_bytes").data


def test_what_cannot_be_drawn_is_said(study):
    empty = StudyResult(replace(study._report, recommended={}, front=[], trials=[study._report.trials[5]]))
    for plot in (empty.plot_front, empty.plot_parallel, empty.plot_losses, empty.plot_forecast):
        with pytest.raises(UserError, match="study 'code-gpt': "):
            plot()


def test_the_difference_of_losses_is_nothing_for_the_baseline_and_small_for_others(study):
    drawn = study.plot_losses(difference=True)
    base = next(trace for trace in drawn.data if "baseline" in trace.name)
    assert set(base.y) == {0.0} and drawn.layout.yaxis.title.text == "training loss minus the baseline's"
    others = [y for trace in drawn.data for y in trace.y if y is not None]
    whole = [y for trace in study.plot_losses().data for y in trace.y if y is not None]
    assert max(others) - min(others) < max(whole) - min(whole)


def test_an_error_in_a_notebook_is_its_sentence_without_a_traceback():
    assert UserError("no study 'model'")._render_traceback_() == ["UserError: no study 'model'"]
