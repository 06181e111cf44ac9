"""What arrives when: requests of a load that is described by a few numbers, and what their prompts are made of.

A prompt is described by its content: runs of (text, tokens), where the same text is the same tokens. So two prompts
share as many tokens as their contents begin alike, and a trace of prompts needs no memory for their tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Content = tuple[tuple[int, int], ...]  # (which text, how many tokens of it from its start on)

SECOND_NS = 1_000_000_000
OWN_TEXT = 1 << 40  # texts from here on are of one request alone
_NOTHING: TokenIds = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a load. `history` stands before its own content: what was said before in its conversation."""

    at_ns: int  # of arrival
    content: Content
    num_output_tokens: int
    num_turns_left: int = 0  # requests that follow in its conversation, each alike
    think_ns: int = 0  # between an answer and the next request
    history: TokenIds = field(default_factory=lambda: _NOTHING)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, the history included."""
        return len(self.history) + sum(length for _, length in self.content)

    @property
    def num_tokens_at_end(self) -> int:
        """Tokens of the whole conversation, its last answer included."""
        own = self.content[-1][1] + self.num_output_tokens
        return self.num_prompt_tokens + self.num_output_tokens + self.num_turns_left * own

    def prompt(self) -> TokenIds:
        """int64[num_prompt_tokens], made again at every call."""
        return np.concatenate([self.history, *(_tokens(text, length) for text, length in self.content)])

    def next_turn(self, history: TokenIds, ended_ns: int, text: int) -> Request | None:
        """What the same client sends next, after an answer that ended then; `history` has the answer's tokens, too."""
        if not self.num_turns_left:
            return None
        return replace(
            self,
            at_ns=ended_ns + self.think_ns,
            content=((text, self.content[-1][1]),),
            num_turns_left=self.num_turns_left - 1,
            history=history,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers that describe a load of requests.

    Attributes:
        requests: conversations, where they have several turns.
        prompt_tokens, output_tokens: of a request; with `spread` on average, uniform within that share of it.
        shared_tokens: stand in front of each prompt, the same for all of one tenant.
        rate: arrivals a second, at random (a Poisson process); None: all of them at the start.
        burst: of the same rate, so many always arrive at once.
        turns: requests of a conversation; each prompt has all that was said before.
    """

    requests: int = 1000
    prompt_tokens: int = 64
    output_tokens: int = 128
    shared_tokens: int = 0
    tenants: int = 1
    spread: float = 0.0
    rate: float | None = None
    burst: int = 1
    turns: int = 1
    think_s: float = 1.0

    def arrivals(self, seed: int) -> list[Request]:
        """In order of arrival, the same for the same seed."""
        rng = random.Random(f"fleet/{seed}")
        requests = []
        at_s = 0.0
        for number in range(self.requests):
            if self.rate is not None and number % self.burst == 0 and number:
                at_s += rng.expovariate(self.rate / self.burst)
            shared = ((rng.randrange(self.tenants), self.shared_tokens),) if self.shared_tokens else ()
            own = (OWN_TEXT + number * self.turns, self._length(rng, self.prompt_tokens))
            request = Request(
                at_ns=round(at_s * SECOND_NS),
                content=(*shared, own),
                num_output_tokens=self._length(rng, self.output_tokens),
                num_turns_left=self.turns - 1,
                think_ns=round(self.think_s * SECOND_NS),
            )
            requests.append(request)
        return requests

    def _length(self, rng: random.Random, mean: int) -> int:
        reach = int(self.spread * mean)
        return max(1, rng.randint(mean - reach, mean + reach)) if reach else mean


def _tokens(text: int, length: int) -> TokenIds:
    """The first tokens of a text, which begins unlike any other: an odd factor maps 31 bits to 31 bits one to one."""
    start = text * 0x9E3779B1 % (1 << 31)
    return ((start + np.arange(length, dtype=np.int64)) & 0x7FFFFFFF).astype(np.int32)
