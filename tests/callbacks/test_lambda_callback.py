from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.callbacks import Callbacks, LambdaCallback
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.units import Epochs


def test_functions_are_called_with_the_arguments_of_their_hooks(make: Callable[..., Any]) -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        on_epoch_end=lambda context, metrics: seen.append((context.progress.epoch, sorted(metrics))),
        on_train_end=lambda context: seen.append("end"),
    )
    make(callback).fit(max_length=Epochs(2))
    assert seen == [(1, ["train_loss"]), (2, ["train_loss"]), "end"]


def test_hooks_that_were_not_given_are_not_called() -> None:
    callbacks = Callbacks([LambdaCallback(on_epoch_end=print)])
    assert (len(callbacks.on_epoch_end), len(callbacks.on_step_end)) == (1, 0)


def test_an_unknown_hook_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown hook 'on_epoch_ended': did you mean 'on_epoch_end'"):
        LambdaCallback(on_epoch_ended=print)


def test_a_value_that_is_not_a_function_is_rejected() -> None:
    with pytest.raises(ConfigError, match="on_epoch_end: expected a function, got 3"):
        LambdaCallback(on_epoch_end=3)  # type: ignore[arg-type]


def test_a_lambda_callback_can_be_sent_to_another_process() -> None:
    copied = pickle.loads(pickle.dumps(LambdaCallback(on_train_end=print)))
    assert copied.on_train_end is print
    assert isinstance(copied, LambdaCallback)
