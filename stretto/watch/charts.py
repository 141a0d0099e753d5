"""The report's drawing tools: scales, axes and marks as SVG text. Pure; knows nothing of training.

Colours are CSS classes and variables of `report.css`, so that one picture serves light and dark. A mark with a `tip`
shows it on hover or touch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

Format = Callable[[float], str]


@dataclass
class Plot:
    """A plot area with linear or logarithmic axes; marks are added, `svg()` draws.

    `x` and `y` are (low, high) in data units; `log` makes y logarithmic (then low > 0).
    """

    label: str
    x: tuple[float, float]
    y: tuple[float, float]
    width: int = 460
    height: int = 250
    left: int = 46
    right: int = 14
    top: int = 14
    bottom: int = 34
    log: bool = False
    parts: list[str] = field(default_factory=list)

    def px(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / ((high - low) or 1) * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        low, high = self.y
        if self.log:
            low, high, y = math.log10(low), math.log10(high), math.log10(max(y, low))
        share = (y - low) / ((high - low) or 1)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def put(self, x: float, y: float, text: str, cls: str = "tick", anchor: str = "start") -> None:
        """Text at pixels, not data units."""
        self.parts.append(f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def axes(
        self,
        y_format: Format = lambda value: f"{value:g}",
        x_format: Format = lambda value: f"{value:g}",
        x_title: str = "",
        y_ticks: Sequence[float] | None = None,
        x_ticks: Sequence[float] | None = None,
        count: int = 5,
    ) -> None:
        low, high = self.y
        right = self.width - self.right
        for tick in y_ticks if y_ticks is not None else decades(low, high) if self.log else ticks(low, high, 5):
            y = self.py(tick)
            self.parts.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.put(self.left - 7, y + 4, y_format(tick), anchor="end")
        for tick in x_ticks if x_ticks is not None else ticks(*self.x, count):
            self.put(self.px(tick), self.height - self.bottom + 16, x_format(tick), anchor="middle")
        if x_title:
            self.put((self.left + right) / 2, self.height - 5, x_title, "title", "middle")

    def line(self, points: Sequence[tuple[float, float]], cls: str) -> None:
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line {cls}" points="{path}"/>')

    def dot(self, x: float, y: float, cls: str, radius: float = 3, tip: str = "") -> None:
        self.parts.append(
            f'<circle class="dot {cls}" cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="{radius}"{_tip(tip)}/>'
        )

    def whisker(self, x: float, low: float, high: float, cls: str, tip: str = "") -> None:
        """A vertical interval with caps."""
        px, top, bottom = self.px(x), self.py(high), self.py(low)
        path = f"M{px:.1f} {bottom:.1f}V{top:.1f}M{px - 5:.1f} {bottom:.1f}h10M{px - 5:.1f} {top:.1f}h10"
        self.parts.append(f'<path class="whisker {cls}" d="{path}"{_tip(tip)}/>')

    def bar(self, x0: float, x1: float, y0: float, y1: float, cls: str, tip: str = "", opacity: float = 1.0) -> None:
        """A rectangle in data units."""
        left, right = self.px(x0), self.px(x1)
        top, bottom = sorted((self.py(y0), self.py(y1)))
        fade = f' opacity="{opacity:.2f}"' if opacity < 1 else ""
        self.parts.append(
            f'<rect class="bar {cls}" x="{left:.2f}" y="{top:.1f}" width="{max(right - left, 0.4):.2f}" '
            f'height="{max(bottom - top, 0):.1f}"{fade}{_tip(tip)}/>'
        )

    def level(self, y: float, text: str, cls: str = "") -> None:
        """A dashed horizontal line with its name."""
        at, right = self.py(y), self.width - self.right
        self.parts.append(f'<line class="level {cls}" x1="{self.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        self.put(right, at - 5, text, f"note {cls}", "end")

    def mark(self, x: float, text: str, cls: str = "") -> None:
        """A dashed vertical line with its name at the top."""
        at, bottom = self.px(x), self.height - self.bottom
        self.parts.append(f'<line class="level {cls}" x1="{at:.1f}" x2="{at:.1f}" y1="{self.top}" y2="{bottom}"/>')
        self.put(at + 5, self.top + 10, text, f"note {cls}")

    def text(
        self, x: float, y: float, text: str, cls: str = "note", anchor: str = "start", dx: float = 0, dy: float = 0
    ) -> None:
        """Text at a place in data units, moved by pixels."""
        self.put(self.px(x) + dx, self.py(y) + dy, text, cls, anchor)

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.label)}">'
            f"{''.join(self.parts)}</svg>"
        )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high]: the coarsest that are at least `count - 1`."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10(high - low))
    for nice in (5, 2.5, 2, 1, 0.5, 0.25, 0.2, 0.1, 0.05, 0.025, 0.02, 0.01):
        step = power * nice
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= count - 1:
            return [round(index * step, 12) for index in range(first, last + 1)]
    return [low, high]


def whole(low: float, high: float, count: int = 6) -> list[float]:
    """Whole numbers in [low, high], evenly, at most `count`."""
    first, last = math.ceil(low), math.floor(high)
    step = next(s for s in _round_steps() if (last - first) // s < count)
    start = math.ceil(first / step) * step
    return [float(tick) for tick in range(start, last + 1, step)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high]."""
    return [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(class, text) as a row of swatches."""
    items = "".join(f'<span><i class="swatch {cls}"></i>{escape(text)}</span>' for cls, text in entries)
    return f'<div class="legend">{items}</div>'


def _round_steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, ..."""
    for power in itertools.count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)


def _tip(text: str) -> str:
    return f' data-tip="{escape(text, quote=True)}"' if text else ""
