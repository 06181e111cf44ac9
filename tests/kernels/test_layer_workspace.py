"""Who gets which workspace of a pass, and which are kept."""

from __future__ import annotations

import torch

from kernels.cpu.layers.layer_workspace import LayerWorkspaces
from tests.kernels.test_layer_stack import SHAPE


def test_a_workspace_that_is_large_enough_is_used_again() -> None:
    workspaces = LayerWorkspaces(SHAPE, 32)
    workspace = workspaces.take(8, torch.float32)
    assert workspaces.take(8, torch.float32) is not workspace  # two passes at once
    workspaces.give_back(workspace)
    assert workspaces.take(3, torch.float32) is workspace
    workspaces.give_back(workspace)
    larger = workspaces.take(9, torch.float32)
    assert larger.rows == 9 and larger.attended.shape == (9, 8) and larger.prepared.numel() == 9 * 32
    workspaces.give_back(larger)
    assert workspaces.take(9, torch.bfloat16).attended.dtype == torch.bfloat16


def test_a_prompt_leaves_the_workspace_of_decode_steps_where_it_is() -> None:
    workspaces = LayerWorkspaces(SHAPE, 32)
    workspace = workspaces.take(4, torch.float32)
    workspaces.give_back(workspace)
    of_prompt = workspaces.take(300, torch.float32)
    assert of_prompt is not workspace
    workspaces.give_back(of_prompt)
    assert workspaces.take(4, torch.float32) is workspace
