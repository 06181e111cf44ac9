"""How long a worker's steps take: a line through the steps that it has answered, with prompt tokens and without."""

from __future__ import annotations

UNKNOWN_TOKENS_PER_S = 10_000.0  # of a worker that has measured nothing
NEWEST = 0.2  # weight of the newest step in a moving average
LEAST_PROMPT_TOKENS = 32  # of a step that has some: its weights are read for these as well as for one
WHOLE_TOKENS = 256  # prompt tokens from which on a step counts as one that shows what they cost


class StepPace:
    """Moving averages of one worker's answered steps, as `base_s + token_s * tokens`.

    Before the first step the line is that of the speed which the worker measured when it was initialised. Steps with
    prompt tokens and steps of decodes alone are averaged apart, so that an hour of decodes forgets nothing of prompts.

    Args:
        prefill_tokens_per_s: as the worker measured it; 0 where it did not.
        max_num_batched_tokens: of its steps.
    """

    def __init__(self, prefill_tokens_per_s: float, max_num_batched_tokens: int) -> None:
        self._heavy_tokens = float(max_num_batched_tokens)
        self._light_tokens = self._light_s = 0.0
        self._has_light = False
        self.mean_s = 0.0  # of any step; 0 before the first
        self.is_claim = True  # no step with prompt tokens has shown it
        self._claim(prefill_tokens_per_s or UNKNOWN_TOKENS_PER_S)

    def _claim(self, tokens_per_s: float) -> None:
        self._heavy_s = self._heavy_tokens / tokens_per_s
        self._least_token_s = 0.1 / tokens_per_s  # between two averages that say little
        self.base_s, self.token_s = 0.0, 1.0 / tokens_per_s

    def believe_at_most(self, tokens_per_s: float) -> None:
        """Lowers a speed that is only claimed."""
        if self.is_claim and self.token_s * tokens_per_s < 1.0:
            self._claim(tokens_per_s)

    def answered(self, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of so many tokens, so many of them of prompts, has taken so long."""
        self.mean_s += (NEWEST if self.mean_s else 1.0) * (seconds - self.mean_s)
        if num_prompt_tokens:
            self.is_claim = False
            newest = NEWEST * min(1.0, num_prompt_tokens / WHOLE_TOKENS)
            self._heavy_tokens += newest * (num_tokens - self._heavy_tokens)
            self._heavy_s += newest * (seconds - self._heavy_s)
        else:
            newest = NEWEST if self._has_light else 1.0
            self._has_light = True
            self._light_tokens += newest * (num_tokens - self._light_tokens)
            self._light_s += newest * (seconds - self._light_s)
        more_tokens, more_s = self._heavy_tokens - self._light_tokens, self._heavy_s - self._light_s
        # Where the averages lie too near to one another for a line, all of a step is put down to its tokens.
        is_line = more_tokens > 0.1 * self._heavy_tokens and more_s > 0.0
        slope = max(more_s / more_tokens, self._least_token_s) if is_line else 1.0
        self.token_s = min(slope, self._heavy_s / self._heavy_tokens)
        self.base_s = max(0.0, self._heavy_s - self.token_s * self._heavy_tokens)

    def seconds(self, num_tokens: float) -> float:
        """What a step of so many tokens takes."""
        return self.base_s + self.token_s * num_tokens

    def prompt_tokens_in(self, seconds: float, num_decodes: float) -> int:
        """Of a step that takes so long, beside so many decodes. Where such a step takes more than half of that without
        prompts, they may double it: so they get at least half of what steps cost."""
        without_s = self.seconds(num_decodes)
        return max(int(max(seconds - without_s, without_s) / self.token_s), LEAST_PROMPT_TOKENS)

    def prompt_tokens_per_s(self, num_decodes: float, max_num_batched_tokens: int, most_prompt_tokens: int) -> float:
        """Beside so many decodes in each step, which leave at least half of it to prompts, but no more than so many."""
        room = max(max_num_batched_tokens - num_decodes, 0.5 * max_num_batched_tokens)
        num_tokens = min(room, most_prompt_tokens)
        return num_tokens / max(self.seconds(min(num_tokens + num_decodes, max_num_batched_tokens)), 1e-9)
