"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-results", metavar="FILE", help="write what faults and latency cost, as JSON with hardware and date"
    )


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that sets up logging (`LLM` does) leaves it writing to a stream that was captured for that test alone."""
    yield
    structlog.reset_defaults()
