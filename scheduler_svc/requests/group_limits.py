"""How many sequences a request becomes, how long they may get, and what can never fit, with the numbers.

Knows nothing of text and of what runs at the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.requests.request_checks import check_fits


def num_outputs(params: pb.SamplingParams) -> int:
    """Outputs that the client gets."""
    return params.n if params.HasField("n") else 1


def best_of(params: pb.SamplingParams) -> int:
    """Sequences that are drawn, or the width of the beam."""
    return params.best_of if params.HasField("best_of") else num_outputs(params)


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What one worker takes, in tokens. `max_prompt_tokens` is None where prompts are computed in chunks."""

    max_model_len: int
    max_cached_tokens: int
    block_size: int = 1
    max_prompt_tokens: int | None = None

    def max_num_tokens(self, num_prompt_tokens: int, params: pb.SamplingParams) -> int:
        """Prompt and generated tokens at which each sequence ends. Raises InvalidRequest for what can never fit."""
        check_fits(num_prompt_tokens, self.max_model_len)
        if self.max_prompt_tokens is not None and num_prompt_tokens > self.max_prompt_tokens:
            limit = f"without --enable-chunked-prefill one step computes the prompt, and takes {self.max_prompt_tokens}"
            raise _too_long(f"{num_prompt_tokens} tokens are too many: {limit}")
        if num_prompt_tokens > self.max_cached_tokens:
            limit = f"a worker's cache holds {self.max_cached_tokens}"
            raise _too_long(f"{num_prompt_tokens} tokens are too many: {limit}")
        wanted = num_prompt_tokens + params.max_tokens if params.HasField("max_tokens") else self.max_model_len
        drawn_last = 1  # nothing is computed from it, so it needs no place in the cache
        return min(wanted, self.max_model_len, self._max_cached_tokens(num_prompt_tokens, params) + drawn_last)

    def _max_cached_tokens(self, num_prompt_tokens: int, params: pb.SamplingParams) -> int:
        """How long all sequences of a group can be at once, when they share no more than the prompt's full blocks.

        A prompt of 9 tokens and 2 sequences, in 8 blocks of 4 tokens: 2 shared and 3 for each, so up to 20 tokens.

            tokens  [0, 4)  [4, 8)  [8, 12)  [12, 16)  [16, 20)
                    shared  shared  own      own       own
        """
        num_sequences = best_of(params)
        if num_sequences == 1:
            return self.max_cached_tokens
        num_blocks, num_shared = self.max_cached_tokens // self.block_size, num_prompt_tokens // self.block_size
        num_own = (num_blocks - num_shared) // num_sequences
        if num_own < 1:
            needed = (
                f"{num_sequences} sequences after a prompt of {num_prompt_tokens} tokens need at least "
                f"{num_shared + num_sequences} blocks of {self.block_size}"
            )
            field = "best_of" if params.HasField("best_of") else "n"
            violation = FieldViolation(f"sampling_params.{field}", f"{needed}: a worker's cache holds {num_blocks}")
            raise InvalidRequest(violation, is_too_long=num_shared > 0)
        return (num_shared + num_own) * self.block_size


def new_beam_search(
    params: pb.SamplingParams,
    num_prompt_tokens: int,
    max_num_tokens: int,
    stop_token_ids: frozenset[int],
    vocab_size: int,
) -> BeamSearch | None:
    """The search that a request asks for, if it does. Raises InvalidRequest for more beams than there are tokens."""
    if not params.use_beam_search:
        return None
    search = BeamSearch(
        best_of(params),
        num_returned=num_outputs(params),
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=max_num_tokens,
        stop_token_ids=stop_token_ids,
        length_penalty=params.length_penalty if params.HasField("length_penalty") else 1.0,
        early_stopping=params.early_stopping,
    )
    if search.num_candidates > vocab_size:
        limit = f"{vocab_size - len(stop_token_ids)}, the vocabulary less {len(stop_token_ids)} end tokens"
        violation = FieldViolation("sampling_params.best_of", f"got {search.width}; accepted: at most {limit}")
        raise InvalidRequest(violation)
    return search


def _too_long(description: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("prompt", description), is_too_long=True)
