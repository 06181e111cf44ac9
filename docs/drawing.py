"""Boxes, arrows and words as SVG: enough for the pictures of ideas, in the colours of docs/pictures/split.svg."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

PLAIN, SCHEDULER, WORKER, SHARED, GONE = "plain", "scheduler", "worker", "shared", "gone"
_COLOURS = {  # fill, border
    PLAIN: ("#f2f2f2", "#777777"),
    SCHEDULER: ("#e3eef7", "#0b62a4"),
    WORKER: ("#fbeee0", "#b86e00"),
    SHARED: ("#d9efd9", "#2d7d2d"),
    GONE: ("#ffffff", "#b0b0b0"),
}
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    ' orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>'
)


class Drawing:
    """One picture. Coordinates are pixels from its upper left corner.

    Args:
        title: what it shows, in a sentence, for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            _TIP,
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, text: str = "", kind: str = PLAIN) -> None:
        """A box with up to a few lines of text in its middle."""
        fill, border = _COLOURS[kind]
        dashes = ' stroke-dasharray="4 3"' if kind == GONE else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{border}"{dashes}/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - 8 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            self.words(x + width // 2, round(top + 16 * i), line, middle=True)

    def cells(self, x: int, y: int, texts: Iterable[str], kind: str = PLAIN, width: int = 44, height: int = 28) -> None:
        """A row of boxes without gaps, as of a block or a table."""
        for i, text in enumerate(texts):
            self.box(x + i * width, y, width, height, text, kind)

    def frame(self, x: int, y: int, width: int, height: int, text: str, kind: str = PLAIN) -> None:
        """A box that others stand in, with its name at the top."""
        self.box(x, y, width, height, "", kind)
        self._parts.append(
            f'<text x="{x + width // 2}" y="{y + 19}" text-anchor="middle" font-weight="bold" fill="#111">'
            f"{escape(text)}</text>"
        )

    def words(self, x: int, y: int, text: str, *, middle: bool = False, small: bool = False) -> None:
        """A line of text; `y` is its base line."""
        anchor = ' text-anchor="middle"' if middle else ""
        look = ' font-size="11" fill="#444"' if small else ' fill="#111"'
        self._parts.append(f'<text x="{x}" y="{y}"{anchor}{look}>{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], text: str = "", both: bool = False) -> None:
        """A line through the points, with a tip at its end; the text stands above the middle of its first part."""
        start = ' marker-start="url(#tip)"' if both else ""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path d="{path}" fill="none" stroke="#444" marker-end="url(#tip)"{start}/>')
        if text:
            (x, y), (to_x, to_y) = points[:2]
            self.words((x + to_x) // 2, (y + to_y) // 2 - 6, text, middle=True, small=True)

    def svg(self) -> str:
        """The whole picture."""
        return "\n".join([*self._parts, "</svg>", ""])
