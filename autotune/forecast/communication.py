"""Time of collectives in the alpha-beta model: ring, tree or hierarchical, within a node and between nodes."""

import math
from typing import Literal

import numpy as np

from autotune.trial.profile import Floats, Machine

Algorithm = Literal["auto", "ring", "tree", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "ring", "tree", "hierarchical")
# The choice of `auto`. NCCL has no hierarchical reduce-scatter and all-gather, so `hierarchical` must be requested.
AUTOMATIC = ("ring", "tree")

# Default latency between nodes: one hop of a collective over Ethernet or InfiniBand.
NODE_LATENCY_S = 2e-5


def collective_s(machine: Machine, n_bytes: Floats, n_calls: Floats, *, halves: Floats) -> tuple[Floats, Floats]:
    """Returns the seconds of collectives over all ranks: on the wire, and for the latency of their messages.

    An all-reduce is two halves, a reduce-scatter and an all-gather. N ranks in M nodes of L; alpha and beta of the link
    within a node, a and B of a node's link to the others, which its ranks share. A half of n bytes takes

    * ring: (N - 1) / N n / min(beta, B); N - 1 hops, M of them between nodes (none with one node);
    * tree, all-reduces only: n / min(beta, B); L - 1 hops within and log2 M between nodes;
    * hierarchical: (L - 1) / L n / beta + (M - 1) / M n / B; L - 1 hops within and M - 1 between nodes.

    (Thakur et al., IJHPCA 2005; the hops of ring and tree as NCCL's own tuning model counts them.)

    Args:
        n_bytes: Bytes of the whole tensor, of all calls together.
        halves: Halves of each call.
    """
    N = float(machine.world_size)
    L = float(min(machine.ranks_per_node or machine.world_size, machine.world_size))
    M = N / L
    beta, B = machine.link_bytes_per_s, machine.node_bytes_per_s if M > 1 else machine.link_bytes_per_s
    alpha, a = machine.link_alpha_s, machine.node_alpha_s
    # With one rank a node, no link within a node is used.
    slowest, crossings = min(beta, B) if L > 1 or M == 1 else B, min(M, N - 1) if M > 1 else 0.0
    costs = {
        "ring": ((N - 1) / N / slowest, (N - 1 - crossings) * alpha + crossings * a),
        "tree": (1.0 / slowest if N > 1 else 0.0, (L - 1) * alpha + np.ceil(np.log2(M)) * a),
        "hierarchical": ((L - 1) / L / beta + (M - 1) / M / B, (L - 1) * alpha + (M - 1) * a),
    }
    wanted = AUTOMATIC if machine.algorithm == "auto" else (machine.algorithm,)
    found = {}
    for name in wanted:
        per_byte, per_call = costs[name]
        ring_byte, ring_call = costs["ring"]
        whole = (halves == 2) | (name != "tree")  # a half alone has no tree
        found[name] = (
            halves * np.where(whole, per_byte, ring_byte) * n_bytes,
            halves * np.where(whole, per_call, ring_call) * n_calls,
        )
    totals = np.stack([wire + latency for wire, latency in found.values()])
    best = totals.argmin(axis=0)
    wire, latency = (np.choose(best, [np.broadcast_to(pair[i], best.shape) for pair in found.values()]) for i in (0, 1))
    return wire, latency


def waiting_s(machine: Machine) -> float:
    """Returns the time that a message waits for a rank without a core, where ranks are more than cores; else 0.

    A rank that computes keeps its core for a slice: 0.75 ms (1 + log2 cores) in Linux, up to 8 cores.
    """
    ranks = min(machine.ranks_per_node or machine.world_size, machine.world_size)
    if not 0 < machine.n_cores < ranks:
        return 0.0
    slice_s = 0.75e-3 * (1 + math.floor(math.log2(min(machine.n_cores, 8))))
    return slice_s * (1 - machine.n_cores / ranks)


def in_groups_s(machine: Machine, n_bytes: Floats, group: Floats) -> Floats:
    """Returns the seconds of all-gathers in groups of neighbouring ranks, which may span nodes."""
    group = np.maximum(group, 1.0)
    slowest = min(machine.link_bytes_per_s, machine.node_bytes_per_s or machine.link_bytes_per_s)
    spans = group > (machine.ranks_per_node or machine.world_size)
    rate = np.where(spans, slowest, machine.link_bytes_per_s)
    return np.asarray((group - 1) / group * n_bytes / rate, dtype=float)
