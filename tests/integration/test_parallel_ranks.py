"""A worker of several ranks over the scheduler service: it answers as one does, and is lost and started as one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from octavo import AsyncClient, SamplingParams
from octavo.shared.ports import free_port, free_ports
from tests.chaos.worker_process import WorkerProcess
from tests.forkserver import ForkedCommand
from tests.integration.scheduler_process import Service, scheduler
from tests.oracle import GreedyOracle
from tests.processes import is_alive
from tests.tiny_models import make_tiny_llama
from worker_svc.parallel.membership import Membership

SIZES = ["--max-model-len=1024", "--max-num-seqs=8", "--kv-cache-memory=0.01", "--swap-space=0", "--num-threads=1"]
SPLITS = ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]
PROMPT = list(b"|a prompt of several blocks, and of ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", intermediate_size=158)


@contextmanager
def ranks_by_hand(
    folders: tuple[Path, Path], logs: Path, *other_flags: str, split: str = SPLITS[0]
) -> Iterator[tuple[str, list[ForkedCommand]]]:
    """Two ranks as torchrun starts them on two machines; rank 1 with other flags as well."""
    port, meeting = free_ports(2)
    ranks = []
    for rank, (folder, flags) in enumerate(zip(folders, ((), other_flags), strict=True)):
        member = Membership(rank, 2, local_rank=0, local_size=1, address="127.0.0.1", port=meeting)
        arguments = ["worker", str(folder), f"--port={port}", split, *SIZES, *flags]
        with (logs / f"rank-{rank}.log").open("w") as log:
            environment = os.environ | member.variables()
            ranks.append(ForkedCommand(arguments, log.fileno(), environment=environment, forks_children=False))
    try:
        yield f"127.0.0.1:{port}", ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait(60)


def said(logs: Path) -> list[str]:
    return [(logs / f"rank-{rank}.log").read_text() for rank in range(2)]


def listens_at(process: psutil.Process) -> set[str]:
    """The addresses of this machine at which others reach it; gRPC writes those of IPv4 as IPv6."""
    connections = process.net_connections("tcp")
    return {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}


async def generate(service: Service, max_tokens: int, begun: asyncio.Event | None = None) -> list[int]:
    """Greedily; `begun` is set with the first tokens."""
    token_ids: list[int] = []
    async with AsyncClient(service.address) as client:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        async for delta in client.generate(prompt_token_ids=PROMPT, sampling_params=params):
            token_ids.extend(token for output in delta.outputs for token in output.token_ids)
            if token_ids and begun is not None:
                begun.set()
    return token_ids


@pytest.mark.parametrize("split", SPLITS)
async def test_ranks_of_several_machines_answer_as_one_model_and_end_as_one(
    split: str, folder: Path, tmp_path: Path
) -> None:
    """Its cache is one that both have room for; only the rank that serves needs the files of what listens."""
    oracle = GreedyOracle(folder)
    expected = oracle.generate(PROMPT, 40, eos_token_id=None)
    others = ("--kv-cache-memory=0.001", "--token-file=nowhere", "--tls-cert-file=nowhere", "--tls-key-file=nowhere")
    with ExitStack() as stack:
        address, ranks = stack.enter_context(ranks_by_hand((folder, folder), tmp_path, *others, split=split))
        service = stack.enter_context(scheduler(f"--worker={address}"))
        service.wait_until_ready()
        oracle.check(PROMPT, expected, await generate(service, 40), split)
        blocks = [int(number) for line in said(tmp_path) for number in re.findall(r'"blocks": (\d+)', line)]
        assert blocks[0] == blocks[1] < 8 * 1024 / 16  # which rank 0 alone would have
        for rank in reversed(ranks):  # torchrun tells all of them at once
            rank.terminate()
        assert [rank.wait(20) for rank in ranks] == [0, 0], said(tmp_path)


def test_ctrl_c_ends_a_rank_that_waits_for_others(folder: Path, tmp_path: Path) -> None:
    member = Membership(0, 2, local_rank=0, local_size=1, address="127.0.0.1", port=free_port())
    log = tmp_path / "rank.log"
    with log.open("w") as file:
        environment = os.environ | member.variables()
        rank = ForkedCommand(["worker", str(folder), SPLITS[0], *SIZES], file.fileno(), environment=environment)
    try:
        while "meeting the other ranks" not in log.read_text():
            assert rank.poll() is None
            time.sleep(0.02)
        rank.send_signal(signal.SIGINT)
        assert rank.wait(60) == 128 + signal.SIGINT, log.read_text()
    finally:
        rank.kill()


def test_a_rank_with_another_model_is_refused_by_all(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "tiny", intermediate_size=158, seed=1)
    with ranks_by_hand((folder, other), tmp_path) as (_, ranks):
        assert [rank.wait(30) for rank in ranks] == [1, 1]
    for line in said(tmp_path):
        assert "rank 1 has model hash" in line and "Traceback" not in line


def test_a_rank_with_other_options_is_refused_by_all(folder: Path, tmp_path: Path) -> None:
    with ranks_by_hand((folder, folder), tmp_path, "--block-size=8") as (_, ranks):
        assert [rank.wait(30) for rank in ranks] == [1, 1]
    for line in said(tmp_path):
        assert "rank 1 has block_size 8, rank 0 has 16" in line and "Traceback" not in line


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_cannot_load_its_part_ends_all_with_its_reason(lost: int, folder: Path, tmp_path: Path) -> None:
    folders = [folder, folder]
    folders[lost] = tmp_path / "nowhere"
    begun_s = time.monotonic()
    with ranks_by_hand((folders[0], folders[1]), tmp_path) as (_, ranks):
        assert [rank.wait(20) for rank in ranks] == [1, 1]
    assert time.monotonic() - begun_s < 15  # a rank that is only silent would have 30 s
    for line in said(tmp_path):
        assert "nowhere" in line and "Traceback" not in line
    assert f"rank {lost}: " in said(tmp_path)[1 - lost]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["ends", "hangs"])
@pytest.mark.parametrize("split", SPLITS)
async def test_a_lost_rank_ends_its_worker_and_no_request(
    split: str, how: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    oracle, num_tokens = GreedyOracle(folder), 300
    expected = oracle.generate(PROMPT, num_tokens, eos_token_id=None)
    with ExitStack() as stack:
        worker = WorkerProcess([str(folder), split, *SIZES], tmp_path / "ranks.log")
        stack.callback(worker.end)
        worker.wait_until_ready()
        first = psutil.Process(worker.pid)
        (rank,) = first.children()
        assert listens_at(first) | listens_at(rank) == {"127.0.0.1"}, "ranks of one machine meet on loopback"
        later = free_port()
        addresses = [f"--worker=127.0.0.1:{port}" for port in (worker.port, later)]
        service = stack.enter_context(scheduler("--max-workers=2", *addresses))
        service.wait_until_ready()
        begun = asyncio.Event()
        requests = [asyncio.create_task(generate(service, num_tokens, begun)) for _ in range(3)]
        await begun.wait()
        lost_s = time.monotonic()
        rank.send_signal(how)
        await asyncio.to_thread(worker.wait_for_end)
        assert time.monotonic() - lost_s < 4.0  # 2 s, and a busy machine
        # Who finds it out first says so: the group's watch, or a sum that fails.
        reasons = "the parallel group ends", "a rank of the group has failed"
        assert any(reason in worker.log.read_text() for reason in reasons)
        assert not any(request.done() for request in requests)
        spare = WorkerProcess([str(folder), f"--port={later}", *SIZES], tmp_path / "spare.log")
        stack.callback(spare.end)
        for got in await asyncio.gather(*requests):
            oracle.check(PROMPT, expected, got, "after a lost rank")
        assert not is_alive(rank)
