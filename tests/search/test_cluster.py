"""Cluster settings that need no cluster; `tests/integration/test_ray.py` has the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.info import ATTEMPT
from dovetail.search.cluster import RayBackend, start_guard
from dovetail.search.processes import Attempt
from dovetail.search.spread import spread


@pytest.mark.parametrize("address", ["", "nowhere", "ray://", "ray://host", "host:", "http://host:1", "a b:1"])
def test_an_invalid_cluster_address_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match="expected local, ray, host:port or ray://host:port"):
        RayBackend(address)


def test_an_invalid_storage_is_rejected_before_a_start() -> None:
    with pytest.raises(UnknownNameError, match=r"'flie'.*'file'"):
        RayBackend("local", storage="flie:///checkpoints")


def test_importing_the_backend_imports_neither_ray_nor_torch() -> None:
    code = "import sys, dovetail.search.cluster; print({'ray', 'torch', 'fsspec'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_each_process_of_a_distributed_trial_is_a_launcher_process() -> None:
    command = [sys.executable, "-X", "dev", "-m", "dovetail.launch", "--slots", "4", "-m", "train", "--slots", "9"]
    assert spread(command, 4, "GPU") == [
        *(sys.executable, "-u", "-m", "dovetail.search.spread", "4", "GPU"),
        *(sys.executable, "-X", "dev", "-m", "dovetail.launch", "-m", "train", "--slots", "9"),
    ]


def test_a_command_that_starts_processes_cannot_be_distributed() -> None:
    with pytest.raises(ConfigError, match=r"no node of the cluster has 4 slots.*got 'torchrun train.py'"):
        spread(["torchrun", "train.py"], 4, "CPU")


def ends(process: psutil.Process) -> bool:
    return not psutil.wait_procs([process], timeout=20)[1]


def test_a_guard_ends_an_attempt_whose_owner_is_killed(tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    code = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "from dovetail.search.cluster import start_guard; from dovetail.search.processes import Attempt\n"
        "guard = start_guard(Attempt(Path(sys.argv[1])))\n"
        "print('ready', flush=True); time.sleep(1000)"
    )
    script = [sys.executable, "-c", code, str(attempt.folder)]
    sleep = ["sleep", "1000"]
    theirs = subprocess.Popen(sleep, env={**os.environ, ATTEMPT: str(attempt.folder)}, start_new_session=True)
    others = subprocess.Popen(sleep, env={**os.environ, ATTEMPT: str(tmp_path / "attempts" / "1")})
    try:
        with subprocess.Popen(script, stdout=subprocess.PIPE) as keeper:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == b"ready\n"
            assert theirs.poll() is None
            keeper.kill()
        assert theirs.wait(timeout=20) == -9
        assert others.poll() is None
    finally:
        for process in (theirs, others):
            process.kill()
            process.wait()


def test_a_guard_that_is_notified_of_the_end_kills_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as sleeper:
        guard = start_guard(Attempt.of(tmp_path, 0), sleeper.pid)
        found = [it for it in psutil.process_iter() if _guards(it, str(tmp_path))]
        guard.communicate(b"over")
        assert len(found) == 1
        assert ends(found[0])
        assert sleeper.poll() is None
        guard = start_guard(Attempt.of(tmp_path, 0), sleeper.pid)
        guard.communicate()
        assert sleeper.wait(timeout=20) == -9


def _guards(process: psutil.Process, folder: str) -> bool:
    try:
        return "dovetail.search.cluster" in process.cmdline() and any(folder in word for word in process.cmdline())
    except psutil.Error:
        return False
