"""The adapters that a model has loaded, by name, and where each is.

All of them are in host memory. The products have as many slots as a step may have adapters, and a step that needs one
puts it into the slot that was used longest ago.

Belongs to the model thread, but for `read`, `names` and `generations`: what these see is replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch

from octavo.models.errors import FetchError
from octavo.models.fetch import available
from octavo.models.hub_cache import ADAPTER, HubName
from worker_svc.adapters.adapted_linear import AdaptedLinear
from worker_svc.adapters.adapter_folder import Adapter, read_adapter
from worker_svc.adapters.errors import AdapterError
from worker_svc.adapters.sites import ATTENTION_OUT, MLP_IN, MLP_OUT, QKV, Site, sites_of
from worker_svc.errors import ProtocolError
from worker_svc.models.decoder import Decoder
from worker_svc.models.decoder_layer import DecoderLayer
from worker_svc.models.mlp import Mlp
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.linear import Linear
from worker_svc.models.products.summed import Summed

log = structlog.get_logger()

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Loaded:
    number: int
    generation: int
    adapter: Adapter


class AdapterSet:
    """Of one decoder, whose products it adapts at construction."""

    def __init__(
        self,
        decoder: Decoder,
        part: ModelPart,
        max_loras: int,
        max_rank: int,
        max_loaded: int,
        download_dir: str = "",
    ) -> None:
        """At most `max_loras` different ones in a step, `max_loaded` at a time, of ranks up to `max_rank`.

        `download_dir`: where those of the hub are kept; empty: in its own cache.
        """
        self._download_dir = download_dir
        self._decoder, self._max_rank, self._max_loras, self._max_loaded = decoder, max_rank, max_loras, max_loaded
        self._sites = list(sites_of(part))
        self._is_host = decoder.device.type == "cpu"
        self._loaded: dict[str, _Loaded] = {}
        self._slots: dict[int, int] = {}  # slot by number, the one used longest ago first
        self._products = {
            (site.layer, site.kind): _adapt(
                decoder, decoder.layers[site.layer - part.layers.start], site, max_loras, max_rank
            )
            for site in self._own_sites()
        }
        self._model_name = part.whole.model_name
        if not self._is_host:
            for product in self._products.values():
                product.warm_up()

    @property
    def max_loras(self) -> int:
        """Most different adapters in a step."""
        return self._max_loras

    @property
    def names(self) -> dict[str, int]:
        """Numbers of the loaded ones by name."""
        return {name: loaded.number for name, loaded in self._loaded.items()}

    @property
    def generations(self) -> dict[str, int]:
        """Of the loaded ones by name."""
        return {name: loaded.generation for name, loaded in self._loaded.items()}

    def modules(self) -> Iterator[tuple[str, int, int]]:
        """What an adapter may be for: names of modules, with their outputs and inputs in the whole model."""
        for site in self._sites:
            is_fused = len(site.modules) < len(site.sizes)
            sizes = [sum(site.sizes)] if is_fused else site.sizes
            for module, size in zip(site.modules, sizes, strict=True):
                yield module, size, site.in_features

    def _own_sites(self) -> list[Site]:
        return [site for site in self._sites if site.is_here]

    def most_bytes(self, max_tokens: int) -> int:
        """Of the model's device, besides what is there since construction. On a CPU that is as many adapters as a step
        has, at the largest rank; on a GPU what a product of so many tokens has between shrinking and expanding."""
        if not self._is_host:
            from kernels.gpu.lora import num_segments  # here: only a worker with a GPU has Triton

            most_segments = max(num_segments(len(site.inputs)) for site in self._own_sites())
            return 2 * 4 * most_segments * max_tokens * self._max_rank  # of a part, while the last one's is still there
        of_one = sum(self._max_rank * (len(site.inputs) * len(site.modules) + site.size) for site in self._own_sites())
        return 2 * 4 * of_one * self._max_loras  # as read, and in slots that are not touched yet

    def read(self, path: str) -> Adapter:
        """An adapter from its folder, or by its name on the hub; on any thread. Raises AdapterError, whatever is wrong
        with it: a rank of a group that raised anything else would end the group."""
        try:
            adapter = read_adapter(self._folder(path), self._sites, self._max_rank)
            if not self._is_host:
                adapter = adapter.pinned()
        except (OSError, RuntimeError, ValueError, ArithmeticError, MemoryError) as error:
            raise AdapterError(f"cannot read {path}: {str(error) or type(error).__name__}") from None
        base = adapter.base.rstrip("/").rpartition("/")[2]
        if base and base.lower() != self._model_name.rpartition("/")[2].lower():
            log.warning("adapter of another base", adapter=path, base=adapter.base, model=self._model_name)
        return adapter

    def _folder(self, path: str) -> Path:
        folder = Path(path).expanduser()
        if folder.is_dir() or folder.is_absolute() or path.startswith(".") or HubName.parse(path) is None:
            return folder
        try:
            return available(path, load_format=ADAPTER, download_dir=self._download_dir or None)
        except (FetchError, LookupError) as error:
            raise AdapterError(str(error)) from None

    def load(self, name: str, generation: int, adapter: Adapter) -> None:
        """Rows may use it from now on. Raises AdapterError."""
        if (loaded := self._loaded.get(name)) is not None:
            if loaded.generation == generation:
                return
            raise AdapterError(f"adapter {name!r} is loaded as generation {loaded.generation}; unload it first")
        if len(self._loaded) >= self._max_loaded:
            most = f"{self._max_loaded} adapters are loaded, as many as --max-cpu-loras allows"
            raise AdapterError(f"adapter {name!r}: {most}; unload one, or start the worker with a larger number")
        taken = {each.number for each in self._loaded.values()}
        number = next(number for number in range(self._max_loaded) if number not in taken)
        self._loaded = {**self._loaded, name: _Loaded(number, generation, adapter)}

    def unload(self, name: str) -> None:
        """Nothing may use it any more. Raises AdapterError."""
        if name not in self._loaded:
            raise AdapterError(f"adapter {name!r} is not loaded; loaded: {', '.join(self._loaded) or 'none'}")
        self._slots.pop(self._loaded[name].number, None)
        self._loaded = {other: each for other, each in self._loaded.items() if other != name}

    def clear(self) -> None:
        """Unloads all."""
        for name in list(self._loaded):
            self.unload(name)

    @contextmanager
    def step(self, numbers: Ints) -> Iterator[None]:
        """For a pass whose rows have the adapters of these numbers [T]; -1: none. Raises ProtocolError for too many."""
        present = [number for number in np.unique(numbers).tolist() if number >= 0]
        if len(present) > self._max_loras:
            raise ProtocolError(f"step with {len(present)} adapters, more than {self._max_loras}")
        if not present:
            yield
            return
        self._use_slots(present)
        slots = np.full(self._max_loaded + 1, -1)  # the last one is that of -1
        slots[list(self._slots)] = list(self._slots.values())
        with self._decoder.step_adapters.step(slots[numbers]):
            yield

    def _use_slots(self, present: list[int]) -> None:
        """Has these in slots, and marks them as used last."""
        adapters = {loaded.number: loaded.adapter for loaded in self._loaded.values()}
        for number in present:
            if number in self._slots:
                self._slots[number] = self._slots.pop(number)
        for number in present:
            if number not in self._slots:
                free = set(range(self._max_loras)) - set(self._slots.values())
                if not free:
                    longest_ago = next(other for other in self._slots if other not in present)
                    free = {self._slots.pop(longest_ago)}
                slot = min(free)
                self._put(slot, adapters[number])
                self._slots[number] = slot

    def _put(self, slot: int, adapter: Adapter) -> None:
        for place, product in self._products.items():
            product.put(slot, adapter.parts.get(place, ()))


def _adapt(decoder: Decoder, layer: DecoderLayer, site: Site, num_slots: int, max_rank: int) -> AdaptedLinear:
    """Puts an adapted product in the place of the one at this site, which is of this layer of the decoder."""
    step = decoder.step_adapters

    def adapted(base: Linear) -> AdaptedLinear:
        like = torch.empty(0, dtype=decoder.config.dtype, device=decoder.device)
        is_host = decoder.device.type == "cpu"
        return AdaptedLinear(base, step, site, num_slots, max_rank, like, is_host=is_host)

    def within(product: Linear) -> tuple[Linear, AdaptedLinear]:
        """Below the sum over ranks, where there is one."""
        if isinstance(product, Summed):
            product.layer = adapted(product.layer)
            return product, product.layer
        of_all = adapted(product)
        return of_all, of_all

    if site.kind == QKV:
        layer.qkv, found = within(layer.qkv)
    elif site.kind == ATTENTION_OUT:
        layer.attention_out, found = within(layer.attention_out)
    else:
        assert isinstance(layer.mlp, Mlp)
        if site.kind == MLP_IN:
            layer.mlp.inner, found = within(layer.mlp.inner)
        else:
            assert site.kind == MLP_OUT
            layer.mlp.outer, found = within(layer.mlp.outer)
    return found
