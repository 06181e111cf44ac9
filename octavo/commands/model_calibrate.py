"""`octavo model calibrate`: measures how large a model's keys and values become over a text, and keeps scales for it.

Workers with `--kv-cache-dtype fp8` on this machine then use them; those on others are given the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

PIECE_TOKENS = 1024  # of a text that is computed as one sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the text, and where the model is computed."""
    parser.add_argument("name", metavar="MODEL", help="folder, GGUF file or name, as of a worker")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="of the kind that will be asked")
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192,
        metavar="N",
        help="most tokens of the text to compute (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where the scales go (default: into Octavo's cache)"
    )
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|cuda:N", help="as the worker's option")
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="as the worker's option")
    parser.add_argument("--load-format", default="auto", help="as the worker's option")
    parser.add_argument("--trust-remote-code", action="store_true", help="as the worker's option")


def run(arguments: argparse.Namespace) -> int:
    """Prints where the scales are, and which layers need them. Raises CommandError and what a worker raises."""
    from octavo.cli import CommandError
    from octavo.shared import log
    from octavo.shared.options import OptionError
    from scheduler_svc.text.tokenizer import Tokenizer
    from worker_svc.config import WorkerConfig
    from worker_svc.models.cache_scales.cache_scales import LARGEST, CacheScales, calibrated_path
    from worker_svc.models.cache_scales.checkpoint_scales import numbers_of
    from worker_svc.server import load
    from worker_svc.steps.calibration import largest_keys_and_values

    log.configure("warning")
    try:
        config = WorkerConfig(
            model=arguments.name,
            device=arguments.device,
            dtype=arguments.dtype,
            load_format=arguments.load_format,
            trust_remote_code=arguments.trust_remote_code,
            download_dir=str(arguments.download_dir or ""),
        )
    except ValueError as error:
        raise OptionError(str(error)) from None
    content = arguments.text.read_bytes()
    runner, files = load(config)
    if runner.config.style.latent is not None:
        raise CommandError(f"{arguments.name} has a cache of latents, which is not kept in 8 bits")
    tokens = Tokenizer.load(files.contents).encode(content.decode(errors="replace"))[: max(arguments.tokens, 0)]
    if not tokens:
        raise CommandError(f"{arguments.text} has no tokens to compute")
    size = min(PIECE_TOKENS, runner.config.max_model_len - 1)
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    largest = largest_keys_and_values(runner, pieces)
    scales = CacheScales.of_largest(largest)
    path = arguments.output or calibrated_path(runner.config.model_hash)
    text = hashlib.sha256(content).hexdigest()
    scales.write(path, runner.config.model_name, runner.config.model_hash, tokens=len(tokens), text_sha256=text)
    clipped = (largest.amax(dim=(1, 2)) > LARGEST).nonzero().flatten().tolist()
    row = {"path": str(path), "digest": scales.digest, "tokens": len(tokens), "largest": float(largest.max())}
    if arguments.json:
        print(json.dumps({**row, "layers_cut_without_scales": clipped}))
        return 0
    print(path)
    print(f"{len(tokens)} tokens: keys and values up to {row['largest']:.4g}; scales {scales.digest or 'of 1'}")
    if clipped:
        print(f"without scales, keys or values of layers {numbers_of(clipped)} would be cut at {LARGEST:g}")
    return 0
