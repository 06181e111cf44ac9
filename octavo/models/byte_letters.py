"""The letters in which byte-level vocabularies write bytes (GPT-2's table)."""

from __future__ import annotations


def byte_letters() -> list[str]:
    """By byte: itself where it can be seen, else a letter from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(stand_ins)) for byte in range(256)]
