"""Batches in classes of their own, as they move to a device."""

import collections
import collections.abc
import types
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from autotune.worker.containers import tensors_in, to_device

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Graphs:
    x: torch.Tensor
    edges: torch.Tensor
    names: tuple = ("a",)


class Store(collections.UserDict):
    """Has attributes besides what it maps, as graphs of PyG."""


def test_a_batch_in_a_class_of_its_own_moves_as_one_in_a_dict_does():
    """On a GPU it stayed behind, and bf16 crashed for want of a cast."""
    batch = Graphs(torch.zeros(3, 2), torch.zeros(2, 5, dtype=torch.long))
    moved = to_device({"graphs": [batch, None, "text"]}, META, torch.bfloat16)["graphs"][0]
    assert isinstance(moved, Graphs) and moved.names == ("a",) and moved.x.device == moved.edges.device == META
    assert (moved.x.dtype, moved.edges.dtype, batch.x.dtype) == (torch.bfloat16, torch.long, torch.float32)
    assert batch.x.device == CPU


def test_a_class_that_keeps_its_tensors_in_a_mapping_or_in_several_keeps_them():
    """Those of each kind of node, in a graph of several kinds, became dicts, of which the model found no attribute."""
    held = Store(x=torch.zeros(3))
    moved = to_device(SimpleNamespace(store=held, kinds={"user": held}, whole=object), META, None)
    for store in (moved.store, moved.kinds["user"]):
        assert type(store) is Store and store["x"].device == META and held["x"].device == CPU
    assert moved.whole is object


class Attributes(dict):
    """A dict whose entries are attributes, too, and may not be added to, as outputs of transformers' models."""

    __getattr__ = dict.__getitem__
    update = None


@pytest.mark.parametrize("kind", [Store, Attributes, dict, types.MappingProxyType])
def test_a_batch_in_a_class_that_maps_keeps_its_class(kind):
    """It became a dict, so that a loss that reads `batch.input_ids`, as of transformers' tokenizers, crashed each trial."""
    batch = kind({"input_ids": torch.zeros(2, 3)})
    moved = to_device(batch, META, torch.bfloat16)
    assert type(moved) is (dict if kind is types.MappingProxyType else kind)
    assert moved["input_ids"].device == META and batch["input_ids"].device == CPU
    assert kind is not Attributes or moved.input_ids.device == META


class Wrapped(collections.abc.MutableMapping):
    """Keeps its values in a dict of its own, and may take none that is on another device."""

    def __init__(self, values, device=None):
        self.kept, self.device = values, device

    def __getitem__(self, key):
        return self.kept[key]

    def __setitem__(self, key, value):
        if self.device == "frozen":
            raise TypeError("no new values")
        self.kept[key] = value if self.device is None else value.to(self.device)

    def __delitem__(self, key):
        del self.kept[key]

    def __iter__(self):
        return iter(self.kept)

    def __len__(self):
        return len(self.kept)


class Itself(dict):
    """The well-known dict whose entries are its attributes."""

    def __init__(self, *given):
        super().__init__(*given)
        self.__dict__ = self


def test_the_batch_that_a_class_wraps_stays_as_it_was():
    """Its tensors were replaced in the user's own batch, so that a data set that keeps its batches filled the device."""
    batch = Wrapped({"x": torch.zeros(2, 3), "more": {"y": torch.zeros(2)}})
    moved = to_device(batch, META, None)
    assert type(moved) is Wrapped and moved["x"].device == moved["more"]["y"].device == META
    assert batch["x"].device == batch["more"]["y"].device == CPU


@pytest.mark.parametrize("device", ["cpu", "frozen"])
def test_a_class_that_does_not_take_the_tensors_as_they_are_becomes_a_dict(device):
    moved = to_device(Wrapped({"x": torch.zeros(2, 3)}, device), META, None)
    assert type(moved) is dict and moved["x"].device == META


def test_attributes_that_are_entries_move_with_them():
    batch = Itself({"x": torch.zeros(2, 3)})
    moved = to_device(batch, META, None)
    assert type(moved) is Itself and moved.x.device == moved["x"].device == META and batch.x.device == CPU


def test_packed_sequences_keep_their_sizes_on_the_host():
    """torch refuses others; so each batch of them failed on a GPU."""
    for sorted_before in (True, False):
        packed = pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)], enforce_sorted=sorted_before)
        moved = to_device((packed,), META, torch.bfloat16)[0]
        assert (moved.data.device, moved.data.dtype, moved.batch_sizes.device) == (META, torch.bfloat16, CPU)
        assert (moved.sorted_indices is None) == sorted_before


def test_what_holds_no_tensors_stays_the_same_object():
    batch = SimpleNamespace(name="text", n=3)
    assert to_device([batch], META, torch.bfloat16)[0] is batch


@dataclass(frozen=True, slots=True)
class InSlots:
    x: torch.Tensor
    name: str = "a"


def test_a_batch_whose_fields_are_slots_is_read_and_moves():
    """Its samples were not counted, and bf16 crashed for want of a cast."""
    batch = InSlots(torch.zeros(3, 2))
    assert [tensor.shape for tensor in tensors_in([batch], objects=True)] == [(3, 2)]
    moved = to_device(batch, META, torch.bfloat16)
    assert (moved.x.device, moved.x.dtype, moved.name) == (META, torch.bfloat16, "a")


def test_objects_that_are_not_asked_for_stay_as_they_are():
    cache, batch = SimpleNamespace(x=torch.zeros(3)), InSlots(torch.zeros(3))
    moved = to_device([cache, batch], META, None, objects=lambda value: isinstance(value, InSlots))
    assert moved[0] is cache and moved[1].x.device == META
    assert len(list(tensors_in([cache, batch], objects=lambda value: value is batch))) == 1
