"""Trainers and their pieces by name, as a configuration calls them."""

from __future__ import annotations

from typing import Any

from dovetail.registry import Registry
from dovetail.trainers import basic, composable
from dovetail.trainers.catalog import losses, optimizers, schedulers

__all__ = ["get", "losses", "names", "optimizers", "register", "schedulers", "trainers"]

trainers: Registry[type[Any]] = Registry(
    "trainer", lambda: {"basic": basic.Trainer, "composable": composable.ComposableTrainer}
)

get = trainers.get
names = trainers.names
register = trainers.register
