"""The pictures of the demos, in one style; without matplotlib there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.errors import MissingExtraError
from dovetail.extras import require

# Okabe and Ito's, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, GREY = "#333333", "#B8B8B8"


def picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write an image; where matplotlib is missing, say so and write none.

    Args:
        path: The file.
        size: Width and height in inches.
        draw: Draws onto a figure of matplotlib.
    """
    try:
        figures = require("matplotlib.figure", "plot")
    except MissingExtraError as error:
        print(f"no {path.name}: {error}")
        return
    # A Figure of its own, never pyplot: nothing global changes, and no display is needed.
    figure = figures.Figure(figsize=size, dpi=144, layout="constrained")
    draw(figure)
    figure.savefig(path)


def tidy(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """Give a plot its title and labels, and take away what says nothing."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)
