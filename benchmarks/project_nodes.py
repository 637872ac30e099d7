"""Puts the ranks of a trial into the network namespaces ("nodes") of `project.py`; the trial server imports it first.

A rank joins its namespace between meeting the others at the store, whose connections stay where they were made, and
opening those of the collectives.
"""

import ctypes
import os

import torch.distributed as dist

CLONE_NEWNET = 0x40000000
PER_NODE = int(os.environ.get("AUTOTUNE_RANKS_PER_NODE", "0"))

_join = dist.init_process_group


def _joined(*args, **kwargs):
    node = int(os.environ["RANK"]) // PER_NODE
    namespace = os.open(f"/run/netns/autotune-node{node}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace of node {node}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"atnode{node}"
    return _join(*args, **kwargs)


if PER_NODE:
    dist.init_process_group = _joined
