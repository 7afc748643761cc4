from __future__ import annotations

import pytest

from dovetail import Batch, Batches, Epoch, Epochs, Progress, Record, Records, Tokens, Updates
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.units import counted, parse_unit


def test_singular_names_are_the_same_units() -> None:
    assert (Epoch, Batch, Record) == (Epochs, Batches, Records)


def test_a_unit_of_one_is_printed_in_the_singular() -> None:
    assert [counted(number, "batch", "batches") for number in (0, 1, 1200)] == ["0 batches", "1 batch", "1200 batches"]
    assert (counted(1, "trial"), counted(2, "trial")) == ("1 trial", "2 trials")


def test_a_length_is_reached_by_its_counter() -> None:
    progress = Progress(epoch=2, batch=3, batches=23, records=184, updates=11)
    assert Epochs(2).reached(progress)
    assert not Epochs(3).reached(progress)
    assert Batches(23).reached(progress)
    assert not Records(185).reached(progress)
    assert Updates(11).reached(progress)
    assert not Tokens(1).reached(progress)
    assert Tokens(5).reached(Progress(tokens=5))


@pytest.mark.parametrize(("before", "now", "due"), [(0, 9, False), (9, 10, True), (10, 19, False), (8, 31, True)])
def test_a_period_is_due_when_a_multiple_is_passed(before: int, now: int, due: bool) -> None:
    assert Records(10).due(Progress(records=before), Progress(records=now)) is due


def test_a_period_of_zero_is_never_due() -> None:
    assert not Batches(0).due(Progress(), Progress(batches=1000))


def test_a_container_is_an_explicit_schedule() -> None:
    schedule = Epochs([2, 5])
    fired = [epoch for epoch in range(1, 8) if schedule.due(Progress(epoch=epoch - 1), Progress(epoch=epoch))]
    assert fired == [2, 5]


def test_a_schedule_is_rejected_as_a_length() -> None:
    with pytest.raises(
        ConfigError, match=r"length: expected one whole number such as Epochs\(5\), got the schedule Epochs"
    ):
        Epochs([2, 5]).reached(Progress())


def test_a_unit_is_read_from_its_file_form() -> None:
    assert parse_unit({"records": 64}) == Records(64)
    assert parse_unit({"tokens": 10**9}) == Tokens(10**9)
    assert parse_unit(Epochs(3)) == Epochs(3)


def test_units_of_different_kinds_differ() -> None:
    assert Epochs(3) != Batches(3)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None])
def test_an_invalid_number_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match="Epochs"):
        Epochs(value)  # type: ignore[arg-type]


def test_an_unknown_unit_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'epochs'"):
        parse_unit({"epoch": 3})


@pytest.mark.parametrize("value", [{}, {"epochs": 1, "batches": 2}, "3 epochs", 7])
def test_an_object_that_is_not_a_unit_is_shown_in_the_error(value: object) -> None:
    with pytest.raises(ConfigError, match="max_length: expected a unit"):
        parse_unit(value, "max_length")  # type: ignore[arg-type]


def test_progress_survives_a_round_trip() -> None:
    progress, other = Progress(1, 2, 3, 4, 5), Progress()
    other.load_state_dict(progress.state_dict())
    assert other == progress
    assert other is not progress
