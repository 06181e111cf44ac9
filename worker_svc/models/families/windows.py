"""How far back each layer sees, as `config.json` says it."""

from __future__ import annotations

from worker_svc.models.families.sizes import Sizes
from worker_svc.models.raw_config import RawConfig


def same_windows(raw: RawConfig, sizes: Sizes, default: int | None) -> tuple[int, ...]:
    """All layers see as far back; () where they see all. `default`: where the key is absent."""
    window = raw.optional_integer("sliding_window", default)
    return () if window is None else (window,) * sizes.num_layers


def qwen_windows(raw: RawConfig, sizes: Sizes) -> tuple[int, ...]:
    """From layer `max_window_layers` on, where windows are used at all."""
    if not raw.flag("use_sliding_window"):
        return ()
    first = raw.count("max_window_layers", 28)
    return _typed_windows(raw, [i >= first for i in range(sizes.num_layers)])


def alternating_windows(raw: RawConfig, sizes: Sizes, pattern: int) -> tuple[int, ...]:
    """Every `pattern`-th layer sees all."""
    return _typed_windows(raw, [(i + 1) % pattern != 0 for i in range(sizes.num_layers)])


def _typed_windows(raw: RawConfig, slides: list[bool]) -> tuple[int, ...]:
    """By layer, as `layer_types` says, or as `slides` where that is absent."""
    if "layer_types" in raw:
        types = raw.list_of(str, "layer_types")
        if len(types) != len(slides):
            raise raw.error(f"layer_types must name a type for each of {len(slides)} layers")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise raw.error(f"layer_types: {min(unknown)!r} is not supported")
        slides = [each == "sliding_attention" for each in types]
    window = raw.optional_integer("sliding_window", 4096)
    return tuple((window or 0) if each else 0 for each in slides)
