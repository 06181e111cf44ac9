"""Sets of instructions that a process can be limited to, as if its processor had no others.

A library that chooses its code when it starts has a variable that takes instructions away from it; a set gives all of
them. Which of them an engine needs, `benchmarks.peer_engine` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cpu.native.build import LEVELS, processor_features


@dataclass(frozen=True)
class InstructionSet:
    """By what each library calls it; the first is a level of `kernels.cpu.native.build`."""

    level: str
    aten: str
    onednn: str
    mkl: str

    def lacking(self) -> list[str]:
        """What of the set this machine does not have itself."""
        return sorted(LEVELS[self.level].needs - processor_features())

    def variables(self) -> dict[str, str]:
        """For the environment of a process. OpenVINO's own kernels have a variable beside oneDNN's, from 2026.4 on, and
        both have to say the same."""
        return {
            "KERNELS_CPU_LEVEL": self.level,
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OV_CPU_MAX_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


SETS = {
    "avx2": InstructionSet("avx2", "avx2", "AVX2", "AVX2"),
    "avx512": InstructionSet("avx512", "avx512", "AVX512_CORE", "AVX512"),
    "avx512-bf16": InstructionSet("avx512-bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
}
