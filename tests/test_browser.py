"""What `make test` does about the browser that some tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SENTENCE = "browser tests are skipped: chromium is not installed"


def make_browser(folder: Path, *programs: str) -> subprocess.CompletedProcess[str]:
    """Run the target of the browser on a machine that has only these programs."""
    for name in ("sh", "id", "touch", *programs):
        (folder / name).symlink_to(shutil.which(name) or shutil.which("true") or name)
    (folder / ".dev").touch()
    # Do not install the environment, which is old because it is empty.
    make = shutil.which("make")
    if make is None:
        pytest.skip("NOT TESTED: there is no make")
    command = [make, "-C", str(ROOT), "-o", f"{folder}/.dev", f"VENV={folder}", f"{folder}/.browser"]
    environment = {**os.environ, "PATH": str(folder), "MAKEFLAGS": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_without_a_browser_the_tests_run_and_the_output_reports_it(tmp_path: Path) -> None:
    done = make_browser(tmp_path)
    assert done.returncode == 0, done.stderr
    assert SENTENCE in done.stdout.splitlines()
    assert not (tmp_path / ".browser").exists()


def test_an_installed_browser_is_used_without_a_message(tmp_path: Path) -> None:
    done = make_browser(tmp_path, "chromium")
    assert (done.returncode, SENTENCE in done.stdout) == (0, False)
    assert (tmp_path / ".browser").exists()


def test_the_last_line_of_the_tests_reports_skipped_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration/test_report_page.py"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == SENTENCE
