from __future__ import annotations

import warnings
from typing import Any

import pytest

from dovetail.callbacks import Callback, Callbacks, TrainerCallback
from dovetail.callbacks.base import FOREIGN_HOOKS


class Misnamed(Callback):
    def on_train_epoch_end(self, *arguments: Any) -> None: ...


class Beside:
    def on_train_epoch_end(self, *arguments: Any) -> None: ...


class OfTwo(Beside, Callback):
    def _on_train_epoch_end(self) -> None: ...


class Platonic(TrainerCallback):
    def on_train_epoch_end(self, *arguments: Any, **further: Any) -> None: ...


def test_a_hook_that_nobody_calls_is_told_with_the_one_that_is_meant() -> None:
    with pytest.warns(
        UserWarning, match=r"unknown hook of Misnamed 'on_train_epoch_end': did you mean 'on_epoch_end'\?"
    ):
        Callbacks([Misnamed])


def test_methods_that_are_no_hooks_of_ours_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Callbacks([OfTwo, Platonic])) == 2


def test_every_hook_of_another_library_is_answered_with_one_of_ours() -> None:
    for theirs, ours in FOREIGN_HOOKS.items():
        assert theirs not in vars(Callback)
        assert ours in vars(Callback)
