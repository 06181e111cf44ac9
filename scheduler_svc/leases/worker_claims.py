"""What a worker says of itself and in its answers, checked against what is possible: anybody may answer at its address.

Memory and trust depend on these numbers: columns are as large as a worker says it is, and tokens go to clients. Wrong
answers that look right cannot be told from right ones here. Knows nothing of connections.
"""

from __future__ import annotations

import math

import numpy as np

from protos import worker_pb2
from scheduler_svc.core.step_plan import WrongAnswer

MAX_VOCAB_SIZE = 1 << 24
MAX_BLOCKS = 1 << 23  # about 0.5 GiB of what is known of each
MAX_COLUMN_BYTES = 16 << 30  # of token ids and block tables, which are touched only where there is a sequence
MAX_NAME_CHARS = 1024
MAX_MESSAGE_CHARS = 8192  # of an error's text, which clients are told
MAX_PHASE_NS = 3_600_000_000_000  # an hour: longer than any step may take
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TOKENIZER_FILES = 64
MAX_HASH_BYTES = 64
MAX_REQUEST_IDS = 1 << 20
U32 = np.dtype("<u4")
LEAST_SPEED = 1e-3  # tokens or bytes a second
_LARGEST_LOGPROB = 1e-3  # 0 and what rounding may add

_INFO = {
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "max_model_len": (1, 1 << 27),
    "max_num_seqs": (1, 1 << 16),  # slots are 16 bits
    "max_num_batched_tokens": (1, 1 << 24),
    "block_size": (1, 1 << 12),
    "max_logprobs": (0, MAX_VOCAB_SIZE),
    "max_loras": (0, 1 << 12),
}
_NAMES = ("instance_id", "model", "model_hash", "architecture", "dtype", "device", "tokenizer_sha256", "quantization")


class WrongClaim(Exception):
    """No worker can be what this one says that it is."""


def check_info(info: worker_pb2.WorkerInfo) -> None:
    """Raises WrongClaim for a description that none can have."""
    for name, (least, most) in _INFO.items():
        _check_between(name, getattr(info, name), least, most)
    for name in (*_NAMES, "kv_cache_dtype"):
        _check_between(f"characters of {name}", len(getattr(info, name)), 0, MAX_NAME_CHARS)
    _check_between("characters of instance_id", len(info.instance_id), 1, MAX_NAME_CHARS)
    _check_between("eos_token_ids", len(info.eos_token_ids), 0, 256)
    _check_between("adapters", len(info.adapters), 0, 1 << 12)
    for token_id in info.eos_token_ids:  # a tokenizer may have more of them than the model has logits
        _check_between("an eos_token_id", token_id, 0, (1 << 31) - 1)


def check_sizes(
    info: worker_pb2.WorkerInfo, asked: worker_pb2.InitializeRequest, sizes: worker_pb2.InitializeResponse
) -> None:
    """Raises WrongClaim for an answer to `asked` that is beyond it, or whose bookkeeping would take absurd memory."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        _check_between(name, getattr(sizes, name), 1, getattr(asked, name))
    _check_between("max_num_seqs", sizes.max_num_seqs, 1, sizes.max_num_batched_tokens)
    blocks_a_sequence = -(-sizes.max_model_len // info.block_size)
    column_bytes = 4 * sizes.max_num_seqs * (sizes.max_model_len + blocks_a_sequence)
    _check_between("max_num_seqs times max_model_len, in bytes", column_bytes, 0, MAX_COLUMN_BYTES)
    wanted = 2 * info.max_num_seqs * -(-info.max_model_len // info.block_size)  # by all sequences at their longest
    _check_between("num_device_blocks", sizes.num_device_blocks, 1, min(MAX_BLOCKS, wanted))
    _check_between("num_host_blocks", sizes.num_host_blocks, 0, MAX_BLOCKS)
    _check_between("block_bytes", sizes.block_bytes, 0, 1 << 40)
    _check_speed("prefill_tokens_per_s", sizes.prefill_tokens_per_s, 1e12)
    _check_speed("swap_bytes_per_s", sizes.swap_bytes_per_s, 1e15)
    _check_between("characters of settings_id", len(sizes.settings_id), 1, MAX_NAME_CHARS)


def check_lease(info: worker_pb2.WorkerInfo, response: worker_pb2.StepResponse) -> None:
    """Raises WrongClaim for a first message of a stream that grants no lease of this worker."""
    if response.notice.WhichOneof("notice") != "lease" or not response.notice.lease.epoch:
        raise WrongClaim("its first message grants no lease")
    if response.notice.lease.instance_id != info.instance_id:
        raise WrongClaim("its lease is of another instance than the one that was asked")


def check_cached(sizes: worker_pb2.InitializeResponse, lease: worker_pb2.LeaseGranted) -> None:
    """Raises WrongClaim for cached blocks that it does not have, or names twice, or two with one content."""
    _check_between("request_ids", len(lease.request_ids), 0, MAX_REQUEST_IDS)
    cached = lease.cached_blocks
    if len(cached.block_ids_u32) % U32.itemsize:
        raise WrongClaim("its cached blocks end within an entry")
    blocks = np.frombuffer(cached.block_ids_u32, U32)
    num_bytes = len(cached.hashes)
    if not len(blocks):
        _check_between("bytes of hashes of no cached block", num_bytes, 0, 0)
        return
    _check_between("the largest cached block", int(blocks.max()), 0, sizes.num_device_blocks - 1)
    _check_between("times that a cached block is named", int(np.bincount(blocks).max()), 1, 1)
    size, rest = divmod(num_bytes, len(blocks))
    _check_between("bytes of the hash of a cached block", size, 1, MAX_HASH_BYTES)
    _check_between("bytes of hashes behind the last cached block", rest, 0, 0)
    num_contents = len({cached.hashes[start : start + size] for start in range(0, num_bytes, size)})
    _check_between("cached blocks of different content", num_contents, len(blocks), len(blocks))


def check_result(result: worker_pb2.StepResult) -> None:
    """Raises WrongAnswer for times that no step can have taken, and for texts that nobody is to read."""
    slowest_ns = max((value for _, value in result.timings.ListFields()), default=0)
    if slowest_ns > MAX_PHASE_NS:
        raise WrongAnswer(f"a phase of {slowest_ns} ns")
    texts = [result.error.message, *(error.message for error in result.outputs.row_errors)]
    if (longest := max(map(len, texts))) > MAX_MESSAGE_CHARS:
        raise WrongAnswer(f"an error of {longest} characters")


def check_tokens(outputs: worker_pb2.SequenceOutputs, vocab_size: int, *, is_of_prompt: bool = False) -> None:
    """Raises WrongAnswer for tokens outside the vocabulary (0: any), and logprobs that are none.

    Those of a prompt's tokens may be no numbers: where the model fails over it, which its row's error says.
    """
    bound = vocab_size or 1 << 31
    for name, column in (("token ids", outputs.token_ids_i32), ("top token ids", outputs.top_token_ids_i32)):
        # A negative one is the largest of all.
        if column and np.maximum.reduce(np.frombuffer(column, U32)) >= bound:
            raise WrongAnswer(f"{name} outside a vocabulary of {vocab_size}")
    for column in (outputs.logprobs_f32, outputs.top_logprobs_f32):
        if not column:
            continue
        logprobs = np.frombuffer(column, "<f4")
        if not bool(((logprobs <= _LARGEST_LOGPROB) | (is_of_prompt & np.isnan(logprobs))).all()):
            raise WrongAnswer("logprobs that are above 0, or no numbers")
    if outputs.ranks_u32 and int(np.frombuffer(outputs.ranks_u32, "<u4").max()) > bound:
        raise WrongAnswer(f"ranks beyond a vocabulary of {vocab_size}")


def _check_between(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise WrongClaim(f"{name} is {value:g}; {least:g} to {most:g} can be")


def _check_speed(name: str, value: float, most: float) -> None:
    """0 says nothing. What is hardly more would make times of it that are no numbers."""
    if value:
        _check_between(name, value, LEAST_SPEED, most)
