"""One variant to machine code, without a GPU, and what ptxas says that it takes.

Triton's interpreter must be off where kernels are imported: with it, there is nothing to compile. Results are kept in
Triton's own cache, under the hash of the kernel's source and of everything that it is compiled for.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_manager

from kernels.bench.compiled import Compiled
from kernels.bench.machine_code import disassembled, main_loop, spills_in_products
from kernels.bench.targets import Target
from kernels.gpu.variant import Variant

_RECORD = "resources.json"
_REVISION = 5  # of what is kept; a new one forgets the old
_WARP_SIZE = 32


def compile_variant(op: str, variant: Variant, target: Target) -> Compiled:
    """Compile, or find what compiling gave before. What the compiler raises becomes `error`; it is not kept."""
    started = time.perf_counter()
    try:
        numbers = _compile(variant, target)
    except Exception as error:  # of many types, and all of them say that this variant does not compile
        numbers = {"error": _one_line(error), "seconds": time.perf_counter() - started}
    return Compiled(op, variant.name, target.name, variant.spills_are_allowed(target.capability), **numbers)


def _compile(variant: Variant, target: Target) -> dict[str, Any]:
    source = source_of(variant)
    gpu = GPUTarget("cuda", target.capability, _WARP_SIZE)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    facts = (_REVISION, triton.__version__, make_backend(gpu).hash(), source.hash(), sorted(options.items()))
    kept = get_cache_manager(hashlib.sha256(repr(facts).encode()).hexdigest())
    if path := kept.get_file(_RECORD):
        with open(path, encoding="utf-8") as file:
            numbers: dict[str, Any] = json.load(file)
            return numbers
    started = time.perf_counter()
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True  # it tells of spills, and a kernel in Triton's cache does not
        triton.knobs.compilation.always_compile = True
        kernel = triton.compile(source, target=gpu, options=options)
    numbers = {
        **read_log(log.getvalue()),
        "shared_bytes": kernel.metadata.shared,
        "tensor_memory_columns": getattr(kernel.metadata, "tmem_size", 0) or 0,
        "has_tf32": re.search(r"[.:]tf32\b", kernel.asm["ptx"]) is not None,
        "seconds": time.perf_counter() - started,
    }
    sass = disassembled(kernel.asm["cubin"])
    numbers["loop"] = str(main_loop(sass))
    if numbers["spill_bytes"]:
        numbers["spills_in_products"] = spills_in_products(sass)
    kept.put(json.dumps(numbers), _RECORD, binary=False)
    return numbers


def source_of(variant: Variant) -> ASTSource:
    """What Triton compiles: every argument in its place, constants among them. Raises ValueError for a misfit."""
    names = variant.kernel.arg_names
    given = [*variant.signature, *variant.constants]
    if sorted(names) != sorted(given):
        raise ValueError(f"arguments are {', '.join(sorted(names))}; the variant gives {', '.join(sorted(given))}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible_by_16}
    return ASTSource(variant.kernel, signature, dict(variant.constants), divisible)


def read_log(text: str) -> dict[str, Any]:
    """Registers, bytes of spill stores and a remark on speed, from what `ptxas -v` prints; sums over functions."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", text)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", text)]
    if not registers or not spills:
        raise RuntimeError(f"ptxas does not say what the kernel takes: {text!r}")
    remarks = re.findall(r"Potential Performance Loss: (.*?)(?: in the function|$)", text, re.MULTILINE)
    return {"registers": max(registers), "spill_bytes": sum(spills), "remark": "; ".join(dict.fromkeys(remarks))}


def _one_line(error: BaseException) -> str:
    """What was wrong first, without the source and the commands that Triton quotes around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"\b(error|fatal)\b *:", line)]
    return f"{type(error).__name__}: {(told or lines[-1:] or ['no message'])[0]}"
