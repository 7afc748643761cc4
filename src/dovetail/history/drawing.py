"""Figures of a history: one panel per metric, one colour per stage."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dovetail.extras import require
from dovetail.history.lines import CUSTOM, Row
from dovetail.history.metrics import mode_or_none

# The colours of Okabe and Ito, which colour-blind readers can distinguish.

_STAGES = {"train": ("#0072B2", "o"), "valid": ("#D55E00", "s"), "test": ("#009E73", "^")}
_OTHERS = (("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"))
_SPELLINGS = {"val": "valid", "validation": "valid"}
INK = "#333333"

Series: TypeAlias = list[tuple[Row, float]]


def draw(series: Mapping[str, Series], path: Path | None) -> Any:
    """Return a figure of metrics for a notebook, and write it to an image file if a path is given."""
    figures = require("matplotlib.figure", "plot")
    panels: dict[str, dict[str, Series]] = {}
    for name, points in series.items():
        metric, stage = _split(name, str(points[0][0]["stage"]))
        panels.setdefault(metric, {}).setdefault(stage, []).extend(points)
    order = sorted(panels, key=lambda metric: (metric == "lr") - (metric == "loss"))
    others = dict.fromkeys(stage for panel in panels.values() for stage in panel if stage not in _STAGES)
    styles = _STAGES | dict(zip(others, itertools.cycle(_OTHERS), strict=False))
    counter = _common_counter(list(series.values()))

    columns = min(len(order), 3)
    lines = math.ceil(len(order) / columns)
    # Not pyplot: it would change global state and need a display.
    figure = figures.Figure(figsize=(4.8 * columns, 3.6 * lines), dpi=144, layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for metric, axes in zip(order, places, strict=False):
        _draw_panel(axes, metric, panels[metric], styles, counter)
    for axes in places[len(order) :]:
        axes.set_axis_off()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    # Notebooks display only figures of pyplot by themselves.
    figure._repr_png_ = partial(_as_png, figure)
    return figure


def _as_png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_panel(
    axes: Any, metric: str, curves: Mapping[str, Series], styles: Mapping[str, tuple[str, str]], counter: str
) -> None:
    """Draw the curves of one metric, one per stage, and mark the best value of the validation."""
    for stage, points in curves.items():
        colour, marker = styles[stage]
        x = [row[counter] for row, _ in points] if counter else range(1, len(points) + 1)
        y = [value for _, value in points]
        best = _best_index(metric, y) if stage == "valid" else None
        # The number is in the legend, because beside its point it would cover other curves.
        label = stage if best is None else f"{stage}, best {y[best]:.4g}"
        marks = {"marker": marker, "markersize": 4.5, "markevery": math.ceil(len(y) / 12)}
        axes.plot(x, y, color=colour, linewidth=1.7, label=label, **marks)
        if best is not None:
            axes.plot(x[best], y[best], "o", markersize=12, markerfacecolor="none", markeredgecolor=INK)
    values = [value for points in curves.values() for _, value in points if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
    elif values and min(values) == max(values):
        # Show a constant as a flat line, not on an axis that is all decimals.
        axes.set_ylim(min(0.0, 2 * values[0]), max(0.0, 2 * values[0]) or 1.0)
    axes.margins(x=0.05, y=0.12)
    tidy(axes, metric, x=counter)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(curves) > 1 or "valid" in curves:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def tidy(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """Set the title and the labels of a plot, and remove decoration."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)


def _split(name: str, stage: str) -> tuple[str, str]:
    """Return the metric and the stage of a name such as `valid_loss`."""
    if stage != CUSTOM:
        return name.removeprefix(f"{stage}_"), stage
    head, _, metric = name.partition("_")
    head = _SPELLINGS.get(head, head)
    return (metric, head) if metric and head in _STAGES else (name, "")


def _common_counter(curves: list[Series]) -> str:
    """Return the coarsest counter that is different for all points of every curve, or an empty string."""
    for counter in ("epoch", "updates", "batches"):
        columns = [[row.get(counter) for row, _ in points] for points in curves]
        if all(None not in column and len(set(column)) == len(column) for column in columns):
            return counter
    return ""


def _best_index(metric: str, values: list[float]) -> int | None:
    """Return the index of the best value, or None if the name of the metric does not show which values are good."""
    comparable = [index for index, value in enumerate(values) if math.isfinite(value)]
    mode = mode_or_none(metric)
    if mode is None or not comparable:
        return None
    return (min if mode == "min" else max)(comparable, key=values.__getitem__)
