"""Curves for charts: fewer points, smoothing, and bands over runs that differ in their seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dovetail.ui.columns import Numbers


def downsample(x: Numbers, y: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Return at most about `most` points with the same extremes: the first, smallest and largest of every interval.

    Example:
        >>> x, y = downsample(np.arange(1000.0), np.arange(1000.0) % 7, 20)
        >>> len(x) <= 20, [float(each) for each in (y.min(), y.max(), x[0], x[-1])]
        (True, [0.0, 6.0, 0.0, 999.0])
    """
    if len(x) <= most or most < 4:
        return x, y
    edges = np.linspace(0, len(y), max(1, (most - 2) // 2) + 1).astype(int)
    filled = np.where(np.isnan(y), math.inf, y)
    low = [start + int(np.argmin(filled[start:end])) for start, end in pairwise(edges)]
    filled = np.where(np.isnan(y), -math.inf, y)
    high = [start + int(np.argmax(filled[start:end])) for start, end in pairwise(edges)]
    kept = np.unique(np.r_[0, low, high, len(y) - 1])
    return x[kept], y[kept]


def smooth(y: Numbers, weight: float) -> Numbers:
    """Return an exponential moving average, corrected for its start; a weight of 0 means no smoothing.

    Example:
        >>> smooth(np.array([1.0, 1.0, 1.0]), 0.9)
        array([1., 1., 1.])
    """
    if not 0 < weight < 1 or not len(y):
        return y
    total, norm = 0.0, 0.0
    found = np.empty(len(y))
    for index, value in enumerate(y.tolist()):
        if math.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        found[index] = total / norm if norm else value
    return found


def band(curves: Sequence[tuple[Numbers, Numbers]], most: int = 400) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return positions, and the smallest, mean and largest value of several curves there.

    Every curve is interpolated between its points, and counts only between its first and its last one.

    Example:
        >>> x = np.array([0.0, 1.0])
        >>> [each.tolist() for each in band([(x, x), (x, x + 2)])]
        [[0.0, 1.0], [0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return (np.empty(0),) * 4
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    if len(grid) > most:
        grid = np.linspace(grid[0], grid[-1], most)
    found = np.array([np.interp(grid, x, y, left=math.nan, right=math.nan) for x, y in curves])
    is_known = ~np.isnan(found).all(axis=0)
    grid, found = grid[is_known], found[:, is_known]
    return grid, np.nanmin(found, axis=0), np.nanmean(found, axis=0), np.nanmax(found, axis=0)
