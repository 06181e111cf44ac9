"""What checkpoints call a decoder's weights, family by family, under the names that Hugging Face gives them.

A name stands for `NAME.weight` and, where there is one, `NAME.bias`. Names of a layer follow `layer`, those of an
expert `expert` too; all but the head's follow one of `bases`, as older files lack the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Names:
    """The defaults are Llama's. A tuple names the parts of one product, which share their input."""

    bases: tuple[str, ...] = ("model.", "")
    embedding: str = "embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    layer: str = "layers.{}."
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = ""  # the whole name; of a number for each head that takes part in its softmax
    query: str = "self_attn.q_proj"  # this and the following: of latent attention
    query_down: str = "self_attn.q_a_proj"
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    key_down: str = "self_attn.kv_a_proj_with_mqa"
    key_down_norm: str = "self_attn.kv_a_layernorm"
    key_up: str = "self_attn.kv_b_proj"
    attention_out: str = "self_attn.o_proj"
    attention_post_norm: str = ""  # of what attention adds to the residual
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    mlp_post_norm: str = ""  # of what the MLP adds to the residual
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"  # the whole name
    expert: str = "mlp.experts.{}."
    expert_in: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_out: str = "down_proj"
    shared_experts: str = "mlp.shared_experts."
    final_norm: str = "norm"  # empty: none
    project_in: str = "project_in"  # of an embedding of another size than the layers'
    project_out: str = "project_out"
    head: str = "lm_head"
    ignored: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)  # whole names; of old files, and computed here
    is_transposed: bool = False  # whether products within layers are stored [in, out]
    has_heads_in_turn: bool = False  # whether rows of the fused product are head 0's q, k, v, then head 1's, ...
    has_gates_in_turn: bool = False  # whether rows of experts' fused product are gate 0, up 0, gate 1, ...

    def base(self, has: Callable[[str], bool]) -> str:
        """Which of `bases` a checkpoint has, by whether it `has` a tensor of a name: the one of its embedding."""
        return next((base for base in self.bases if has(f"{base}{self.embedding}.weight")), self.bases[0])


LLAMA = Names()
PHI3 = replace(LLAMA, qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
STARCODER2 = replace(LLAMA, mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj")
GEMMA2 = replace(
    LLAMA,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
MIXTRAL = replace(
    LLAMA,
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_in=("w1", "w3"),
    expert_out="w2",
)
# The experts' tensors are stacked in the files; see `stacked_experts`.
GPT_OSS = replace(
    LLAMA, sinks="self_attn.sinks", router="mlp.router", expert_in=("gate_up_proj",), has_gates_in_turn=True
)
GPT2 = Names(
    bases=("transformer.", ""),
    embedding="wte",
    positions="wpe",
    layer="h.{}.",
    input_norm="ln_1",
    qkv=("attn.c_attn",),
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
    final_norm="ln_f",
    ignored=("attn.bias", "attn.masked_bias"),
    is_transposed=True,
)
OPT = Names(
    bases=("model.decoder.", "decoder."),
    positions="embed_positions",
    input_norm="self_attn_layer_norm",
    attention_out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp_in=("fc1",),
    mlp_out="fc2",
    final_norm="final_layer_norm",
    ignored=(),
)
BLOOM = Names(
    bases=("transformer.", ""),
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    layer="h.{}.",
    qkv=("self_attention.query_key_value",),
    attention_out="self_attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
    final_norm="ln_f",
    ignored=(),
    has_heads_in_turn=True,
)
