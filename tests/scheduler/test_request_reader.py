"""Requests from their bytes: what is known of one before it is read."""

from __future__ import annotations

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.requests.request_reader import MAX_SKIMMED_BYTES, MAX_SKIMMED_FIELDS, read_head, skim_head

LARGE = pb.GenerateRequest(
    request_id="r",
    tenant="t",
    prompt_token_ids=pb.TokenIds(ids=[300] * 50_000),
    priority=-1,
    sampling_params=pb.SamplingParams(temperature=0.5, seed=1 << 63),
    resume=[pb.ResumedOutput(index=index, token_ids=[7] * 2000) for index in range(128)],
    attempt=3,
)


def test_the_head_of_a_large_request_is_told_without_its_other_fields() -> None:
    data = LARGE.SerializeToString()
    assert skim_head(data) == read_head(data) == pb.GenerateRequest(request_id="r", tenant="t")
    again = data + pb.GenerateRequest(request_id="the last counts").SerializeToString()
    assert skim_head(again) == read_head(again)
    assert skim_head(b"") == pb.GenerateRequest()
    of_later = data + b"\xf1\x7f" + bytes(8) + b"\xf5\x7f" + bytes(4)  # fields of fixed length that are not known here
    assert skim_head(of_later) == read_head(of_later) == skim_head(data)


@pytest.mark.parametrize(
    "data",
    [
        LARGE.SerializeToString()[:-1],
        LARGE.SerializeToString() + b"\x0b",  # a group
        LARGE.SerializeToString() + b"\xff" * 100_000,
        pb.GenerateRequest(request_id="r").SerializeToString() + b"\x0a\x01\xff",
        LARGE.SerializeToString() + b"\x58\x00" * MAX_SKIMMED_FIELDS,
        pb.GenerateRequest(request_id="r" * MAX_SKIMMED_BYTES).SerializeToString(),
    ],
    ids=["cut off", "another wire type", "a number without end", "no text", "too many fields", "too long"],
)
def test_what_cannot_be_told_in_no_time_is_left_open(data: bytes) -> None:
    assert skim_head(data) == pb.GenerateRequest()
