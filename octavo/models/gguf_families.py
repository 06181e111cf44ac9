"""What GGUF files call the weights of each architecture, what `transformers` calls them, and their shapes.

llama.cpp names a tensor `blk.LAYER.LEAF.weight`, for most architectures by the same few leaves, and stores some of them
in an order of its own (`Layout`), which has to be undone. Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Layout(Enum):
    """How the values of a tensor lie in a GGUF file, compared with a checkpoint of `transformers`."""

    SAME = auto()
    QUERY_PAIRS = auto()  # rows of a head are (pair, half) and not (half, pair), for another rotary embedding
    KEY_PAIRS = auto()  # likewise, with as many heads as keys have
    TRANSPOSED = auto()  # [out, in] where the checkpoint has [in, out]
    PARTS = auto()  # all queries, all keys, all values, where the checkpoint has them head by head
    ONE_ADDED = auto()  # the weights of a norm, which the model itself adds 1 to
    EXPERTS = auto()  # all experts in one tensor, where the checkpoint has a tensor each


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor, and the bias that belongs to it.

    `shape` is the checkpoint's, in words of `gguf_config.lengths`, without the number of experts.
    """

    name: str  # without `.weight`; `{}` stands for an expert's number
    shape: tuple[str, ...]
    layout: Layout = Layout.SAME
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """`outer` and `layer`: name in the file, without `blk.LAYER.` and `.weight` -> weight."""

    architecture: str
    model_type: str
    outer: dict[str, Weight]
    layer: dict[str, Weight]
    layer_prefix: str = "model.layers.{}."


def _attention(query: Layout = Layout.SAME, key: Layout = Layout.SAME, *, is_biased: bool = False) -> dict[str, Weight]:
    return {
        "attn_norm": Weight("input_layernorm", ("hidden",)),
        "attn_q": Weight("self_attn.q_proj", ("queries", "hidden"), query, is_biased),
        "attn_k": Weight("self_attn.k_proj", ("keys", "hidden"), key, is_biased),
        "attn_v": Weight("self_attn.v_proj", ("keys", "hidden"), has_bias=is_biased),
        "attn_output": Weight("self_attn.o_proj", ("hidden", "queries")),
        "ffn_norm": Weight("post_attention_layernorm", ("hidden",)),
    }


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, Weight]:
    return {
        "ffn_gate_inp": Weight(f"{prefix}.gate", ("experts", "hidden")),
        "ffn_gate_exps": Weight(f"{prefix}.experts.{{}}.{gate}", ("expert_inner", "hidden"), Layout.EXPERTS),
        "ffn_up_exps": Weight(f"{prefix}.experts.{{}}.{up}", ("expert_inner", "hidden"), Layout.EXPERTS),
        "ffn_down_exps": Weight(f"{prefix}.experts.{{}}.{down}", ("hidden", "expert_inner"), Layout.EXPERTS),
    }


_OUTER = {
    "token_embd": Weight("model.embed_tokens", ("vocab", "hidden")),
    "output_norm": Weight("model.norm", ("hidden",)),
    "output": Weight("lm_head", ("vocab", "hidden")),
}
_MLP = {
    "ffn_gate": Weight("mlp.gate_proj", ("inner", "hidden")),
    "ffn_up": Weight("mlp.up_proj", ("inner", "hidden")),
    "ffn_down": Weight("mlp.down_proj", ("hidden", "inner")),
}
_PAIRED = _attention(Layout.QUERY_PAIRS, Layout.KEY_PAIRS)
_HEAD_NORMS = {
    "attn_q_norm": Weight("self_attn.q_norm", ("head",)),
    "attn_k_norm": Weight("self_attn.k_norm", ("head",)),
}
_GEMMA_OUTER = _OUTER | {"output_norm": Weight("model.norm", ("hidden",), Layout.ONE_ADDED)}
_GEMMA = _attention() | _MLP | {
    "attn_norm": Weight("input_layernorm", ("hidden",), Layout.ONE_ADDED),
    "ffn_norm": Weight("post_attention_layernorm", ("hidden",), Layout.ONE_ADDED),
}  # fmt: skip
_GEMMA2 = _GEMMA | {
    "post_attention_norm": Weight("post_attention_layernorm", ("hidden",), Layout.ONE_ADDED),
    "ffn_norm": Weight("pre_feedforward_layernorm", ("hidden",), Layout.ONE_ADDED),
    "post_ffw_norm": Weight("post_feedforward_layernorm", ("hidden",), Layout.ONE_ADDED),
}
_GEMMA3 = _GEMMA2 | {leaf: Weight(weight.name, weight.shape, Layout.ONE_ADDED) for leaf, weight in _HEAD_NORMS.items()}


def _biased(weights: dict[str, Weight]) -> dict[str, Weight]:
    return {leaf: Weight(each.name, each.shape, each.layout, has_bias=True) for leaf, each in weights.items()}


LLAMA = GgufFamily("LlamaForCausalLM", "llama", _OUTER, _PAIRED | _MLP)
MIXTRAL = GgufFamily(
    "MixtralForCausalLM", "mixtral", _OUTER, _PAIRED | _experts("block_sparse_moe", "w1", "w3", "w2")
)  # fmt: skip
QWEN2 = GgufFamily("Qwen2ForCausalLM", "qwen2", _OUTER, _attention(is_biased=True) | _MLP)
QWEN3 = GgufFamily("Qwen3ForCausalLM", "qwen3", _OUTER, _attention() | _HEAD_NORMS | _MLP)
QWEN3_MOE = GgufFamily(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _OUTER,
    _attention() | _HEAD_NORMS | _experts("mlp", "gate_proj", "up_proj", "down_proj"),
)
PHI3 = GgufFamily(
    "Phi3ForCausalLM",
    "phi3",
    _OUTER,
    {
        "attn_norm": Weight("input_layernorm", ("hidden",)),
        "attn_qkv": Weight("self_attn.qkv_proj", ("queries_keys_values", "hidden")),
        "attn_output": Weight("self_attn.o_proj", ("hidden", "queries")),
        "ffn_norm": Weight("post_attention_layernorm", ("hidden",)),
        "ffn_up": Weight("mlp.gate_up_proj", ("inner_twice", "hidden")),
        "ffn_down": Weight("mlp.down_proj", ("hidden", "inner")),
    },
)
STARCODER2 = GgufFamily(
    "Starcoder2ForCausalLM",
    "starcoder2",
    _OUTER | _biased({"output_norm": _OUTER["output_norm"]}),
    _biased(
        _attention()
        | {
            "ffn_up": Weight("mlp.c_fc", ("inner", "hidden")),
            "ffn_down": Weight("mlp.c_proj", ("hidden", "inner")),
        }
    ),
)
GEMMA = GgufFamily("GemmaForCausalLM", "gemma", _GEMMA_OUTER, _GEMMA)
GEMMA2 = GgufFamily("Gemma2ForCausalLM", "gemma2", _GEMMA_OUTER, _GEMMA2)
GEMMA3 = GgufFamily("Gemma3ForCausalLM", "gemma3_text", _GEMMA_OUTER, _GEMMA3)
GPT2 = GgufFamily(
    "GPT2LMHeadModel",
    "gpt2",
    {
        "token_embd": Weight("transformer.wte", ("vocab", "hidden")),
        "position_embd": Weight("transformer.wpe", ("positions", "hidden")),
        "output_norm": Weight("transformer.ln_f", ("hidden",), has_bias=True),
        "output": Weight("lm_head", ("vocab", "hidden")),
    },
    _biased(
        {
            "attn_norm": Weight("ln_1", ("hidden",)),
            "attn_qkv": Weight("attn.c_attn", ("hidden", "queries_keys_values"), Layout.TRANSPOSED),
            "attn_output": Weight("attn.c_proj", ("queries", "hidden"), Layout.TRANSPOSED),
            "ffn_norm": Weight("ln_2", ("hidden",)),
            "ffn_up": Weight("mlp.c_fc", ("hidden", "inner"), Layout.TRANSPOSED),
            "ffn_down": Weight("mlp.c_proj", ("inner", "hidden"), Layout.TRANSPOSED),
        }
    ),
    "transformer.h.{}.",
)
BLOOM = GgufFamily(
    "BloomForCausalLM",
    "bloom",
    {
        "token_embd": Weight("transformer.word_embeddings", ("vocab", "hidden")),
        "token_embd_norm": Weight("transformer.word_embeddings_layernorm", ("hidden",), has_bias=True),
        "output_norm": Weight("transformer.ln_f", ("hidden",), has_bias=True),
        "output": Weight("lm_head", ("vocab", "hidden")),
    },
    _biased(
        {
            "attn_norm": Weight("input_layernorm", ("hidden",)),
            "attn_qkv": Weight("self_attention.query_key_value", ("queries_keys_values", "hidden"), Layout.PARTS),
            "attn_output": Weight("self_attention.dense", ("hidden", "queries")),
            "ffn_norm": Weight("post_attention_layernorm", ("hidden",)),
            "ffn_up": Weight("mlp.dense_h_to_4h", ("inner", "hidden")),
            "ffn_down": Weight("mlp.dense_4h_to_h", ("hidden", "inner")),
        }
    ),
    "transformer.h.{}.",
)

# `general.architecture` -> family; what is called llama with experts is Mixtral.
FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "phi3": PHI3,
    "starcoder2": STARCODER2,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "bloom": BLOOM,
}
