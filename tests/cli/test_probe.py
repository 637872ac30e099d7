"""`autotune probe`: latency and bandwidth from message times, what is printed, what is kept."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from autotune.cli import probe
from autotune.errors import UserError
from autotune.study.setup import profile_cache
from autotune.trial.links import RINGS, LoaderRate, Probe, fit
from autotune.trial.profile import Machine

SIZES = [1 << n for n in range(10, 25, 2)]


def times_of(collective, world_size, alpha_s, bytes_per_s):
    k, n = RINGS[collective], world_size
    return [(size, k * (n - 1) * alpha_s + k * (n - 1) / n * size / bytes_per_s) for size in SIZES]


@pytest.mark.parametrize("collective", RINGS)
@pytest.mark.parametrize("world_size", [2, 8])
def test_latency_and_bandwidth_are_found_again_in_the_times_that_follow_from_them(collective, world_size):
    found = fit(collective, world_size, times_of(collective, world_size, 1e-4, 2e9))
    assert (found.alpha_s, found.bytes_per_s) == (pytest.approx(1e-4, rel=1e-6), pytest.approx(2e9, rel=1e-6))
    assert found.error < 1e-6 and found.seconds(SIZES[3]) == pytest.approx(dict(found.times_s)[SIZES[3]])


def test_small_messages_tell_the_latency_however_long_the_large_ones_take():
    times = times_of("all_reduce", 2, 1e-5, 1e9)
    size, seconds = times[-1]
    found = fit("all_reduce", 2, [*times[:-1], (size, 1.5 * seconds)])
    assert found.alpha_s == pytest.approx(1e-5, rel=0.2) and found.error < 0.2


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_device_has_a_link_to_its_host(accelerator):
    machine = replace(Machine.guess(accelerator, 1), host_bytes_per_s=5e10)
    found = Probe(
        machine=machine, device_name="x", threads=0, flops={}, sizes={}, links=(), loader=(), data=None, caveats=()
    )
    said = "\n".join(probe.lines(found, kept=False))
    assert ("from the host      50.0 GB/s" in said) is ("offloaded" in said) is (accelerator == "cuda")


def test_times_that_do_not_grow_leave_no_negative_bandwidth():
    found = fit("all_gather", 4, [(size, 1e-3 * (1 - 0.01 * i)) for i, size in enumerate(SIZES)])
    assert found.alpha_s > 0 and found.bytes_per_s > 0 and found.seconds(1 << 30) < 1.0


@pytest.mark.parametrize("seed", range(20))
def test_no_link_without_negative_parts_fits_scattered_times_better(seed):
    rng, k = np.random.default_rng(seed), RINGS["all_reduce"]
    times = [(size, seconds * math.exp(rng.normal())) for size, seconds in times_of("all_reduce", 4, 1e-4, 1e9)]
    found = fit("all_reduce", 4, times)
    rows = np.array([[3 * k / seconds, 0.75 * k * size / seconds] for size, seconds in times])
    best = nnls(rows / rows.max(axis=0), np.ones(len(rows)))[1]
    reached = np.linalg.norm(rows @ [found.alpha_s, 1 / found.bytes_per_s] - 1)
    assert reached == pytest.approx(best, rel=0.01)  # a link has at least some latency


@pytest.mark.process
def test_ranks_that_probe_a_machine_import_no_scipy(zoo):
    """Its import would delay the rank, and then the first trial: the server imports ahead what ranks imported."""
    program = (
        "import sys\n"
        "for name in list(sys.modules):\n"
        "    if name.partition('.')[0] in ('autotune', 'scipy'): del sys.modules[name]\n"
        "import autotune.worker.profile.machine\nfrom autotune.trial.links import fit\n"
        "fit('all_reduce', 2, [(1024, 2e-3), (4096, 1e-3)])\nprint('scipy' in sys.modules)"
    )
    assert zoo.printed(program).split()[-1] == "False"


@pytest.fixture
def probed(monkeypatch, tmp_path):
    """A machine whose probe takes no time; the number of times that it was probed."""
    machine = replace(Machine.guess("cpu", 2), measured=True)
    links = tuple(fit(name, 2, times_of(name, 2, 1e-4, 2e9)) for name in RINGS)
    found = Probe(
        machine=machine, device_name="A Device", threads=1, flops={"fp32": 5e10, "bf16": 1e11}, sizes={"fp32": 512, "bf16": 1024},
        links=links, loader=(LoaderRate(n_workers=0, samples_per_s=20_000.0, bytes_per_s=1e9),),
    )  # fmt: skip
    times = []
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        probe, "measure", lambda target, _: times.append(1) or replace(found, data=found.loader[0] if target else None)
    )
    return times


def test_a_machine_is_probed_once_and_forecasts_start_from_it(probed, capsys):
    probe.probe(None, 2)
    said = capsys.readouterr().out
    assert "A Device" in said and "all_reduce" in said and "100 us" in said and "2.00 GB/s" in said
    probe.probe(None, 2, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["kept"] and data["ranks"] == 2 and data["flops"] == {"fp32": 5e10, "bf16": 1e11} and len(probed) == 1
    kept = profile_cache.load(Machine, profile_cache.machine_key(2))
    assert kept is not None and kept.measured
    probe.probe(None, 2, again=True)
    assert len(probed) == 2


def test_the_data_of_a_model_are_not_kept_for_a_probe_without_it(probed, tmp_path, capsys):
    """A later probe of the machine said `your data` of those of another model."""
    (tmp_path / "model.py").write_text("def model(): ...\ndef data(): ...\n")
    said = []
    for target in (tmp_path / "model.py", None):
        probe.probe(target, 2)
        said.append("your data" in capsys.readouterr().out)
    assert said == [True, False] and len(probed) == 1


def test_other_numbers_of_ranks_are_other_machines(probed):
    probe.probe(None, 2)
    probe.probe(None, 1)
    assert len(probed) == 2


def test_what_cannot_be_probed_is_refused_in_a_sentence(probed, tmp_path):
    with pytest.raises(UserError, match="from 1 on"):
        probe.probe(None, 0)
    (tmp_path / "train.py").write_text("import deepspeed\n\ndeepspeed.initialize()\n")
    with pytest.raises(UserError, match=r"data of a model\.py"):
        probe.probe(tmp_path / "train.py", 2)
