"""Packs what was sampled into the columns of `SequenceOutputs`, in the order of the step's rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from worker_svc.mirror.sequence_states import AppliedRows
from worker_svc.sampling.sampled import Logprobs, Sampled

_MESSAGES = {
    worker_pb2.ROW_ERROR_KIND_MODEL: "the model's logits for this row are not finite",
    worker_pb2.ROW_ERROR_KIND_SAMPLING: "its sampling parameters forbid every token that could come next",
}


def pack_outputs(rows: AppliedRows, sampled: Sampled) -> worker_pb2.SequenceOutputs:
    """Every drawn token of every row; a row that nothing could be drawn from answers no token but a RowError."""
    outputs = worker_pb2.SequenceOutputs()
    keeps: npt.NDArray[np.bool_] | slice = slice(None)
    if sampled.bad_rows.size:
        sampling_rows = np.flatnonzero(rows.num_samples > 0)
        bad_rows = sampling_rows[sampled.bad_rows]
        emptied = set(sampling_rows[sampled.emptied_rows].tolist())
        keeps = ~np.isin(rows.sample_rows, bad_rows)
        num_tokens = rows.num_samples.copy()
        num_tokens[bad_rows] = 0
        outputs.num_tokens_u16 = num_tokens.astype("<u2").tobytes()
        for row in bad_rows.tolist():
            kind = worker_pb2.ROW_ERROR_KIND_SAMPLING if row in emptied else worker_pb2.ROW_ERROR_KIND_MODEL
            outputs.row_errors.add(row=row, message=_MESSAGES[kind], kind=kind)
    outputs.token_ids_i32 = sampled.token_ids[keeps].astype("<i4").tobytes()
    if sampled.logprobs is not None:
        pack_logprobs(outputs, sampled.logprobs, keeps)
    return outputs


def pack_logprobs(
    outputs: worker_pb2.SequenceOutputs, logprobs: Logprobs, keeps: npt.NDArray[np.bool_] | slice
) -> None:
    """Fills the logprob columns from the entries that `keeps` names; what it leaves out has no candidates."""
    outputs.logprobs_f32 = logprobs.drawn[keeps].astype("<f4").tobytes()
    outputs.ranks_u32 = logprobs.ranks[keeps].astype("<u4").tobytes()
    if logprobs.top_token_ids.size:  # samples of a bad row have no candidates
        outputs.top_counts_u32 = logprobs.top_counts[keeps].astype("<u4").tobytes()
        outputs.top_token_ids_i32 = logprobs.top_token_ids.astype("<i4").tobytes()
        outputs.top_logprobs_f32 = logprobs.top_logprobs.astype("<f4").tobytes()
