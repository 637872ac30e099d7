"""The table of cards: real drivers' names, users' names, and names that must not be taken for another card."""

import pytest

from autotune.system.cards import cards, find_card

# Names as NVIDIA's and AMD's drivers write them.
DRIVER_NAMES = {
    "Tesla T4": "T4", "Tesla V100-SXM2-16GB": "V100-SXM-16GB", "Tesla V100-SXM2-32GB": "V100-SXM-32GB",
    "Tesla V100-PCIE-16GB": "V100-PCIe-16GB", "NVIDIA A10": "A10", "NVIDIA A10G": "A10G",
    "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA L40": "L40",
    "NVIDIA GeForce RTX 3090": "RTX-3090", "NVIDIA GeForce RTX 3090 Ti": "RTX-3090-Ti", "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA GeForce RTX 5090": "RTX-5090", "NVIDIA H100 80GB HBM3": "H100-80GB", "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL", "NVIDIA H200": "H200", "NVIDIA H200 NVL": "H200-NVL", "NVIDIA B200": "B200",
    "NVIDIA GH200 480GB": "GH200-96GB", "AMD Instinct MI300X": "MI300X", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
}  # fmt: skip


@pytest.mark.parametrize(("name", "card"), DRIVER_NAMES.items())
def test_a_drivers_name_means_one_card(name, card):
    found = find_card(name)
    assert found is not None and found.name == card


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
     "NVIDIA A1000", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4080 SUPER", "GRID A100-10C", "NVIDIA A10-24Q",
     "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA GeForce RTX 3080 with Max-Q Design", "Tesla V100S-PCIE-32GB",
     "AMD EPYC 7763", "NVIDIA GeForce GTX 1080", ""],
)  # fmt: skip
def test_a_part_of_a_card_and_an_unknown_one_have_no_peak(name):
    assert find_card(name) is None


def test_a_users_name_means_one_card():
    assert [find_card(each).name for each in ("h100-80g", "A100", "RTX4090", "A100 40GiB", "A100-40")] == [
        "H100-80GB", "A100-80GB", "RTX-4090", "A100-40GB", "A100-40GB",
    ]  # fmt: skip
    assert find_card("H1000") is None


def test_each_card_finds_itself_and_states_all_that_it_must():
    for card in cards():
        assert find_card(card.name) is card and card.source and card.flops["fp32"]
        assert 0.9 * card.memory_bytes < card.usable_bytes <= card.memory_bytes
        native = card.capability.startswith("gfx") or float(card.capability) >= 8.0
        assert ("bf16" in card.flops) == ("tf32" in card.flops) == native, card.name


def test_a_precision_has_the_peak_of_the_type_that_it_multiplies_in():
    a100, v100 = find_card("A100"), find_card("V100")
    assert a100.peak_flops("torch_autocast") == 312e12 and a100.peak_flops("fp32") == 19.5e12
    assert a100.peak_flops("fp32", tf32=True) == 156e12 and v100.peak_flops("fp32", tf32=True) == 15.7e12
    assert v100.peak_flops("bf16") is None and v100.peak_flops("fp16") == 125e12
