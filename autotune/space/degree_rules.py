"""Why degrees are refused: ranks that share a copy of the model, or a sequence."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.space.degree import DEGREES, SEQUENCE_DEGREE, TENSOR_DEGREE, degrees_of
from autotune.space.rule import Rule, Setting, older

ZERO = "zero_optimization."
HPZ = f"{ZERO}zero_hpz_partition_size"
QUANTISED = tuple(f"{ZERO}zero_quantized_{name}" for name in ("weights", "gradients", "nontrainable_weights"))
EXPERTS = "expert_parallel."


def hpz(config: Mapping[str, Scalar]) -> int:
    """Ranks that share a second copy of the weights; 1 without."""
    value = config.get(HPZ)
    return value if isinstance(value, int) else 1


def _own_degrees(setting: Setting) -> tuple[int, ...]:
    own = degrees_of(dict(setting.base).get)
    return tuple(own.get(path, 1) for path in DEGREES)


def why_unlike(candidate: Candidate, setting: Setting) -> str:
    """What the split model computed unlike the whole one, where that was found; else empty."""
    degrees = {TENSOR_DEGREE: candidate.tensor_degree, SEQUENCE_DEGREE: candidate.sequence_degree}
    found = (f"{path}={degree}: {why}" for path, degree, why in setting.unlike if degrees[path] == degree)
    return next(found, "")


# Degrees: how many ranks share a copy of the model (tensor) or a sequence.
DEGREE_RULES: tuple[Rule, ...] = (
    Rule(lambda c, k, s: bool(s.no_degrees) and (c.tensor_degree, c.sequence_degree) != _own_degrees(s), "{no_degrees}", DEGREES),
    Rule(lambda c, k, s: s.world_size % c.ranks_per_replica != 0,
         "degrees of {replica} ranks do not divide the {world_size} ranks of a trial", DEGREES),
    Rule(lambda c, k, s: c.tensor_degree > 1 and c.sequence_degree > 1,
         "tensor and sequence groups at once: DeepSpeed builds the one or the other; leave one of them out", DEGREES),
    Rule(lambda c, k, s: c.tensor_degree > 1 and s.ranks_per_node % c.tensor_degree != 0,
         "a tensor group of {tensor} ranks does not fit into machines of {ranks_per_node}: every layer would wait for the"
         " network between them", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and older(s, 0, 16, 4),
         "DeepSpeed {deepspeed_version} trains no split layers: AutoTP for training came with 0.16.4",
         (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and s.heads % c.tensor_degree != 0,
         "the model's {heads} attention heads do not divide by {tensor} ranks", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and s.kv_heads % c.tensor_degree != 0,
         "the model's {kv_heads} heads of keys and values do not divide by {tensor} ranks", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.tensor_degree > 1 and bool(s.no_tensor), "{no_tensor}", (TENSOR_DEGREE,)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and s.heads % c.sequence_degree != 0,
         "the model's {heads} attention heads do not divide by {sequence} ranks", (SEQUENCE_DEGREE,)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and s.kv_heads % c.sequence_degree != 0
         and c.sequence_degree % (s.kv_heads or 1) != 0,
         "the model's {kv_heads} heads of keys and values and {sequence} ranks do not divide each other",
         (SEQUENCE_DEGREE,)),
    # Its optimizer divides by all ranks that share a gradient, those of a sequence group too.
    Rule(lambda c, k, s: c.sequence_degree > 1 and c.zero_stage == 3,
         "ZeRO stage 3 makes the gradient of a sequence group 1/{sequence} of what it is; use stage 0, 1 or 2",
         (SEQUENCE_DEGREE, "zero_stage")),
    Rule(lambda c, k, s: c.sequence_degree > 1 and bool(s.no_sequence), "{no_sequence}", (SEQUENCE_DEGREE,)),
    Rule(lambda c, k, s: c.ranks_per_replica > 1 and (hpz(k) > 1 or any(k.get(path) for path in QUANTISED)),
         "ZeRO++ beside tensor or sequence groups: its groups know nothing of theirs", (*DEGREES, HPZ, *QUANTISED)),
    Rule(lambda c, k, s: c.sequence_degree > 1 and bool(k.get("data.packing")),
         "data.packing: samples that share a row cannot be told apart where sequences are split over ranks",
         (SEQUENCE_DEGREE, "data.packing")),
    Rule(lambda c, k, s: any(name.startswith(EXPERTS) for name in k),
         "expert_parallel: expert groups are not tuned: DeepSpeed's AutoEP (0.19) fails on transformers 5, and the layers of"
         " deepspeed.moe state their own ep_size; tune the rest", (f"{EXPERTS}*",)),
    Rule(lambda c, k, s: bool(why_unlike(c, s)), "{unlike}", DEGREES),
)  # fmt: skip
