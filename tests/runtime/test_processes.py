from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dovetail.runtime.processes import describe_exit, end_with_parent


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (-9, "was ended by SIGKILL (the system does so when memory is short)"),
        (-15, "was ended by SIGTERM"),
        (143, "was ended by SIGTERM"),
        (1, "ended with exit code 1"),
        (255, "ended with exit code 255"),
        (None, "ended with exit code None"),
    ],
)
def test_the_exit_status_of_a_process_is_described_in_words(code: int | None, sentence: str) -> None:
    assert describe_exit(code) == sentence


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_ends_with_its_parent() -> None:
    readable, writable = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(readable)
        ends = end_with_parent(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sleep", "600"], pass_fds=[writable], preexec_fn=ends)
        os._exit(0)
    os.close(writable)
    os.waitpid(middle, 0)
    # The end of the file: no process has the other end any more.
    with open(readable, "rb") as pipe:
        assert pipe.read() == b""


def test_a_process_whose_parent_is_dead_ends_at_once() -> None:
    child = os.fork()
    if child == 0:
        end_with_parent(os.getpid(), signal.SIGKILL)()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
