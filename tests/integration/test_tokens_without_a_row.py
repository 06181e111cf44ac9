"""A text with a token that was added to the tokenizer and not to the model: who sent it hears so, and nobody else."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from octavo import AsyncClient, SamplingParams
from octavo.errors import RequestFailed
from tests.chaos.worker_process import WorkerProcess
from tests.gateway.running import gateway
from tests.integration.scheduler_process import scheduler
from tests.tiny_models import NUM_PADDING_TOKENS, make_tiny_llama

VOCAB_SIZE = 1031
ADDED = [f"<added {number}>" for number in range(NUM_PADDING_TOKENS + 1)]  # all but the last one have a row
BESIDE = 300  # tokens of the stream beside it
SIZES = ["--max-model-len=512", "--max-num-seqs=8", "--kv-cache-memory=0.01", "--swap-space=0", "--num-threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB_SIZE)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens(ADDED)
    tokenizer.save(file)
    assert tokenizer.token_to_id(ADDED[-1]) == VOCAB_SIZE
    return folder


async def num_generated(address: str, max_tokens: int, begun: asyncio.Event | None = None, **prompt: Any) -> int:
    """Greedily; `begun` is set with the first tokens."""
    params, count = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), 0
    async with AsyncClient(address) as client:
        async for delta in client.generate(sampling_params=params, **prompt):
            count += sum(len(output.token_ids) for output in delta.outputs)
            if count and begun is not None:
                begun.set()
    return count


async def test_it_is_refused_before_it_reaches_a_step(folder: Path, tmp_path: Path) -> None:
    text, complaint = f"a{ADDED[-1]}", f"got token {VOCAB_SIZE} ('{ADDED[-1]}'); accepted: 0 to {VOCAB_SIZE - 1}"
    messages = [{"role": "user", "content": text}]
    with ExitStack() as stack:
        worker = WorkerProcess([str(folder), *SIZES], tmp_path / "worker.log")
        stack.callback(worker.end)
        worker.wait_until_ready()
        service = stack.enter_context(scheduler(f"--worker=127.0.0.1:{worker.port}"))
        service.wait_until_ready()
        http = stack.enter_context(gateway(service.address))
        begun = asyncio.Event()
        beside = asyncio.create_task(num_generated(service.address, BESIDE, begun, prompt="b" * 40))
        await begun.wait()
        for prompt in ({"prompt": text}, {"messages": messages}):
            with pytest.raises(RequestFailed) as raised:
                await num_generated(service.address, 2, **prompt)
            assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT and complaint in str(raised.value)
        for path, body in (("completions", {"prompt": text}), ("chat/completions", {"messages": messages})):
            status, answer = await asyncio.to_thread(http.post, f"/v1/{path}", {**body, "max_tokens": 2})
            assert status == 400 and complaint in answer["error"]["message"]
        assert await num_generated(service.address, 2, prompt=f"a{ADDED[-2]}") == 2
        assert await beside == BESIDE
        assert "step refused" not in worker.log.read_text()
