"""What is known of the machine without asking a rank."""

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
