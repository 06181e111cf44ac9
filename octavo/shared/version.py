"""Which version of Octavo this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

FROM_SOURCES = "0+source"  # of a folder of sources that nobody installed


def installed_version() -> str:
    """As its installation says."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return FROM_SOURCES
