"""Where an adapter can add to a decoder: the products of attention and MLP, layer by layer, by the names of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker_svc.models.parts import ModelPart

QKV, ATTENTION_OUT, MLP_IN, MLP_OUT = "qkv", "attention_out", "mlp_in", "mlp_out"


@dataclass(frozen=True, slots=True)
class Site:
    """One product of one layer, as the whole model has it, and this rank's part of its outputs and inputs."""

    layer: int
    kind: str  # one of the names above
    modules: tuple[str, ...]  # each part's, or that of all parts
    sizes: Sequence[int]  # outputs of each part
    in_features: int
    outputs: Sequence[range]  # of each part
    inputs: range
    num_turns: int = 1  # see `take_linear`
    is_here: bool = True  # whether this rank's stage has the layer

    @property
    def size(self) -> int:
        """Outputs on this rank."""
        return sum(map(len, self.outputs))


def sites_of(part: ModelPart) -> Iterator[Site]:
    """All of a model, also of layers that other stages have; experts have none."""
    config, names, style = part.whole, part.whole.style.names, part.whole.style
    heads = [count * config.head_size for count in (config.num_heads, *[config.num_kv_heads] * 2)]
    hidden, inner = config.hidden_size, config.intermediate_size
    every, num_halves = range(hidden), 2 if style.is_gated else 1
    for layer in range(config.num_layers):
        prefix = names.bases[0] + names.layer.format(layer)

        def modules(*parts: str, prefix: str = prefix) -> tuple[str, ...]:
            return tuple(prefix + name for name in parts)

        own_heads, here = part.outputs_of_heads, layer in part.layers
        turns = config.num_heads if names.has_heads_in_turn else 1
        yield Site(layer, QKV, modules(*names.qkv), heads, hidden, own_heads, every, turns, is_here=here)
        out = modules(names.attention_out)
        yield Site(layer, ATTENTION_OUT, out, [hidden], heads[0], [every], own_heads[0], is_here=here)
        if style.experts is None or not style.experts.is_sparse[layer]:
            own = part.neurons(inner)
            sizes, halves = [inner] * num_halves, [own] * num_halves
            yield Site(layer, MLP_IN, modules(*names.mlp_in), sizes, hidden, halves, every, is_here=here)
            yield Site(layer, MLP_OUT, modules(names.mlp_out), [hidden], inner, [every], own, is_here=here)
