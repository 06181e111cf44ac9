"""What sets one decoder apart from another of the same sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker_svc.models.names import LLAMA, Names
from worker_svc.models.rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class GroupedChoice:
    """How DeepSeek's models choose experts; see `reference.score_experts`."""

    scores: Literal["softmax", "sigmoid"]
    is_biased: bool  # whether each expert has a number that counts in its choice, and not in its share
    num_groups: int = 1
    num_chosen_groups: int = 1  # within which a token's experts are
    scale: float = 1.0  # of shares


@dataclass(frozen=True, slots=True)
class ExpertStyle:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538)."""

    num_experts: int
    num_chosen: int  # of them by each token
    intermediate_size: int
    is_normalized: bool  # whether the weights of the chosen ones sum to 1
    is_sparse: tuple[bool, ...]  # per layer; the others have an MLP
    are_biased: bool = False  # whether the router and all products of experts have a bias
    num_shared: int = 0  # more experts, which every token goes to: one MLP of so many times the size
    choice: GroupedChoice | None = None  # None: those of the largest logits


@dataclass(frozen=True, slots=True)
class LatentStyle:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434): all heads' keys and values are products of one
    vector a token, the latent, which is what the cache holds, beside a part of the key that is turned and that all
    heads share. Sizes are numbers of elements."""

    latent_size: int
    rotary_size: int
    plain_size: int  # of a head's query and key, not turned
    value_size: int  # of a head
    query_latent_size: int  # of what all heads' queries are products of; 0: of the residual itself
    are_pairs: bool  # whether neighbours are turned together, rather than elements of two halves
    norm_eps: float = 1e-6  # of the latents' norms: the published code's own, whatever `rms_norm_eps` says

    @property
    def cached_size(self) -> int:
        """Of a token and layer: the latent, then what is turned."""
        return self.latent_size + self.rotary_size

    @property
    def query_size(self) -> int:
        """Of a head."""
        return self.plain_size + self.rotary_size

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Of a layer's attention."""
        into_queries = num_heads * self.query_size
        if self.query_latent_size:
            queries = self.query_latent_size * (hidden_size + into_queries)
        else:
            queries = hidden_size * into_queries
        of_heads = num_heads * (self.plain_size + self.value_size) * self.latent_size
        return queries + hidden_size * self.cached_size + of_heads + num_heads * self.value_size * hidden_size


@dataclass(frozen=True, slots=True)
class DecoderStyle:
    """The defaults are Llama's. A tuple by layer is empty where all layers are alike."""

    names: Names = LLAMA
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_weight_offset: float = 0.0  # added to the weights of norms
    are_norms_behind: bool = False  # whether attention and MLP see the residual as it is, and their sums are normed
    has_head_norms: bool = False  # whether each head's query and key are normed before they are turned
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    swiglu_alpha: float = 1.702  # of clamped_swiglu; see `reference.clamped_swiglu`
    swiglu_limit: float = 7.0  # likewise
    is_gated: bool = True  # whether the MLP multiplies an activated half with the other
    experts: ExpertStyle | None = None
    latent: LatentStyle | None = None  # None: heads have keys and values of their own
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    learned_offset: int = 0  # row of the first position in a table of learned ones
    ropes: tuple[Rope, ...] = ()
    rope_of_layer: tuple[int, ...] = ()  # by layer, which of `ropes`
    windows: tuple[int, ...] = ()  # by layer, the last tokens that attention sees; 0: all
    attention_scale: float | None = None  # None: 1 / sqrt(head size)
    is_scaled_by_layer: bool = False  # whether layer i divides its scale by i + 1
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    embedding_size: int = 0  # 0: that of the layers; else embeddings are projected to it, and back before the head
    num_extra_layers: int = 0  # in the checkpoint, behind those that are computed: they guess at further tokens

    def window(self, layer: int) -> int:
        """Tokens that this layer sees at most; 0: all."""
        return self.windows[layer] if self.windows else 0
