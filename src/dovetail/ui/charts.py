"""Charts of the page as options of ECharts. All functions return plain values; text is never interpreted as markup.

Names of runs and metrics only occur as values, never as keys: nicegui would run the value of a key that starts with a
colon as JavaScript.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.printing import printable
from dovetail.search.charts import BarChart, Line, LineChart, ParallelChart, quality_color
from dovetail.search.records import ExperimentRecord
from dovetail.search.report import Chart, is_log_scale, is_number, measured_trials, varied_hparams
from dovetail.ui.columns import Numbers
from dovetail.ui.experiments import finite, lanes, rungs, timeline
from dovetail.ui.federations import Federation

# The colours of Okabe and Ito, which colour-blind readers can distinguish; without black, which a dark page hides.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C7A00")
_DASHES = ("solid", "dashed", "dotted")
# Has enough contrast on white and on the dark background.
GREY = "#7a7a7a"
_LINE = "rgba(128,128,128,0.25)"
STATE_COLORS = {
    "COMPLETED": PALETTE[2],
    "RUNNING": PALETTE[0],
    "STOPPED": PALETTE[4],
    "ERROR": PALETTE[3],
    "INVALID_HP": PALETTE[3],
    "CANCELED": PALETTE[5],
    "WAITING": PALETTE[1],
}
_LONGEST_NAME = 60
_LONGEST_LEGEND = 40
_MOST_AXES = 10

Options = dict[str, Any]


def shortened(text: str, length: int = _LONGEST_NAME) -> str:
    r"""Return a name for a chart: control characters visible, and long names cut in the middle.

    Example:
        >>> shortened("a" * 100, 9), shortened("one\ntwo")
        ('aaaa…aaaa', 'one\\ntwo')
    """
    text = printable(text)
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def points(x: Numbers, y: Numbers) -> list[list[float | None]]:
    """Return points for a chart; a value that is not finite is a gap."""
    xs, ys = _rounded(x).tolist(), _rounded(y).tolist()
    return [[place, value if math.isfinite(value) else None] for place, value in zip(xs, ys, strict=True)]


def _rounded(values: Numbers) -> Numbers:
    """Return values with about six digits, in relation to the largest one: fewer bytes, and the same picture."""
    finite_values = np.abs(values[np.isfinite(values)])
    largest = float(finite_values.max()) if len(finite_values) else 0.0
    if not 1e-300 < largest < 1e300:
        return values
    return np.round(values, 6 - math.floor(math.log10(largest)))


def line_style(index: int) -> tuple[str, str]:
    """Return colour and dash of a curve; the first 21 curves differ in one of them."""
    return PALETTE[index % len(PALETTE)], _DASHES[index // len(PALETTE) % len(_DASHES)]


def axes(x: str, y: str = "", *, log_x: bool = False, log_y: bool = False) -> Options:
    """Return the frame of a chart with two axes of numbers."""
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 8, "right": 26, "top": 34 if y else 14, "bottom": 30, "containLabel": True},
        "xAxis": {**_axis(log_x), "name": x, "nameLocation": "middle", "nameGap": 26},
        "yAxis": {**_axis(log_y), "name": shortened(y, 40), "nameTextStyle": {"align": "left", "color": GREY}},
        "tooltip": {"trigger": "axis", "confine": True, "order": "valueAsc", "appendTo": "body"},
        "series": [],
    }


def _axis(is_log: bool) -> Options:
    return {
        "type": "log" if is_log else "value",
        "scale": True,
        "nameTextStyle": {"color": GREY},
        "axisLabel": {"color": GREY, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": GREY}},
        "splitLine": {"lineStyle": {"color": _LINE}},
    }


def line(name: str, data: list[Any], index: int = 0, **changes: Any) -> Options:
    """Return a curve."""
    color, dash = line_style(index)
    return {
        "type": "line",
        "name": shortened(name),
        "data": data,
        "showSymbol": len(data) == 1,
        "symbolSize": 6,
        "color": color,
        "lineStyle": {"width": 1.8, "type": dash, "color": color},
        "emphasis": {"focus": "series"},
        **changes,
    }


def legend(options: Options, number: int) -> Options:
    """Add a legend below the chart, which scrolls if it has many entries; without one, hovering shows the names."""
    if 1 < number <= _LONGEST_LEGEND:
        options["legend"] = {"type": "scroll", "bottom": 0, "textStyle": {"color": GREY}, "icon": "roundRect",
                             "itemHeight": 10, "itemWidth": 16, "pageTextStyle": {"color": GREY}}  # fmt: skip
        options["grid"]["bottom"] = 56
    return options


def comparison(
    curves: Sequence[tuple[str, Numbers, Numbers, bool]],
    bands: Sequence[tuple[str, Numbers, Numbers, Numbers, Numbers]],
    x: str,
    metric: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> Options:
    """Return overlaid curves of runs, or bands over seeds.

    Args:
        curves: Name, positions, values, and whether the run is the baseline.
        bands: Name, positions, and the smallest, mean and largest values.
        x: The name of the positions.
        metric: The name of the values.
        log_x: True for a logarithmic axis of positions; positions up to 0 are left out.
        log_y: True for a logarithmic axis of values; values up to 0 are left out.
    """
    options = axes(x, metric, log_x=log_x, log_y=log_y)
    for index, (name, xs, ys, is_baseline) in enumerate(curves):
        xs, ys = _positive(xs, ys, log_x, log_y)
        changes: Options = {}
        if is_baseline:
            changes = {"color": GREY, "z": 5, "lineStyle": {"width": 3.5, "type": "solid", "color": GREY}}
        options["series"].append(line(f"{name} (baseline)" if is_baseline else name, points(xs, ys), index, **changes))
    for index, (name, xs, low, mean, high) in enumerate(bands):
        if log_y:
            low = np.maximum(low, np.nanmin(np.where(mean > 0, mean, np.nan), initial=1e-12) / 10)
        color = line_style(index)[0]
        stack = {"stack": f"band{index}", "silent": True, "lineStyle": {"opacity": 0}, "tooltip": {"show": False}}
        hidden = {"type": "line", "name": shortened(name), "showSymbol": False, "color": color, **stack}
        options["series"] += [
            {**hidden, "data": points(xs, low)},
            {**hidden, "data": points(xs, high - low), "areaStyle": {"color": color, "opacity": 0.2}},
            line(name, points(xs, mean), index),
        ]
    return legend(options, len(curves) + len(bands))


def _positive(xs: Numbers, ys: Numbers, log_x: bool, log_y: bool) -> tuple[Numbers, Numbers]:
    kept = np.ones(len(xs), dtype=bool)
    if log_x:
        kept &= xs > 0
    if log_y:
        kept &= ys > 0
    return xs[kept], ys[kept]


# Experiments


def drawn(chart: Chart) -> Options:
    """Return a chart of an experiment; the report draws the same lines, labels and colours."""
    if isinstance(chart, BarChart):
        shares = list(reversed(chart.bars))
        return bars([shortened(name, 24) for name, _ in shares], [value for _, value in shares], "share")
    return _parallel(chart) if isinstance(chart, ParallelChart) else _lines(chart)


def _lines(chart: LineChart) -> Options:
    options = axes(chart.x, chart.y, log_y=chart.is_log)
    # Batches and trials are whole numbers, so ticks are, too.
    options["xAxis"]["minInterval"] = 1
    dots: list[Options] = []
    for each in sorted(chart.lines, key=lambda each: each.quality):
        color = quality_color(each.quality)
        data = [list(point) for point in each.points]
        if each.style == "dots":
            dots += [{"value": point, "name": _first_line(each), "itemStyle": {"color": color}} for point in data]
            continue
        look = {"width": 1.6, "color": color, "type": "solid", "opacity": _opacity(each.quality)}
        style: Options = {"lineStyle": look, "color": color}
        if each.style == "stairs":
            style |= {"step": "end", "showSymbol": False}
        options["series"].append(line(_first_line(each), data, **style))
    if dots:
        options["series"].append(
            {"type": "scatter", "name": "trial", "symbolSize": 7, "color": PALETTE[0], "data": dots}
        )
    # Hovering a point shows one trial; a list of all trials would cover the chart.
    options["tooltip"]["trigger"] = "item" if dots or len(options["series"]) > 12 else "axis"
    return options


def _opacity(quality: float) -> float:
    """Return the opacity of a trial: on a light and on a dark page, bad trials are nearer to the background."""
    return round(0.65 + 0.35 * quality, 2)


def _first_line(each: Line) -> str:
    return each.label.partition("\n")[0]


def _parallel(chart: ParallelChart) -> Options:
    # The last axis is the metric.
    chosen = [*chart.dimensions[:-1][:_MOST_AXES], chart.dimensions[-1]]
    dimensions: list[Options] = []
    columns: list[tuple[float, ...]] = []
    for index, given in enumerate(chosen):
        dimension: Options = {"dim": index, "name": shortened(given.name.rpartition(".")[2] or given.name, 18)}
        if all(is_number(value) for value in given.values):
            dimension |= {"type": "log" if given.is_log else "value", "scale": True}
            columns.append(tuple(float(value) for value in given.values))
        else:
            words = [label for _, label in given.labels]
            dimension |= {"type": "category", "data": [shortened(word, 14) for word in words]}
            # Numbers of the words: as text, all values would be drawn at one place.
            columns.append(tuple(words.index(str(value)) for value in given.values))
        dimensions.append(dimension)
    data = [
        {"value": list(values), "name": _first_line(each),
         "lineStyle": {"color": quality_color(each.quality), "opacity": _opacity(each.quality)}}
        for each, values in zip(chart.lines, zip(*columns, strict=True), strict=True)
    ]  # fmt: skip
    label = {"color": GREY, "hideOverlap": True}
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "parallel": {
            "left": 50, "right": 70, "top": 36, "bottom": 16,
            "parallelAxisDefault": {"nameTextStyle": {"color": GREY}, "axisLabel": label,
                                    "axisLine": {"lineStyle": {"color": GREY}}},
        },
        "parallelAxis": dimensions,
        "tooltip": {"confine": True},
        "series": [{"type": "parallel", "smooth": False, "lineStyle": {"width": 1.6}, "data": data}],
    }  # fmt: skip


def bars(names: Sequence[str], values: Sequence[float], label: str = "", *, upright: bool = False) -> Options:
    """Return one bar per name."""
    options = axes(label)
    category = {**_axis(False), "type": "category", "data": list(names), "splitLine": {"show": False}}
    category["axisLabel"] = {"color": GREY, "hideOverlap": True}
    if upright:
        category |= {"name": label, "nameLocation": "middle", "nameGap": 26}
    value = {**_axis(False), "scale": False, "name": label, "nameLocation": "middle", "nameGap": 26}
    options["xAxis"], options["yAxis"] = (category, {**value, "name": ""}) if upright else (value, category)
    options["series"] = [{"type": "bar", "data": list(values), "color": PALETTE[0], "barMaxWidth": 22}]
    return options


def slices(record: ExperimentRecord) -> list[tuple[str, Options]]:
    """Return a scatter plot of the metric for each differing hyperparameter, by its name."""
    trials = measured_trials(record)
    found = []
    for name, column in list(varied_hparams(trials).items())[:12]:
        is_numeric = all(is_number(value) for value in column)
        options = axes(shortened(name, 30), record.metric)
        if is_numeric and is_log_scale(record, name) and min(column) > 0:
            options["xAxis"]["type"] = "log"
        words = column if is_numeric else [shortened(str(value), 20) for value in column]
        if not is_numeric:
            options["xAxis"] |= {"type": "category", "data": sorted(set(words))}
        data = [[word, trial.best] for word, trial in zip(words, trials, strict=True)]
        options["series"] = [{"type": "scatter", "symbolSize": 8, "color": PALETTE[0], "data": data}]
        options["tooltip"]["trigger"] = "item"
        found.append((name, options))
    return found


def rung_bars(record: ExperimentRecord) -> Options | None:
    """Return how many trials reached each rung, and how many were stopped there; None without early stops."""
    found = rungs(record)
    if not any(rung["stopped"] for rung in found):
        return None
    options = bars([f"{rung['batches']:,}" for rung in found], [], "batches", upright=True)
    left = [rung["reached"] - rung["stopped"] for rung in found]
    options["series"] = [
        {"type": "bar", "stack": "a", "name": "continued", "data": left, "color": PALETTE[0]},
        {
            "type": "bar",
            "stack": "a",
            "name": "stopped",
            "data": [rung["stopped"] for rung in found],
            "color": PALETTE[4],
        },
    ]
    options["tooltip"]["order"] = "seriesAsc"
    return legend(options, 2)


def gantt(record: ExperimentRecord) -> Options | None:
    """Return when each trial ran, one lane per worker; None before the first start."""
    spans = timeline(record)
    if not spans:
        return None
    rows = lanes(spans)
    options = bars([f"worker {lane + 1}" for lane in range(max(rows) + 1)], [], "seconds")
    options["series"] = []
    ends: dict[int, float] = {}
    for (trial_id, start, end, state), lane in zip(spans, rows, strict=True):
        gap = max(0.0, start - ends.get(lane, 0.0))
        ends[lane] = end
        color = STATE_COLORS.get(state, GREY)
        width = max(rows) + 1
        common = {"type": "bar", "stack": "time", "barMaxWidth": 22}
        options["series"] += [
            {
                **common,
                "name": "",
                "silent": True,
                "itemStyle": {"color": "transparent"},
                "data": _in_lane(round(gap, 3), lane, width),
            },
            {
                **common,
                "name": f"trial {trial_id}, {state}",
                "itemStyle": {"color": color, "borderColor": "rgba(255,255,255,0.6)", "borderWidth": 1},
                "data": _in_lane(round(max(end - start, 0.001), 3), lane, width),
            },
        ]
    options["tooltip"] = {"trigger": "item", "confine": True}
    return options


def _in_lane(value: float, lane: int, number: int) -> list[float | str]:
    return [value if each == lane else "-" for each in range(number)]


# Federations


def federation_lines(federation: Federation, names: Sequence[str]) -> Options:
    """Return some metrics over the rounds."""
    options = axes("round")
    options["xAxis"]["minInterval"] = 1
    for index, name in enumerate(names):
        data = [[each.number, finite(each.metrics[name])] for each in federation.rounds if name in each.metrics]
        options["series"].append(line(name, data, index))
    return legend(options, len(names))


def spread(federation: Federation) -> Options | None:
    """Return the accuracy of clients over the rounds: mean, deviation and worst tenth; None if it is not recorded."""
    known = [each for each in federation.rounds if "clients_accuracy" in each.metrics]
    if not known:
        return None
    xs = np.array([float(each.number) for each in known])
    mean = np.array([each.metrics["clients_accuracy"] for each in known])
    deviation = np.array([each.metrics.get("clients_accuracy_std", 0.0) for each in known])
    options = comparison([], [("mean of clients ± deviation", xs, mean - deviation, mean, mean + deviation)],
                         "round", "accuracy")  # fmt: skip
    worst = [[each.number, finite(each.metrics.get("clients_accuracy_worst"))] for each in known]
    options["series"].append(line("worst tenth", worst, 3))
    return legend(options, 2)


def traffic(federation: Federation) -> Options:
    """Return the megabytes of each round."""
    options = axes("round", "MB")
    for index, (name, key) in enumerate((("to clients", "bytes_down"), ("from clients", "bytes_up"))):
        data = [[each.number, round(getattr(each, key) / 1e6, 6)] for each in federation.rounds]
        options["series"].append(line(name, data, index))
    return legend(options, 2)


def selection_map(federation: Federation) -> Options:
    """Return a picture of selected clients by round; the colour shows whether the update was used or a fault."""
    clients = list(federation.selections())
    rows = {client: index for index, client in enumerate(clients)}
    data = []
    for column, each in enumerate(federation.rounds):
        faulty, used = {client for client, _ in each.faults}, set(each.reported)
        for client in each.selected:
            kind = 2 if client in faulty else 0 if client in used else 1
            data.append([column, rows[client], kind])
    options = axes("round")
    category = {**_axis(False), "type": "category", "splitLine": {"show": False}}
    options["xAxis"] = {**category, "data": [str(each.number) for each in federation.rounds], "name": "round",
                        "nameLocation": "middle", "nameGap": 26}  # fmt: skip
    options["yAxis"] = {**category, "data": [str(client) for client in clients]}
    pieces = [
        {"value": 0, "label": "update used", "color": PALETTE[0]},
        {"value": 1, "label": "not used yet", "color": PALETTE[1]},
        {"value": 2, "label": "fault", "color": PALETTE[3]},
    ]
    options["visualMap"] = {"type": "piecewise", "pieces": pieces, "orient": "horizontal", "left": "center", "top": 0,
                            "textStyle": {"color": GREY}}  # fmt: skip
    options["grid"]["top"] = 40
    options["series"] = [{"type": "heatmap", "data": data, "itemStyle": {"borderWidth": 1, "borderColor": _LINE}}]
    options["tooltip"] = {"trigger": "item", "confine": True}
    return options


def counts(values: Mapping[int, int], label: str) -> Options:
    """Return a number for every client."""
    options = bars([str(client) for client in values], list(values.values()), label, upright=True)
    options["yAxis"]["minInterval"] = 1
    return options
