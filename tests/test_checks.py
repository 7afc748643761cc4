"""Mistakes in a configuration, as one error."""

from __future__ import annotations

from dovetail.checks import ConfigErrors


def test_an_error_shows_the_first_fifty_mistakes_and_stores_all() -> None:
    error = ConfigErrors([f"mistake {number}" for number in range(5_000)])
    assert str(error).splitlines()[-2:] == ["mistake 49", "and 4,950 more mistakes"]
    assert len(error.problems) == 5_000
