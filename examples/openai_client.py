"""OpenAI's own client against `octavo serve --http-port 8000`: a chat as it is written, a completion with logprobs.

python examples/openai_client.py [BASE_URL]
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

with OpenAI(base_url=base_url, api_key="none") as client:
    model = client.models.list().data[0].id

    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=32,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")

    completion = client.completions.create(
        model=model, prompt="The sea is", max_tokens=4, logprobs=0, extra_body={"top_k": 20, "min_tokens": 4}
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs
    for token, logprob in zip(logprobs.tokens, logprobs.token_logprobs, strict=True):
        print(f"{token!r}: {logprob:.2f}")
