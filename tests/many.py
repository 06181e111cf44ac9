"""How often a test tries what has no end, as random histories: a few times in `make test`, often in `make chaos`."""

from __future__ import annotations

import os

import pytest

MORE = int(os.environ.get("TESTS_TRY", "1"))  # so many times as often
without_end = pytest.mark.without_end  # `make chaos` runs these again, with more


def trials(few: int) -> int:
    """Of a test that is marked `without_end`."""
    return few * MORE
