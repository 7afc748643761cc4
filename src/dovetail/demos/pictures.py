"""Figures of the demos, in one style; not written without matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.errors import MissingExtraError
from dovetail.extras import require

# The colours of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY = "#B8B8B8"


def picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write an image; without matplotlib, print a message and write nothing."""
    try:
        figures = require("matplotlib.figure", "plot")
    except MissingExtraError as error:
        print(f"{path.name} is not written: {error}")
        return
    # Not pyplot: it would change global state and need a display.
    figure = figures.Figure(figsize=size, dpi=144, layout="constrained")
    draw(figure)
    figure.savefig(path)
