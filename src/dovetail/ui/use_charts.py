"""Charts of one run's use of the machine, and of a partition, as options of ECharts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dovetail.ui.charts import GREY, PALETTE, Options, axes, bars, legend, line, points, shortened
from dovetail.ui.columns import Numbers
from dovetail.ui.federations import PartitionTable
from dovetail.ui.samples import SamplesReader
from dovetail.ui.series import downsample

_POINTS = 1000
_MOST_BARS, _MOST_COLORS, _MOST_ROWS = 50, 21, 120
# Small shares are almost transparent, so that they look small on a light and on a dark page.
_SHADES = ("rgba(0,114,178,0.08)", "rgba(0,114,178,1)", "rgba(230,159,0,1)")


def usage(samples: SamplesReader, start: float | None) -> Iterator[tuple[str, Options]]:
    """Yield charts of CPU, memory and device over the time, with their titles; only those that have values.

    Args:
        samples: The samples.
        start: The time at which the axis starts; None means the first sample.
    """
    times, cores, machine, memory, all_memory, total, allocated, device_total, device = samples.columns(
        "time", "cpu", "machine_cpu", "memory", "machine_memory", "machine_total", "device_memory", "device_total",
        "device_use",
    )  # fmt: skip
    if times is None or not len(times):
        return
    seconds = times - (float(times[0]) if start is None else start)
    yield from _chart(
        "CPU, percent", seconds, {"process and its children, of one core": cores, "machine, of all cores": machine}
    )
    yield from _chart("Memory of the process and its children, GB", seconds, {"process": _giga(memory)})
    yield from _chart(
        "Memory of the machine, GB", seconds, {"used by all processes": _giga(all_memory), "installed": _giga(total)}
    )
    yield from _chart(
        "Memory of the device, GB",
        seconds,
        {"tensors of the process": _giga(allocated), "installed": _giga(device_total)},
    )
    yield from _chart("Use of the device, percent", seconds, {"device": device})


def _giga(values: Numbers | None) -> Numbers | None:
    return None if values is None else values / 1e9


def _chart(title: str, seconds: Numbers, curves: dict[str, Numbers | None]) -> Iterator[tuple[str, Options]]:
    options = axes("seconds")
    options["yAxis"] |= {"scale": False, "min": 0}
    for index, (name, values) in enumerate(curves.items()):
        if values is None:
            continue
        is_known = np.isfinite(values) & np.isfinite(seconds)
        if not is_known.any():
            continue
        drawn = points(*downsample(seconds[is_known], values[is_known], _POINTS))
        pale = (
            {"lineStyle": {"width": 1, "type": "dashed", "color": GREY}, "color": GREY} if name == "installed" else {}
        )
        options["series"].append(line(name, drawn, index, **pale))
    if options["series"]:
        yield title, legend(options, len(options["series"]))


def partition(table: PartitionTable) -> tuple[str, Options]:
    """Return the title and the chart of a partition: stacked bars, or a picture of shares if there are many."""
    drawn = table.clients[:: -(-len(table.clients) // _MOST_ROWS)]
    what = "Samples" if table.labels == ("",) else "Samples of each label"
    some = "" if len(drawn) == table.num_clients else f" of {table.num_clients:,}"
    title = f"{what} at {len(drawn):,}{some} clients"
    if len(table.clients) <= _MOST_BARS and len(table.labels) <= _MOST_COLORS:
        return title, _partition_bars(table)
    return title, _partition_shares(table)


def _partition_bars(table: PartitionTable) -> Options:
    options = bars([str(client) for client in table.clients], [], "client", upright=True)
    counts = np.array(table.counts)
    options["series"] = [
        {
            "type": "bar",
            "stack": "samples",
            "name": shortened(name or "samples", 24),
            "data": counts[:, index].tolist(),
            "barMaxWidth": 28,
            "color": PALETTE[index % len(PALETTE)],
            # Labels beyond the colours have the same ones again, with a pattern.
            "itemStyle": {"decal": _DECALS[index // len(PALETTE)]} if index >= len(PALETTE) else {},
        }
        for index, name in enumerate(table.labels)
    ]
    options["tooltip"]["order"] = "seriesAsc"
    return legend(options, len(table.labels))


_DECALS = (
    None,
    {"symbol": "rect", "dashArrayX": [1, 0], "dashArrayY": [2, 3], "rotation": 0.8, "color": "rgba(255,255,255,0.55)"},
    {"symbol": "circle", "dashArrayX": [[4, 4], [0, 4, 4, 0]], "dashArrayY": [4, 0], "color": "rgba(255,255,255,0.55)"},
)


def _partition_shares(table: PartitionTable) -> Options:
    every = -(-len(table.clients) // _MOST_ROWS)
    counts = np.array(table.counts[::every], dtype=np.float64)
    total = counts.sum(axis=1, keepdims=True)
    # Without labels, the colour shows the samples of a client in relation to the largest one.
    shares = counts / np.maximum(counts.max() if table.labels == ("",) else total, 1)
    options = axes("label" if table.labels != ("",) else "")
    category = {**options["xAxis"], "type": "category", "splitLine": {"show": False}}
    options["xAxis"] = {**category, "data": [shortened(name or "samples", 14) for name in table.labels]}
    shown = table.clients[::every]
    options["yAxis"] = {**category, "data": [str(client) for client in shown], "inverse": True, "nameLocation": "start",
                        "name": "client", "nameGap": 12}  # fmt: skip
    rows, columns = np.nonzero(counts)
    cells = [
        [int(column), int(row), round(float(shares[row, column]), 3), int(counts[row, column])]
        for row, column in zip(rows, columns, strict=True)
    ]
    options["visualMap"] = {
        "type": "continuous", "dimension": 2, "min": 0, "max": round(float(shares.max()), 3) or 1,
        "inRange": {"color": list(_SHADES)}, "precision": 2, "orient": "horizontal", "left": "center", "top": 0,
        "itemHeight": 80,
        "text": ["share of the client's samples" if table.labels != ("",) else "samples", ""],
        "textStyle": {"color": GREY},
    }  # fmt: skip
    options["grid"]["top"] = 64
    options["series"] = [{"type": "heatmap", "data": cells, "name": "share", "progressive": 0}]
    options["tooltip"] = {"trigger": "item", "confine": True}
    return options
