"""Who gets which room of a pass, and which are kept."""

from __future__ import annotations

import torch

from kernels.cpu.layers.layer_room import LayerRooms
from tests.kernels.test_layer_stack import SHAPE


def test_a_room_that_is_large_enough_is_used_again() -> None:
    rooms = LayerRooms(SHAPE)
    room = rooms.take(8, torch.float32)
    assert rooms.take(8, torch.float32) is not room  # two passes at once
    rooms.give_back(room)
    assert rooms.take(3, torch.float32) is room
    rooms.give_back(room)
    larger = rooms.take(9, torch.float32)
    assert larger.rows == 9 and larger.attended.shape == (9, 8)
    rooms.give_back(larger)
    assert rooms.take(9, torch.bfloat16).attended.dtype == torch.bfloat16


def test_a_prompt_leaves_the_room_of_decode_steps_where_it_is() -> None:
    rooms = LayerRooms(SHAPE)
    room = rooms.take(4, torch.float32)
    rooms.give_back(room)
    of_prompt = rooms.take(300, torch.float32)
    assert of_prompt is not room
    rooms.give_back(of_prompt)
    assert rooms.take(4, torch.float32) is room
