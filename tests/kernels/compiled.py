"""What is looked up in kernels that are compiled: each part in a process where Triton's interpreter is off."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kernels.bench.compiler import compile_variant, source_of
from kernels.bench.machine_code import disassembled, main_loop
from kernels.bench.targets import TARGETS
from kernels.gpu.attention.kinds import variants_of_all
from kernels.gpu.cache import rotary_and_cache
from kernels.gpu.quantized import grouped_product, rounded_rms_norm
from kernels.gpu.rows import rms_norm
from kernels.gpu.variant import Variant


def main() -> None:
    """The part that the argument names."""
    parts = (resources, sums_of_norms, squares_of_heads, loops_of_attention, float32_products)
    {part.__name__: part for part in parts}[sys.argv[1]]()


def compiled(variant: Variant, capability: int) -> Any:
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    return triton.compile(source_of(variant), target=GPUTarget("cuda", capability, 32), options=options)


def resources() -> None:
    """Of toys, as reported, and as their machine code has them."""
    for op, name in (("toys.add", "add bf16"), ("faulty_toys.spilling", "spilling, allowed")):
        module = importlib.import_module(f"tests.kernels.{op}")
        variant = next(variant for variant in module.variants() if variant.name == name)
        said = compile_variant("toy", variant, TARGETS["sm_90"])
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled(variant, 90).asm["cubin"])
            file.flush()
            usage, code = (
                subprocess.run(
                    [triton.knobs.nvidia.cuobjdump.path, flag, file.name], capture_output=True, text=True, check=True
                ).stdout
                for flag in ("-res-usage", "-sass")
            )
        print(json.dumps({"said": said.as_dict(), "usage": usage, "local_stores": code.count("STL")}))


def sums_of_norms() -> None:
    """How those of both norms are laid out over threads, and in how many operations they are made of squares."""
    for variant in (*rms_norm.variants(), *rounded_rms_norm.variants()):
        if variant.name in ("rms_norm bf16 4096 residual", "rounded_rms_norm fp8e4nv 4096"):
            kernel = compiled(variant, 90)
            ir = kernel.asm["ttgir"]
            operand = re.search(r"addf.*?: \(tensor<(\S+), (#\w+)>\) ->", ir, re.S)
            assert operand is not None
            layout = re.search(f"^{operand[2]} = (.*)$", ir, re.M)
            assert layout is not None
            print(operand[1], layout[1], kernel.asm["ptx"].count("fma.rn.f32"))


def squares_of_heads() -> None:
    """What the norms of rows and of heads add up, and to which threads of a warp that is shared out; of 128 numbers."""
    named = ("rms_norm bf16 128", "rotary_and_cache bf16 cache bf16 head 128 turned 128 block 16 normed")
    for variant in (*rms_norm.variants(), *rotary_and_cache.variants()):
        if variant.name in named:
            ir = compiled(variant, 90).asm["ttgir"]
            for reduced in re.findall(r'"tt.reduce"\((%\w+)\)', ir):
                made = re.search(rf"{reduced} = (\S+) .*: tensor<\S+, (#\w+)>", ir)
                assert made is not None
                layout = re.search(f"^{made[2]} = .*(sizePerThread.*), warpsPerCTA = .*, 1]", ir, re.M)
                assert layout is not None
                print(made[1], layout[1])


def loops_of_attention() -> None:
    """Of both kernels, on a card that multiplies out of registers."""
    for variant in variants_of_all():
        is_meant = "bf16 head 128 group 4 block 16 tile" in variant.name and " join " not in variant.name
        if is_meant and 80 in variant.capabilities:
            kernel = compiled(variant, 80)
            loop = main_loop(disassembled(kernel.asm["cubin"]))
            print(loop.barriers, loop.copies_under_way, loop.spills, kernel.asm["ttgir"].count("warpsPerCTA = [1, "))


def float32_products() -> None:
    """What is wrong with that of float32 rows and codes, on a card whose matrix units would multiply them as TF32."""
    for variant in grouped_product.variants():
        if variant.signature["x"] == "*fp32" and 100 in variant.capabilities:
            for num_warps in (4, variant.num_warps):
                print(compile_variant("product", replace(variant, num_warps=num_warps), TARGETS["sm_100"]).fault)
