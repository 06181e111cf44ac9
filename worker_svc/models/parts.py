"""Which part of a model each rank of a parallel group has: some of the layers, and of those a share.

    q, k, v, gate, up, head of the vocabulary     rows of their outputs: whole heads, whole neurons, whole tokens
    o, down                                       columns of their inputs, and the sum over ranks behind them
    embedding                                     its tokens' rows, and the sum: a rank gives zeros for foreign tokens
    norms, router, positions                      all of them

(Shoeybi et al. 2019, arXiv:1909.08053.) A key/value head is on several ranks where there are fewer than ranks.

Stages of a pipeline have layers that follow each other, the first the embedding, the last the final norm and the head
(Narayanan et al. 2021, arXiv:2104.04473). Where layers do not divide, the first stages have one more: the head takes
time, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker_svc.models.config import ModelConfig
from worker_svc.models.errors import ModelError
from worker_svc.parallel.ranks import OnlyRank, Ranks
from worker_svc.parallel.stages import OnlyStage, Stages

_VOCABULARY_MULTIPLE = 64  # token ids of a rank: full tiles


def part_of(ranks: Ranks, count: int, size: int = 1) -> range:
    """The rows of this rank, of `count` things of `size` rows each, whose number divides that of ranks or the reverse:
    ranks are given the same thing where there are fewer."""
    each = max(count // ranks.size, 1)
    first = ranks.rank * count // ranks.size
    return range(first * size, (first + each) * size)


def vocabulary_part(ranks: Ranks, vocab_size: int) -> tuple[range, int]:
    """Token ids of this rank, and the most that a rank has; the last ranks may have fewer."""
    if ranks.size == 1:
        return range(vocab_size), vocab_size
    each = -(-vocab_size // (ranks.size * _VOCABULARY_MULTIPLE)) * _VOCABULARY_MULTIPLE
    first, last = (min(rank * each, vocab_size) for rank in (ranks.rank, ranks.rank + 1))
    return range(first, last), each


def layers_of(stages: Stages, num_layers: int) -> range:
    """The layers of this stage."""
    first, last = (-(-stage * num_layers // stages.count) for stage in (stages.stage, stages.stage + 1))
    return range(first, last)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One rank's part of a model. `whole` says what the checkpoint holds, `own` what this rank computes with: its
    layers, heads and neurons; vocabulary and hidden size are those of the model."""

    whole: ModelConfig
    own: ModelConfig
    ranks: Ranks
    stages: Stages
    is_expert_parallel: bool  # whether experts are dealt out whole

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
        *,
        is_expert_parallel: bool = False,
    ) -> ModelPart:
        """Raises ModelError for a model that the ranks, or the stages, cannot share. None: there is only one."""
        ranks, stages = ranks or OnlyRank(), stages or OnlyStage()
        if stages.count > 1:
            _check_stages(config, stages.count)
        layers = layers_of(stages, config.num_layers)
        whole, config = config, replace(config, num_layers=len(layers), first_layer=layers.start)
        if ranks.size == 1:
            return cls(whole, config, ranks, stages, False)
        _check(config, ranks.size, is_expert_parallel)
        style = config.style
        if style.experts is not None and not is_expert_parallel:
            inner = style.experts.intermediate_size // ranks.size
            style = replace(style, experts=replace(style.experts, intermediate_size=inner))
        own = replace(
            config,
            num_heads=config.num_heads // ranks.size,
            num_kv_heads=max(config.num_kv_heads // ranks.size, 1),
            intermediate_size=config.intermediate_size // ranks.size,
            style=style,
        )
        return cls(whole, own, ranks, stages, is_expert_parallel)

    @property
    def num_parts(self) -> int:
        """Of the model, about equal in size."""
        return self.ranks.size * self.stages.count

    @property
    def layers(self) -> range:
        """Those of this rank's stage, by their numbers in the model."""
        return layers_of(self.stages, self.whole.num_layers)

    @property
    def is_first(self) -> bool:
        """Whether it begins with tokens, rather than with what a stage before has computed."""
        return self.stages.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with logits."""
        return self.stages.stage == self.stages.count - 1

    @property
    def heads(self) -> range:
        """Those whose queries this rank has."""
        return part_of(self.ranks, self.whole.num_heads)

    @property
    def kv_heads(self) -> range:
        """Those whose keys and values this rank has."""
        return part_of(self.ranks, self.whole.num_kv_heads)

    @property
    def outputs_of_heads(self) -> list[range]:
        """Of the products that give queries, keys and values: their rows for this rank's heads."""
        config = self.whole
        counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
        return [part_of(self.ranks, count, config.head_size) for count in counts]

    @property
    def experts(self) -> range:
        """Those that this rank has, whole or in part."""
        assert self.whole.style.experts is not None
        count = self.whole.style.experts.num_experts
        return part_of(self.ranks, count) if self.is_expert_parallel else range(count)

    def prefixes_without_place(self, base: str) -> list[str]:
        """How names of tensors begin that this part has no place for, as another stage has it or none. A tied table,
        which the last stage has as its head, is among them. `base`: of the checkpoint's names."""
        style, names = self.whole.style, self.whole.style.names
        layers = range(self.whole.num_layers + style.num_extra_layers)
        prefixes = [base + names.layer.format(i) for i in layers if i not in self.layers]
        ends = [] if self.is_first else [names.embedding, names.project_in, names.positions, names.embedding_norm]
        if not self.is_last:
            ends += [names.final_norm, names.project_out]
            prefixes.append(f"{names.head}.")
        return prefixes + [f"{base}{name}." for name in ends if name]

    def neurons(self, count: int, *, of_experts: bool = False) -> range:
        """Of the `count` inner ones of an MLP."""
        return range(count) if of_experts and self.is_expert_parallel else part_of(self.ranks, count)


def _check_stages(config: ModelConfig, count: int) -> None:
    refused = f"pipeline_parallel_size {count}"
    _check_is_own(config, refused)
    if count > config.num_layers:
        raise ModelError(f"{refused}: the model has {config.num_layers} layers, fewer than stages")


def _check_is_own(config: ModelConfig, refused: str) -> None:
    if config.impl != "octavo":
        raise ModelError(f"{refused}: {config.architecture} is computed by transformers, on one rank alone")


def _check(config: ModelConfig, size: int, is_expert_parallel: bool) -> None:
    refused = f"tensor_parallel_size {size}"
    _check_is_own(config, refused)
    if config.quantization not in ("", "fp8"):
        raise ModelError(
            f"{refused}: quantization {config.quantization} multiplies whole rows; "
            "--pipeline-parallel-size divides the layers instead"
        )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ModelError(f"{refused}: {config.num_kv_heads} key/value heads and so many ranks do not divide each other")
    experts, shared = config.style.experts, [(config.num_heads, "attention heads")]
    if experts is None or not all(experts.is_sparse):
        shared.append((config.intermediate_size, "neurons of an MLP"))
    if experts is not None and is_expert_parallel:
        shared.append((experts.num_experts, "experts"))
    elif experts is not None:
        shared.append((experts.intermediate_size, "neurons of an expert"))
    if experts is not None and experts.num_shared:
        shared.append((experts.num_shared * experts.intermediate_size, "neurons of shared experts"))
    for count, what in shared:
        if count % size:
            raise ModelError(f"{refused}: {count} {what} do not divide among so many ranks")
