"""README.md and docs/ as their readers have them: pages, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docs import generate

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in generate.PAGES}


@dataclass(frozen=True)
class Block:
    """A block of code: what follows its opening fence ("" for commands), and its lines."""

    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """In their order; those that are indented have no language."""
    fenced = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)]
    rest = re.sub(r"^```\w*\n.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^((?:    \S.*\n(?:    .*\n)*)+)", rest, flags=re.MULTILINE)
    return fenced + [Block("", re.sub(r"^    ", "", text, flags=re.MULTILINE)) for text in indented]


def commands_of(page: str) -> list[str]:
    """Whole commands without their comments; lines that end in a backslash, or within quotes, are joined."""
    words = r"^(?:octavo|make|docker|curl|grpcurl|python|cat|eval|export|pytest) "
    found: list[str] = []
    for block in blocks_of(page):
        if block.language:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if found and found[-1].count("'") % 2:
                found[-1] += " " + line.strip()
            elif re.match(words, line):
                found.append(line)
    return [re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", command)).strip() for command in found]
