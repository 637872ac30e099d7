"""What is known of the machine without asking a rank."""

import math
import os

import pytest

from autotune.errors import UserError
from autotune.study.setup import profile_cache
from autotune.system import machine


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["avx2", "avx512_bf16"], {}, ""),
        (["avx2"], {}, "this processor has no fast bf16"),
        ([], {}, ""),  # the system does not tell
        (["avx512_bf16"], {"ONEDNN_MAX_CPU_ISA": "avx2"}, "ONEDNN_MAX_CPU_ISA=avx2 allows no fast bf16"),
        (["avx512_bf16"], {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "DNNL_MAX_CPU_ISA=AVX512_CORE allows no fast bf16"),
        (["amx_bf16"], {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "DNNL_MAX_CPU_ISA": "AVX2"}, ""),
        (["avx2"], {"ONEDNN_MAX_CPU_ISA": "ALL"}, "this processor has no fast bf16"),
    ],
)
def test_bf16_is_slow_where_the_processor_lacks_it_or_onednn_may_not_use_it(monkeypatch, flags, variables, said):
    monkeypatch.setattr(machine, "processor_flags", lambda: flags)
    for name in machine.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.why_bf16_is_slow() == said


def test_rates_measured_under_other_instructions_are_not_used_again(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = profile_cache.machine_key(2)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert profile_cache.machine_key(2) != before


def test_a_user_without_a_home_folder_is_told_to_name_a_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it returns it where there is none
    monkeypatch.delenv("AUTOTUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(UserError, match="no home folder"):
        machine.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_dir() == tmp_path / "autotune"


@pytest.fixture
def within(monkeypatch, tmp_path):
    """Has control groups be those that a test writes."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "MOUNTED", tmp_path)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),  # a container
        ("0::/a.slice/b.service", {"a.slice/cpu.max": "150000 100000", "a.slice/b.service/cpu.max": "max 100000"}, 1.5),
        ("4:cpu,cpuacct:/pod/1\n0::/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("3:cpuset:/", {}, math.inf),
        (None, {}, math.inf),
    ],
)
def test_a_limit_on_cores_is_that_of_all_control_groups_around(within, tmp_path, groups, files, cores):
    """In a container of 8 of 64 cores, which others leave it anyway, equal trials were told apart by the load on the others."""
    if groups is not None:
        (tmp_path / "groups").write_text(f"{groups}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert machine.cpu_limit() == cores


@pytest.mark.parametrize(
    ("group", "name", "text", "limit"),
    [
        ("0::/", "memory.max", "1073741824", 2**30),
        ("0::/", "memory.max", "max", None),
        ("8:memory:/pod", "memory/memory.limit_in_bytes", "1073741824", 2**30),
        ("8:memory:/pod", "memory/memory.limit_in_bytes", "9223372036854771712", None),  # what version 1 calls none
    ],
)
def test_memory_is_what_a_container_may_take_of_it(within, tmp_path, group, name, text, limit):
    """Trials in a container of 16 of 256 GiB were chosen for 256, and the kernel ended them, or the container with all in it."""
    (tmp_path / "groups").write_text(f"{group}\n")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{text}\n")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_bytes() == (limit or physical)


@pytest.mark.parametrize(
    ("group", "limit", "stat"),
    [
        ("0::/", "memory.max", "anon 90000000\nfile 9000000000\nshmem 10000000\n"),
        ("8:memory:/", "memory/memory.limit_in_bytes", "rss 5\ntotal_cache 9000000000\ntotal_rss 90000000\ntotal_shmem 10000000\n"),
        ("0::/", "memory.max", ""),
    ],
)  # fmt: skip
def test_what_is_left_of_a_container_s_memory_is_without_what_processes_in_it_use(within, tmp_path, group, limit, stat):
    """Ranks could take 0.9 of the limit beside driver and server; at its end Kubernetes kills the container with all in it."""
    (tmp_path / "groups").write_text(f"{group}\n")
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("300000000\n")
    (tmp_path / limit).with_name("memory.stat").write_text(stat)
    assert machine.memory_left() == (200_000_000 if stat else 300_000_000)


@pytest.mark.parametrize(("limit", "cores"), [(math.inf, 64), (4.0, 4), (2.5, 2), (0.5, 1), (96.0, 64)])
def test_cores_are_those_that_a_container_s_limit_lets_it_keep_busy(monkeypatch, limit, cores):
    """A rank in a container of 4 of 64 cores computed on 64 threads, which the kernel held up together for most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "cpu_limit", lambda: limit)
    assert machine.n_cores() == cores


def test_a_cache_is_the_same_folder_wherever_a_rank_works(monkeypatch, tmp_path):
    """Neither `.env` files nor quotation marks have a shell expand `~`, of which a folder of that name came."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path)
    for stated, found in {"~/cache": "me/cache", "cache": "cache"}.items():
        monkeypatch.setenv("AUTOTUNE_CACHE", stated)
        assert machine.cache_dir() == tmp_path / found
