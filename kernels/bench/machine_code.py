"""What a kernel's machine code does in its loops over products. Reads `cuobjdump -sass`, which comes with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile

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


def spills_in_products(sass: str) -> int | None:
    """Instructions by which the innermost loops over products of matrix units use memory as registers; None: no loop
    has such products.

    A loop is what lies between a branch and an earlier place to which it leads.
    """
    code = [(int(found[1], 16), found[2]) for found in _INSTRUCTION.finditer(sass)]
    loops = []
    for address, text in code:
        if (branch := _BRANCH.search(text)) and (begin := int(branch[1], 16)) <= address:
            body = [text for place, text in code if begin <= place <= address]
            if any(_PRODUCT.search(text) for text in body):
                loops.append((begin, address, sum(bool(_SPILL.search(text)) for text in body)))
    innermost = [
        spills
        for begin, end, spills in loops
        if not any(begin <= other and last <= end and (other, last) != (begin, end) for other, last, _ in loops)
    ]
    return sum(innermost) if innermost else None
