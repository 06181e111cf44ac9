"""Whose a call is, and that names which clients make up win them nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import yaml

from octavo.shared.access.callers import Callers
from octavo.shared.access.keys import Keys, hash_of
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import DuplicateRequest, InvalidRequest, NotAllowed
from scheduler_svc.requests.tenants import Tenants
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import scheduler
from tests.scheduler.hand_turned_loop import Loop

# ---- whose a call is ------------------------------------------------------------------------------------------------


def test_clients_are_believed_where_nobody_else_says_it() -> None:
    tenants = Tenants()
    assert tenants.of_call([("x-tenant", "a")]) is None and tenants.check(None, "b") == "b"


def test_a_call_that_is_older_than_the_roles_of_its_key_brings_no_more_requests(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [{"name": "eyes", "sha256": hash_of("a key"), "roles": ["metrics"]}]}))
    with pytest.raises(NotAllowed, match="key 'eyes' is not for requests any more"):
        Tenants(callers=Callers(Keys(path))).of_call([("authorization", "Bearer a key")])


def test_the_metadata_says_it_and_the_request_may_only_agree() -> None:
    tenants = Tenants("x-tenant")
    a = tenants.of_call([("authorization", "x"), ("x-tenant", "a"), ("x-tenant", "a")])
    assert a == "a" and tenants.check(a, "") == tenants.check(a, "a") == "a"
    with pytest.raises(InvalidRequest, match="tenant: got 'b'; accepted here: none, as metadata 'x-tenant'"):
        tenants.check(a, "b")
    nobody = tenants.of_call(None)
    assert nobody == "" and tenants.check(nobody, "") == ""
    with pytest.raises(InvalidRequest, match="got 'a'"):
        tenants.check(nobody, "a")


def test_prefixes_are_shared_within_a_tenant_that_metadata_names() -> None:
    """Those of the unnamed one, too; and what tenant and request say cannot be shifted from one to the other."""
    tenants = Tenants("x-tenant")
    assert tenants.prefixes([("x-tenant", "a")], "mine") == tenants.prefixes([("x-tenant", "a")], "mine")
    assert tenants.prefixes([("x-tenant", "")], "mine") == tenants.prefixes(None, "mine")
    texts = ("", "a", "b", "a b", " ", "1 a", "1 a b", "3 a b ")
    salts = {tenants.prefixes([("x-tenant", name)], asked) for name in texts for asked in texts}
    assert len(salts) == len(texts) ** 2 and not any(is_hidden for _, is_hidden in salts)
    assert Tenants().prefixes([("x-tenant", "a")], "mine") == ("mine", False)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ([("x-tenant", "a"), ("x-tenant", "b")], "2 different values"),
        ([("x-tenant", "a" * 257)], "257 characters"),
    ],
)
def test_metadata_that_leave_it_open_are_refused(metadata: list[tuple[str, str]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Tenants("x-tenant").of_call(metadata)


@pytest.mark.parametrize("name", ["X-Tenant", "x tenant", "grpc-tenant", "tenant-bin", ":authority"])
def test_names_that_no_text_in_metadata_has_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match="tenant_metadata is"):
        SchedulerConfig(tenant_metadata=name)


# ---- what each is served --------------------------------------------------------------------------------------------

NUM_STEPS, NUM_PLACES, NUM_OUTPUTS = 150, 4, 9
# Turns are given by whole requests: a share may be that of one more or less.
ONE_REQUEST = NUM_OUTPUTS / (NUM_PLACES * NUM_STEPS)


def share_of_honest(loop: Loop, flood_tenant: Callable[[int], str]) -> float:
    """Of all tokens, while a flood of 600 requests and 60 requests of `honest` wait together for four places."""
    worker = loop.join(max_num_seqs=NUM_PLACES)
    for number in range(600):
        loop.engine.submit(loop.group(f"flood {number}", tenant=flood_tenant(number)))
        if number < 60:
            loop.engine.submit(loop.group(f"honest {number}", tenant="honest"))
    for _ in range(NUM_STEPS):
        loop.turn()
        loop.answer(worker)
    tokens = {request_id: len(token_ids) for request_id, token_ids in loop.token_ids.items()}
    of_honest = sum(count for request_id, count in tokens.items() if request_id.startswith("honest"))
    assert of_honest < 60 * NUM_OUTPUTS, "nothing of it waits any more: this shows nothing"
    return of_honest / sum(tokens.values())


def a_new_name_each(number: int) -> str:
    return f"made up {number}"


def test_one_name_a_request_takes_nothing_from_a_tenant_that_the_server_knows() -> None:
    loop = Loop(scheduling_policy="fair", tenant_weights={"honest": 1.0})
    assert share_of_honest(loop, a_new_name_each) == pytest.approx(0.5, abs=ONE_REQUEST)


def test_all_made_up_names_have_one_weight_together() -> None:
    loop = Loop(scheduling_policy="fair", tenant_weights={"honest": 3.0})
    assert share_of_honest(loop, a_new_name_each) == pytest.approx(0.75, abs=ONE_REQUEST)


def test_names_that_do_not_come_from_clients_have_a_share_each() -> None:
    loop = Loop(scheduling_policy="fair", tenants_are_known=True)
    assert share_of_honest(loop, lambda number: "flood") == pytest.approx(0.5, abs=ONE_REQUEST)


def test_if_clients_names_were_believed_one_name_a_request_would_win_all() -> None:
    """What the one share of all made-up names is there for."""
    loop = Loop(scheduling_policy="fair", tenants_are_known=True)
    assert share_of_honest(loop, a_new_name_each) < 0.05


def test_tenants_that_share_a_weight_have_their_request_ids_each() -> None:
    loop = Loop(scheduling_policy="fair")
    for tenant in ("a", "b"):
        loop.engine.submit(loop.group("same", tenant=tenant))
    with pytest.raises(DuplicateRequest):
        loop.engine.submit(loop.group("same", tenant="a"))
    assert loop.engine.abort("same", "a") and len(loop.engine.find("same", "b")) == 1


# ---- over the service -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frontends", [1, 2])
async def test_a_proxys_word_counts_whichever_process_is_asked_and_however_large_the_request(frontends: int) -> None:
    flags = ("--tenant-metadata=x-tenant", "--scheduling-policy=fair", f"--frontends={frontends}")
    with (
        FakeWorker(delay_s=0.02, max_model_len=2048, num_blocks=1024) as worker,
        scheduler(f"--worker={worker.address}", *flags) as service,
    ):
        service.wait_until_ready()
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub, control = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.ControlStub(channel)
            params = pb.SamplingParams(temperature=0, max_tokens=500)
            calls = {}
            for tenant, request in (
                ("a", pb.GenerateRequest(request_id="same", prompt="say|", sampling_params=params)),
                ("b", pb.GenerateRequest(request_id="same", prompt="say|", sampling_params=params)),
                ("", pb.GenerateRequest(request_id="same", prompt="say|", sampling_params=params)),
            ):
                metadata = (("x-tenant", tenant),) if tenant else ()
                calls[tenant] = stub.Generate(request, metadata=metadata)
                assert (await calls[tenant].read()).HasField("admission")
            listed = (await control.ListRequests(pb.ListRequestsRequest())).requests
            assert sorted(request.tenant for request in listed) == ["", "a", "b"]
            for num_chars in (1, 70_000):  # of which the second is not looked into as it comes
                request = pb.GenerateRequest(prompt="x" * num_chars, truncate_prompt_tokens=9, tenant="b")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Generate(request, metadata=(("x-tenant", "a"),)).read()
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "tenant" in str(refused.value.details())
            assert not (await stub.Abort(pb.AbortRequest(request_id="same"), metadata=(("x-tenant", "c"),))).found
            assert (await stub.Abort(pb.AbortRequest(request_id="same"), metadata=(("x-tenant", "a"),))).found
            while (response := await calls["a"].read()) is not grpc.aio.EOF:
                last = response
            assert last.outputs[0].finish_reason == pb.FINISH_REASON_ABORT
            listed = (await control.ListRequests(pb.ListRequestsRequest())).requests
            assert sorted(request.tenant for request in listed) == ["", "b"]
            for call in calls.values():
                call.cancel()


@pytest.mark.parametrize("frontends", [1, 2])
def test_a_tenant_that_a_proxy_names_finds_no_prompt_of_another(frontends: int) -> None:
    flags = ("--tenant-metadata=x-tenant", f"--frontends={frontends}")
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=range(1, 65)))
    request.sampling_params.max_tokens = 2
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", *flags) as service:
        service.wait_until_ready()
        with grpc.insecure_channel(service.address) as channel:
            generate = inference_pb2_grpc.InferenceStub(channel).Generate
            cached = [
                list(generate(request, metadata=[("x-tenant", tenant)] if tenant else []))[-1].usage.cached_tokens > 0
                for tenant in ("a", "b", "", "a", "b", "")
            ]
    assert cached == [False] * 3 + [True] * 3
