"""A script that trained in a group ends cleanly, by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_no_thread_of_the_process_group_outlives_it(run_group: Any, tmp_path: Path) -> None:
    # One that does may abort the process: `terminate called without an active exception`.
    for threads in run_group(Path(__file__).with_name("leaving_ranks.py"), 2, tmp_path):
        assert not [name for name in threads if "gloo" in name]
