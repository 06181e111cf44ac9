"""`LoRARequest`: which adapter a prompt is for, and where it is."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidPrompt


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name, loaded from `lora_path` when a prompt first names it.

    `lora_int_id` is taken for scripts that number their adapters; what tells two of them apart is the name.
    Raises InvalidPrompt (a ValueError) without a name or path.

    >>> LoRARequest("pirate", 1, "/adapters/pirate").lora_name
    'pirate'
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise InvalidPrompt(f"{name}: got {value!r}; accepted: text that is not empty")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidPrompt(f"lora_int_id: got {self.lora_int_id!r}; accepted: a number from 1")
