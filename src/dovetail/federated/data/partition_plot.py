"""Figure of a partition: the samples of each label at each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.extras import require

_MOST_BARS, _MOST_COLOURS, _MOST_ROWS = 50, 20, 500
_INK = "#333333"


def figure_of(table: npt.NDArray[np.int64], names: Sequence[str]) -> Any:
    """Return a figure of a table of samples, which has a row per client and a column per label."""
    # A Figure without pyplot: nothing global changes, and no display is needed.
    figure = require("matplotlib.figure", "plot").Figure(dpi=144, layout="constrained")
    if len(table) <= _MOST_BARS and len(names) <= _MOST_COLOURS:
        _draw_bars(figure, table, names)
    else:
        _draw_shares(figure, table, names)
    return figure


def _draw_bars(figure: Any, table: npt.NDArray[np.int64], names: Sequence[str]) -> None:
    figure.set_size_inches(7.2, 1.4 + 0.26 * max(len(table), 6))
    axes = figure.subplots()
    colours = require("matplotlib", "plot").colormaps["tab10" if len(names) <= 10 else "tab20"].colors
    clients = np.arange(1, len(table) + 1)
    left = np.zeros(len(table))
    for column, name in enumerate(names):
        axes.barh(clients, table[:, column], left=left, height=0.8, color=colours[column], label=name)
        left += table[:, column]
    axes.set_ylim(len(table) + 0.6, 0.4)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("samples", color=_INK)
    axes.set_ylabel("client", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    figure.legend(title="label", loc="outside right upper", frameon=False, fontsize=9)


def _draw_shares(figure: Any, table: npt.NDArray[np.int64], names: Sequence[str]) -> None:
    figure.set_size_inches(7.2, 5.4)
    axes = figure.subplots()
    # A row needs a pixel to be seen.
    every = -(-len(table) // _MOST_ROWS)
    shares = table[::every] / np.maximum(table[::every].sum(axis=1, keepdims=True), 1)
    extent = (-0.5, len(names) - 0.5, len(table) + 0.5, 0.5)
    image = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, extent=extent)
    if len(names) <= _MOST_COLOURS:
        axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("label" if len(names) <= _MOST_COLOURS else "label, by its rank", color=_INK)
    axes.set_ylabel("client" if every == 1 else f"client, one in {every}", color=_INK)
    axes.tick_params(colors=_INK, labelsize=9)
    figure.colorbar(image, label="share of the client's samples")
