"""Shapes of transformers: the table of known models, a `config.json`, or a size; and their parameters by part."""

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from autotune.advise.names import closest
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
    "block_types": "blocks without attention", "block_configs": "blocks of different shapes",
}  # fmt: skip
# Families of which the parameters that are counted here are those of their class in transformers, within 3 %.
COUNTED = frozenset(
    "afmoe apertus arcee aria_text axk1 bert bert-generation biogpt bloom camembert codegen cohere cohere2 cohere2_moe convbert cwm"
    " data2vec-text deberta deberta-v2 deepseek_v2 deepseek_v3 diffllama distilbert emu3 ernie ernie4_5 ernie4_5_moe eurobert exaone"
    " exaone4 exaone_moe falcon flex_olmo fuyu gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode"
    " gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoeshared helium ibert llama llama4 llama4_text"
    " megatron-bert minimax_m2 mistral mixtral mllama modernbert modernbert-decoder mpnet mpt mra nystromformer olmo olmo2 olmo3"
    " olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roformer seed_oss smollm3"
    " stablelm starcoder2 xglm xlm-roberta xlm-roberta-xl".split()
)
# Families of which models here have their published number, where their class is not in transformers or has no defaults.
PUBLISHED = frozenset("baichuan chatglm dbrx internlm2 nemotron qwen".split())
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
    "dense_layers": "first_k_dense_replace moe_layer_start_index num_dense_layers",
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
    return re.sub(r"[^a-z0-9]+", "", "".join(word for word in words if not IDLE.fullmatch(word)))


def find(name: str) -> Architecture:
    """The model that somebody names: a file, a name of the table as people spell it, or a size such as `7B`."""
    path = Path(name or " ")  # an empty one is this folder
    if path.is_dir() and not (path / "config.json").is_file() and ("/" in name or not _by_name().get(essence(name))):
        raise UserError(f"{name}: a folder without a config.json")
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
    if any(ENCODER_DECODERS.fullmatch(word) for word in re.split(r"[\s_-]", name.rsplit("/", 1)[-1])):
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
    # From a width of 2,048 on, eight divides the heads, as it does in current models: so layers can be split in a node.
    for hidden in (*range(256, 2048, 256), *range(2048, 32_769, 1024)):
        heads = hidden // 128
        shared = max(n for n in range(1, max(2, heads // 4 + 1)) if heads % n == 0)
        tied = parameters < 4e9
        a_layer = hidden * hidden * (2 + 2 / min(4, heads) + 10.5)
        layers = max(2, round((parameters - vocab * hidden * (1 if tied else 2)) / a_layer))
        shape = Architecture(
            name=f"{parameters / 1e9:g}B", layers=layers, hidden=hidden, heads=heads, kv_heads=shared,
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
    is_part = inner or config.get("vision_config") or config.get("audio_config")
    note = "the language model alone is counted, not its encoders of images or sound" if is_part else ""
    parts = [config.get(name) for name in ("attn_config", "ffn_config")]
    flat = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    return _of_config({**flat, **config, **(inner if isinstance(inner, dict) else {})}, path, note)


def _whole(value: Any, name: str, path: Path) -> int:
    """A whole number of a configuration that is not negative; 0 for one that is not there."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and not (is_number and value >= 0 and value == int(value)):
        raise UserError(f"{path}: {name}: {value!r} is no whole number")
    return int(value or 0)


def _first(config: Mapping[str, Any], keys: str) -> Any:
    """The value of the first of some keys that has one; None where none has."""
    return next((config[key] for key in keys.split() if config.get(key) is not None), None)


def _listed(config: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    """A list of a configuration; empty where it is not there."""
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise UserError(f"{path}: {key}: {value!r} is no list")
    return value or []


def _facts(config: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The whole numbers of a configuration by our names for them."""
    found: dict[str, int] = {}
    for name, keys in KEYS.items():
        value = _whole(_first(config, keys), name, path)
        if not value and name in ("layers", "hidden", "heads", "vocab"):
            key = keys.split()[0]
            raise UserError(
                f"{path}: its text_config leaves out {key}, a default of its class; name the language model itself"
                if config.get("text_config")
                else f"{path}: no {key} in it, so it is no config.json of a transformer over tokens; a model.py can be any model"
            )
        found[name] = value
    return found


def _check_blocks(config: Mapping[str, Any], path: Path) -> None:
    """Refuses a model whose blocks are not attention with a feed-forward network, or not alike."""
    kinds = _listed(config, "layer_types", path)
    reasons = [why for key, why in UNLIKE.items() if config.get(key)]
    if any(not str(kind).endswith("attention") or kind == "linear_attention" for kind in kinds):
        reasons.append("blocks without attention or with a linear one")
    if reasons:
        raise UserError(f"{path}: {reasons[0]}, which advise does not know; give a model.py, which is profiled")


def _check_facts(found: Mapping[str, int], path: Path) -> None:
    """Refuses numbers that no model can have together."""
    if found["heads"] % found["kv_heads"]:
        raise UserError(f"{path}: {found['heads']} heads cannot share {found['kv_heads']} heads of keys and values")
    for part, whole in (("active_experts", "experts"), ("dense_layers", "layers")) if found["experts"] else ():
        if found[part] > found[whole]:
            raise UserError(f"{path}: {part} is {found[part]}, and there are {found[whole]} {whole}")


def _is_gated(config: Mapping[str, Any], family: str) -> bool:
    """Whether the feed-forward network has a gate."""
    if family in PLAIN or family.startswith(GATED_GELU):
        return family not in PLAIN
    names = ("hidden_act", "hidden_activation", "activation_function", "activation")
    activation = next((str(config[name]) for name in names if config.get(name)), "silu")
    return "glu" in activation or "gated" in activation or "elu" not in activation  # silu and swish


def _of_config(config: Mapping[str, Any], path: Path, note: str) -> Architecture:
    _check_blocks(config, path)
    found, family = _facts(config, path), str(config.get("model_type") or "")
    found["head_dim"] = found["head_dim"] or max(1, found["hidden"] // found["heads"])
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    ratio = config.get("expansion_ratio") or 4
    if not isinstance(ratio, int | float) or not 0 < ratio < math.inf:
        raise UserError(f"{path}: expansion_ratio: {ratio!r} is no number above 0")
    found["intermediate"] = found["intermediate"] or int(ratio * found["hidden"])
    if found["experts"]:
        found |= _mixture(config, found, path)
    _check_facts(found, path)
    mla = tuple(_whole(config.get(key), key, path) for key in MLA_KEYS) if config.get("kv_lora_rank") else ()
    tied = config.get("tie_word_embeddings", family == "gpt_neo" or family.startswith(TIED))
    learned = family in LEARNED_POSITIONS
    if family not in COUNTED | PUBLISHED:
        kind = f"the family {family!r}" if family else "its family, as model_type is missing,"
        note = "; ".join(filter(None, [note, f"{kind} is not known: counted as blocks of a usual transformer"]))
    shape = Architecture(
        name=str(config.get("_name_or_path") or path.parent.name or path.name), tied=bool(tied),
        gated=_is_gated(config, family), positions=found["context"] if learned else 0, mla=mla, note=note, **found,
    )  # fmt: skip
    if shape.n_parameters > LARGEST:
        raise UserError(f"{path}: {shape.n_parameters:.3g} parameters follow from it, which no transformer has")
    return shape


def _mixture(config: Mapping[str, Any], found: Mapping[str, int], path: Path) -> dict[str, int]:
    """What a mixture of experts has beside a dense model."""

    def number(keys: str) -> int:
        return next(filter(None, (_whole(config.get(key), key, path) for key in keys.split())), 0)

    step = number("interleave_moe_layer_step decoder_sparse_step moe_layer_interval") or 1
    first, layers = found["dense_layers"], found["layers"]
    plain_ones = {n for n in _listed(config, "mlp_only_layers", path) if isinstance(n, int)}
    sparse = layers // step - first // step
    sparse -= sum(first <= n < layers and (n + 1) % step == 0 for n in plain_ones)
    # Where the width of dense blocks has another name, the plain one is that of an expert.
    plain = number("intermediate_size") if number("intermediate_size_mlp") else 0
    width = found["expert_intermediate"] or plain or found["intermediate"]
    n_shared = number("n_shared_experts moe_num_shared_experts num_shared_experts") or (1 if plain else 0)
    return {
        "expert_intermediate": width,
        "active_experts": found["active_experts"] or min(2, found["experts"]),
        "shared_intermediate": number("shared_expert_intermediate_size shared_intermediate_size") or n_shared * width,
        "dense_layers": max(first, layers - sparse),
    }
