"""Where a fault happened, without a word of what it was over: messages of exceptions may have users' names in them."""

from __future__ import annotations

import traceback
from pathlib import PurePath


def where_of(fault: BaseException) -> str:
    """Its kind, and the file, line and function that raised it."""
    frames = traceback.extract_tb(fault.__traceback__)
    if not frames:
        return type(fault).__name__
    last = frames[-1]
    return f"{type(fault).__name__} in {'/'.join(PurePath(last.filename).parts[-3:])}:{last.lineno} {last.name}"
