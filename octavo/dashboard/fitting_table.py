"""A table that leaves whole columns out where a terminal is too narrow for all, rather than a piece of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from octavo.shared.terminal_text import harmless_line

Cell = Text | ProgressBar

_GAP = 2  # characters between columns
_NAME_WIDTH = 24  # characters of a name that are worth more than another column


def text(words: str, style: str = "") -> Text:
    """A cell. What it says may come from anybody: it is no markup, and steers no terminal."""
    return Text(harmless_line(words), style=style, no_wrap=True, overflow="ellipsis")


@dataclass
class Column:
    """One of a table. `is_name`: it may be cut; `min_width`: in characters, so that a number that grows moves nothing.

    `folds`: goes on in the next line instead.
    """

    title: str
    is_number: bool = False
    is_name: bool = False
    folds: bool = False
    min_width: int = 0
    cells: list[Cell] = field(default_factory=list)

    @property
    def asked_width(self) -> int:
        """Characters that it needs: all of its cells, or the beginning of names."""
        width = max([self.min_width, len(self.title), *map(_width, self.cells)])
        return min(width, _NAME_WIDTH) if self.is_name or self.folds else width


@dataclass
class FittingTable:
    """`spared`: titles of columns that are left out one after the other, until those that remain fit.

    `below`: lines that are shown below the rows where the column of that title is left out.
    """

    columns: Sequence[Column]
    spared: Sequence[str]
    below: dict[str, list[Text]] = field(default_factory=dict)

    def add_row(self, *cells: str | Cell) -> None:
        """A cell for each column."""
        for column, cell in zip(self.columns, cells, strict=True):
            column.cells.append(text(cell) if isinstance(cell, str) else cell)

    def shown(self, width: int) -> list[Column]:
        """The columns that fit into so many characters; those that are never spared, if none do."""
        left_out: set[str] = set()
        for title in self.spared:
            if _total(self._without(left_out)) <= width:
                break
            left_out.add(title)
        return self._without(left_out)

    def _without(self, titles: Collection[str]) -> list[Column]:
        return [column for column in self.columns if column.title not in titles]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.shown(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                min_width=column.min_width or None,
                no_wrap=not (column.is_name or column.folds),  # rich first narrows those that may be wrapped
            )
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        yield table
        titles = {column.title for column in columns}
        for title, lines in self.below.items():
            yield from () if title in titles else lines


def _width(cell: Cell) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell.width or 0


def _total(columns: Sequence[Column]) -> int:
    return sum(column.asked_width + _GAP for column in columns) - _GAP
