"""Settings for all tests."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Two test processes on two cores: torch's second thread would only spin. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files whose tests share what takes long to make, and so belong into one test process.
_TOGETHER = ("tests/integration/", "tests/search/test_store.py")
_APART = "tests/integration/test_examples.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out such files as a whole, the one with the most tests first, and every other test by itself.

    The group marks of pytest-xdist 3.8 would say the same, but mean nothing to pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_shared = nodeid.startswith(_TOGETHER) and not nodeid.startswith(_APART)
            return nodeid.split("::", 1)[0] if is_shared else nodeid

    return Scheduling(config, log)
