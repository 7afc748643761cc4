"""Federated algorithms: the public import path of `dovetail.federated.algorithms`."""

from __future__ import annotations

from dovetail.federated import algorithms as _home
from dovetail.federated.algorithms import *  # noqa: F403

__all__ = _home.__all__
