"""What a prompt costs that is prepared on the event loop: `python -m benchmarks.short_texts [MODEL]` (some seconds).

A model's tokenizer, with its own regular expression and with each that is known of other families, over texts of the
size from which on prompts go to a text process: those that were found to cost the most, and a line of English.
Milliseconds of processor time for one request, the least of several rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterable, Iterator

from octavo.models import gguf_tokenizer
from octavo.models.resolve import resolve_model
from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.short_texts import SHORT_BYTES, ShortTexts
from scheduler_svc.text.tokenizer import Tokenizer

PATTERNS = {
    "llama 3": gguf_tokenizer._LLAMA3.split,
    "qwen 2": gguf_tokenizer._QWEN2.split,
    "tekken": gguf_tokenizer._TEKKEN.split,
    "gpt 4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
}
_PARTS = (
    *(chr(code) for code in (*range(9, 14), *range(32, 127))),
    *("😀", "\u0301", "\u0300\u0345", "a\u0301", "漢", "각", "\ufdfa", "▁", "\xa0", "\u2028", "\u017f"),
    *("'s", "'S ", " a", "ab", "\r\n", "\n ", " \n", "\t \n", "1a", "a1", ".a", "A", "aA", "Aa", "ʰa", "'l"),
    *("<|im_start|>", "<|im_start|"),
)
LINE = "How many of the ships that left the harbour in the storm of that year have ever come back?"
ROUNDS = 5


def hostile() -> Iterator[bytes]:
    """Requests of `SHORT_BYTES` at most, whose texts repeat what makes tokenizers slow, or mix it."""
    chance = random.Random(1)
    texts = [(part * SHORT_BYTES, "") for part in _PARTS]
    texts += [(part * SHORT_BYTES, "!") for part in (" ", "\n", "\t", "a", "\xa0", " \n")]
    texts += [("".join(chance.choices(_PARTS, k=SHORT_BYTES)), "") for _ in range(20)]
    for text, end in texts:
        prompt = text.encode()[: SHORT_BYTES - 8].decode(errors="ignore") + end
        yield pb.GenerateRequest(prompt=prompt).SerializeToString()


def splitting(model: ServedModel, pattern: str) -> ServedModel:
    """The same, but its tokenizer splits by this expression first."""
    content = json.loads(model.tokenizer.files["tokenizer.json"])
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    files = {**model.tokenizer.files, "tokenizer.json": json.dumps(content).encode()}
    return dataclasses.replace(model, tokenizer=Tokenizer(files))


def least_s(model: ServedModel, requests: Iterable[bytes], rounds: int) -> list[float]:
    """Processor seconds of each request, the least of some rounds."""
    short = ShortTexts(lambda: ServedModels.of(model), TextSettings(), cpu_clock=float)  # which spends what it likes
    found = []
    for data in requests:
        took_s = []
        for _ in range(rounds):
            started_s = time.thread_time()
            assert short.prepare(data) is not None, "it would go to a text process"
            took_s.append(time.thread_time() - started_s)
        found.append(min(took_s))
    return found


def main() -> None:
    """Prints a row a regular expression."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="a name, or a folder")
    tokenizer = Tokenizer.from_folder(resolve_model(parser.parse_args().model))
    info = worker_pb2.WorkerInfo(vocab_size=tokenizer.vocab_size, block_size=16)
    sizes = worker_pb2.InitializeResponse(
        max_model_len=8192, num_device_blocks=512, max_num_seqs=8, max_num_batched_tokens=512
    )
    own = ServedModel.from_worker(info, sizes, tokenizer, "own")
    line = [pb.GenerateRequest(prompt=LINE).SerializeToString()]
    print("| expression | worst text, ms | mean of the hostile ones | a line |\n| --- | --- | --- | --- |")
    for name, model in {"own": own, **{name: splitting(own, each) for name, each in PATTERNS.items()}}.items():
        found = least_s(model, hostile(), ROUNDS)
        ordinary_s = min(least_s(model, line * 20, ROUNDS))
        print(f"| {name} | {1e3 * max(found):.2f} | {1e3 * sum(found) / len(found):.2f} | {1e3 * ordinary_s:.3f} |")


if __name__ == "__main__":
    main()
