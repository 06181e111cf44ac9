"""A prefix that many simultaneous requests share is computed once, over the whole service."""

from __future__ import annotations

import asyncio

from octavo import AsyncClient, SamplingParams
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import scheduler
from tests.scheduler.hashed_tokens import hashed_after

NUM_REQUESTS, NUM_SHARED, NUM_OWN, NUM_OUT = 64, 512, 32, 4


async def test_64_clients_at_once_have_their_common_prompt_computed_once():
    shared = [33 + position * 7 % 90 for position in range(NUM_SHARED)]
    prompts = [shared + [33 + number] * NUM_OWN for number in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    fake = FakeWorker(
        block_size=16, num_blocks=2500, max_num_seqs=NUM_REQUESTS, max_model_len=1024, max_num_batched_tokens=2048
    )
    with fake as worker, scheduler(f"--worker={worker.address}") as it:
        it.wait_until_ready()
        async with AsyncClient(it.address) as client:
            outputs = await asyncio.gather(
                *(client.complete(None, params, prompt_token_ids=prompt) for prompt in prompts)
            )
        num_prefilled = worker.num_tokens_computed - NUM_REQUESTS * (NUM_OUT - 1)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == hashed_after(prompt, NUM_OUT)
    least = NUM_SHARED + NUM_REQUESTS * NUM_OWN
    assert least <= num_prefilled <= 1.05 * least
    told = sum(output.metrics.num_prompt_tokens - output.metrics.num_cached_tokens for output in outputs)
    assert told == num_prefilled, "what clients are told is what was computed"
