"""The layers of a Llama-like model on a CPU in one call of compiled code, instead of ten calls a layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder_layer import DecoderLayer
from worker_svc.models.mlp import Mlp
from worker_svc.models.norm import Norm, RmsNorm
from worker_svc.models.products.compiled_linear import CompiledLinear

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product

NUM_PRODUCTS = 4  # of a layer: into and out of attention and of the MLP


class FusedLayers:
    """What the layers compute one after the other, bit for bit."""

    def __init__(self, config: ModelConfig, layers: Sequence[DecoderLayer]) -> None:
        """Layers of a model that this `is_for`."""
        # Here, so that a worker with a GPU waits for no compiler of CPU code.
        from kernels.cpu.layers.layer_stack import LayerStack, LayerWeights, StackStep
        from kernels.cpu.layers.layer_workspace import StackShape

        style, weights = config.style, []
        assert style.activation != "relu" and style.activation != "clamped_swiglu"
        for layer in layers:
            assert isinstance(layer.mlp, Mlp) and layer.cos_sin is not None
            assert isinstance(layer.input_norm, RmsNorm) and isinstance(layer.mlp_norm, RmsNorm)
            qkv, attention_out, mlp_in, mlp_out = _products(layer)
            weights.append(
                LayerWeights(
                    input_norm=layer.input_norm.weight,
                    qkv=qkv,
                    cos_sin=layer.cos_sin,
                    attention_scale=layer.attention_options["scale"],
                    sliding_window=layer.attention_options["sliding_window"],
                    attention_out=attention_out,
                    mlp_norm=layer.mlp_norm.weight,
                    mlp_in=mlp_in,
                    mlp_out=mlp_out,
                    **_optional_norms(layer),
                )
            )
        shape = StackShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            norm_eps=style.norm_eps,
            norm_weight_offset=style.norm_weight_offset,
            logit_soft_cap=style.attention_soft_cap,
            activation=style.activation,
        )
        self._stack, self._step = LayerStack(shape, weights), StackStep

    @staticmethod
    def is_for(config: ModelConfig, layers: Sequence[DecoderLayer], kernels: ModuleType) -> bool:
        """Whether these layers consist of what is computed here, and of nothing else. `kernels`: theirs."""
        style = config.style
        return (
            kernels.__name__ == "kernels.cpu"
            and style.norm == "rms"
            and not style.are_norms_behind
            and style.positions == "rotary"
            and style.activation not in ("relu", "clamped_swiglu")
            and style.is_gated
            and not style.names.sinks
            and style.experts is None
            and style.latent is None
            and all(len(_products(layer)) == NUM_PRODUCTS for layer in layers)
        )

    def __call__(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionMetadata,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual and its last update of the rows i64[R] `wanted`, [R, hidden] each; None: of all rows.

        residual [rows, hidden] is what the embedding gives, and is overwritten; `caches` are those of all layers.
        """
        step = self._step(
            positions=positions,
            slot_mapping=attention.slot_mapping,
            block_tables=attention.block_tables,
            seq_lens=attention.seq_lens,
            query_starts=attention.query_starts,
        )
        return self._stack(residual, caches, step, wanted)


def _optional_norms(layer: DecoderLayer) -> dict[str, torch.Tensor]:
    """Weights of the norms that only some families have, by their names in `LayerWeights`."""
    norms: dict[str, Norm | None] = dict(zip(("query_norm", "key_norm"), layer.head_norms, strict=False))
    norms |= {"attention_post_norm": layer.attention_post_norm, "mlp_post_norm": layer.mlp_post_norm}
    return {name: norm.weight for name, norm in norms.items() if isinstance(norm, RmsNorm)}


def _products(layer: DecoderLayer) -> list[Product]:
    """Those of its products that the library multiplies."""
    assert isinstance(layer.mlp, Mlp)
    layers = layer.qkv, layer.attention_out, layer.mlp.inner, layer.mlp.outer
    return [linear.product for linear in layers if isinstance(linear, CompiledLinear)]
