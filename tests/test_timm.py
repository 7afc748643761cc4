"""The recipe with timm, mixup and an average of the weights, as its page has it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from forked import run

pytestmark = [pytest.mark.full_size, pytest.mark.slow]


@pytest.mark.usefixtures("forking")
def test_the_page_about_timm_runs(tmp_path: Path) -> None:
    runpy.run_path(str(Path(__file__).with_name("vision.py")))["skip_unless_installed"]()
    done = run(Path(__file__).with_name("timm_page.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 blocks\n"
