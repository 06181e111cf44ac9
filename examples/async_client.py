"""Three requests at once over one connection to `octavo serve`: python examples/async_client.py [ADDRESS]"""

from __future__ import annotations

import asyncio
import sys

from octavo import AsyncClient, SamplingParams

PROMPTS = ["The sea is", "Once upon a time", "A tide is"]


async def ask(client: AsyncClient, prompt: str) -> str:
    """The whole text that the model writes after `prompt`."""
    text = ""
    async for delta in client.generate(prompt, SamplingParams(temperature=0.2, max_tokens=32)):
        text += "".join(part.text for part in delta.outputs)
    return text


async def main(address: str = "127.0.0.1:50051") -> None:
    """Prints the answers in the order of the prompts; the server computes them in the same steps."""
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r} -> {answer!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
