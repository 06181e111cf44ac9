"""A model whose logits are a plain function of its input, and the smallest steps that drive it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from protos import inference_pb2, worker_pb2
from worker_svc.models import ModelConfig
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.logit_reader import LogitReader
from worker_svc.models.style import DecoderStyle

VOCAB_SIZE = 31


def next_token(token_id: int, position: int) -> int:
    """The greedy successor of a token at a position."""
    return (token_id * 7 + position * 3 + 1) % VOCAB_SIZE


class Hold:
    """Keeps a model in the step that comes next, from `has_begun` until somebody sets `may_end`."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def wait(self) -> None:
        """In the model. Raises AssertionError where nobody lets it go on."""
        self.has_begun.set()
        assert self.may_end.wait(60)


class FakeModel:
    """Puts logit 5 on `next_token` and 0 elsewhere; can be slow, held, fail, or answer NaN for one token id."""

    weights_bytes = 0
    is_capturable = True
    device = torch.device("cpu")

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config or fake_config()
        self.delay_s = 0.0
        self.spins = False  # whether it computes in Python for that long, rather than sleep
        self.hold: Hold | None = None
        self.error: Exception | None = None
        self.poison: int | None = None
        self.num_forwards = 0

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        finished_s = time.monotonic() + self.delay_s
        while self.spins and time.monotonic() < finished_s:
            pass
        time.sleep(max(finished_s - time.monotonic(), 0))
        if self.hold is not None:
            self.hold.wait()
        self.num_forwards += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if reader is not None:
            for rows in reader.rows.split(3):
                reader.take(self._logits(token_ids[rows], positions[rows]))
        logits = self._logits(token_ids[logits_rows], positions[logits_rows])
        return logits if out is None else out.copy_(logits)

    def _logits(self, last: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(last), VOCAB_SIZE)
        logits[torch.arange(len(last)), (last * 7 + where * 3 + 1) % VOCAB_SIZE] = 5.0
        if self.poison is not None:
            logits[last == self.poison] = torch.nan
        return logits


def fake_config(max_model_len: int = 64) -> ModelConfig:
    """One layer of the smallest cache."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=4,
        max_positions=max_model_len,
        max_model_len=max_model_len,
        tie_word_embeddings=True,
        style=DecoderStyle(),
        dtype=torch.float32,
        eos_token_ids=(2,),
        model_name="fake",
        model_hash="0",
    )


def slots_u16(slots: Iterable[int]) -> bytes:
    return np.array(list(slots), "<u2").tobytes()


def u32(values: Iterable[int]) -> bytes:
    return np.array(list(values), "<u4").tobytes()


def greedy(seed: int = 1, **params: object) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(seed=seed, temperature=0.0, **params)  # type: ignore[arg-type]  # any field


def prefill(
    step_id: int,
    prompts: Sequence[Sequence[int]],
    *,
    block_size: int = 4,
    max_len: int = 64,
    params: inference_pb2.SamplingParams | None = None,
) -> worker_pb2.Step:
    """Prompt i goes to slot i, with blocks for `max_len` tokens, and samples its first token."""
    step = worker_pb2.Step(step_id=step_id)
    num_blocks = -(-max_len // block_size)
    for slot, prompt in enumerate(prompts):
        group = step.groups.add(request_id=f"request-{slot}", sampling_params=params or greedy())
        table = range(slot * num_blocks, (slot + 1) * num_blocks)
        group.sequences.add(slot=slot, token_ids=prompt, block_table=table)
    step.rows.slots_u16 = slots_u16(range(len(prompts)))
    step.rows.query_lens_u32 = u32(len(prompt) for prompt in prompts)
    step.rows.num_samples_u16 = slots_u16([1] * len(prompts))
    return step


def decode(step_id: int, slots: Iterable[int]) -> worker_pb2.Step:
    """One more token for each of `slots`."""
    slots = list(slots)
    return worker_pb2.Step(
        step_id=step_id, rows=worker_pb2.Rows(slots_u16=slots_u16(slots), num_decode_rows=len(slots))
    )


def tokens_of(result: worker_pb2.StepResult) -> list[int]:
    return np.frombuffer(result.outputs.token_ids_i32, "<i4").tolist()
