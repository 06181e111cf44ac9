"""Requests as a record knows them: no tokens, and the hashes of their blocks by number.

Their tokens are zeros. What of them is found in a cache depends on hashes alone, and these are given, also for blocks
that are yet to be generated. A hash that the record does not have is one that nobody else has.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from protos import inference_pb2
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.flight.hidden import digest_of

EOS = 1  # the token that ends a sequence with STOP
LIKE_IT = ("number", "order", "is_resumed", "num_prompt_logprobs", "share")  # fields that are set as they were


class Hashes:
    """Numbers of a request's blocks: of its prompt, and of those behind by index of the sequence."""

    def __init__(self, form: Mapping[str, Any] | None) -> None:
        form = form or {}
        self.of_prompt = [digest_of(number) for number in form.get("prompt", ())]
        self.own = {index: [digest_of(number) for number in own] for index, own in form.get("own", ())}


class ReplayedGroup(SequenceGroup):
    """A request of a record."""

    known: Hashes

    def use_hash_root(self, root: bytes) -> None:
        """Its hashes are given, whatever they are chained on."""

    def prompt_hashes(self, block_size: int) -> list[bytes]:
        """Those of the record."""
        if self._prompt_hashes is None:
            full = self.num_prompt_tokens // block_size
            known = self.known.of_prompt[:full]
            self._prompt_hashes = known + [_unknown(self, -1, index) for index in range(len(known), full)]
        return self._prompt_hashes


class ReplayedSequence(Sequence):
    """A line of tokens of such a request. Beams have hashes of the tokens that stand for theirs."""

    __slots__ = ()

    def hashes(self, first: int, last: int, block_size: int) -> list[bytes]:
        """Those of the record."""
        if self.group.uses_beam_search:
            return super().hashes(first, last, block_size)
        of_prompt = self.group.prompt_hashes(block_size)
        return [self._digest(index, of_prompt) for index in range(first, last)]

    def hash_of_next(self, index: int, token_bytes: bytes, block_size: int) -> bytes:
        """That of the record."""
        if self.group.uses_beam_search:
            return super().hash_of_next(index, token_bytes, block_size)
        return self._digest(index, self.group.prompt_hashes(block_size))

    def child(self, index: int) -> Sequence:
        """As of any sequence."""
        child = super().child(index)
        child.__class__ = ReplayedSequence
        return child

    def _digest(self, index: int, of_prompt: list[bytes]) -> bytes:
        if index < len(of_prompt):
            return of_prompt[index]
        assert isinstance(self.group, ReplayedGroup)
        own, place = self.group.known.own.get(self.index, []), index - len(of_prompt)
        return own[place] if place < len(own) else _unknown(self.group, self.index, index)


def _unknown(group: SequenceGroup, sequence: int, block: int) -> bytes:
    return sha256(f"{group.number} {sequence} {block}".encode()).digest()


def group_of(facts: Mapping[str, Any], hashes: Mapping[str, Any] | None) -> ReplayedGroup:
    """A request as it was submitted; `facts` are those of a file."""
    group = _group(facts, hashes, _search(facts))
    if not facts["beams"]:
        group.sequences = []
        for index, num_tokens, status in facts["sequences"]:
            sequence = ReplayedSequence(group, index, np.zeros(num_tokens, np.int32))
            sequence.status = SequenceStatus[status]
            group.sequences.append(sequence)
    return group


def group_of_image(facts: Mapping[str, Any], hashes: Mapping[str, Any] | None) -> ReplayedGroup:
    """A request in the middle of its life; its sequences and its search are for the caller."""
    group = _group(facts, hashes, None)
    group.sequences = []
    for name, value in facts.items():
        if name not in ("wants_logprobs", "parameter_bytes"):
            setattr(group, name, value)
    return group


def _group(facts: Mapping[str, Any], hashes: Mapping[str, Any] | None, search: BeamSearch | None) -> ReplayedGroup:
    is_ranked = facts["best_of"] > facts["num_outputs"] and search is None
    params = inference_pb2.SamplingParams(seed=1)
    if facts["wants_logprobs"] and not is_ranked:
        params.logprobs = 0
    group = ReplayedGroup(
        str(facts["number"]),
        np.zeros(facts["num_prompt_tokens"], np.int32),
        params,
        max_num_tokens=facts["max_num_tokens"],
        arrival_ns=facts["arrival_ns"],
        eos_token_id=EOS,
        num_outputs=facts["num_outputs"],
        best_of=facts["best_of"],
        beam_search=search,
        priority=facts["priority"],
        tenant=facts["tenant"],
        adapter=facts["adapter"],
        model=facts["model"],
    )
    group.known = Hashes(hashes)
    group.has_resumed_tokens = facts["has_resumed_tokens"]
    for name in LIKE_IT:
        setattr(group, name, facts.get(name, 0))
    group.__dict__["parameter_bytes"] = facts["parameter_bytes"]
    for sequence in group.sequences:
        sequence.__class__ = ReplayedSequence
    return group


def _search(facts: Mapping[str, Any]) -> BeamSearch | None:
    beams = facts["beams"]
    if not beams:
        return None
    return BeamSearch(
        beams["width"],
        num_returned=beams["num_returned"],
        num_prompt_tokens=facts["num_prompt_tokens"],
        max_num_tokens=facts["max_num_tokens"],
        stop_token_ids=frozenset(EOS - index for index in range(int(beams["num_stop_token_ids"]))),
        length_penalty=beams["length_penalty"],
        early_stopping=beams["early_stopping"],
    )
