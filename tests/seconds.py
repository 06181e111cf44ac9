"""How long each test file takes: what the suite begins with, and what is quick.

`python -m tests.seconds .pytest_cache/results.xml`, after `make test` on an idle machine, writes `seconds.json` anew.
It decides no result. Files that it does not know count as quick.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
ROOT = FILE.parents[1]
QUICK_S = 1.6  # a file that takes no longer is part of `make test-quick`


def seconds_of_files() -> dict[str, float]:
    """By path from the root of the repository."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def read_results(path: Path) -> dict[str, float]:
    """Of a JUnit file: the sum of its tests' seconds by file, set-up included."""
    seconds: dict[str, float] = defaultdict(float)
    for case in xml.parse(path).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        # A class of tests follows the module in its name.
        names = ["/".join(parts[:length]) + ".py" for length in range(len(parts), 0, -1)]
        for file in [name for name in names if (ROOT / name).is_file()][:1]:
            seconds[file] += float(case.get("time", "0"))
    return {file: round(each, 1) for file, each in sorted(seconds.items())}


if __name__ == "__main__":
    FILE.write_text(json.dumps(read_results(Path(sys.argv[1])), indent=0) + "\n", encoding="utf-8")
