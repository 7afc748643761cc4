from __future__ import annotations

import pytest

from dovetail.errors import (
    ConfigError,
    DovetailError,
    MissingExtraError,
    UnknownNameError,
    add_note,
    misspelled_methods,
)
from dovetail.extras import require


def test_an_unknown_name_suggests_the_nearest_in_any_case() -> None:
    assert "did you mean 'AdamW'?" in str(UnknownNameError("optimizer", "adamw", ["SGD", "AdamW", "LBFGS"]))


def test_the_start_of_one_known_name_is_nearer_than_a_similar_spelling() -> None:
    known = ["accuracy", "mcc", "mse"]
    assert "did you mean 'accuracy'?" in str(UnknownNameError("metric", "acc", known))
    assert "did you mean 'mcc'?" in str(UnknownNameError("metric", "acc", [*known, "accordance"]))


def test_a_name_without_a_near_match_lists_the_known_ones() -> None:
    message = str(UnknownNameError("loss", "zzz", ["MSELoss", "L1Loss"]))
    assert message == "unknown loss 'zzz' (known: L1Loss, MSELoss)"


def test_without_known_names_the_error_states_this() -> None:
    assert str(UnknownNameError("loss", "zzz", [])) == "unknown loss 'zzz' (there are none)"


def test_a_user_mistake_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, DovetailError)


def test_several_notes_are_added_to_one_error() -> None:
    error = KeyError("x")
    add_note(error, "one")
    add_note(error, "two")
    assert error.__notes__ == ["one", "two"]


def test_a_missing_extra_is_named_in_the_error() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'dovetail\[plot\]'"):
        require("no_such_package_here.part", "plot")


def test_a_present_module_is_returned() -> None:
    import json

    assert require("json", "plot") is json


def test_a_misspelled_method_is_found_and_a_helper_is_not() -> None:
    class Base:
        def train_batch(self) -> None: ...
        def evaluate_batch(self) -> None: ...

    class Mine(Base):
        evaluate_batchs = Base.evaluate_batch

        def train_batch(self) -> None: ...
        def train_batches(self) -> None: ...
        def _evaluate_batch(self) -> None: ...
        def load_words(self) -> None: ...

    assert list(misspelled_methods(Mine, Base)) == [("evaluate_batchs", "evaluate_batch")]
    assert list(misspelled_methods(Base, Base)) == []
