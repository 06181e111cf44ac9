"""docs/adding-a-kernel.md: its oracle, kernel and test are put in their places, and the test passes there."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from kernels.oracles import reference

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-kernel.md"


@pytest.fixture
def blocks() -> Mapping[str, str]:
    """The page's code, by the file that it belongs to."""
    return dict(re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


def test_what_the_page_adds_works(blocks: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle: dict[str, object] = {}
    exec(blocks["kernels/oracles/reference.py"], vars(reference), oracle)
    monkeypatch.setattr(reference, "squared_relu", oracle["squared_relu"], raising=False)
    spec = importlib.util.spec_from_file_location("kernels.gpu.rows.squared_relu", tmp_path / "squared_relu.py")
    assert spec is not None and spec.loader is not None and spec.origin is not None
    Path(spec.origin).write_text(
        blocks["kernels/gpu/rows/squared_relu.py"]
    )  # Triton reads a kernel's source in its file
    kernel = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels.gpu.rows.squared_relu", kernel)
    spec.loader.exec_module(kernel)
    tests: dict[str, object] = {}
    exec(blocks["tests/kernels/test_squared_relu.py"], tests)
    of_values, of_errors = tests["test_squared_relu"], tests["test_what_does_not_fit_is_refused"]
    assert callable(of_values) and callable(of_errors)
    for count, size in ((1, 1), (3, 577)):
        of_values(torch.float32, count, size)
    of_errors()
    assert len(list(kernel.variants())) == 4

    # And it is a test: a kernel that is wrong does not pass.
    monkeypatch.setattr(kernel, "squared_relu", lambda out, x: out.copy_(x.abs() * x))
    tests["squared_relu"] = kernel.squared_relu
    with pytest.raises(AssertionError):
        of_values(torch.float32, 3, 577)


def test_the_commands_and_places_that_it_names_are_there() -> None:
    page, root = PAGE.read_text(), PAGE.parents[1]
    for place in re.findall(r"`((?:kernels|tests)/[\w/]+\.?\w*/?)`", page):
        if "NAME" not in place and "squared_relu" not in place:
            assert (root / place).exists(), place
