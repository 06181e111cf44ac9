"""Adapters on real workers: loaded while serving, several in one batch, and there again after a worker was lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo import LLM, AsyncClient, LoRARequest, SamplingParams
from octavo.errors import RequestFailed
from octavo.shared.ports import free_port
from tests.adapters import make_adapter, merge
from tests.chaos.worker_process import WorkerProcess
from tests.integration.scheduler_process import scheduler
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama

PROMPT = list(b"|a prompt of several blocks, for an adapter")
SIZES = ["--max-model-len=1024", "--max-num-seqs=8", "--kv-cache-memory=0.01", "--swap-space=0", "--num-threads=1"]
NAMES = ["", "pirate", "poet"]  # "": no adapter


class Made:
    """A model, two adapters, and the oracle of each by name."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny_llama(folder / "tiny", intermediate_size=158)
        self.adapters: dict[str, Path] = {}
        self._oracles = {"": GreedyOracle(self.model)}
        for seed, name in enumerate(NAMES[1:], 1):
            self.adapters[name] = make_adapter(folder / name, self.model, rank=4 * seed, seed=seed)
            merged = merge(folder / f"merged-{name}", self.model, self.adapters[name])
            self._oracles[name] = GreedyOracle(merged)
        self._expected: dict[tuple[str, int], list[int]] = {}

    def check(self, name: str, got: Sequence[int]) -> None:
        key = name, len(got)
        if key not in self._expected:
            self._expected[key] = self._oracles[name].generate(PROMPT, len(got), eos_token_id=None)
        self._oracles[name].check(PROMPT, self._expected[key], got, f"adapter {name!r}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("models"))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"max_num_seqs": 2}],
    ids=["one", "ranks", "stages", "few"],
)
def test_prompts_of_several_adapters_and_none_in_one_call(options: dict[str, int], made: Made) -> None:
    """Twice, so that the second time prefixes are found: each adapter's own."""
    requests = [None, *(LoRARequest(name, 1, str(path)) for name, path in made.adapters.items())]
    limits = {"max_model_len": 256, "kv_cache_memory": 0.01, "swap_space": 0.0, **options}
    with LLM(str(made.model), enable_lora=True, max_loras=2, **limits) as llm:
        for _ in range(2):
            outputs = llm.generate(
                prompt_token_ids=[PROMPT] * 6, sampling_params=greedy(20), lora_request=requests * 2, use_tqdm=False
            )
            for name, output in zip(NAMES * 2, outputs, strict=True):
                made.check(name, output.outputs[0].token_ids)
        assert outputs[-1].num_cached_tokens


async def generate(address: str, adapter: str, max_tokens: int, begun: asyncio.Event | None = None) -> list[int]:
    token_ids: list[int] = []
    async with AsyncClient(address) as client:
        params = greedy(max_tokens)
        async for delta in client.generate(prompt_token_ids=PROMPT, sampling_params=params, adapter=adapter):
            token_ids.extend(token for output in delta.outputs for token in output.token_ids)
            if token_ids and begun is not None:
                begun.set()
    return token_ids


async def test_a_worker_that_comes_for_a_lost_one_has_its_adapters_first(made: Made, tmp_path: Path) -> None:
    with ExitStack() as stack:
        port, flags = free_port(), [str(made.model), *SIZES, "--enable-lora", "--max-loras=2"]
        worker = WorkerProcess([*flags, f"--port={port}"], tmp_path / "worker.log")
        stack.callback(worker.end)
        worker.wait_until_ready()
        service = stack.enter_context(scheduler(f"--worker=127.0.0.1:{port}"))
        service.wait_until_ready()
        async with AsyncClient(service.address) as client:
            for name, path in made.adapters.items():
                await client.load_adapter(name, str(path))
            with pytest.raises(RequestFailed, match="adapter folder /nowhere does not exist"):
                await client.load_adapter("nobody", "/nowhere")
            begun = asyncio.Event()
            requests = {name: asyncio.create_task(generate(service.address, name, 200, begun)) for name in NAMES}
            await begun.wait()
            worker.send_signal(signal.SIGKILL)
            worker.end()
            again = WorkerProcess([*flags, f"--port={port}"], tmp_path / "again.log")
            stack.callback(again.end)
            for name, request in requests.items():
                made.check(name, await request)
            await client.unload_adapter("poet")
            with pytest.raises(RequestFailed, match="adapter 'poet' is not here; loaded: 'pirate'"):
                await generate(service.address, "poet", 5)
            made.check("pirate", await generate(service.address, "pirate", 20))


async def test_a_worker_that_takes_no_adapters_says_how_to_start_it(made: Made, tmp_path: Path) -> None:
    with ExitStack() as stack:
        worker = WorkerProcess([str(made.model), *SIZES], tmp_path / "worker.log")
        stack.callback(worker.end)
        worker.wait_until_ready()
        service = stack.enter_context(scheduler(f"--worker=127.0.0.1:{worker.port}"))
        service.wait_until_ready()
        async with AsyncClient(service.address) as client:
            with pytest.raises(RequestFailed, match="no worker of this server takes adapters"):
                await client.load_adapter("pirate", str(made.adapters["pirate"]))
