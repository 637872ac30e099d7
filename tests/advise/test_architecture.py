"""Shapes of models: the table against published parameter counts, names as people spell them, config.json."""

import json
import math

import pytest

from autotune.advise import architecture
from autotune.errors import UserError

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_table_has_at_least_60_models_each_once():
    names = [model.name for model in architecture.known()]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("model", architecture.known(), ids=lambda model: model.name)
def test_the_parameters_of_a_model_agree_with_its_published_count_within_1_percent(model):
    assert model.parameters > 1e8
    assert model.n_parameters == pytest.approx(model.parameters, rel=0.01)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen3 8b", "Qwen/Qwen3-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-v0.3"),
        ("gpt2", "openai-community/gpt2"),
        ("gemma 2 9b it", "google/gemma-2-9b"),
        ("tinyllama", "TinyLlama/TinyLlama-1.1B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen2.5-7B"),
        ("DeepSeek R1", "deepseek-ai/DeepSeek-V3"),
    ],
)
def test_a_name_is_known_as_people_spell_it(written, meant):
    assert architecture.find(written).name == meant


@pytest.mark.parametrize("size", ["0.5B", "1b", "7B", "13B", "70b", "405B", "350M"])
def test_a_size_stands_for_a_typical_shape_of_that_size_which_is_said(size):
    model = architecture.find(size)
    wanted = float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)
    assert model.n_parameters == pytest.approx(wanted, rel=0.06)
    assert "typical shape" in model.note


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(UserError, match=r"no model of this name.*Qwen/Qwen3-8B"):
        architecture.find("qwen3-9b")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("phi-3", "which of microsoft/Phi-3-mini-4k-instruct, microsoft/Phi-3-medium-4k-instruct"),
        ("falcon-180b", r"nearest are tiiuae/falcon-40b.*its size alone \(180B\)"),
        ("t5-11b", "an encoder with a decoder"),
        ("google/flan-t5-xl", "an encoder with a decoder"),
        ("openai/whisper-large-v3", "an encoder with a decoder"),
        (" ", "a model is needed"),
        ("", "a model is needed"),
    ],
)
def test_what_a_name_may_mean_or_why_it_cannot_be_is_said(written, said):
    with pytest.raises(UserError, match=said):
        architecture.find(written)


def read(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return architecture.find(str(tmp_path / "config.json"))


def test_a_config_json_gives_the_shape(tmp_path):
    assert read(tmp_path, LLAMA).n_parameters == 8_030_261_248


SMALL_MIXTURE = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts_per_tok": 2,
}  # fmt: skip
# Other families' words, with what the shape has to be.
FAMILIES = {
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}, 124_439_808),
    "falcon": ({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
                "num_kv_heads": 71, "vocab_size": 65024, "tie_word_embeddings": True}, 6_921_720_704),
    "mixtral": ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, 46_702_792_704),
    "deepseek": ({"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
                  "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
                  "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "vocab_size": 102400,
                  "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
                 15_706_484_224),
    "dbrx": ({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8},
              "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}, 131_596_523_520),
    "llama4": ({"model_type": "llama4", "text_config": {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
                "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "vocab_size": 202048}},
               400_711_848_960),
    # Built of their classes in transformers: experts in every second of the later blocks, or not in some; and those of all tokens.
    "ernie": ({**SMALL_MIXTURE, "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2,
               "moe_layer_start_index": 1, "moe_layer_interval": 2, "tie_word_embeddings": True}, 3_670_288),
    "qwen3_moe": ({**SMALL_MIXTURE, "model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0, 1]}, 3_533_312),
    "exaone_moe": ({**SMALL_MIXTURE, "model_type": "exaone_moe", "num_experts": 8, "num_shared_experts": 1, "first_k_dense_replace": 1},
                   4_223_488),
    "granitemoeshared": ({**SMALL_MIXTURE, "model_type": "granitemoeshared", "num_local_experts": 8, "moe_intermediate_size": None,
                          "shared_intermediate_size": 320, "tie_word_embeddings": False}, 14_743_808),
    "nemotron": ({"model_type": "nemotron", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32, "head_dim": 128,
                  "num_attention_heads": 48, "num_key_value_heads": 8, "hidden_act": "relu2", "vocab_size": 256000}, 8_272_232_448),
    "distilbert": ({"model_type": "distilbert", "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522,
                    "max_position_embeddings": 512, "activation": "gelu"}, 66_362_880),
    "xglm": ({"model_type": "xglm", "d_model": 4096, "num_layers": 32, "attention_heads": 32, "ffn_dim": 16384, "vocab_size": 256008,
              "activation_function": "gelu"}, 7_492_771_840),
    "gemma3": ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208}},
               3_880_263_168),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_words_of_other_families_are_known(tmp_path, family):
    config, parameters = FAMILIES[family]
    assert read(tmp_path, config).n_parameters == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not JSON"),
        ("[" * 99_999, "not JSON"),
        ("[]", "a config.json is a JSON object"),
        ({"a": 1}, "no num_hidden_layers in it"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden: 'wide' is no whole number"),
        ({**LLAMA, "is_encoder_decoder": True}, "decoder-only"),
        ({**LLAMA, "hidden_size": -1}, "hidden: -1 is no whole number"),
        ({**LLAMA, "hidden_size": 10**9, "num_hidden_layers": 10**9}, "which no transformer has"),
        ({**LLAMA, "mamba_d_state": 16}, "blocks without attention"),
        ({"text_config": {"vocab_size": 32000}}, "leaves out num_hidden_layers"),
        ('{"hidden_size": NaN, "num_hidden_layers": 2}', "hidden: nan is no whole number"),
        ({**LLAMA, "num_key_value_heads": math.inf}, "kv_heads: inf is no whole number"),
        ({**LLAMA, "num_key_value_heads": 64}, "32 heads cannot share 64 heads"),
        ({**LLAMA, "num_key_value_heads": 7}, "32 heads cannot share 7 heads"),
        ({**LLAMA, "num_experts": 8, "num_experts_per_tok": 16}, "active_experts is 16, and there are 8 experts"),
        ({**LLAMA, "num_experts": 8, "first_k_dense_replace": 99}, "dense_layers is 99, and there are 32 layers"),
        ({**LLAMA, "num_experts": 8, "n_shared_experts": "x"}, "n_shared_experts: 'x' is no whole number"),
        ({**LLAMA, "num_experts": 8, "decoder_sparse_step": "x"}, "decoder_sparse_step: 'x' is no whole number"),
        ({**LLAMA, "kv_lora_rank": "x"}, "kv_lora_rank: 'x' is no whole number"),
        ({**LLAMA, "intermediate_size": None, "expansion_ratio": "x"}, "expansion_ratio: 'x' is no number"),
        ({**LLAMA, "layer_types": ["linear_attention", "full_attention"]}, "a linear one"),
        ({**LLAMA, "layer_types": ["conv", "full_attention"]}, "blocks without attention"),
        ({**LLAMA, "layer_types": 3}, "layer_types: 3 is no list"),
        ({**LLAMA, "num_experts": 8, "mlp_only_layers": 3}, "mlp_only_layers: 3 is no list"),
        ({**LLAMA, "block_configs": [{}]}, "blocks of different shapes"),
    ],
)
def test_a_config_json_that_is_none_is_refused_in_a_sentence(tmp_path, config, said):
    with pytest.raises(UserError, match=said):
        read(tmp_path, config)


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention", "attention"])
def test_attention_over_a_window_is_attention(tmp_path, kind):
    assert read(tmp_path, {**LLAMA, "layer_types": [kind, "full_attention"]}).n_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"model_type": "gemma4_text"}, "the family 'gemma4_text' is not known"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "qwen2", "vision_config": {"depth": 32}}, "the language model alone is counted"),
    ],
)
def test_what_was_not_compared_or_is_left_out_is_said(tmp_path, changes, said):
    note = read(tmp_path, {**LLAMA, **changes}).note
    assert said in note if said else not note


@pytest.mark.cells(12)
@pytest.mark.parametrize("family", sorted(architecture.COUNTED))
def test_a_family_that_is_known_is_counted_as_its_class_has_it(tmp_path, family):
    """A file with the defaults of the class, against that class without its memory."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = transformers.CONFIG_MAPPING[family]()
    for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM"):
        if type(config) in getattr(transformers, name)._model_mapping:
            with torch.device("meta"):
                module = getattr(transformers, name).from_config(config)
            (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
            found = architecture.find(str(tmp_path / "config.json"))
            assert found.n_parameters == pytest.approx(sum(p.numel() for p in module.parameters()), rel=0.03)
            break
    else:
        pytest.fail(f"{family} is no model of text")
