"""Beams by the hundred over many steps: what is packed into 16 bits stays small, and neighbours get their tokens."""

from __future__ import annotations

import numpy as np

from protos import worker_pb2
from tests.scheduler.simulation import Simulation


def test_a_search_of_48_beams_never_has_an_index_beyond_its_width() -> None:
    """Also on the way to another worker. New ones by the dozen a step would leave 16 bits after a thousand tokens."""
    width = 48
    simulation = Simulation(
        num_slots=width + 2, num_blocks=3000, max_num_batched_tokens=width + 34, max_model_len=64, vocab_size=400
    )
    beams = simulation.add(list(range(4, 20)), 40, eos_token_id=None, beam_width=width, n=2)
    neighbour = simulation.add([5, 6, 7], 40, eos_token_id=None)
    for _ in range(12):
        simulation.send()
        simulation.answer()
    simulation.lose_worker()
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    forked = [index for step in simulation.steps for index in np.frombuffer(step.fork_indices_u16, "<u2").tolist()]
    assert len(forked) > 5 * width, "every step ends some beams, and forks others in their place"
    assert max(forked) < width and max(map(_largest_introduced, simulation.steps)) < width
    assert beams.is_finished and neighbour.is_finished


def test_live_beams_never_share_an_index() -> None:
    simulation = Simulation(num_slots=8, num_blocks=200, max_num_batched_tokens=32)
    group = simulation.add([4, 5, 6], 40, eos_token_id=None, beam_width=8)
    while not group.is_finished:
        simulation.send()
        simulation.answer()
        live = [beam.index for beam in group.unfinished()]
        assert len(set(live)) == len(live) and max(live, default=0) < 8


def _largest_introduced(step: worker_pb2.Step) -> int:
    return max((sequence.index for group in step.groups for sequence in group.sequences), default=0)
