"""What an answer says of prompts: the logprobs that their groups have not been told yet.

A prompt may be computed more than once, in other chunks each time. What has been told is not told again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protos import worker_pb2
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import ScheduledRows, WrongAnswer
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.engine.messages.step_encoder import check_logprobs
from scheduler_svc.leases.worker_claims import check_tokens


def take_prompt_logprobs(
    rows: ScheduledRows, outputs: worker_pb2.SequenceOutputs, vocab_size: int = 0
) -> Iterator[tuple[SequenceGroup, worker_pb2.SequenceOutputs]]:
    """Groups with the logprobs of the next tokens of their prompts, which then count as told.

    Raises WrongAnswer for what does not fit the rows.
    """
    for entry in outputs.prompt_logprobs:
        if entry.row >= len(rows):
            raise WrongAnswer(f"prompt logprobs of row {entry.row} of {len(rows)}")
        group = rows.sequences[entry.row].group
        check_logprobs(entry.logprobs)
        check_tokens(entry.logprobs, vocab_size, is_of_prompt=True)
        if not entry.logprobs.logprobs_f32:
            raise WrongAnswer(f"prompt logprobs of row {entry.row} without logprobs")
        columns = LogprobColumns(entry.logprobs)
        first, end = entry.first_position, entry.first_position + len(columns)
        if not 0 < first <= group.num_prompt_logprobs or end > group.num_prompt_tokens:
            raise WrongAnswer(f"logprobs of prompt tokens {first} to {end} after {group.num_prompt_logprobs}")
        if end > group.num_prompt_logprobs:
            new = columns.select(np.arange(group.num_prompt_logprobs - first, len(columns)))
            group.num_prompt_logprobs = end
            yield group, new
