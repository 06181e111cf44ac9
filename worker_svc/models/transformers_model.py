"""Any plain decoder of `transformers` over the paged cache, through that library's attention interface.

The layers are the library's; where they would attend, `_attend` writes keys and values to our cache and runs our
kernel. All sequences of a step lie one after the other in a batch of one, at the positions of our input batch: no mask
and no cache of the library's is ever made. Unlike in Octavo's own decoder, a row's products may differ in their last
bits with the rows beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.select import kernels_for
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.cache_scales.checkpoint_scales import is_cache_scale
from worker_svc.models.checkpoint.checkpoint_files import detect_format
from worker_svc.models.config import ModelConfig
from worker_svc.models.errors import ModelError
from worker_svc.models.logit_reader import MAX_ROWS_AT_ONCE, LogitReader
from worker_svc.models.transformers_config import read_config

_INTERFACE = "octavo_paged"  # the name under which `transformers` knows our attention


class StepContext:
    """What attention has to know of the step that runs; every attention module holds the model's one."""

    def __init__(self, config: ModelConfig, device: torch.device, raw: Any) -> None:
        """`raw`: the library's configuration."""
        self.config, self.kernels = config, kernels_for(device)
        self.has_window = _has_window(raw, config)
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.attention: AttentionMetadata | None = None
        self.attention_options: dict[str, Any] = {}  # `AttentionMetadata.shared_options`
        self.layers_seen: set[int] = set()
        self.cache_scales: list[dict[str, torch.Tensor]] = [{}] * config.num_layers
        if config.cache_scales is not None:
            heads = range(config.num_kv_heads)
            self.cache_scales = [config.cache_scales.of_layer(i, heads, device) for i in range(config.num_layers)]

    def refuse(self, why: str) -> ModelError:
        """What to raise where the library's model asks for attention that our kernels do not have."""
        return ModelError(f"architecture {self.config.architecture} is not supported: {why}")


class TransformersModel:
    """See `worker_svc.models.loader.Model` for the contract."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        device: torch.device,
        load_format: str,
        seed: int,
        trust_remote_code: bool = False,
    ) -> None:
        """Raises ModelError: for weights that are missing, too many or of another shape, and for what is no decoder."""
        from transformers import AttentionInterface

        self.config, self.device = config, device
        AttentionInterface.register(_INTERFACE, _attend)
        raw = read_config(folder, trust_remote_code)
        self._model = _load(folder, raw, config, load_format, seed, trust_remote_code).to(device).eval()
        self._context = StepContext(config, device, raw)
        if getattr(self._model, "_is_stateful", False):
            raise self._context.refuse("it keeps a recurrent state")
        if not getattr(self._model, "_supports_attention_backend", False):
            raise self._context.refuse("its attention cannot be replaced")
        for module in self._model.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.octavo_step = self._context
        parameters = inspect.signature(self._model.forward).parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    @property
    def weights_bytes(self) -> int:
        """Bytes of the library's parameters on the device."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def is_capturable(self) -> bool:
        """Unknown: it depends on the library's code."""
        return False

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`. What `reader` wants is computed at once: the library's head runs once a step."""
        num_rows = logits_rows.shape[0]
        if reader is not None:
            logits_rows = torch.cat([logits_rows, reader.rows])
        context = self._context
        context.caches, context.attention = caches, attention
        context.attention_options = attention.shared_options()
        context.layers_seen.clear()
        options: dict[str, Any] = {"use_cache": False}
        if self._takes_positions:
            options["position_ids"] = positions[None]
        if self._picks_rows:
            options["logits_to_keep"] = logits_rows
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids[None], **options).logits[0]
        finally:  # a cache that is given up must free its memory
            context.caches, context.attention, context.attention_options = [], None, {}
        if len(context.layers_seen) != self.config.num_layers:
            seen, all_layers = len(context.layers_seen), self.config.num_layers
            raise context.refuse(f"{seen} of its {all_layers} layers attend where attention can be replaced")
        logits = logits if self._picks_rows else logits[logits_rows]
        if reader is not None:
            for part in logits[num_rows:].split(MAX_ROWS_AT_ONCE):
                reader.take(part.float())
        logits = logits[:num_rows]
        return logits.float() if out is None else out.copy_(logits)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as `transformers` calls it: query [1, num_heads, T, head_size], key and value [1, num_kv_heads, T,
    head_size]; gives [1, T, num_heads, head_size] and no weights. Raises ModelError for what our kernel has not.
    """
    context: StepContext = module.octavo_step  # type: ignore[assignment]  # set by us
    config, attention = context.config, context.attention
    assert attention is not None, "attention outside a step"
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, in a Module
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise context.refuse("its attention sees what comes after a token")
    if attention_mask is not None:
        raise context.refuse("its attention makes a mask of its own")
    if layer in context.layers_seen:
        raise context.refuse("a layer attends more than once")
    if unknown := {name for name in others if others[name] is not None and name in ("s_aux", "position_bias")}:
        raise context.refuse(f"its attention takes {min(unknown)}")
    expected = (config.num_kv_heads, config.head_size)
    for part in (key, value):
        if (found := (part.shape[1], part.shape[3])) != expected:
            raise context.refuse(
                f"keys or values of {found[0]} heads of {found[1]}, not {expected[0]} of {expected[1]}"
            )
    if context.has_window[layer] and not sliding_window:
        raise context.refuse("its attention does not tell its window")
    context.layers_seen.add(layer)
    key_cache, value_cache = context.caches[layer]
    query, key, value = (_by_token(part) for part in (query, key, value))
    scales = context.cache_scales[layer]
    context.kernels.reshape_and_cache(key, value, key_cache, value_cache, attention.slot_mapping, **scales)
    out = torch.empty_like(query)
    context.kernels.paged_attention(
        out,
        query,
        key_cache,
        value_cache,
        attention.block_tables,
        attention.seq_lens,
        attention.query_starts,
        scale=config.head_size**-0.5 if scaling is None else scaling,
        max_query_len=attention.max_query_len,
        max_seq_len=attention.max_seq_len,
        sliding_window=sliding_window or 0,
        logit_soft_cap=softcap or 0.0,
        **scales,
        **context.attention_options,
    )
    return out[None], None


def _has_window(raw: Any, config: ModelConfig) -> list[bool]:
    """By layer, whether it sees less than a sequence may have. Some models say it in a mask alone, and none is made."""
    if layer_types := getattr(raw, "layer_types", None):
        return [each == "sliding_attention" for each in layer_types]
    window = getattr(raw, "sliding_window", None) if getattr(raw, "use_sliding_window", True) else None
    return [window is not None and window < config.max_model_len] * config.num_layers


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, head_size] to [T, heads, head_size], line after line, also where T is 1 and any stride would do."""
    by_token: torch.Tensor = x[0].transpose(0, 1).flatten(1).unflatten(1, (x.shape[1], x.shape[3]))
    return by_token


def _load(folder: Path, raw: Any, config: ModelConfig, load_format: str, seed: int, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    common = {"attn_implementation": _INTERFACE, "dtype": config.dtype, "trust_remote_code": trust_remote_code}
    if load_format == "auto":
        load_format = detect_format(folder)
    if load_format == "gguf":
        raise ModelError(f"{folder}: a GGUF file is read for Octavo's own families only")
    if load_format == "dummy":
        torch.manual_seed(seed)
        return _told(folder, lambda: AutoModelForCausalLM.from_config(raw, **common))
    model, report = _told(
        folder,
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            config=raw,
            use_safetensors=load_format == "safetensors",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to be told of them by name, here below
            **common,
        ),
    )
    for key, what in (("missing_keys", "has no tensor"), ("unexpected_keys", "has one tensor too many:")):
        if names := sorted(name for name in report.get(key) or () if not is_cache_scale(name)):
            raise ModelError(f"{folder}: the checkpoint {what} {names[0]}")
    for name, found, expected in sorted(report.get("mismatched_keys") or ()):
        raise ModelError(f"{folder}: tensor {name} is {list(found)}, config.json says {list(expected)}")
    return model


def _told(folder: Path, load: Callable[[], Any]) -> Any:
    """The result of `load`, its errors as a line."""
    try:
        return load()
    except KeyError as error:
        if error.args == (_INTERFACE,):  # it looks its attention up among the kinds that it knows itself
            raise ModelError(f"{folder}: this model is not supported: its attention cannot be replaced") from None
        raise ModelError(f"{folder}: there is no {error}") from None
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{folder}: {' '.join(str(error).split())[:300]}") from None
