from __future__ import annotations

import warnings
from collections.abc import Mapping
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


def test_an_unknown_hook_name_raises_with_the_nearest_hook() -> None:
    with pytest.warns(
        UserWarning, match=r"unknown hook of Misnamed 'on_train_epoch_end': did you mean 'on_epoch_end'\?"
    ):
        Callbacks([Misnamed])


def test_methods_that_are_not_hooks_are_ignored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Callbacks([OfTwo, Platonic])) == 2


def test_every_hook_of_another_library_suggests_one_of_ours() -> None:
    for theirs, ours in FOREIGN_HOOKS.items():
        assert theirs not in vars(Callback)
        assert ours in vars(Callback)


class MisspelledPlatonic(TrainerCallback):
    def on_train_epoch_ends(self, *arguments: Any, **further: Any) -> None: ...


class OurHookPlatonic(TrainerCallback):
    def on_validation_end(self, *arguments: Any, **further: Any) -> None: ...


class CustomEventPlatonic(TrainerCallback):
    def on_upload(self, *arguments: Any, **further: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            MisspelledPlatonic,
            r"MisspelledPlatonic\.on_train_epoch_ends is never called: did you mean on_train_epoch_end\?",
        ),
        (
            OurHookPlatonic,
            r"OurHookPlatonic\.on_validation_end is never called: it is a hook of dovetail\.callbacks\.Callback, "
            r"and OurHookPlatonic derives from TrainerCallback \(known: on_train_epoch_end, .*\)",
        ),
    ],
)
def test_a_plato_callback_hook_that_is_never_called_warns(kind: type[TrainerCallback], sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence):
        Callbacks([kind])


def test_an_event_that_a_handler_calls_by_name_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Callbacks([CustomEventPlatonic])) == 1


class SetsHook(Callback):
    def __init__(self) -> None:
        self.on_epoch_end = lambda context, metrics: None  # type: ignore[method-assign]


class ReplacesHook(SetsHook):
    def on_epoch_end(self, *arguments: Any) -> None: ...


def test_a_hook_set_on_the_instance_warns() -> None:
    sentence = (
        r"SetsHook\.on_epoch_end is never called, because it was set on the instance: define it in the class, "
        r"or use LambdaCallback\(on_epoch_end=…\)"
    )
    with pytest.warns(UserWarning, match=sentence):
        callbacks = Callbacks([SetsHook()])
    assert callbacks.on_epoch_end == ()


def test_a_hook_of_the_class_may_be_replaced_on_the_instance() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Callbacks([ReplacesHook()]).on_epoch_end) == 1


class SavesOnly(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}


class RestoresOnly(Callback):
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RestoresToo(SavesOnly):
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (SavesOnly, "SavesOnly defines state_dict without load_state_dict: its state is saved and never restored"),
        (RestoresOnly, "RestoresOnly defines load_state_dict without state_dict: checkpoints have no state for it"),
    ],
)
def test_one_state_method_without_the_other_warns(kind: type[Callback], sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence):
        Callbacks([kind])


def test_state_methods_may_come_from_different_classes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Callbacks([RestoresToo])) == 1
