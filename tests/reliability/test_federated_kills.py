"""Servers that are killed, again and again, and end as if nothing had been.

Real processes and real `SIGKILL`s: at random moments, and just before operations on files. `DOVETAIL_TORTURE=1` kills
50 times where otherwise 6 do, each time a new interpreter, and at every single operation on files.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import forked
import pytest
from federation import KINDS

_TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"
_KILLS = 10 if _TORTURE else 2
_KINDS = list(KINDS) if _TORTURE else ["everything", "asynchronous, everything", "cross-silo"]
# Every n-th file operation of a run is one to die at.
_STRIDE = 1 if _TORTURE else 23
_SCRIPT = Path(__file__).with_name("federation.py")

pytestmark = [pytest.mark.full_size, pytest.mark.slow, pytest.mark.timeout(3600 if _TORTURE else 600)]


def _run(folder: Path, kind: str, die_at: int = 0, die_after: float | None = None) -> int:
    """Run a federation, kill it after the given seconds if any, and return its exit code."""
    folder.mkdir(exist_ok=True)
    reported, telling = os.pipe()
    with tempfile.TemporaryFile() as errors, os.fdopen(telling, "wb") as output, os.fdopen(reported, "rb"):
        process = forked.start(_SCRIPT, str(folder), kind, str(die_at), folder=folder, stdout=output, stderr=errors)
        try:
            if die_after is not None:
                assert select.select([reported], [], [], 120)[0], "it never began"
                try:
                    process.wait(die_after)
                except subprocess.TimeoutExpired:
                    process.kill()
            code = process.wait(240)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        assert code in (0, -signal.SIGKILL), errors.read().decode()
        return code


def _reference(folder: Path, kind: str) -> tuple[str, float]:
    start = time.monotonic()
    assert _run(folder / "reference", kind) == 0
    return (folder / "reference" / "result.txt").read_text(), time.monotonic() - start


@pytest.mark.parametrize("kind", _KINDS)
def test_a_server_killed_repeatedly_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    expected, seconds = _reference(tmp_path, kind)
    moments = random.Random(kind)
    hits = 0
    for run in itertools.count(1):
        place = tmp_path / f"run-{run}"
        while True:
            # As long as kills are left, at any moment of what is at most a whole run.
            code = _run(place, kind, die_after=moments.uniform(0, 0.8 * seconds) if hits < _KILLS else None)
            hits += code != 0
            if code == 0:
                break
        assert (place / "result.txt").read_text() == expected
        if hits >= _KILLS:
            break


@pytest.mark.parametrize(
    "kind", ["everything", "asynchronous, everything"] if _TORTURE else ["asynchronous, everything"]
)
def test_a_server_survives_a_kill_at_any_file_operation(tmp_path: Path, kind: str) -> None:
    expected, _ = _reference(tmp_path, kind)
    wrong = []
    for operation in itertools.count(5, _STRIDE):
        place = tmp_path / f"killed-at-{operation}"
        if _run(place, kind, die_at=operation) == 0:
            break
        assert _run(place, kind) == 0
        if (place / "result.txt").read_text() != expected:
            wrong.append(operation)
    assert operation > 2 * _STRIDE, "hardly anything was killed"
    assert not wrong
