"""A study of 1,000 trials: how long the report takes and how large it is, and the dashboard's page beside plain optuna-dashboard's.

python benchmarks/views.py [TRIALS]
"""

import copy
import io
import json
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from wsgiref.util import setup_testing_defaults

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import write
from instant import Instant, runner_of
from optuna.storages import RDBStorage
from optuna_dashboard import wsgi

from autotune import store
from autotune.report import summary, takeaway
from autotune.report.dashboard import Application
from autotune.report.overlay import Overlay

ROUNDS = 5


def grown(folder: Path, n_trials: int) -> str:
    """A study of that many trials with their files: some that ran, and copies of them with other figures."""
    runner_of(folder, Instant(), trials=6).run()
    url, rng = store.default_url(folder), random.Random(0)
    study = store.load_study(store.open_storage(url), "s")
    ran, first = store.told_trials(study), len(study.get_trials(deepcopy=False))
    for n in range(n_trials - len(ran)):
        drawn, factor = copy.deepcopy(rng.choice(ran[1:])), rng.uniform(0.5, 2.0)
        shutil.copytree(store.trial_path(folder / "s", drawn.number), store.trial_path(folder / "s", first + n))
        data = store.told_data(drawn)
        data["metrics"] = {name: value * factor for name, value in data["metrics"].items()}
        data["ci95"] = {name: [end * factor for end in ends] for name, ends in data["ci95"].items()}
        drawn.user_attrs = {**drawn.user_attrs, store.MEASURED_ATTR: json.dumps(data)}
        drawn.values = [value * factor for value in drawn.values]
        study.add_trial(drawn)
    return url


def asked_s(app, path: str) -> float:
    """Seconds until an application has answered."""
    environ = {"PATH_INFO": path, "HTTP_HOST": "localhost", "QUERY_STRING": "after=0", "wsgi.input": io.BytesIO()}
    setup_testing_defaults(environ)
    start = time.perf_counter()
    content = b"".join(app(environ, lambda *_: None))
    assert json.loads(content)["trials"]
    return time.perf_counter() - start


def main() -> None:
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = grown(folder, n_trials)
        start = time.perf_counter()
        page = takeaway.write(summary.load("s", url, folder / "s"), folder / "out", single_file=True)[0]
        report_s = time.perf_counter() - start
        overlay = Overlay(store.open_storage(url), partial(store.study_folder, studies=folder, url=url))
        ours, plain = Application(overlay, "127.0.0.1", None), wsgi(RDBStorage(url))
        first_s = asked_s(ours, "/api/studies/1")
        pairs = [(asked_s(plain, "/api/studies/1"), asked_s(ours, "/api/studies/1")) for _ in range(ROUNDS)]
        figures = {"n_trials": n_trials, "report_s": report_s, "report_bytes": page.stat().st_size, "dashboard_first_s": first_s}
        write("views", {**figures, "dashboard_over_plain": [own / other for other, own in pairs]})


if __name__ == "__main__":
    main()
