"""What the mirror holds of every slot. A slot is a row of the persistent batch."""

from __future__ import annotations

import numpy as np

from protos import inference_pb2
from worker_svc.mirror.sampling_columns import SamplingColumns


class SlotColumns:
    """Columns by slot. Arrays are public to read; an unoccupied slot has zero tokens and blocks."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        vocab_size: int = 1 << 31,
    ) -> None:
        """Sizes in sequences, tokens, tokens a block, blocks. `vocab_size`: sequences bring tokens below it."""
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.vocab_size = vocab_size
        self.max_blocks = -(-max_model_len // block_size)
        self.occupied = np.zeros(max_num_seqs, np.bool_)  # [slots]
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)  # [slots, max_model_len]
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # [slots], prompt and generated, as far as drawn
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)  # [slots]
        self.num_blocks = np.zeros(max_num_seqs, np.int64)  # [slots]
        self.block_tables = np.zeros((max_num_seqs, self.max_blocks), np.int32)  # [slots, max_blocks]
        self.sequence_index = np.zeros(max_num_seqs, np.int64)  # [slots], in the group
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)  # [slots]
        self.tenancy = np.zeros(max_num_seqs, np.int64)  # [slots], another number for every sequence that a slot had
        self.sampling = SamplingColumns(max_num_seqs)
        self.loaded_adapters: dict[str, int] = {}  # their numbers by name; the code that loads them maintains this
        self.adapters: list[str] = [""] * max_num_seqs  # by slot; "": none
        self.adapter_numbers = np.full(max_num_seqs, -1)  # [slots], of the same; -1: none
        self.request_ids: list[str | None] = [None] * max_num_seqs
        self.sampling_params: list[inference_pb2.SamplingParams | None] = [None] * max_num_seqs
