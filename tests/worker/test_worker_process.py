"""The worker as a process and as a whole: starts, refusals to start, ends, and a tiny Llama over the step stream."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from octavo.models.resolve import ModelNotFound
from octavo.shared import log as logging
from octavo.shared.ports import BindError
from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from tests import forkserver
from tests.forkserver import ForkedCommand
from tests.tiny_models import make_tiny_llama
from tests.worker.fake_model import decode, greedy, slots_u16, tokens_of, u32
from tests.worker.kept import wait_until_kept
from worker_svc import server as worker_server
from worker_svc.config import WorkerConfig
from worker_svc.errors import StartupError
from worker_svc.models.errors import ModelError
from worker_svc.models.loader import load_model
from worker_svc.parallel.membership import Membership
from worker_svc.parallel.ranks import OnlyRank
from worker_svc.parallel.stages import OnlyStage
from worker_svc.server import WorkerServer, load, main
from worker_svc.steps.worker import Worker

PROMPTS = [[5], [17, 3, 200, 45, 9], list(range(60, 101)), [7] * 23, [1000, 4, 4, 900, 31, 2, 650]]
NUM_NEW_TOKENS = 24
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def config(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder),
        port=0,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=128,
        kv_cache_memory=0.02,
    )


async def test_a_worker_says_what_it_serves_while_it_measures_its_first_steps(config: WorkerConfig) -> None:
    runner, files = load(config)
    worker, measured = Worker(runner, config), threading.Event()
    worker.thread.call(measured.wait)  # what comes after has to wait
    server = WorkerServer(worker, runner.config, files)
    starting = asyncio.create_task(server.start())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=CHANNEL_OPTIONS) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), wait_for_ready=True, timeout=60)
        assert info.lifecycle == worker_pb2.WORKER_LIFECYCLE_LOADED
        chunks = [chunk async for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=10)]
        assert chunks[-1].sha256 == info.tokenizer_sha256
        asks = health_pb2.HealthCheckRequest(service=worker_server.SERVICE_NAME)
        health = await health_pb2_grpc.HealthStub(channel).Check(asks)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        fewer = stub.Initialize(worker_pb2.InitializeRequest(max_num_seqs=3), timeout=300)  # kernels may be compiled
        assert not starting.done() and not fewer.done()
        measured.set()
        await starting
        assert (await fewer).max_num_seqs == 3
        assert worker.sizes == await fewer, "a scheduler's settings come last"
    await server.stop()


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, [{}, {}]),
        ({"quantization": "int8"}, [{"quantised_weights": "to be made"}, {"quantised_weights": "kept"}]),
    ],
)
def test_what_is_loaded_and_what_computes_it_is_said_before_weights_are_read(
    config: WorkerConfig,
    options: dict[str, Any],
    facts: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    said_before: list[list[Any]] = []

    def read(*arguments: Any) -> Any:
        said_before.append([dict(line) for line in lines])
        return load_model(*arguments)

    monkeypatch.setattr(worker_server, "load_model", read)
    config = dataclasses.replace(config, device="cpu", dtype="float32", **options)
    gib = round((Path(config.model) / "model.safetensors").stat().st_size / (1 << 30), 3)
    for expected in facts:
        with capture_logs() as lines:
            load(config)
        wait_until_kept()
        computing, loading = said_before.pop()
        assert computing["event"].startswith("computing") and computing["dtype"] == "float32"
        line = {"event": "loading weights", "log_level": "info", "model": "tiny", "load_format": "auto", "gib": gib}
        assert loading == line | expected
        events = [line["event"] for line in lines]
        assert sum(event.startswith("computing") for event in events) == 1 and events.count("weights loaded") == 1


class RankOfTwo:
    """One of two ranks of a machine, without the other, which begins to load as soon as they have met; as
    `ParallelGroup`."""

    ranks, stages, answers = OnlyRank(), OnlyStage(), None

    def __init__(self, memory: list[int]) -> None:
        self.member = Membership(0, 2, local_rank=0, local_size=2, address="127.0.0.1", port=1)
        self._memory = memory

    def check_alike(self, *_: object) -> None:
        self._memory[0] = 0


@pytest.mark.parametrize(("shares", "is_enough"), [(1.9, False), (2.1, True)])
def test_ranks_of_one_machine_divide_the_memory_that_was_free_before_any_loads(
    config: WorkerConfig, shares: float, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, device="cpu", num_threads=torch.get_num_threads())
    needed_bytes = 10_000_000
    monkeypatch.setattr("worker_svc.models.loader._peak_bytes", lambda *_: needed_bytes)
    memory = [int(shares * needed_bytes)]
    monkeypatch.setattr(worker_server, "available_bytes", lambda: memory[0])
    group: Any = RankOfTwo(memory)
    if is_enough:
        assert load(config, group)[0].config.num_layers == 3
    else:
        with pytest.raises(ModelError, match="too little memory for tiny: loading its weights takes up to"):
            load(config, group)


@pytest.mark.parametrize(
    ("quantization", "asked", "kept"),
    [("none", "auto", "float32"), ("int8", "auto", "bfloat16"), ("int8", "float32", "float32")],
)
async def test_a_worker_says_what_its_cache_is_kept_in(
    config: WorkerConfig, quantization: str, asked: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    config = dataclasses.replace(config, device="cpu", dtype="float32", quantization=quantization, kv_cache_dtype=asked)
    runner, files = load(config)
    wait_until_kept()
    server = WorkerServer(Worker(runner, config), runner.config, files)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=CHANNEL_OPTIONS) as channel:
        info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
        assert info.kv_cache_dtype == kept == str(runner.cache.store.dtype).removeprefix("torch.")
    await server.stop()


# ---- A model over the stream ----------------------------------------------------------------------------------------


@pytest.fixture
async def stub(config: WorkerConfig) -> AsyncIterator[Any]:
    runner, files = load(config)
    server = WorkerServer(Worker(runner, config), runner.config, files)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=CHANNEL_OPTIONS) as channel:
        yield worker_pb2_grpc.WorkerStub(channel)
    await server.stop()


class Scheduler:
    """The least that can drive a worker: every prompt at once, in chunks, each with a table of its own."""

    def __init__(self, call: Any, epoch: int, num_blocks: int) -> None:
        self.call, self.epoch, self.step_id = call, epoch, 0
        # Tables that neither rise nor lie together, so that a slot mapping that only looks right is found out.
        self.free_blocks = np.random.default_rng(0).permutation(num_blocks).tolist()

    @classmethod
    async def connect(cls, stub: Any) -> Scheduler:
        sizes = await stub.Initialize(worker_pb2.InitializeRequest())
        call = stub.Execute()
        await call.write(worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id=sizes.settings_id)))
        return cls(call, (await call.read()).notice.lease.epoch, sizes.num_device_blocks)

    async def run(self, step: worker_pb2.Step) -> list[int]:
        self.step_id += 1
        step.step_id = self.step_id
        await self.call.write(worker_pb2.StepRequest(epoch=self.epoch, step=step))
        while not (response := await self.read()).HasField("result"):
            pass
        assert response.result.status == worker_pb2.STEP_STATUS_OK, response.result.error.message
        return tokens_of(response.result)

    async def read(self) -> worker_pb2.StepResponse:
        """The next message; until it comes the lease is kept, as a first step may have kernels to compile."""
        reading = asyncio.ensure_future(self.call.read())
        while not (await asyncio.wait([reading], timeout=1))[0]:
            await self.call.write(worker_pb2.StepRequest(epoch=self.epoch, keepalive=worker_pb2.Keepalive()))
        return reading.result()

    def introduce(self, prompts: list[list[int]], params: list[inference_pb2.SamplingParams]) -> worker_pb2.Step:
        step = worker_pb2.Step()
        for slot, prompt in enumerate(prompts):
            num_blocks = -(-(len(prompt) + NUM_NEW_TOKENS) // BLOCK_SIZE)
            table = [self.free_blocks.pop() for _ in range(num_blocks)]
            group = step.groups.add(request_id=f"request-{slot}", sampling_params=params[slot])
            group.sequences.add(slot=slot, token_ids=prompt, block_table=table)
        return step

    async def generate(
        self, prompts: list[list[int]], params: list[inference_pb2.SamplingParams], chunk: int = 1000
    ) -> list[list[int]]:
        """Slots 0, 1, ... until all have NUM_NEW_TOKENS; they are free again afterwards."""
        outputs: list[list[int]] = [[] for _ in prompts]
        computed = [0] * len(prompts)
        step = self.introduce(prompts, params)
        while left := [slot for slot in range(len(prompts)) if computed[slot] < len(prompts[slot])]:
            lens = [min(chunk, len(prompts[slot]) - computed[slot]) for slot in left]
            ends = [computed[slot] + length == len(prompts[slot]) for slot, length in zip(left, lens, strict=True)]
            decoding = [
                slot for slot in range(len(prompts)) if slot not in left and len(outputs[slot]) < NUM_NEW_TOKENS
            ]
            step.rows.CopyFrom(decode(0, [*decoding, *left]).rows)
            step.rows.num_decode_rows = len(decoding)
            step.rows.query_lens_u32, step.rows.num_samples_u16 = u32(lens), slots_u16(map(int, ends))
            tokens = await self.run(step)
            sampling = [*decoding, *(slot for slot, is_end in zip(left, ends, strict=True) if is_end)]
            for slot, token in zip(sampling, tokens, strict=True):
                outputs[slot].append(token)
            for slot, length in zip(left, lens, strict=True):
                computed[slot] += length
            step = worker_pb2.Step()
        while going := [slot for slot in range(len(prompts)) if len(outputs[slot]) < NUM_NEW_TOKENS]:
            for slot, token in zip(going, await self.run(decode(0, going)), strict=True):
                outputs[slot].append(token)
        await self.run(worker_pb2.Step(released_slots_u16=slots_u16(range(len(prompts)))))
        return outputs


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers generates greedily in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=None, pad_token_id=0
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("chunk", [1000, 7])
async def test_greedy_tokens_are_those_of_transformers(stub: Any, expected: list[list[int]], chunk: int) -> None:
    scheduler = await Scheduler.connect(stub)
    assert await scheduler.generate(PROMPTS, [greedy()] * len(PROMPTS), chunk) == expected
    for prompt, tokens in zip(PROMPTS[:2], expected[:2], strict=True):
        assert await scheduler.generate([prompt], [greedy()], chunk) == [tokens]


async def test_seeded_tokens_are_the_same_alone_and_in_a_full_batch(stub: Any) -> None:
    scheduler = await Scheduler.connect(stub)
    mine = inference_pb2.SamplingParams(seed=12345, temperature=1.1, top_p=0.95)
    prompt = PROMPTS[1]
    [alone] = await scheduler.generate([prompt], [mine])
    others = [inference_pb2.SamplingParams(seed=seed, temperature=1.0, top_k=seed % 7) for seed in range(63)]
    prompts = [PROMPTS[seed % 4][:9] for seed in range(63)]
    # Not even the same slot, nor the same chunks.
    outputs = await scheduler.generate([*prompts[:40], prompt, *prompts[40:]], [*others[:40], mine, *others[40:]], 4)
    assert outputs[40] == alone
    assert len({tuple(output) for output in outputs}) > 55


# ---- Refusals to start ----------------------------------------------------------------------------------------------


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "broken"))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` in this process leaves its logging and its threads' switching alone."""
    monkeypatch.setattr(logging, "configure", lambda level: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)


def refusal(config: WorkerConfig) -> str:
    """What the command would end with."""
    started_after_all = threading.Timer(30, os.kill, (os.getpid(), signal.SIGTERM))
    started_after_all.start()
    try:
        with pytest.raises((BindError, ModelNotFound, ModelError, StartupError)) as refused:
            main(config)
    finally:
        started_after_all.cancel()
    return str(refused.value)


def test_missing_folder(quiet: None, config: WorkerConfig) -> None:
    assert "/nowhere/at/all" in refusal(dataclasses.replace(config, model="/nowhere/at/all"))


def test_unknown_architecture(quiet: None, config: WorkerConfig, broken: Path) -> None:
    path = broken / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in refusal(dataclasses.replace(config, model=str(broken)))


@pytest.mark.parametrize("size", [0, 5, 2000])
def test_corrupt_safetensors(quiet: None, config: WorkerConfig, broken: Path, size: int) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors" in refusal(dataclasses.replace(config, model=str(broken)))


def test_too_little_memory(quiet: None, config: WorkerConfig) -> None:
    greedy_for_memory = dataclasses.replace(config, max_num_seqs=256, max_model_len=None, swap_space=1e6)
    assert "too little memory" in refusal(greedy_for_memory)
    assert "--kv-cache-memory 1e-09 is too little: a block takes" in refusal(
        dataclasses.replace(config, kv_cache_memory=1e-9)
    )


def test_model_length_that_no_sequence_reaches(quiet: None, config: WorkerConfig) -> None:
    small = dataclasses.replace(config, kv_cache_memory=50_000 / 2**30)
    said = refusal(small)
    assert "max_model_len 128" in said and "--max-model-len auto" in said


def test_port_in_use(quiet: None, config: WorkerConfig) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in refusal(dataclasses.replace(config, port=port))


@pytest.mark.parametrize(
    "options",
    [
        dict(device="gpu"),
        dict(device="cpu", kv_cache_dtype="fp8"),
        dict(device="cuda:"),
        dict(cuda_graph_memory=-1.0),
        dict(gpu_memory_utilization=0.0),
        dict(max_num_seqs=300, max_num_batched_tokens=200),
        dict(max_model_len="long"),
        dict(max_model_len=0),
        dict(block_size=0),
        dict(kv_cache_memory=0.0),
        dict(swap_space=-1.0),
        dict(max_loras=0),
        dict(max_loras=2),
        dict(enable_lora=True, max_loras=40),
        dict(max_lora_rank=257),
        dict(tensor_parallel_size=0),
        dict(enable_lora=True, model_impl="transformers"),
    ],
)
def test_options_that_contradict(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        WorkerConfig(**options)


# ---- A process ------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.modules["transformers"] = None  # importing it on the way to readiness would fail
from octavo.cli import main
sys.exit(main(["worker", *sys.argv[1:]]))
"""


@contextmanager
def started(
    *arguments: str, is_forked: bool = True
) -> Iterator[tuple[ForkedCommand | subprocess.Popen[bytes], TextIO]]:
    """A worker without transformers, and what it says; in an interpreter of its own, unless it `is_forked`."""
    reader, writer = os.pipe()
    process: ForkedCommand | subprocess.Popen[bytes]
    with open(reader, encoding="utf-8") as said:
        try:
            if is_forked:
                process = ForkedCommand(["worker", *arguments], writer, missing=("transformers",))
            else:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=writer, env=environment)
        finally:
            os.close(writer)
        try:
            yield process, said
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def process(
    request: pytest.FixtureRequest, config: WorkerConfig
) -> Iterator[tuple[ForkedCommand | subprocess.Popen[bytes], str]]:
    """A worker with made-up weights, whose longest sequence is what its cache holds, and its address."""
    sizes = "--kv-cache-memory=0.0005", "--max-model-len=auto"
    arguments = f"--model={config.model}", "--port=0", "--load-format=dummy", *sizes
    with started(*arguments, is_forked=request.param == "forked") as (process, said):
        yield process, _ready(said)["address"]


def _ready(said: TextIO) -> dict[str, Any]:
    """What a worker says when it is ready."""
    events: Iterator[dict[str, Any]] = map(json.loads, said)
    return next(event for event in events if event["event"] == "worker ready")


@pytest.mark.parametrize(
    ("process", "number"),
    [("in an interpreter of its own", signal.SIGTERM), ("forked", signal.SIGINT)],
    indirect=["process"],
)
def test_process_serves_and_ends_promptly(
    process: tuple[ForkedCommand | subprocess.Popen[bytes], str], number: signal.Signals
) -> None:
    worker, address = process
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = stub.GetInfo(worker_pb2.GetInfoRequest())
        assert (info.model, info.architecture, info.dtype) == ("tiny", "LlamaForCausalLM", "float32")
        sizes = stub.Initialize(worker_pb2.InitializeRequest())
        assert sizes.max_model_len == sizes.num_device_blocks * info.block_size < info.max_model_len
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "octavo.v1.Worker"):
            response = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
    signalled = time.monotonic()
    worker.send_signal(number)
    assert worker.wait(timeout=60) == 0
    assert time.monotonic() - signalled < 5


def test_a_process_ends_promptly_under_an_adapter_that_no_disk_gives(config: WorkerConfig, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")  # whoever opens it waits for its writer
    with started(f"--model={config.model}", "--port=0", "--load-format=dummy", "--enable-lora") as (worker, said):
        with grpc.insecure_channel(_ready(said)["address"], options=CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            settings_id = stub.Initialize(worker_pb2.InitializeRequest()).settings_id
            may_end = threading.Event()

            def messages() -> Iterator[worker_pb2.StepRequest]:
                yield worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id=settings_id))
                may_end.wait()

            answers = stub.Execute(messages())
            lease = next(answers).notice.lease
            request = worker_pb2.LoadAdapterRequest(name="hung", path=str(tmp_path), generation=1, epoch=lease.epoch)
            loading = stub.LoadAdapter.future(request)
            time.sleep(0.5)
            assert not loading.done()
            may_end.set()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=30) == 0
        assert "worker stopped" in said.read()


def measure_for_ever(arguments: list[str], begun: Connection) -> None:
    """In a process that was forked: a worker whose first steps never end, as those with kernels to compile seem to."""

    def never_ends(*arguments: object) -> None:
        begun.send("measuring")
        threading.Event().wait()

    setattr(Worker, "_initialize", never_ends)  # noqa: B010 - mypy takes no method for another
    forkserver.run("octavo.cli", arguments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_that_measures_its_first_steps_ends_promptly(config: WorkerConfig, number: signal.Signals) -> None:
    forkserver.start()
    reader, writer = forkserver.CONTEXT.Pipe(duplex=False)
    arguments = ["worker", f"--model={config.model}", "--port=0"]
    process = forkserver.CONTEXT.Process(target=measure_for_ever, args=(arguments, writer), daemon=True)
    process.start()
    writer.close()
    try:
        assert reader.recv() == "measuring"
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(timeout=60)
        assert process.exitcode == 0, "it would measure for ever"
    finally:
        process.kill()
        process.join()
        reader.close()


def test_process_says_in_one_line_why_it_cannot_start() -> None:
    with started("--model=/nowhere/at/all") as (worker, said):
        text = said.read()
        assert worker.wait(60) == 1
    assert text.count("\n") == 1 and "/nowhere/at/all" in text
