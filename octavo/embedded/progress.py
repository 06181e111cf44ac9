"""The bar of `LLM.generate`: tokens as they come, with tokens a second in and out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler_svc.core.sequences.sequence import SequenceGroup

INTERVAL_S = 0.2  # between two looks at what has come


class Progress:
    """A bar over generated tokens: of as many as there may be, fewer once a request has ended before its bound.

    `use_tqdm`: True for tqdm's own bar, False for none, or a function that is called as `tqdm` is and gives one.
    """

    def __init__(self, groups: Iterable[SequenceGroup], use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar = None
        if not use_tqdm or (use_tqdm is True and sys.stderr is None):  # which tqdm writes to
            return
        self._unfinished = list(groups)
        self._num_requests = len(self._unfinished)
        self._most = sum(map(_most_tokens, self._unfinished))  # that may come
        self._tokens_in = self._tokens_out = 0  # of requests that have ended
        self._num_shown = 0
        self._started_s = self._looked_s = time.monotonic()
        self._bar = _maker(use_tqdm)(total=self._most, desc="generating", unit=" tokens", dynamic_ncols=True)

    @property
    def interval_s(self) -> float | None:
        """How often it wants to `look`; None: never."""
        return None if self._bar is None else INTERVAL_S

    def look(self) -> None:
        """Shows what has come, unless it has just been shown."""
        if self._bar is not None and time.monotonic() - self._looked_s >= INTERVAL_S:
            self._show()

    def close(self) -> None:
        """Shows the last speeds, and leaves the bar where it is."""
        if self._bar is not None:
            self._show()
            self._bar.close()

    def _show(self) -> None:
        self._looked_s = time.monotonic()
        still, tokens_in, tokens_out = [], 0, 0
        for group in self._unfinished:
            num_tokens = group.output.num_tokens
            if group.output.is_finished:
                self._tokens_in += group.num_prompt_tokens
                self._tokens_out += num_tokens
                self._most -= _most_tokens(group) - num_tokens
                continue
            still.append(group)
            tokens_out += num_tokens
            tokens_in += group.num_prompt_tokens if num_tokens else 0
        self._unfinished = still
        tokens_in, tokens_out = tokens_in + self._tokens_in, tokens_out + self._tokens_out
        seconds = max(self._looked_s - self._started_s, 1e-9)
        bar = self._bar
        assert bar is not None
        bar.total = self._most
        bar.set_postfix_str(
            f"{self._num_requests - len(still)}/{self._num_requests} requests, "
            f"in {tokens_in / seconds:.0f}, out {tokens_out / seconds:.0f} tokens/s",
            refresh=False,
        )
        bar.update(tokens_out - self._num_shown)
        self._num_shown = tokens_out


def _maker(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    return tqdm


def _most_tokens(group: SequenceGroup) -> int:
    num_sequences = group.num_outputs if group.uses_beam_search else group.best_of
    return num_sequences * (group.max_num_tokens - group.num_prompt_tokens)
