"""What people write for devices."""

import pytest

from autotune.advise.devices import GIB, Devices, device_card, read_gpus
from autotune.errors import UserError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("8xA100-40", (8, 8, "A100-40GB")),
        ("a100 80gb", (1, 1, "A100-80GB")),
        ("H100", (1, 1, "H100-80GB")),
        ("4090", (1, 1, "RTX-4090")),
        ("RTX4090", (1, 1, "RTX-4090")),
        ("NVIDIA GeForce RTX 4090", (1, 1, "RTX-4090")),
        ("2x8xH100", (16, 8, "H100-80GB")),
        ("16xH100", (16, 8, "H100-80GB")),
        ("4x4090", (4, 4, "RTX-4090")),
        ("8 x A100 40GB", (8, 8, "A100-40GB")),
        ("A100 x 8", (8, 8, "A100-80GB")),
        ("H100:8", (8, 8, "H100-80GB")),
        ("NVIDIA H100 80GB HBM3", (1, 1, "H100-80GB")),
        ("Tesla T4", (1, 1, "T4")),
        ("2 x 8 x A100 80GB", (16, 8, "A100-80GB")),
        ("a100x8", (8, 8, "A100-80GB")),
        ("RTX4090x2", (2, 2, "RTX-4090")),
        ("8 h100s", (8, 8, "H100-80GB")),
        ("8x L40S", (8, 8, "L40S")),
        ("mi300x", (1, 1, "MI300X")),
        ("2x DGX H100", (16, 8, "H100-80GB")),
        ("8×A100", (8, 8, "A100-80GB")),
        ("GH200 480GB", (1, 1, "GH200-96GB")),
        ("B200-192GB", (1, 1, "B200")),
    ],
)
def test_devices_are_read_as_people_write_them(written, meant):
    count, per_node, name = read_gpus(written)
    assert (count, per_node, device_card(name, {}).name) == meant


@pytest.mark.parametrize(
    ("written", "nodes", "said"),
    [("", None, "devices are needed"), ("-1xH100", None, "devices are needed"), ("8xH100", 0, "--nodes 0"),
     ("0xH100", None, "0 devices"), ("9xH100", None, "whole number"),
     ("8xA100,8xH100", None, "one kind of device"), ("8xA100 + 4xH100", None, "one kind of device"),
     ("2x8xH100", 2, "twice"), ("99999x1xH100", None, "99999 devices")],
)  # fmt: skip
def test_what_are_no_devices_is_refused(written, nodes, said):
    with pytest.raises(UserError, match=said):
        read_gpus(written, nodes)


def test_an_unknown_card_gets_the_nearest_ones():
    with pytest.raises(UserError, match=r"unknown card 'H1000'.*H100-80.*--device-memory"):
        device_card("H1000", {})


@pytest.mark.parametrize("card", ["A100-64", "H100 94GB", "4090-48GB", "8/A100", "A100-8"])
def test_a_size_or_number_that_would_be_passed_over_is_refused_unless_the_memory_is_stated(card):
    with pytest.raises(
        UserError, match=r"is not the memory of the .* and not read as a number of devices.*--device-memory"
    ):
        device_card(card, {})
    assert device_card(card, {"memory_bytes": 64 * GIB}).usable_bytes == 64 * GIB


@pytest.mark.parametrize(("card", "has"), [("H100", True), ("V100", False), ("MI300X", False)])
def test_the_rate_of_tf32_is_that_of_nvidias_cards_from_ampere_on(card, has):
    assert ("tf32" in Devices(card=device_card(card, {}), count=1, per_node=1).machine().flops) is has


def test_autocast_has_the_rate_of_the_type_that_it_names():
    a100, v100 = (Devices(card=device_card(card, {}), count=1, per_node=1).machine().flops for card in ("A100", "V100"))
    assert a100["torch_autocast"] == a100["torch_autocast_fp16"] == a100["fp16"] > 5 * a100["fp32"]
    assert v100["torch_autocast_fp16"] == v100["fp16"] and "torch_autocast" not in v100


def test_more_devices_than_a_lone_node_has_make_nodes_of_eight():
    lone = Devices(card=device_card("4090", {}), count=1, per_node=1)
    assert (lone.of(4).nodes, lone.of(16).nodes, lone.of(16).per_node) == (1, 2, 8)
    assert Devices(card=lone.card, count=16, per_node=16).of(32).per_node == 16  # it became nodes of eight
