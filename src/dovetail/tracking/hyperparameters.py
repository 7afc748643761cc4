"""Hyperparameters for trackers: flat names, plain values, no secrets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from dovetail.tracking.base import Scalar

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

MASK = "***"


@runtime_checkable
class _HasOptions(Protocol):
    """A trainer with options, and the names of those that the user gave."""

    options: Any
    _given: frozenset[str]


_SECRET_WORDS = frozenset(
    ("apikey", "auth", "authorization", "credential", "credentials", "passphrase", "passwd", "password", "pwd")
) | {"secret", "secrets", "tkn", "token"}
# Words that make a secret of a following `key`: `api_key` is one, `sort_key` is not.
_SECRET_KEYS = frozenset(("access", "api", "private", "secret", "signing", "ssh"))
_LONGEST = 500


def flatten(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return nested settings with dotted names and plain values; values with the name of a secret are masked.

    Example:
        >>> flatten({"optimizer": {"lr": 0.1, "kind": torch.optim.SGD}, "wandb": {"api_key": "1234"}})
        {'optimizer.lr': 0.1, 'optimizer.kind': 'SGD', 'wandb.api_key': '***'}
    """
    return dict(_flat("", values))


def hyperparameters_of(context: TrainingContext) -> dict[str, Scalar]:
    """Return the settings of a run: the given options, the configuration, the model and the optimizers."""
    trainer: object = context.run.trainer
    model = context.model
    settings: dict[str, Any] = {}
    if isinstance(trainer, _HasOptions):
        settings = {name: getattr(trainer.options, name) for name in sorted(trainer._given)}
    settings.update(context.config)
    if model is not None:
        parameters = list(model.parameters())
        # The empty key is the name itself: `model` is the class, `model.parameters` their number.
        settings["model"] = {"": type(model).__name__, "parameters": sum(each.numel() for each in parameters)}
    for place, optimizer in enumerate(context.optimizers):
        # The initial rate, because a schedule has already changed the rates of the groups.
        used = {name: value for name, value in optimizer.defaults.items() if value is not None and value is not False}
        settings[f"optimizer{place or ''}"] = {"": type(optimizer).__name__, **used}
    if context.run.plan is not None:
        settings["max_length"] = repr(context.run.plan.max_length)
    return flatten(settings)


def without_passwords(text: str) -> str:
    """Return a text without the user and password of URLs such as `postgresql://me:secret@host`."""
    return re.sub(r"://[^/@\s]+@", f"://{MASK}@", text)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Scalar]]:
    """Yield a setting, or the settings inside of it, with dotted names; secrets are masked."""
    if _is_secret(name):
        yield name, MASK
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(".".join(filter(None, (name, str(key)))), inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value).__name__
        for field in dataclasses.fields(value):
            yield from _flat(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, partial):
        yield from _flat(name, {"": value.func, **value.keywords})
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Scalar:
    """Return a setting as a plain value, or as a text that identifies it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return _plain(value.item())
    if isinstance(value, (str, PurePath, torch.device, torch.dtype)):
        return without_passwords(str(value))[:_LONGEST]
    if isinstance(value, (Sequence, set, frozenset)) and len(value) <= 32:
        members = [_plain(member) for member in value]
        return f"[{', '.join(map(str, members))}]"[:_LONGEST]
    # For other objects (data, modules, functions) only the name is a hyperparameter.
    return str(getattr(value, "__name__", type(value).__name__))


def _is_secret(name: str) -> bool:
    # `apiKey` has the same words as `api_key`.
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return not _SECRET_WORDS.isdisjoint(words) or any(
        kind in _SECRET_KEYS and key == "key" for kind, key in pairwise(words)
    )
