"""Who gets which workspace of a pass, how large it is, and which are kept."""

from __future__ import annotations

import torch

from kernels.cpu.elements import BFLOAT16, FLOAT32
from kernels.cpu.layers.layer_workspace import LayerWorkspaces
from kernels.cpu.library import library
from kernels.cpu.native.build import LEVELS
from tests.kernels.test_layer_stack import SHAPE, of_bytes, product, stack


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


def test_a_workspace_has_what_any_of_the_products_prepares_of_a_row() -> None:
    """Of each 32 inputs their codes, a scale and four sums, of 4 bytes each, and where no instruction multiplies bytes
    the codes as words as well; float32 rows stay where they are."""
    features = LEVELS[library().level].needs
    group_bytes = 52 if features & {"avx512_vnni", "avx_vnni"} or not features else 52 + 64
    sizes = [of_bytes(num_in, 8).workspace_bytes(FLOAT32) for num_in in (1, 32, 33)]
    assert sizes == [group_bytes, group_bytes, 2 * group_bytes]
    assert [product(8, 8).workspace_bytes(element) for element in (FLOAT32, BFLOAT16)] == [0, 8 * 4]
    for layers, row_bytes in ((stack(), 0), (stack(mlp_out=of_bytes(2, 8)), group_bytes)):
        assert layers._workspaces.take(3, torch.float32).prepared.numel() == 3 * row_bytes
