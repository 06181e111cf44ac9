"""Regular expressions that files bring, tried before they are used.

Python's may take years over a short text, and hold up every thread meanwhile. So those that may match in several ways
are tried first in a process that can be ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from subprocess import DEVNULL

PATTERNS_TIMEOUT_S = 5.0
_TIMEOUT_OF_ONE_S = 20e-6  # of a pattern and a name more: honest ones take a tenth, and some models have many of both
_MATCH_ALL = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.match(rf"(.*\\.)?({pattern})$", name)
        re.fullmatch(pattern, name)
"""


def why_too_slow(patterns: Iterable[str], names: Sequence[str], file: str) -> str | None:
    """What is wrong where these patterns of a `file` take too long over one of these names, whether the beginning of a
    name is to match, all of it, or its end; else None. What is no pattern is not found here."""
    tried = [pattern for pattern in patterns if re.search(r"[*+?{|]", pattern)]
    if not tried:
        return None
    command, given = [sys.executable, "-I", "-S", "-c", _MATCH_ALL], json.dumps([tried, list(names)]).encode()
    timeout_s = PATTERNS_TIMEOUT_S + _TIMEOUT_OF_ONE_S * len(tried) * len(names)
    try:  # what is no pattern at all ends it with an error, and is named where it is used
        subprocess.run(command, input=given, stdout=DEVNULL, stderr=DEVNULL, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        longest = max(tried, key=len)
        return f"the patterns of {file} take too long, more than {timeout_s:.2g} s, such as {longest!r}"
    return None
