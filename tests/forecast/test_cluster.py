"""What a study's configurations would take on a larger cluster: collectives over two tiers, what is carried over, the command."""

import itertools
import json
import math
import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.commands import called, one_sentence
from support.paths import BENCHMARKS, MODELS

from autotune.cli import project
from autotune.errors import UserError
from autotune.forecast import cluster
from autotune.forecast.cluster import Cluster, Projector
from autotune.forecast.communication import collective_s
from autotune.forecast.predictor import ForecastInputs, Predictor
from autotune.space.candidate import Candidate
from autotune.space.degree import EXPERT_DEGREE, TENSOR_DEGREE
from autotune.space.rule import Setting
from autotune.study.setup import forecasts
from autotune.trial.profile import Machine, Profile

GB = 1e9
ONE = np.ones(1)
PROFILE = Profile(
    n_parameters=10**8, n_trainable=10**8, flops_per_sample=1e12, activation_bytes_per_sample=1e8, checkpointed_bytes_per_sample=1e7,
    n_blocks=12, sequence=1024,
)  # fmt: skip
HERE = Machine(
    accelerator="cuda", world_size=2, flops={"fp32": 5e13, "bf16": 5e14}, memory_bytes_per_s=2e12, link_alpha_s=5e-6,
    link_bytes_per_s=100 * GB, measured=True,
)  # fmt: skip
CLUSTER = Cluster(devices=64, per_node=8, intra_bytes_per_s=300 * GB, inter_bytes_per_s=50 * GB, inter_latency_s=2e-5)
FORESEEN = ForecastInputs(
    profile=PROFILE, machine=HERE, world_size=2, base_config={}, baseline=Candidate(micro_batch_size=8),
    setting=Setting(accelerator="cuda", world_size=2, ranks_per_node=2, fp16=True, n_blocks=12), share_bytes=80e9, notes=[],
    device="A card (cuda)",
)  # fmt: skip
BASE = Candidate(micro_batch_size=8, precision="bf16", zero_stage=1)


def nodes(n, per_node=8, algorithm="ring", **links):
    return replace(
        HERE, world_size=n, ranks_per_node=per_node, node_bytes_per_s=links.get("node", 50 * GB), node_alpha_s=2e-5, algorithm=algorithm,
        link_bytes_per_s=links.get("link", 300 * GB),
    )  # fmt: skip


def seconds(machine, n_bytes=1e9, calls=1.0, halves=2.0):
    return tuple(float(part[0]) for part in collective_s(machine, ONE * n_bytes, ONE * calls, halves=ONE * halves))


def test_a_ring_over_nodes_is_as_fast_as_its_slowest_link_and_crosses_each_node_once():
    wire, latency = seconds(nodes(64))
    assert wire == pytest.approx(2 * 63 / 64 * 1e9 / (50 * GB))
    assert latency == pytest.approx(2 * (55 * 5e-6 + 8 * 2e-5))
    assert seconds(nodes(64, node=1000 * GB))[0] == pytest.approx(2 * 63 / 64 * 1e9 / (300 * GB))


def test_nodes_of_one_device_have_only_links_between_them():
    apart = nodes(4, per_node=1)
    for algorithm in ("ring", "hierarchical"):
        assert seconds(replace(apart, algorithm=algorithm)) == pytest.approx(
            (2 * 3 / 4 * 1e9 / (50 * GB), 2 * 3 * 2e-5)
        )


def test_two_tiers_move_within_the_node_what_the_ring_moves_between_them():
    wire, latency = seconds(nodes(64, algorithm="hierarchical"))
    assert wire == pytest.approx(2 * (7 / 8 * 1e9 / (300 * GB) + 7 / 8 * 1e9 / (50 * GB)))
    assert latency == pytest.approx(2 * (7 * 5e-6 + 7 * 2e-5))


def test_a_tree_has_logarithmically_many_hops_and_only_all_reduces_take_it():
    assert seconds(nodes(64, algorithm="tree"))[1] == pytest.approx(2 * (7 * 5e-6 + math.log2(8) * 2e-5))
    assert seconds(nodes(64, algorithm="tree"), halves=1.0) == seconds(nodes(64), halves=1.0)


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    for n_bytes, name in ((1e3, "tree"), (1e10, "ring")):
        assert seconds(nodes(64, algorithm="auto"), n_bytes) == seconds(nodes(64, algorithm=name), n_bytes)


def test_on_one_node_every_algorithm_but_the_tree_is_the_ring_that_was_measured():
    flat = replace(HERE, world_size=8)
    assert seconds(flat) == pytest.approx((2 * 7 / 8 * 1e9 / (100 * GB), 2 * 7 * 5e-6))
    assert seconds(nodes(8, algorithm="hierarchical", link=100 * GB)) == pytest.approx(seconds(flat))
    assert seconds(replace(HERE, world_size=1)) == (0.0, 0.0)


def learned(factor=1.0, link=1.0, machine=HERE):
    """A predictor that saw every step take so many times what the formula says, and communication so many times besides."""
    predictor = Predictor(PROFILE, machine)
    names = ("communication", "messages")
    for stage in range(4):
        for micro in (1, 2, 4, 8, 16):
            candidate = Candidate(micro_batch_size=micro, precision="bf16", zero_stage=stage)
            terms = {term.name: term.value for term in Predictor(PROFILE, machine).step_time(candidate).terms}
            step = factor * sum(value * (link if name in names else 1.0) for name, value in terms.items())
            predictor.learn(candidate, peak_memory_bytes=None, step_time_s=step)
    return predictor


def test_what_was_learned_of_computing_is_carried_over_and_what_was_learned_of_another_link_is_not():
    slow = Projector(learned(factor=1.5, link=4.0), CLUSTER, FORESEEN)
    there = slow.predictor.on(CLUSTER.machine(HERE, 64), CLUSTER.spread(64)).step_time(BASE)
    plain = Predictor(PROFILE, CLUSTER.machine(HERE, 64)).step_time(BASE)
    parts, formula = ({term.name: term.value for term in said.terms} for said in (there, plain))
    assert there.total.value == pytest.approx(
        sum(value * (1.0 if name in ("communication", "messages") else 1.5) for name, value in formula.items()), rel=0.1
    )
    assert parts["compute"] > 0


def test_a_measured_link_within_the_nodes_is_as_slow_between_as_on_one_of_them():
    asked = Cluster(devices=16, per_node=8, inter_bytes_per_s=1000 * GB)
    slow = Projector(learned(link=4.0), asked, FORESEEN)
    one, two = (slow.one(BASE, n).step_time_s.value for n in (8, 16))
    assert two > one
    stated = Projector(learned(link=4.0), replace(asked, intra_bytes_per_s=100 * GB), FORESEEN)
    assert stated.one(BASE, 16).step_time_s.value < 0.9 * two


def test_a_link_that_is_only_stated_widens_the_interval():
    sure, unsure = (
        learned().on(CLUSTER.machine(HERE, 64), spread).step_time(replace(BASE, zero_stage=3))
        for spread in (None, CLUSTER.spread(64))
    )
    width = [said.total.high / said.total.low for said in (sure, unsure)]
    assert width[1] > 1.05 * width[0]


def test_one_predictor_learns_from_several_numbers_of_ranks():
    alone, both = Predictor(PROFILE, HERE), Predictor(PROFILE, HERE)
    for micro in (2, 4, 8, 16):
        candidate = replace(BASE, micro_batch_size=micro)
        for n, predictors in ((2, (alone, both)), (4, (both,))):
            machine = replace(HERE, world_size=n)
            real = 1.3 * Predictor(PROFILE, machine).step_time(candidate).total.value
            for predictor in predictors:
                predictor.learn(candidate, peak_memory_bytes=None, step_time_s=real, machine=machine)
    said = [predictor.on(replace(HERE, world_size=8)).step_time(BASE) for predictor in (alone, both)]
    real = 1.3 * Predictor(PROFILE, replace(HERE, world_size=8)).step_time(BASE).total.value
    assert said[1].n_measured == 8 and said[1].total.value == pytest.approx(real, rel=0.05)
    assert said[1].total.high / said[1].total.low < said[0].total.high / said[0].total.low


def test_weak_scaling_loses_efficiency_with_every_node_and_gains_throughput():
    # At stage 1 the optimizer's shard shrinks with every device, which makes up for some of it.
    rows = Projector(learned(), CLUSTER, FORESEEN).over_devices(replace(BASE, zero_stage=0), "weak")
    assert [row.world_size for row in rows] == [2, 4, 8, 16, 32, 64]
    assert rows[0].efficiency == 1 and all(a.samples_per_s < b.samples_per_s for a, b in itertools.pairwise(rows))
    assert rows[-1].efficiency < rows[2].efficiency < 1 and rows[-1].samples_per_step == 512
    low, high = rows[-1].efficiency_90
    assert low < rows[-1].efficiency < high and 0 < rows[-1].communication < 1
    _, cells = project._cells([replace(rows[-1], samples_per_s=123_456.0)], "devices", ["64"])
    assert cells[4] == "123,456"  # it read 1.235e+05
    told = project.Projection(
        study="s", trial=1, mode="weak", cluster=CLUSTER, rows=rows, others=[(0, rows[-1])], n_measured=3, notes=(), device="an H100",
    )  # fmt: skip
    table = [line for line in told.lines() if re.match(r" {2,}", line)]  # it had 105 columns
    assert max(map(len, table)) <= 80 and table[-1].strip() == rows[-1].candidate.describe()


def test_devices_that_train_one_copy_of_the_model_together_read_one_micro_batch():
    inputs = replace(FORESEEN, world_size=4, setting=replace(FORESEEN.setting, world_size=2))
    rows = Projector(learned(), CLUSTER, inputs).over_devices(BASE, "weak")
    assert [(row.world_size, row.samples_per_step) for row in rows] == [(n, 8 * n // 2) for n in (4, 8, 16, 32, 64)]
    assert rows[0].samples_per_s == pytest.approx(16 / rows[0].step_time_s.value)
    odd = Projector(learned(), replace(CLUSTER, devices=3), inputs).one(BASE, 3)
    assert odd.impossible == "the script trains a copy of the model on 2 ranks, and 3 are no multiple of that"


def test_fewer_devices_than_a_configuration_needs_have_no_row():
    """A tensor group of four ranks was forecast on two, with half a micro-batch."""
    setting = replace(FORESEEN.setting, heads=8)
    split = replace(BASE, config=((TENSOR_DEGREE, 4),))
    rows = Projector(learned(), CLUSTER, replace(FORESEEN, setting=setting)).over_devices(split, "weak")
    assert [row.world_size for row in rows] == [4, 8, 16, 32, 64] and not any(row.impossible for row in rows)
    assert rows[0].efficiency == 1
    mixture, groups = replace(PROFILE, n_expert=5 * 10**7), replace(BASE, config=((EXPERT_DEGREE, 2),))
    (alone,) = Projector(Predictor(mixture, HERE), replace(CLUSTER, devices=1), FORESEEN).over_devices(groups, "weak")
    assert "2 ranks" in alone.impossible  # it ended in a ZeroDivisionError


def test_strong_scaling_keeps_the_global_batch_or_says_why_it_cannot():
    projector = Projector(learned(), CLUSTER, FORESEEN)
    rows = projector.over_devices(replace(BASE, gradient_accumulation_steps=32), "strong")
    assert {row.samples_per_step for row in rows} == {512} and rows[-1].candidate.gradient_accumulation_steps == 1
    with pytest.raises(UserError, match=r"global batch of 16 .* cannot be split over 64 devices"):
        projector.over_devices(BASE, "strong")


def test_strong_scaling_from_ranks_that_do_not_divide_the_devices_keeps_the_batch_where_it_can_be_split():
    """It was refused, and told to choose other rank counts, which the command does not take."""
    inputs = replace(FORESEEN, world_size=3, setting=replace(FORESEEN.setting, world_size=3))
    for devices, accumulation, counts in ((8, 16, [3, 6, 8]), (8, 8, [3, 6, 8]), (9, 3, [3, 9])):
        projector = Projector(learned(), replace(CLUSTER, devices=devices, per_node=devices), inputs)
        rows = projector.over_devices(replace(BASE, gradient_accumulation_steps=accumulation), "strong")
        assert [row.world_size for row in rows] == counts
        assert {row.samples_per_step for row in rows} == {3 * 8 * accumulation}


def test_sharding_saves_memory_with_every_device():
    peaks = [
        row.peak_memory_bytes.value
        for row in Projector(learned(), CLUSTER, FORESEEN).over_devices(replace(BASE, zero_stage=3), "weak")
    ]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("fewest", "devices", "per_node", "counts"),
    [
        (2, 64, 8, [2, 4, 8, 16, 32, 64]),
        (1, 24, 8, [1, 2, 4, 8, 16, 24]),
        (2, 12, 6, [2, 4, 12]),
        (8, 4, 4, [4]),
        (1, 1, 1, [1]),
    ],
)
def test_rank_counts_double_and_fill_nodes(fewest, devices, per_node, counts):
    assert Cluster(devices=devices, per_node=per_node, inter_bytes_per_s=1e9).counts(fewest) == counts


def test_so_many_devices_that_the_table_would_be_long_begin_with_more():
    counts = Cluster(devices=65536, per_node=8, inter_bytes_per_s=1e9).counts(1)
    assert len(counts) == cluster.MOST_ROWS and counts[-1] == 65536


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"devices": 0}, "at least 1"), ({"devices": 20}, "no whole number of nodes"), ({"inter_bytes_per_s": None}, "--inter-bandwidth"),
        ({"algorithm": "star"}, "auto, ring, tree, hierarchical"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_is_refused_with_the_remedy(what, said):
    with pytest.raises(UserError, match=said):
        replace(CLUSTER, **what)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_study_on_a_cpu_says_that_a_clusters_devices_are_not_forecast(accelerator):
    inputs = SimpleNamespace(machine=replace(HERE, accelerator=accelerator), world_size=2)
    last = SimpleNamespace(impossible="", fits=None, world_size=16)
    notes = list(project._notes(CLUSTER, inputs, last, 3))
    assert any("the study ran on a CPU" in note for note in notes) is (accelerator == "cpu")


def test_the_stated_probability_is_that_of_fitting():
    """Of one that needed ten times the memory it was said that it may not fit, with a probability of 0 %."""
    inputs = SimpleNamespace(machine=SimpleNamespace(accelerator="cuda"), world_size=2)
    notes = list(project._notes(CLUSTER, inputs, SimpleNamespace(impossible=None, fits=0.0), 3))
    assert sum("it fits a device there with a probability of 0%" in note for note in notes) == 1


def test_a_study_on_one_rank_knows_no_link():
    alone = replace(HERE, world_size=1)
    with pytest.raises(UserError, match="--intra-bandwidth"):
        replace(CLUSTER, intra_bytes_per_s=None).machine(alone, 8)
    assert replace(CLUSTER, intra_bytes_per_s=None).machine(HERE, 8).link_bytes_per_s == 100 * GB


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A working directory with one small study that has come to its recommendation."""
    root = tmp_path_factory.mktemp("project")
    folder = root / "studies" / "small"
    folder.mkdir(parents=True)
    shutil.copy(MODELS / "tied.py", folder / "model.py")
    (folder / "study.yaml").write_text("target: model.py\nranks: 2\n")
    rows = [
        {
            "trial": n,
            "candidate": {"micro_batch_size": 8, "zero_stage": n},
            "metrics": {"step_time_s": 0.01 + 0.002 * n, "peak_memory_bytes": 5e7},
        }
        for n in range(3)
    ]
    (folder / "front.json").write_text(json.dumps(rows))
    (folder / "recommended.json").write_text(json.dumps({"picks": {"recommended": rows[1]}, "baseline": rows[0]}))
    return root


def test_the_benchmark_compares_medians_with_what_was_never_learned(monkeypatch):
    """Steps made by the formula itself: 1 and 2 ranks must foretell the other places, a spoiled round must not matter."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import project as benchmark

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))  # a core for each rank

    places = (*benchmark.SOURCES, benchmark.HERE, *benchmark.NODES)
    here = {place.name: replace(HERE, accelerator="cpu", world_size=place.ranks, algorithm="ring") for place in places}
    rows = []
    for place in places:
        real = here[place.name]
        if place.per_node:
            real = replace(real, ranks_per_node=place.per_node, node_bytes_per_s=GB, node_alpha_s=real.link_alpha_s)
        rows += [{"place": place.name, "machine": asdict(here[place.name])}] * 3
        predictor = Predictor(PROFILE, real)
        for candidate in benchmark.CANDIDATES:
            step = 1.2 * predictor.step_time(candidate).total.value
            rows += [
                {"place": place.name, "candidate": candidate.values(), "step_s": step * off} for off in (1.0, 1.0, 3.0)
            ]
    rows.append({"place": "4 ranks", "candidate": benchmark.CANDIDATES[0].values(), "step_s": None})  # it failed once
    foreseen = replace(FORESEEN, machine=here["2 ranks"])
    found = benchmark.figures(json.loads(json.dumps(rows)), foreseen, GB)
    for place in (benchmark.HERE, *benchmark.NODES):
        assert found[place.name]["kendall_tau"] > 0.9 and found[place.name]["error_median"] < 0.2
        assert len(found[place.name]["configurations"]) == len(benchmark.CANDIDATES)
    assert found["rounds"] == 3 and set(found["sources"]) == {"1 rank", "2 ranks"}


LINKS = ["--devices", "64", "--per-node", "8", "--intra-bandwidth", "300GB/s", "--inter-bandwidth", "50GB/s"]


@pytest.mark.process
def test_the_command_projects_a_study_and_its_front(studied, executor, monkeypatch):
    monkeypatch.setattr(forecasts, "executor_for", lambda *_: nullcontext(executor))
    done = called("project", *LINKS, cwd=studied)
    assert done.returncode == 0, done.stderr
    assert (
        "small, trial 1: micro-batch 8 x 1, fp32, ZeRO 1" in done.stdout
        and "64 devices, 8 a node; weak scaling" in done.stdout
    )
    assert re.search(r"^ +64 +512 .* (?:no|yes|maybe) ", done.stdout, flags=re.MULTILINE)
    assert (
        "The front's other configurations on 64 devices" in done.stdout
        and "corrected by 3 measurements on 2 rank(s)" in done.stdout
    )
    found = json.loads(called("project", "small", *LINKS, "--json", "--trial", "2", cwd=studied).stdout)
    assert [row["world_size"] for row in found["rows"]] == [2, 4, 8, 16, 32, 64] and found["trial"] == 2
    assert {other["trial"] for other in found["others"]} == {0, 1}
    assert all(
        1 < other["speedup"] == pytest.approx(32 * other["efficiency"]) for other in found["others"]
    )  # both were 1


def test_what_cannot_be_projected_is_said_in_one_sentence(studied, tmp_path):
    assert "run a study first" in one_sentence(called("project", *LINKS, cwd=tmp_path))
    assert "no study with a recommendation" in one_sentence(called("project", "other", *LINKS, cwd=studied))
    # It projected the study of that name which lies here.
    elsewhere = called("project", "elsewhere/studies/small", *LINKS, cwd=studied)
    assert "no study with a recommendation" in one_sentence(elsewhere)
    assert "--inter-bandwidth" in one_sentence(called("project", "studies/small", "--devices", "64", cwd=studied))
    assert "trial 9 is not on the front; there are 0, 1, 2" in one_sentence(
        called("project", *LINKS, "--trial", "9", cwd=studied)
    )


@pytest.mark.system
def test_a_study_of_a_launch_command_is_projected_with_its_script(studied, tmp_path, monkeypatch):
    """It said that `target` is missing in the study.yaml that autotune wrote."""
    folder = tmp_path / "studies" / "small"
    shutil.copytree(studied / "studies" / "small", folder)
    (folder / "train.py").write_text("import deepspeed\ndeepspeed.initialize()\n")
    (folder / "study.yaml").write_text("command: torchrun --standalone --nproc_per_node 2 train.py\n")

    def foreseen(spec, _view):
        raise UserError(f"{spec.target.name} on {spec.ranks}")

    monkeypatch.setattr("autotune.study.setup.forecasts.foresee_workload", foreseen)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"train.py on 2"):
        project.project("small")
