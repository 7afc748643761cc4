from __future__ import annotations

from typing import Any

import pytest

from dovetail.callbacks import Callback, CallbackHandler, TrainerCallback
from dovetail.errors import UnknownNameError
from dovetail.trainers.context import TrainingContext


class Plato(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_step_end(self, trainer: Any, config: Any, batch: Any = None, loss: Any = None, **kwargs: Any) -> None:
        self.seen.append((trainer, config, batch, loss))


class Ours(Callback):
    def on_train_end(self, context: TrainingContext) -> None:
        raise AttributeError("mine")


def test_classes_and_instances_are_added_and_named_in_order() -> None:
    handler = CallbackHandler([Plato])
    handler.add_callback(Ours())
    handler.add_callbacks([Plato(), Ours])
    assert handler.callback_list == ["Plato", "Ours", "Plato", "Ours"]


def test_clear_removes_all_callbacks() -> None:
    handler = CallbackHandler([Plato, Ours])
    handler.clear_callbacks()
    assert handler.callback_list == []
    assert handler.on_train_end == ()


def test_an_event_reaches_every_callback_that_has_it() -> None:
    first, second = Plato(), Plato()
    CallbackHandler([first, Ours, second]).call_event("on_train_step_end", "trainer", {}, 3, loss=0.5)
    assert first.seen == second.seen == [("trainer", {}, 3, 0.5)]


def test_an_error_inside_a_callback_keeps_its_type() -> None:
    with pytest.raises(AttributeError, match="mine"):
        CallbackHandler([Ours]).call_event("on_train_end", None)


def test_an_unknown_event_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'on_train_run_start'"):
        CallbackHandler([Plato]).call_event("on_train_run_strat", None, {})


def test_a_known_event_without_receivers_is_accepted() -> None:
    CallbackHandler([Ours]).call_event("on_train_run_start", None, {})
