"""The pictures of the demos, in one style; without matplotlib there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.errors import MissingExtraError
from dovetail.extras import require

# Okabe and Ito's, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY = "#B8B8B8"


def picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write an image; where matplotlib is missing, say so and write none."""
    try:
        figures = require("matplotlib.figure", "plot")
    except MissingExtraError as error:
        print(f"no {path.name}: {error}")
        return
    # A Figure of its own, never pyplot: nothing global changes, and no display is needed.
    figure = figures.Figure(figsize=size, dpi=144, layout="constrained")
    draw(figure)
    figure.savefig(path)
