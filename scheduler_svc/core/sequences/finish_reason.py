"""Why a sequence has ended."""

from __future__ import annotations

import enum

from protos import inference_pb2


class FinishReason(enum.IntEnum):
    """Numbered as in the protos, so that a column of them is a column of the answer."""

    NONE = inference_pb2.FINISH_REASON_UNSPECIFIED
    STOP = inference_pb2.FINISH_REASON_STOP
    LENGTH = inference_pb2.FINISH_REASON_LENGTH
    ABORT = inference_pb2.FINISH_REASON_ABORT
    ERROR = inference_pb2.FINISH_REASON_ERROR
