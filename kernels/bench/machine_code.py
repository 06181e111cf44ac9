"""What a kernel's machine code does in its loops over products. Reads `cuobjdump -sass`, which comes with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

import triton

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
_SPILL = re.compile(r"\b(LDL|STL)\b")
_PRODUCT = re.compile(r"\b\w*MMA\b")


def disassembled(cubin: bytes) -> str:
    """The instructions of a kernel, a line each with its address. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True, slots=True)
class Loop:
    """What the loop over products of matrix units consists of, branches that are seldom taken included."""

    instructions: int = 0  # of one warp; 0: there is no such loop
    products: int = 0  # instructions for matrix units
    barriers: int = 0  # at which all warps of a block wait for each other
    spills: int = 0  # instructions by which it uses memory as registers
    copies: str = ""  # "8 LDGSTS", each of 16 bytes a thread, or "2 UTMALDG", each of a tile
    copies_under_way: int | None = None  # groups of LDGSTS that may still be when it waits for the first
    products_under_way: int | None = None  # at the least strict wait for Hopper's; 0: each is waited for at once

    def __str__(self) -> str:
        if not self.instructions:
            return "no loop over products"
        said = [f"{self.instructions} instructions", f"{self.products} products", f"{self.barriers} barriers"]
        said += [f"copies {self.copies}"] * bool(self.copies)
        said += [f"{self.copies_under_way} groups of copies under way"] * (self.copies_under_way is not None)
        said += [f"{self.products_under_way} products under way"] * (self.products_under_way is not None)
        return ", ".join(said + [f"{self.spills} spills"] * bool(self.spills))


def main_loop(sass: str) -> Loop:
    """The shortest of the innermost loops over products."""
    innermost = _innermost(sass)
    if not innermost:
        return Loop()
    text = "\n".join(body := min(innermost, key=len))
    copies = Counter(re.findall(r"\b(LDGSTS|UTMALDG)\b", text))
    groups = [int(number, 16) for number in re.findall(r"\bDEPBAR\.LE SB0, (0x[0-9a-f]+)", text)]
    waits = [int(number, 16) for number in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", text)]
    return Loop(
        len(body),
        len(_PRODUCT.findall(text)),
        len(re.findall(r"\bBAR\.SYNC", text)),
        len(_SPILL.findall(text)),
        ", ".join(f"{number} {name}" for name, number in copies.items()),
        min(groups) if "LDGSTS" in copies and groups else None,
        max(waits, default=None),
    )


def spills_in_products(sass: str) -> int | None:
    """Instructions by which the innermost loops over products of matrix units use memory as registers; None: no loop
    has such products."""
    innermost = _innermost(sass)
    return sum(bool(_SPILL.search(text)) for body in innermost for text in body) if innermost else None


def _innermost(sass: str) -> list[list[str]]:
    """Instructions of each loop that has products, and in it no other such loop.

    A loop is what lies between a branch and an earlier place to which it leads. A wait that stands behind the code and
    leads back into a loop is none: it begins within that loop and ends past it, which loops in one another do not.
    """
    code = [(int(found[1], 16), found[2]) for found in _INSTRUCTION.finditer(sass)]
    loops = []
    for address, text in code:
        if (branch := _BRANCH.search(text)) and (begin := int(branch[1], 16)) <= address:
            body = [text for place, text in code if begin <= place <= address]
            if any(_PRODUCT.search(text) for text in body):
                loops.append((begin, address, body))
    nested = [
        (begin, end, body)
        for begin, end, body in loops
        if not any(other < begin <= last < end for other, last, _ in loops)
    ]
    return [
        body
        for begin, end, body in nested
        if not any(begin <= other and last <= end and (other, last) != (begin, end) for other, last, _ in nested)
    ]
