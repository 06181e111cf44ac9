"""A request that is sent again with what its client has: the stream goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.errors import InvalidRequest
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.frontend import Frontend
from tests.scheduler.tiny_served_model import tiny_served_model
from tests.tiny_models import IM_END

NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return tiny_served_model(tmp_path_factory.mktemp("tokenizer"))


def _prepare(model: ServedModel, resume: Sequence[dict[str, Any] | pb.ResumedOutput], **params: Any) -> SequenceGroup:
    params = {"seed": 5, "max_tokens": MAX_TOKENS, **params}
    stream = params.pop("stream", True)
    request = pb.GenerateRequest(
        request_id="it", prompt="abc", sampling_params=pb.SamplingParams(**params), resume=resume, stream=stream
    )
    group = Frontend(lambda: ServedModels.of(model), lambda _: None).prepare(request)
    assert group.output.is_behind == bool(resume)
    for _ in group.output.catch_up():
        pass
    return group


class _Client:
    """Reads one output, at its own pace, until it is lost."""

    def __init__(self) -> None:
        self.held = pb.ResumedOutput()
        self.text = ""
        self.matched_stop = ""
        self.usage = 0

    def read(self, group: SequenceGroup) -> None:
        response = group.output.next_message()
        if response is None:
            return
        for delta in response.outputs:
            assert not self.held.finish_reason, "something came after the end"
            self.text += delta.text
            self.held.token_ids.extend(delta.token_ids)
            self.held.finish_reason = delta.finish_reason
            self.matched_stop = str(delta.matched_stop)
        self.usage = response.usage.completion_tokens


def _stream(
    group: SequenceGroup, token_ids: list[int], reads_after: set[int], client: _Client, lost_after: int
) -> None:
    """What the scheduler does with the tokens that follow those the client has, until so many were drawn."""
    sequence = group.sequences[0]
    for position in range(len(client.held.token_ids), lost_after):
        if group.output.is_finished:
            break
        is_last = position == len(token_ids) - 1
        reason = STOP if token_ids[position] == IM_END else LENGTH if is_last else NONE
        group.output.take(sequence, token_ids[position], reason, came_ns=group.arrival_ns + position)
        if position in reads_after:
            client.read(group)


@given(data=st.data())
def test_lost_anywhere_the_text_has_no_seam(model: ServedModel, data: st.DataObject) -> None:
    """Half characters and half stop strings at the cut among them; twice lost, read at any pace."""
    words = st.sampled_from(["é", "日本", "st", "stop", "🙂", "a", "\xff", "op", "s"])
    text = "".join(data.draw(st.lists(words, min_size=1, max_size=10)))
    token_ids = list(text.encode())[:MAX_TOKENS]
    if data.draw(st.booleans()):
        token_ids[-1] = IM_END
    params: dict[str, Any] = {"stop": data.draw(st.sampled_from([[], ["stop"], ["日x", "sto", "éa"], ["🙂s"]]))}
    params["include_stop_str_in_output"] = data.draw(st.booleans())
    params["stop_token_ids"] = data.draw(st.sampled_from([[], [IM_END]]))
    params["max_tokens"] = len(token_ids)
    everywhere = set(range(len(token_ids)))

    undisturbed = _Client()
    group = _prepare(model, [], **params)
    _stream(group, token_ids, everywhere, undisturbed, len(token_ids))
    undisturbed.read(group)
    assert undisturbed.usage == len(undisturbed.held.token_ids) > 0

    client = _Client()
    for _ in range(2):
        group = _prepare(model, [client.held], **params)
        reads_after = data.draw(st.sets(st.sampled_from(sorted(everywhere))))
        _stream(group, token_ids, reads_after, client, data.draw(st.integers(0, len(token_ids))))
    group = _prepare(model, [client.held], **params)
    _stream(group, token_ids, set(), client, len(token_ids))
    client.read(group)
    assert (client.text, client.held, client.matched_stop) == (
        undisturbed.text,
        undisturbed.held,
        undisturbed.matched_stop,
    )
    assert client.usage == undisturbed.usage
    assert group.output.next_message() is None


def test_outputs_that_ended_stay_ended_and_the_others_go_on(model: ServedModel) -> None:
    resume = [
        {"index": 1, "token_ids": [65, 66], "finish_reason": pb.FINISH_REASON_STOP},
        {"index": 0, "token_ids": [67]},
    ]
    group = _prepare(model, resume, n=3)
    assert [s.status for s in group.sequences] == [
        SequenceStatus.WAITING,
        SequenceStatus.FINISHED,
        SequenceStatus.WAITING,
    ]
    assert [s.token_ids[group.num_prompt_tokens :].tolist() for s in group.sequences] == [[67], [65, 66], []]
    assert group.output.next_message() is None, "the client has all that there is"
    group.output.take(group.sequences[0], 68, LENGTH, came_ns=group.arrival_ns)
    group.output.take(group.sequences[2], 69, LENGTH, came_ns=group.arrival_ns)
    response = group.output.next_message()
    assert [(delta.index, delta.text) for delta in response.outputs] == [(0, "D"), (2, "E")]
    assert response.usage.completion_tokens == 2 + 2 + 1


@pytest.mark.parametrize(
    ("token_ids", "params", "reason", "matched"),
    [
        ([65, IM_END], {}, STOP, pb.MatchedStop()),
        ([65, IM_END], {"stop_token_ids": [IM_END]}, STOP, pb.MatchedStop(token_id=IM_END)),
        ([65, 66], {"max_tokens": 2}, LENGTH, pb.MatchedStop()),
        ([65, 66], {"stop": ["AB"]}, STOP, pb.MatchedStop(text="AB")),
    ],
)
def test_an_end_that_the_client_was_not_told_of_is_told_at_once(
    model: ServedModel, token_ids: list[int], params: dict[str, Any], reason: FinishReason, matched: pb.MatchedStop
) -> None:
    group = _prepare(model, [{"index": 0, "token_ids": token_ids}], **params)
    response = group.output.next_message()
    assert group.is_finished
    assert [(d.finish_reason, d.text, list(d.token_ids)) for d in response.outputs] == [(reason, "", [])]
    assert response.outputs[0].matched_stop == matched
    assert response.usage.completion_tokens == 2


def test_the_sum_of_logprobs_is_left_to_who_has_them_all(model: ServedModel) -> None:
    group = _prepare(model, [{"index": 0, "token_ids": [65]}], logprobs=0, n=2)
    for sequence in group.sequences:
        group.output.take(sequence, 66, LENGTH, came_ns=group.arrival_ns)
    has_sum = [output.HasField("cumulative_logprob") for output in group.output.next_message().outputs]
    assert has_sum == [False, True], "nothing of the second one was there before"


def test_the_prompt_that_is_told_again_is_the_prompt_alone(model: ServedModel) -> None:
    request = pb.GenerateRequest(
        prompt="abc", return_prompt_token_ids=True, resume=[{"index": 0, "token_ids": [65, 66]}]
    )
    request.sampling_params.seed = 5
    admission = Frontend(lambda: ServedModels.of(model), lambda _: None).prepare(request).output.admission()
    assert list(admission.prompt_token_ids) == list(b"abc")


@pytest.mark.parametrize(
    ("resume", "params", "says"),
    [
        ([{"index": 1, "token_ids": [65]}], {}, r"resume\[0\].index: got 1; accepted: each of 0 to 0"),
        ([{"index": 0}, {"index": 0}], {}, r"resume\[1\].index: got 0"),
        ([{"index": 0, "token_ids": [400]}], {}, r"resume\[0\].token_ids: got 400; accepted: 0 to 399"),
        ([{"index": 0, "token_ids": [IM_END, 65]}], {}, "output 0 goes on after token"),
        ([{"index": 0, "token_ids": [65, 66, 67]}], {"stop": ["AB"]}, "output 0: it goes on after 'AB'"),
        ([{"index": 0, "token_ids": [65] * 3}], {"max_tokens": 2}, "output 0 has 3 tokens; accepted: at most 2"),
        (
            [{"index": 0, "token_ids": [65] * 3, "finish_reason": pb.FINISH_REASON_STOP}],
            {"max_tokens": 2},
            "output 0 has 3 tokens; accepted: at most 2",
        ),
        ([{"index": 0, "token_ids": [65]}], {"n": 1, "best_of": 2}, "resume: got some; accepted: none with best_of"),
        ([{"index": 0, "token_ids": [65]}], {"stream": False}, "resume: got some; accepted: none with"),
        ([{"index": 0, "token_ids": [65], "finish_reason": 77}], {}, "finish_reason 77"),
    ],
)
def test_what_no_client_can_have_is_refused(
    model: ServedModel, resume: list[dict[str, Any]], params: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        _prepare(model, resume, **params)


def test_draws_can_only_go_on_with_their_seed(model: ServedModel) -> None:
    sampling = pb.SamplingParams(temperature=1.0)
    request = pb.GenerateRequest(prompt="abc", sampling_params=sampling, resume=[{"index": 0, "token_ids": [65]}])
    with pytest.raises(InvalidRequest, match=r"sampling_params.seed: got none; accepted: with resume"):
        Frontend(lambda: ServedModels.of(model), lambda _: None).prepare(request)
    request.sampling_params.temperature = 0
    assert Frontend(lambda: ServedModels.of(model), lambda _: None).prepare(request).sequences[0].num_tokens == 4
