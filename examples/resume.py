"""A stream that breaks is taken up where it was, as `Client` does by itself: python examples/resume.py [ADDRESS]

The second request carries the first one's id, its seed and the tokens that arrived. Those are neither computed nor sent
again; the text goes on at the character where it stopped.
"""

from __future__ import annotations

import itertools
import sys

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

SENT_BEFORE_THE_BREAK = 5  # messages that bring tokens


def main(address: str = "127.0.0.1:50051") -> None:
    """Prints the text before and after the break, and exits with 1 if together they are not the undisturbed text."""
    params = pb.SamplingParams(temperature=0.8, max_tokens=32, seed=7, ignore_eos=True)
    with grpc.insecure_channel(address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        whole = _text(inference.Generate(pb.GenerateRequest(prompt="The sea is", sampling_params=params)))

        request = pb.GenerateRequest(prompt="The sea is", sampling_params=params, request_id="resumed-example")
        stream = inference.Generate(request)
        came = [part for message in itertools.islice(stream, 1 + SENT_BEFORE_THE_BREAK) for part in message.outputs]
        stream.cancel()
        before = "".join(part.text for part in came)
        tokens = [token for part in came for token in part.token_ids]
        print(f"{len(tokens)} tokens before the break: {before!r}")

        request.resume.add(index=0, token_ids=tokens)
        after = _text(inference.Generate(request))
    print(f"{params.max_tokens - len(tokens)} tokens after it:      {after!r}")
    if before + after != whole:
        sys.exit(f"not the undisturbed text: {whole!r}")
    print("together they are the undisturbed text")


def _text(stream: grpc.Call) -> str:
    return "".join(part.text for message in stream for part in message.outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
