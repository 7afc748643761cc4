"""Fixtures of the tests of names that other libraries have."""

from __future__ import annotations

import pytest
from problem import Problem, make_problem


@pytest.fixture(scope="session")
def problem() -> Problem:
    return make_problem()
