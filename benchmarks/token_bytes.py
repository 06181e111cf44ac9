"""Bytes of weights that an engine reads for each token of a request that is alone: with the speed of memory its bound.

Weights are counted as the engine keeps them, an embedding that is not the head's left out; so are keys and values.
Octavo finds out when it loads a model how few bits keep it: `python -m benchmarks.token_bytes MODEL NAME=VALUE ...`
loads it, with options of `LLM`, and prints them.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

from octavo.shared import log
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model


def of_checkpoint(folder: Path, bytes_a_number: int) -> int:
    """All numbers of the weights in `folder`, whose head is its embedding or a matrix of its own."""
    count = of_embedding = 0
    has_head = False
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                size = math.prod(file.get_slice(name).get_shape())
                count += size
                of_embedding += size if "embed_tokens" in name else 0
                has_head |= name.startswith("lm_head")
    return (count - of_embedding if has_head else count) * bytes_a_number


def of_octavo(model: Path, options: list[str], variables: dict[str, str]) -> int:
    """Loads the model in a process with these variables, which ends then."""
    command = [sys.executable, "-m", "benchmarks.token_bytes", str(model), *options]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def of_decoder(model: Decoder) -> int:
    """Of its layers and its head."""
    assert model.head is not None
    return model.head.weight_bytes + sum(layer.weights_bytes for layer in model.layers)


def main() -> int:
    """Prints the bytes of layers and head."""
    parser = argparse.ArgumentParser(description="Counts the bytes of weights that a token of one request reads.")
    parser.add_argument("model", type=Path)
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="dtype, quantization; others change nothing")
    arguments = parser.parse_args()
    log.configure()  # to stderr: what is written of a quantised model is told when that is done
    options = dict(option.split("=", 1) for option in arguments.options)
    with model_folder(arguments.model) as folder:
        config = ModelConfig.from_folder(
            folder, options.get("dtype", "auto"), quantization=options.get("quantization", "")
        )
        model = load_model(folder, config, "cpu")
    if not isinstance(model, Decoder):
        raise SystemExit(f"{arguments.model}: layers that transformers computes are not counted")
    print(of_decoder(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
