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

    @property
    def size(self) -> int:
        """Outputs on this rank."""
        return sum(map(len, self.outputs))


def sites_of(part: ModelPart) -> Iterator[Site]:
    """All of a model; experts have none."""
    config, names, style = part.whole, part.whole.style.names, part.whole.style
    heads = [count * config.head_size for count in (config.num_heads, *[config.num_kv_heads] * 2)]
    hidden, inner = config.hidden_size, config.intermediate_size
    every, num_halves = range(hidden), 2 if style.is_gated else 1
    for layer in range(config.num_layers):
        prefix = names.bases[0] + names.layer.format(layer)

        def modules(*parts: str, prefix: str = prefix) -> tuple[str, ...]:
            return tuple(prefix + name for name in parts)

        own_heads = part.outputs_of_heads
        turns = config.num_heads if names.has_heads_in_turn else 1
        yield Site(layer, QKV, modules(*names.qkv), heads, hidden, own_heads, every, turns)
        yield Site(layer, ATTENTION_OUT, modules(names.attention_out), [hidden], heads[0], [every], own_heads[0])
        if style.experts is None or not style.experts.is_sparse[layer]:
            own = part.neurons(inner)
            sizes, halves = [inner] * num_halves, [own] * num_halves
            yield Site(layer, MLP_IN, modules(*names.mlp_in), sizes, hidden, halves, every)
            yield Site(layer, MLP_OUT, modules(names.mlp_out), [hidden], inner, [every], own)
