"""Charts of an experiment, for its report (SVG and matplotlib) and for the live page, which draws them with ECharts.

A chart has its lines, labels, scales and colours, so report and page show the same. Only the drawing differs: a report
is one small file without scripts of libraries, and ECharts draws in a browser only.

The colour shows the quality of a trial, from `BAD` to `GOOD`, in the same way in every chart. In a report the two
colours are variables of its style sheet, so that it can be light or dark.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.printing import page_text as escape
from dovetail.printing import printable

Color = tuple[float, float, float]
# Has a contrast of at least 3 to 1 on white, and on the dark background of the live page.
GOOD: Color = (0.09, 0.43, 0.80)
BAD: Color = (0.84, 0.80, 0.75)
_INK = "#222222"

_WIDTH, _HEIGHT = 640.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 14.0, 44.0


def quality_color(quality: float) -> str:
    """Return a colour between `BAD` for the worst and `GOOD` for the best trial, as `#rrggbb`.

    Example:
        >>> quality_color(0.0), quality_color(1.0)
        ('#d6ccbf', '#176ecc')
    """
    return "#" + "".join(f"{round(255 * part):02x}" for part in _color(quality))


def shown(value: Any) -> str:
    """Return a value for display: numbers with at most four significant digits.

    Example:
        >>> [shown(value) for value in (0.123456, 64, True, "relu", None)]
        ['0.1235', '64', 'true', 'relu', '–']
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """Maps the numbers of an axis to positions between 0 and 1.

    Example:
        >>> scale = Scale.of([1e-4, 1e-1])
        >>> scale.is_log, round(scale(1e-3), 2), scale.ticks()
        (True, 0.33, [0.0001, 0.001, 0.01, 0.1])
    """

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], is_log: bool | None = None) -> Scale:
        """Return the scale for some finite values.

        Args:
            values: The values that the axis shows.
            is_log: Whether it is logarithmic, if possible; None means yes if the values span several magnitudes.
        """
        # Different integers may be equal as floats.
        low, high = float(min(values, default=0.0)), float(max(values, default=1.0))
        # Half of the smallest float is 0.
        if low / 2 == high / 2:
            margin = abs(low) / 2 or 1.0
            return cls(low - margin, high + margin)
        return cls(low, high, low > 0 and (high > 30 * low if is_log is None else is_log))

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = map(math.log, (low, high, value))
        # Use halves, because the difference of two huge numbers may overflow.
        return (value / 2 - low / 2) / (high / 2 - low / 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round numbers on the axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / (count + 1)))
            # If the range has few powers of ten, show also 2 and 5 times each.
            factors = (1, 2, 5) if last - first <= 2 else (1,)
            ticks = [float(f"{factor}e{power}") for power in range(first, last + 1, stride) for factor in factors]
            return [tick for tick in ticks if -1e-9 < self(tick) < 1 + 1e-9]
        # The difference of halves cannot overflow.
        rough = max(self.high / 2 - self.low / 2, sys.float_info.min) / count * 2
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= 0.7 * rough)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True)
class Line:
    """The curve or the dots of one trial, or of all trials.

    Attributes:
        label: The text of the tooltip.
        points: Finite coordinates.
        quality: From 0 for the worst trial to 1 for the best.
        trial: The id of the trial, or None.
        style: A line, stairs, or dots alone.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    quality: float = 1.0
    trial: int | None = None
    style: Literal["line", "stairs", "dots"] = "line"


@dataclass(frozen=True)
class LineChart:
    """Lines over two axes.

    Example:
        >>> chart = LineChart("batches", "loss", (Line("trial 0", ((0, 1.0), (10, 0.5))),))
        >>> "<title>trial 0</title>" in chart.svg()
        True
    """

    x: str
    y: str
    lines: tuple[Line, ...]

    def svg(self) -> str:
        """Return the chart as an SVG element of a page."""
        x_scale, y_scale = self._scales()
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

        def place(point: tuple[float, float]) -> tuple[float, float]:
            # Slightly above the axis, so that the lowest line is visible.
            return _LEFT + x_scale(point[0]) * (right - _LEFT), bottom - 8 - y_scale(point[1]) * (bottom - 8 - _TOP)

        parts = []
        for tick in y_scale.ticks():
            y = place((x_scale.low, tick))[1]
            parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(_LEFT - 8, y + 4, f"{tick:.4g}", "end"))
        # Batches and trials are whole numbers, so ticks are, too.
        parts += [
            _text(place((tick, y_scale.low))[0], bottom + 18, f"{tick:.6g}", "middle")
            for tick in x_scale.ticks(6)
            if tick == round(tick)
        ]
        parts.append(f'<line class="axis" x1="{_LEFT:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}"/>')
        parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, self.x, "middle", "name"))
        parts += [
            _group(line.label, line.quality, line.trial, self._marks(line, [*map(place, line.points)]))
            for line in sorted(self.lines, key=lambda line: line.quality)
        ]
        return _svg(f"{self.y} over {self.x}", _WIDTH, _HEIGHT, parts)

    def draw(self, figure: Any) -> None:
        """Draw the chart into a matplotlib figure."""
        axes = figure.subplots()
        for line in sorted(self.lines, key=lambda line: line.quality):
            x, y = [point[0] for point in line.points], [point[1] for point in line.points]
            is_alone = line.style == "dots" or len(x) == 1
            look = {"linestyle": "none", "marker": "o", "markersize": 5} if is_alone else {"linewidth": 1.6}
            drawstyle = "steps-post" if line.style == "stairs" else "default"
            axes.plot(x, y, color=_color(line.quality), drawstyle=drawstyle, **look)
        if self.is_log:
            axes.set_yscale("log")
        axes.set_xlabel(_plain(self.x), color=_INK)
        axes.set_ylabel(_plain(self.y), color=_INK)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        _frame(axes)

    @property
    def is_log(self) -> bool:
        """Whether the vertical axis is logarithmic."""
        return self._scales()[1].is_log

    def _scales(self) -> tuple[Scale, Scale]:
        points = [point for line in self.lines for point in line.points]
        xs = Scale.of([point[0] for point in points])
        return Scale(xs.low, xs.high), Scale.of([point[1] for point in points])

    def _marks(self, line: Line, places: list[tuple[float, float]]) -> str:
        if line.style == "dots" or len(places) == 1:
            return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places)
        first, *others = places
        way = f"M{first[0]:.1f} {first[1]:.1f}"
        for x, y in others:
            way += f"H{x:.1f}V{y:.1f}" if line.style == "stairs" else f"L{x:.1f} {y:.1f}"
        # The wide invisible copy makes the thin line easy to reach with a pointer.
        return f'<path class="reach" d="{way}"/><path d="{way}"/>'


@dataclass(frozen=True)
class Dimension:
    """One axis of parallel coordinates.

    Attributes:
        name: The name of the hyperparameter or metric.
        labels: Positions from 0 to 1, and the text at each of them.
        values: The value of each line on this axis: numbers, or text that has its place among `labels`.
        is_log: Whether the numbers are on a logarithmic scale.
    """

    name: str
    labels: tuple[tuple[float, str], ...]
    values: tuple[float, ...] | tuple[str, ...] = ()
    is_log: bool = False


@dataclass(frozen=True)
class ParallelChart:
    """Parallel coordinates: one vertical axis per hyperparameter, the metric last.

    The points of a line are the numbers of the axes, and its positions on them from 0 to 1.

    Example:
        >>> axes = (Dimension("lr", ((0, "0.01"), (1, "0.1"))), Dimension("loss", ((0, "0.5"), (1, "2"))))
        >>> chart = ParallelChart(axes, (Line("trial 0", ((0, 0.0), (1, 1.0))),))
        >>> chart.svg().count('class="axis"')
        2
    """

    dimensions: tuple[Dimension, ...]
    lines: tuple[Line, ...]

    def svg(self) -> str:
        """Return the chart as an SVG element of a page."""
        side, num_gaps = 110.0, max(1, len(self.dimensions) - 1)
        width = max(1000.0, 2 * side + 150.0 * num_gaps)
        gap = (width - 2 * side) / num_gaps
        top, bottom = 44.0, _HEIGHT - 18
        parts, axes = [], []
        for index, dimension in enumerate(self.dimensions):
            x = side + index * gap
            axes.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>')
            axes.append(_text(x, 20, _cut(dimension.name, 18), "middle", "name", dimension.name))
            for place, label in dimension.labels:
                y = bottom - place * (bottom - top)
                axes.append(_text(x + 6, y + 4, _cut(label, 14), "start", "tick halo", label))
        for line in sorted(self.lines, key=lambda line: line.quality):
            points = " ".join(
                f"{side + index * gap:.1f},{bottom - place * (bottom - top):.1f}" for index, place in line.points
            )
            marks = f'<polyline class="reach" points="{points}"/><polyline points="{points}"/>'
            parts.append(_group(line.label, line.quality, line.trial, marks))
        return _svg("Parallel coordinates", width, _HEIGHT, [*parts, *axes], min_width=2 * side + 120.0 * num_gaps)

    def draw(self, figure: Any) -> None:
        """Draw the chart into a matplotlib figure."""
        figure.set_size_inches(max(7.0, 1.7 * len(self.dimensions)), 3.6)
        axes = figure.subplots()
        for line in sorted(self.lines, key=lambda line: line.quality):
            axes.plot(*zip(*line.points, strict=True), color=_color(line.quality), linewidth=1.6)
        halo = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        for index, dimension in enumerate(self.dimensions):
            axes.axvline(index, color="#777777", linewidth=1)
            for place, label in dimension.labels:
                axes.text(index + 0.03, place, _plain(_cut(label, 14)), fontsize=8, color=_INK, va="center", bbox=halo)
        axes.set_xticks(range(len(self.dimensions)), [_plain(_cut(each.name, 18)) for each in self.dimensions])
        axes.tick_params(axis="x", length=0, labelsize=9, colors=_INK, labeltop=True, labelbottom=False)
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(self.dimensions) - 0.6)
        axes.spines[:].set_visible(False)


@dataclass(frozen=True)
class BarChart:
    """A bar chart of shares of one.

    Attributes:
        bars: The names and their shares.
        note: A sentence about their origin, for the page.

    Example:
        >>> BarChart((("lr", 0.75), ("depth", 0.25))).svg().count("<rect")
        2
    """

    bars: tuple[tuple[str, float], ...]
    note: str = ""

    def svg(self) -> str:
        """Return the chart as an SVG element of a page."""
        left, height = 190.0, 30.0
        parts = []
        for index, (name, share) in enumerate(self.bars):
            y = 8 + index * height
            width = share * (_WIDTH - left - 60)
            parts.append(_text(left - 8, y + 15, _cut(name, 26), "end", "tick", name))
            parts.append(
                f'<rect class="bar" x="{left:g}" y="{y:g}" width="{width:.1f}" height="{height - 8:g}" rx="3"/>'
            )
            parts.append(_text(left + width + 6, y + 15, f"{100 * share:.0f} %"))
        return _svg("Importance of hyperparameters", _WIDTH, 16 + height * len(self.bars), parts)

    def draw(self, figure: Any) -> None:
        """Draw the chart into a matplotlib figure."""
        figure.set_size_inches(7.0, 0.8 + 0.32 * len(self.bars))
        axes = figure.subplots()
        names = [_plain(_cut(name, 26)) for name, _ in self.bars]
        places = range(len(names))
        drawn = axes.barh(places, [share for _, share in self.bars], color=GOOD, height=0.7)
        axes.bar_label(drawn, [f"{100 * share:.0f} %" for _, share in self.bars], padding=4, fontsize=9, color=_INK)
        axes.set_yticks(places, names)
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        _frame(axes)
        axes.spines["bottom"].set_visible(False)


def _svg(label: str, width: float, height: float, parts: Sequence[str], min_width: float = 400.0) -> str:
    # If the page is narrower, as on a phone, the chart is scrolled sideways.
    opening = (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'style="min-width:{min_width:.0f}px;max-width:{1.2 * width:.0f}px">'
    )
    return "\n".join([opening, *parts, "</svg>"])


def _group(label: str, quality: float, trial: int | None, marks: str) -> str:
    whose = "" if trial is None else f' data-trial="{trial}"'
    return f'<g class="trial"{whose} style="--quality:{100 * quality:.0f}%"><title>{escape(label)}</title>{marks}</g>'


def _text(x: float, y: float, text: str, anchor: str = "start", look: str = "tick", title: str = "") -> str:
    # The tooltip contains the whole text if it was cut.
    more = f"<title>{escape(title)}</title>" if title and title != text else ""
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{more}{escape(text)}</text>'


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _plain(text: str) -> str:
    """Return a text that matplotlib does not parse as a formula."""
    return printable(text).replace("$", r"\$")


def _color(quality: float) -> Color:
    red, green, blue = (bad + quality * (good - bad) for good, bad in zip(GOOD, BAD, strict=True))
    return red, green, blue


def _frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=_INK, labelsize=9)
