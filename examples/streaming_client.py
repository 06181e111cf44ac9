"""An answer shown as it is made, by a running `octavo serve`: python examples/streaming_client.py [ADDRESS]"""

from __future__ import annotations

import sys

from octavo import Client, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    """Prints each piece of text when it arrives, then why the output ended."""
    params = SamplingParams(temperature=0.2, max_tokens=48)
    with Client(address) as client:
        print(f"{client.model_info().model}: The sea is", end="", flush=True)
        for delta in client.generate("The sea is", params):
            for part in delta.outputs:
                print(part.text, end="", flush=True)
                if part.finish_reason:
                    print(f"\n[{part.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
