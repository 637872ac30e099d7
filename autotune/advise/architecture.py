"""Shapes of transformers: the table of known models, a `config.json`, or a size; and their parameters by part."""

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from autotune.advise.names import closest, spelled
from autotune.errors import UserError
from autotune.system import files

TABLE = Path(__file__).with_name("models.csv")
SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([bBmMtT])")
# Words of a name that do not change the shape: who trained it further, when, and in which format.
IDLE = re.compile(
    r"meta|instruct|chat|base|hf|it|pt|preview|sft|dpo|bnb|4bit|awq|gptq|fp8|bf16|thinking|v\d+(\.\d+)?|[12]\d{3}"
)
# Parameters that somebody's name states: `40b` in `falcon-40b`.
STATED_SIZE = re.compile(r"(?<![0-9.a-z])([0-9]+(?:\.[0-9]+)?[bm])(?![a-z0-9])", re.IGNORECASE)
# Families whose feed-forward network has two matrices and not three (a gate); others tell it by their activation.
PLAIN = frozenset(
    "gpt2 gpt_neo gpt_neox gptj gpt_bigcode opt bloom falcon mpt phi starcoder2 bert roberta distilbert codegen".split()
)
LEARNED_POSITIONS = frozenset(
    "gpt2 gpt_neo opt gpt_bigcode bert roberta xlm-roberta camembert electra distilbert".split()
)
GATED_GELU = ("gemma", "modernbert")
# Families that share the embedding with the output layer unless their file says otherwise.
TIED = (
    "gemma", "gpt2", "gpt_bigcode", "bloom", "opt", "mpt", "cohere", "starcoder2", "granite", "xglm", "bert", "roberta",
    "distilbert", "modernbert", "deberta", "electra", "xlm-roberta", "camembert",
)  # fmt: skip
ENCODER_DECODERS = re.compile(r"(flan|m|mt|by|code)?t5|m?bart|whisper|nllb|pegasus|m2m100|marian|led", re.IGNORECASE)
# Keys of blocks that are no attention with a feed-forward network, or that share their weights.
UNLIKE = {
    "mamba_d_state": "blocks without attention", "ssm_cfg": "blocks without attention", "state_size": "blocks without attention",
    "attention_hidden_size": "blocks without attention", "num_hidden_groups": "blocks that share their weights",
}  # fmt: skip
LARGEST = 5e13
# By fact: the names that configuration files give it.
KEYS = {
    "layers": "num_hidden_layers n_layer n_layers num_layers",
    "hidden": "hidden_size n_embd d_model dim",
    "heads": "num_attention_heads n_head n_heads num_heads attention_heads",
    "vocab": "vocab_size padded_vocab_size",
    "kv_heads": "num_key_value_heads num_kv_heads multi_query_group_num n_head_kv kv_n_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size_mlp intermediate_size ffn_hidden_size n_inner ffn_dim hidden_dim",
    "context": "max_position_embeddings n_positions seq_length max_seq_len",
    "experts": "num_local_experts num_experts n_routed_experts moe_num_experts",
    "active_experts": "num_experts_per_tok num_selected_experts moe_top_k moe_k",
    "expert_intermediate": "moe_intermediate_size",
    "dense_layers": "first_k_dense_replace moe_layer_start_index",
}
NO_ENCODER_DECODERS = (
    "an encoder with a decoder; advise knows decoder-only models and encoders alone; give a model.py, which is profiled"
)
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the size and the work of a decoder-only transformer follow from.

    Attributes:
        hidden: Width of the residual stream.
        kv_heads: Heads of keys and values.
        intermediate: Width of the feed-forward network (of a dense block).
        vocab: Rows of the embedding.
        tied: The output layer shares the embedding.
        gated: The feed-forward network has a gate, and so three matrices.
        positions: Learned positions; 0 for rotary ones and the like.
        context: Longest sequence it was made for; 0 if that is not known.
        experts: Experts of a block; 0 in a dense model.
        active_experts: Experts that a token passes.
        expert_intermediate: Width of an expert.
        shared_intermediate: Width of the experts that every token passes.
        dense_layers: Blocks without experts in a model that has them.
        mla: Ranks and widths of multi-head latent attention: query rank (0 without), key-value rank, head width without
            and with rotation, value width; empty for plain attention.
        parameters: Published number of parameters; 0 if none is known.
        note: How it was found, where that matters.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    gated: bool = True
    positions: int = 0
    context: int = 0
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    mla: tuple[int, ...] = ()
    parameters: int = 0
    note: str = ""

    @property
    def source(self) -> str:
        """Where the facts of a model of the table stand."""
        return f"https://huggingface.co/{self.name}/blob/main/config.json"

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * (self.mla[2] + self.mla[3] if self.mla else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.heads * self.mla[4] if self.mla else self.kv_heads * self.head_dim

    def attention_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block's attention."""
        h, q, kv = self.hidden, self.query_width, self.kv_width
        if not self.mla:
            return [(h, q), (h, kv), (h, kv), (q, h)]
        rank, latent, plain, rotated, value = self.mla
        query = [(h, rank), (rank, q)] if rank else [(h, q)]
        return [*query, (h, latent + rotated), (latent, self.heads * (plain + value)), (self.heads * value, h)]

    def mlp_matrices(self, width: int) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of a feed-forward network."""
        return [(self.hidden, width)] * (2 if self.gated else 1) + [(width, self.hidden)]

    def parameters_of(self, *, active: bool = False) -> dict[str, int]:
        """Elements by part: `blocks` (matrices), `norms`, `embedding`, `head`; with `active` those a token passes."""
        h, dense = self.hidden, self.layers if not self.experts else self.dense_layers
        attention = sum(a * b for a, b in self.attention_matrices())
        experts = self.active_experts if active else self.experts
        per_width = sum(a * b for a, b in self.mlp_matrices(1))
        sparse = per_width * (experts * self.expert_intermediate + self.shared_intermediate) + h * self.experts
        blocks = self.layers * attention + dense * per_width * self.intermediate + (self.layers - dense) * sparse
        return {
            "blocks": blocks,
            "norms": (2 * self.layers + 1) * h,
            "embedding": self.vocab * h + self.positions * h,
            "head": 0 if self.tied else self.vocab * h,
        }

    @property
    def n_parameters(self) -> int:
        """Parameters, tied ones once."""
        return sum(self.parameters_of().values())


@functools.cache
def known() -> tuple[Architecture, ...]:
    """The models of the table."""
    whole = {field.name for field in fields(Architecture)} - {"name", "tied", "gated", "mla", "note"}
    found = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            mla = tuple(int(part) for part in row["mla"].split("/")) if row["mla"] else ()
            numbers: dict[str, Any] = {name: int(row[name] or 0) for name in whole}
            found.append(
                Architecture(name=row["name"], tied=row["tied"] == "1", gated=row["gated"] == "1", mla=mla, **numbers)
            )
    return tuple(found)


@functools.cache
def _by_name() -> dict[str, Architecture]:
    """Models by the essence of each of their names."""
    found: dict[str, Architecture] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        others = [row["also"].split(";") for row in csv.DictReader(file)]
    for model, also in zip(known(), others, strict=True):
        for name in filter(None, [model.name, *also]):
            found.setdefault(essence(name), model)
    return found


def essence(name: str) -> str:
    """A model's name without owner, punctuation and words that do not change its shape: `qwen38b` for Qwen/Qwen3-8B."""
    words = re.split(r"[\s_/-]+", name.strip().rsplit("/", 1)[-1].lower())
    return spelled("".join(word for word in words if not IDLE.fullmatch(word)))


def find(name: str) -> Architecture:
    """The model that somebody names: a file, a name of the table as people spell it, or a size such as `7B`."""
    path = Path(name)
    if path.suffix == ".json" or (path.is_dir() and (path / "config.json").is_file()):
        return read(path if path.suffix == ".json" else path / "config.json")
    if match := SIZE.fullmatch(name.strip()):
        return typical(float(match[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()])
    wanted = essence(name)
    begin_so = {model.name: model for key, model in _by_name().items() if wanted and key.startswith(wanted)}
    model = _by_name().get(wanted) or (next(iter(begin_so.values())) if len(begin_so) == 1 else None)
    if model is None:
        raise UserError(_unknown(name, wanted, list(begin_so)))
    return model


def _unknown(name: str, wanted: str, begin_so: list[str]) -> str:
    """What is said of a name that is in no table, or that several models have."""
    if not wanted:
        return "a model is needed: a name, a config.json, a size such as 7B, or a model.py"
    if ENCODER_DECODERS.fullmatch(re.split(r"[\s_-]", name.rsplit("/", 1)[-1])[0]):
        return f"{name}: {NO_ENCODER_DECODERS}"
    if begin_so:
        more = f" and {len(begin_so) - 6} more" if len(begin_so) > 6 else ""
        return f"{name}: several models are called so; which of {', '.join(begin_so[:6])}{more}?"
    near = closest(wanted, {key: model.name for key, model in _by_name().items()})
    size = STATED_SIZE.search(name)
    sized = f"its size alone ({size[1].upper()})" if size else "a size such as 7B"
    return (
        f"{name}: no model of this name in the table; the nearest are {', '.join(near)}; or give its config.json,"
        f" {sized}, or a model.py"
    )


def typical(parameters: float) -> Architecture:
    """A shape as current models of a size have it."""
    if not 1e7 <= parameters <= 5e12:
        raise UserError(f"{parameters:.4g} parameters: a size between 10M and 5T is needed, as in 7B")
    vocab, best, least = 128_256 if parameters > 5e8 else 50_304, None, math.inf
    for hidden in range(256, 32_769, 256):
        heads = max(1, hidden // 128)
        tied = parameters < 4e9
        a_layer = hidden * hidden * (2 + 2 / min(4, heads) + 10.5)
        layers = max(2, round((parameters - vocab * hidden * (1 if tied else 2)) / a_layer))
        shape = Architecture(
            name=f"{parameters / 1e9:g}B", layers=layers, hidden=hidden, heads=heads, kv_heads=max(1, heads // 4),
            head_dim=128, intermediate=int(3.5 * hidden), vocab=vocab, tied=tied,
        )  # fmt: skip
        size = abs(math.log(shape.n_parameters / parameters))
        off = 20 * size + abs(math.log(hidden / (128 * layers)))
        if off < least:
            best, least = shape, off
    assert best is not None
    said = (
        f"a typical shape of {best.name} is assumed: {best.layers} blocks of width {best.hidden}, vocabulary {vocab:,}"
    )
    return replace(best, note=said)


def read(path: Path) -> Architecture:
    """The model of a Hugging Face `config.json`."""
    try:
        config = files.json_of(files.read_text(path, "MODEL"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: a config.json is a JSON object, not {type(config).__name__}")
    if config.get("is_encoder_decoder"):
        raise UserError(f"{path}: {NO_ENCODER_DECODERS}")
    inner = config.get("text_config")
    note = "the language model alone is counted, not its encoders of images or sound" if inner else ""
    parts = [config.get(name) for name in ("attn_config", "ffn_config")]
    flat = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    return _of_config({**flat, **config, **(inner if isinstance(inner, dict) else {})}, path, note)


def _facts(config: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The whole numbers of a configuration by our names for them."""
    found: dict[str, int] = {}
    for name, keys in KEYS.items():
        value = next((config[key] for key in keys.split() if config.get(key) is not None), 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise UserError(f"{path}: {name}: {value!r} is no whole number")
        if not value and name in ("layers", "hidden", "heads", "vocab"):
            key = keys.split()[0]
            raise UserError(
                f"{path}: its text_config leaves out {key}, a default of its class; name the language model itself"
                if config.get("text_config")
                else f"{path}: no {key} in it, so it is no config.json of a transformer over tokens; a model.py can be any model"
            )
        found[name] = int(value)
    return found


def _is_gated(config: Mapping[str, Any], family: str) -> bool:
    """Whether the feed-forward network has a gate."""
    if family in PLAIN or family.startswith(GATED_GELU):
        return family not in PLAIN
    names = ("hidden_act", "hidden_activation", "activation_function", "activation")
    activation = next((str(config[name]) for name in names if config.get(name)), "silu")
    return "glu" in activation or "gated" in activation or "elu" not in activation  # silu and swish


def _of_config(config: Mapping[str, Any], path: Path, note: str) -> Architecture:
    for key, why in UNLIKE.items():
        if config.get(key):
            raise UserError(f"{path}: {why}, which advise does not know; give a model.py, which is profiled")
    found, family = _facts(config, path), str(config.get("model_type", ""))
    found["head_dim"] = found["head_dim"] or max(1, found["hidden"] // found["heads"])
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    found["intermediate"] = found["intermediate"] or int(float(config.get("expansion_ratio") or 4) * found["hidden"])
    if found["experts"]:
        found |= _mixture(config, found)
    mla = tuple(int(config.get(key) or 0) for key in MLA_KEYS) if config.get("kv_lora_rank") else ()
    tied = config.get("tie_word_embeddings", family == "gpt_neo" or family.startswith(TIED))
    learned = family in LEARNED_POSITIONS
    shape = Architecture(
        name=str(config.get("_name_or_path") or path.parent.name or path.name), tied=bool(tied),
        gated=_is_gated(config, family), positions=found["context"] if learned else 0, mla=mla, note=note, **found,
    )  # fmt: skip
    if shape.n_parameters > LARGEST:
        raise UserError(f"{path}: {shape.n_parameters:.3g} parameters follow from it, which no transformer has")
    return shape


def _mixture(config: Mapping[str, Any], found: Mapping[str, int]) -> dict[str, int]:
    """What a mixture of experts has beside a dense model."""
    step = int(config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1)
    # Where the width of dense blocks has another name, the plain one is that of an expert.
    plain = config.get("intermediate_size") if config.get("intermediate_size_mlp") else None
    width = found["expert_intermediate"] or int(plain or found["intermediate"])
    n_shared = config.get("n_shared_experts") or config.get("moe_num_shared_experts") or (1 if plain else 0)
    return {
        "expert_intermediate": width,
        "active_experts": found["active_experts"] or 2,
        "shared_intermediate": int(config.get("shared_expert_intermediate_size") or int(n_shared) * width),
        "dense_layers": found["dense_layers"] or found["layers"] - found["layers"] // step,
    }
