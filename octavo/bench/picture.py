"""Figures as a picture: charts of lines or points beside each other, in SVG, which needs no library and no screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 420, 300  # of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46  # of these, the margins around its axes
LEGEND_LINE = 16
COLORS = ("#0b62a4", "#d1495b", "#2e8b57", "#e08e0b", "#6a4c93", "#4d4d4d", "#17a2b8")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 2", "1 2", "10 4")


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name, joined by a line in order, or not. A NaN is left out.

    Attributes:
        color: its number among `COLORS`; None takes the series' place in its chart.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_joined: bool = True
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """One pair of axes. With `categories` the xs are their numbers from 0 on."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    categories: Sequence[str] = ()
    log_x: bool = False  # to base 2, where ticks stand at the xs
    log_y: bool = False  # to base 10; ys are above 0
    is_bars: bool = False  # with `categories`: a bar a value, those of one category side by side


def check_path(path: Path) -> None:
    """Raises ValueError for a path that is no .svg file, or whose folder does not exist."""
    if path.suffix.lower() != ".svg":
        raise ValueError(f"{path}: a picture is written as FILE.svg")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def write(path: Path, charts: Sequence[Chart]) -> None:
    """Writes the charts as one SVG file. Raises OSError where that fails."""
    path.write_text(draw(charts), encoding="utf-8")


def draw(charts: Sequence[Chart]) -> str:
    """The text of an SVG file: charts from left to right, each above its legend."""
    widths = [max(WIDTH, LEFT + RIGHT + 110 * len(chart.categories)) for chart in charts]
    rows = max(-(-len(chart.series) // _columns(chart, width)) for chart, width in zip(charts, widths, strict=True))
    height = HEIGHT + LEGEND_LINE * rows + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sum(widths)} {height}" width="{sum(widths)}"'
        f' height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{sum(widths)}" height="{height}" fill="white"/>',
    ]
    offset = 0
    for chart, width in zip(charts, widths, strict=True):
        parts += [f'<g transform="translate({offset} 0)">', *_chart(chart, width), "</g>"]
        offset += width
    return "\n".join([*parts, "</svg>", ""])


def _columns(chart: Chart, width: int) -> int:
    """How many legend entries stand side by side below a chart of this width."""
    return max(1, (width - LEFT) // _entry_width(chart))


def _entry_width(chart: Chart) -> int:
    """The width of a legend entry in pixels: letters are about 6 wide."""
    return 44 + 6 * max(len(series.name) for series in chart.series)


def _chart(chart: Chart, width: int) -> list[str]:
    xs = [x for series in chart.series for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
    ys = [y for series in chart.series for y in series.ys if math.isfinite(y)]
    if chart.categories:
        across = _Axis(-0.5, len(chart.categories) - 0.5, LEFT, width - RIGHT)
    else:
        across = _Axis(min(xs, default=0), max(xs, default=1), LEFT, width - RIGHT, chart.log_x)
    heights = _powers(min(ys, default=1), max(ys, default=1)) if chart.log_y else _ticks_around(max(ys, default=1))
    up = _Axis(heights[0], heights[-1], HEIGHT - BOTTOM, TOP, chart.log_y)
    middle = (LEFT + width - RIGHT) / 2
    parts = [
        f'<text x="{middle:g}" y="18" text-anchor="middle" font-size="13">{escape(chart.title)}</text>',
        f'<text x="{middle:g}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>",
    ]
    for value in heights:
        y = up.at(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{width - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>')
    marks: list[tuple[float, str]]
    if chart.categories:
        marks = list(enumerate(chart.categories))
    else:
        values = sorted(set(xs)) if chart.log_x else _ticks(max(xs, default=1))
        marks = [(value, f"{value:,g}") for value in values if min(xs, default=0) <= value <= max(xs, default=1)]
    for place, name in marks:
        x = across.at(place)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{width - RIGHT}" stroke="black" fill="none"/>')
    for number, series in enumerate(chart.series):
        parts += _bars(chart, number, across, up) if chart.is_bars else _points(series, number, across, up)
        row, column = divmod(number, _columns(chart, width))
        x, y = LEFT + _entry_width(chart) * column, HEIGHT + LEGEND_LINE * row + 6
        if chart.is_bars:
            parts.append(f'<rect x="{x + 8}" y="{y - 9}" width="10" height="10" fill="{_color(series, number)}"/>')
        else:
            parts += _mark(x, y - 4, _color(series, number), DASHES[number % len(DASHES)], series.is_joined)
        parts.append(f'<text x="{x + 26}" y="{y}">{escape(series.name)}</text>')
    return parts


def _bars(chart: Chart, number: int, across: _Axis, up: _Axis) -> list[str]:
    """One series of a chart of bars, each with its value above it; four fifths of a category's place are bars."""
    series, color = chart.series[number], _color(chart.series[number], number)
    width = 0.8 * (across.at(1) - across.at(0)) / len(chart.series)
    parts = []
    for x, y in zip(series.xs, series.ys, strict=True):
        if math.isfinite(y):
            left, top = across.at(x) + width * (number - len(chart.series) / 2), up.at(y)
            size = f'width="{width - 1:.1f}" height="{up.start - top:.1f}"'
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{color}"/>'
                f'<text x="{left + width / 2:.1f}" y="{top - 3:.1f}" text-anchor="middle" font-size="9">{y:,.0f}</text>'
            )
    return parts


def _points(series: Series, number: int, across: _Axis, up: _Axis) -> list[str]:
    color, dash = _color(series, number), DASHES[number % len(DASHES)]
    places = [(across.at(x), up.at(y)) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
    parts = []
    if series.is_joined and len(places) > 1:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{line}" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}" fill="none"/>')
    if not series.is_joined or len(places) <= 16:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places]
    return parts


def _color(series: Series, number: int) -> str:
    """The colour of the series with that number in its chart."""
    return COLORS[(number if series.color is None else series.color) % len(COLORS)]


def _mark(x: float, y: float, color: str, dash: str, is_joined: bool) -> list[str]:
    if not is_joined:
        return [f'<circle cx="{x + 12}" cy="{y}" r="3.5" fill="{color}"/>']
    return [f'<path d="M{x} {y}h22" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>']


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps [low, high] to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def _ticks(high: float) -> list[float]:
    """About five round numbers from 0 on."""
    if high <= 0:
        return [0.0]
    rough = high / 5
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough)
    return [step * place for place in range(int(high / step + 1e-9) + 1)]


def _ticks_around(highest: float) -> list[float]:
    """The same, and one more where the highest value comes close to the last."""
    ticks = _ticks(1.05 * highest)
    return ticks if ticks[-1] >= 1.05 * highest else [*ticks, ticks[-1] + (ticks[1] if len(ticks) > 1 else 1.0)]


def _powers(lowest: float, highest: float) -> list[float]:
    """Powers of ten, from the last below the values to the first above."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]
