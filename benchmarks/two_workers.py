"""Does a second worker pay on this machine? `python -m benchmarks.two_workers`

`octavo serve` with one worker and with two, each of one thread, and a backlog of requests with random weights: pairs in
turns, the median of their ratios. The model is small, but large enough that its steps and not the scheduler's take the
time; requests ask for one message at their end, so that streaming takes no core from a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.served import served, wait_until_ready
from octavo.bench import machine
from octavo.bench.byte_tokenizer import END_OF_TEXT, IM_END, write_byte_tokenizer
from octavo.bench.streaming import GENERATE
from protos import inference_pb2 as pb

RESULTS = Path(__file__).parent / "results"
VOCAB_SIZE = 2048
MAX_MODEL_LEN = 1024


def main() -> None:
    """Prints the median ratio; keeps all pairs in benchmarks/results/."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="that run at once on a worker")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts = machine.describe()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.hidden_size, arguments.layers)
        for number in range(arguments.pairs):
            order = (1, 2) if number % 2 == 0 else (2, 1)  # what the machine does meanwhile strikes both alike
            speeds = {workers: measure(folder, workers, arguments) for workers in order}
            pairs.append({"one": round(speeds[1], 1), "two": round(speeds[2], 1), "ratio": speeds[2] / speeds[1]})
            load = os.getloadavg()[0]
            print(f"{speeds[1]:.0f} tokens/s, {speeds[2]:.0f} with two: {pairs[-1]['ratio']:.2f}; load {load:.1f}")
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    print(f"median of {len(pairs)} pairs: {ratio:.2f}")
    if not arguments.no_results:
        keep(facts, arguments, pairs, ratio)


def write_model(folder: Path, hidden_size: int, num_layers: int) -> None:
    """A configuration and a tokenizer; its weights are drawn by the worker."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "intermediate_size": 3 * hidden_size,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_byte_tokenizer(folder, VOCAB_SIZE)


def measure(model: str, workers: int, arguments: argparse.Namespace) -> float:
    """Output tokens a second of a fresh server, from the first request that is sent to the last answer."""
    flags = ("--load-format", "dummy", "--workers", str(workers), "--num-threads", "1")
    with served(model, *flags, "--max-num-seqs", str(arguments.max_num_seqs)) as address:
        wait_until_ready(address)
        with grpc.insecure_channel(address) as channel:
            wait_for_workers(channel, workers)
        asyncio.run(_backlog(address, 8 * workers, arguments.prompt_tokens, 8, salt="warm-up"))
        return asyncio.run(
            _backlog(address, arguments.requests, arguments.prompt_tokens, arguments.output_tokens, salt="run")
        )


def wait_for_workers(channel: grpc.Channel, count: int, timeout_s: float = 120.0) -> None:
    """Until so many have joined. Raises TimeoutError."""
    list_workers = channel.unary_unary("/octavo.v1.Control/ListWorkers")
    deadline = time.monotonic() + timeout_s
    while len(pb.ListWorkersResponse.FromString(list_workers(b"")).workers) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {count} workers after {timeout_s:.0f} s")
        time.sleep(0.1)


async def _backlog(address: str, requests: int, prompt_tokens: int, output_tokens: int, salt: str) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        generate = channel.unary_stream(GENERATE)

        async def one(number: int) -> int:
            request = pb.GenerateRequest(
                prompt_token_ids=pb.TokenIds(
                    ids=[(number * 7919 + place * 31) % 200 for place in range(prompt_tokens)]
                ),
                sampling_params=pb.SamplingParams(
                    max_tokens=output_tokens, ignore_eos=True, temperature=0, detokenize=False
                ),
                stream=False,
                cache_salt=salt,
            )
            num_tokens = 0
            async for data in generate(request.SerializeToString()):
                response = pb.GenerateResponse.FromString(data)
                num_tokens += sum(len(output.token_ids) for output in response.outputs)
            return num_tokens

        started_s = time.monotonic()
        counts = await asyncio.gather(*(one(number) for number in range(requests)))
        took_s = time.monotonic() - started_s
    if sum(counts) != requests * output_tokens:
        raise RuntimeError(f"{sum(counts)} tokens came, {requests * output_tokens} were asked for")
    return sum(counts) / took_s


def keep(facts: dict[str, Any], arguments: argparse.Namespace, pairs: list[dict[str, float]], ratio: float) -> None:
    """Writes a run into benchmarks/results/."""
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}-two-workers-{machine.slug(facts)}.json"
    asked = {name: value for name, value in vars(arguments).items() if name != "no_results"}
    result = {"machine": facts, "asked": asked, "pairs": pairs, "median_ratio": ratio}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
