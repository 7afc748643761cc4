"""Attempts of trials as processes: the state is in files, and one process does the work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dovetail.info import ATTEMPT
from dovetail.runtime.cores import NO_CARDS
from dovetail.search.processes import Attempt, Ended, LocalBackend, shell_command

Until = Callable[[Callable[[], bool]], None]
WAIT = "import time; open('begun', 'w').close(); time.sleep(600)"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt.of(tmp_path, 0)


def _start(backend: LocalBackend, attempt: Attempt, *command: str, **env: str) -> None:
    backend.start(attempt, command, env, attempt.folder.parent.parent, slots=1)


def _end(backend: LocalBackend, attempt: Attempt, until: Until) -> Ended:
    until(lambda: backend.poll(attempt) is not None)
    ended = backend.poll(attempt)
    assert ended is not None
    return ended


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_a_command_is_written_to_a_file(attempt: Attempt, until: Until, code: int) -> None:
    backend = LocalBackend()
    _start(backend, attempt, "sh", "-c", f"exit {code}")
    assert _end(backend, attempt, until) == Ended(code)
    assert (attempt.folder / "exit").read_text() == f"{code}\n"


def test_arguments_reach_the_command_unchanged(attempt: Attempt, until: Until, tmp_path: Path) -> None:
    backend = LocalBackend()
    given = ["a b", "$HOME", "'", '"', "*", "", "-x", "a\nb"]
    _start(backend, attempt, sys.executable, "-c", "import sys; print(sys.argv[1:])", *given)
    _end(backend, attempt, until)
    assert (tmp_path / "log.txt").read_text() == f"{given}\n"


def test_a_missing_command_exits_with_127_and_a_log_line(attempt: Attempt, until: Until, tmp_path: Path) -> None:
    backend = LocalBackend()
    _start(backend, attempt, "no-such-program")
    assert _end(backend, attempt, until) == Ended(127)
    assert "no-such-program" in (tmp_path / "log.txt").read_text()


def test_variables_reach_the_command(attempt: Attempt, until: Until, tmp_path: Path) -> None:
    backend = LocalBackend()
    _start(backend, attempt, "sh", "-c", f"echo $COLOUR ${ATTEMPT}", COLOUR="red")
    _end(backend, attempt, until)
    assert (tmp_path / "log.txt").read_text() == f"red {attempt.folder}\n"


def test_of_many_processes_that_start_an_attempt_only_one_does(attempt: Attempt, tmp_path: Path) -> None:
    attempt.folder.parent.mkdir()
    command = shell_command(attempt, ["sh", "-c", "echo once"])
    codes = sorted(process.wait() for process in [subprocess.Popen(command, cwd=tmp_path) for _ in range(8)])
    assert codes == [0] + [75] * 7
    assert (tmp_path / "log.txt").read_text() == "once\n"


def test_sigterm_reaches_only_the_command_and_its_exit_code_is_stored(
    attempt: Attempt, until: Until, tmp_path: Path
) -> None:
    script = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap 'echo child heard' TERM; touch trapped; while :; do sleep 0.01; done"])
def leave(number, frame):
    child.kill()
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
while not os.path.exists("trapped"):
    time.sleep(0.01)
open("begun", "w").close()
time.sleep(600)
"""
    backend = LocalBackend()
    _start(backend, attempt, sys.executable, "-c", script)
    until(lambda: (tmp_path / "begun").exists())
    attempt.request_exit("stop")
    backend.stop(attempt)
    assert _end(backend, attempt, until) == Ended(143)
    assert (tmp_path / "log.txt").read_text() == "saved\n"
    assert attempt.exit_request == "stop"


def test_an_attempt_stopped_before_its_start_never_runs(attempt: Attempt, until: Until, tmp_path: Path) -> None:
    backend = LocalBackend()
    attempt.request_exit("cancel")
    _start(backend, attempt, "touch", "ran")
    assert _end(backend, attempt, until) == Ended(None)
    assert not (tmp_path / "ran").exists()


def test_an_attempt_stopped_while_its_shell_starts_never_runs_its_command(attempt: Attempt, tmp_path: Path) -> None:
    # The shell has taken the folder, and has not looked yet whether it was asked.
    text = shell_command(attempt, ["touch", "ran"])
    text[2] = text[2].replace("echo $$ >", 'printf pause >"$1/asked"; echo $$ >', 1)
    attempt.folder.parent.mkdir()
    assert subprocess.run(text, cwd=tmp_path).returncode == 143
    assert (attempt.exit_request, attempt.exit_code) == ("pause", 143)
    assert not (tmp_path / "ran").exists()


def test_killing_also_ends_processes_that_left_the_session(attempt: Attempt, until: Until, tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {WAIT!r}], start_new_session=True).wait()
"""
    backend = LocalBackend()
    _start(backend, attempt, sys.executable, "-c", script)
    until(lambda: (tmp_path / "begun").exists())
    attempt.request_exit("cancel")
    backend.stop(attempt, kill=True)
    assert _end(backend, attempt, until) == Ended(None)
    assert not [process for process in psutil.process_iter() if _belongs(process, attempt)]


def _belongs(process: psutil.Process, attempt: Attempt) -> bool:
    try:
        return process.environ().get(ATTEMPT) == str(attempt.folder)
    except psutil.Error:
        return False


def test_another_backend_adopts_running_attempts(attempt: Attempt, until: Until, tmp_path: Path) -> None:
    first, second = LocalBackend(), LocalBackend()
    _start(first, attempt, sys.executable, "-c", WAIT)
    until(lambda: (tmp_path / "begun").exists())
    assert second.adopt(attempt)
    assert second.poll(attempt) is None
    attempt.request_exit("pause")
    second.stop(attempt)
    assert _end(second, attempt, until) == Ended(143)
    assert first.poll(attempt) == Ended(143)


def test_an_attempt_that_never_started_cannot_be_adopted(attempt: Attempt) -> None:
    assert not LocalBackend().adopt(attempt)


def test_a_reused_process_id_is_not_mistaken_for_the_shell(attempt: Attempt) -> None:
    attempt.folder.mkdir(parents=True)
    (attempt.folder / "wrapper").write_text(f"{os.getpid()}\n")
    (attempt.folder / "pid").write_text(f"{os.getpid()}\n")
    backend = LocalBackend()
    assert backend.adopt(attempt)
    backend.stop(attempt)
    backend.stop(attempt, kill=True)
    assert backend.poll(attempt) == Ended(None)


def test_the_attempts_of_a_trial_are_listed_in_order(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        Attempt.of(tmp_path, number).folder.mkdir(parents=True)
    assert [attempt.number for attempt in Attempt.all_of(tmp_path)] == [0, 2, 10]
    assert Attempt.all_of(tmp_path / "elsewhere") == []


def test_each_trial_gets_separate_graphics_cards(tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    backend = LocalBackend()
    attempts = [Attempt.of(tmp_path / str(number), 0) for number in range(2)]
    for attempt in attempts:
        attempt.folder.parent.mkdir(parents=True)
        _start(backend, attempt, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; touch begun; exec sleep 600")
    until(lambda: all((tmp_path / str(number) / "begun").exists() for number in range(2)))
    # The adopting backend knows which cards are free.
    other = LocalBackend()
    third = Attempt.of(tmp_path / "2", 0)
    third.folder.parent.mkdir(parents=True)
    assert all(other.adopt(attempt) for attempt in attempts)
    _start(other, third, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    _end(other, third, until)
    for attempt in attempts:
        backend.stop(attempt, kill=True)
        _end(backend, attempt, until)
    assert [(tmp_path / str(number) / "log.txt").read_text() for number in range(3)] == ["4\n", "5\n", "7\n"]
    assert (backend.capacity(1), backend.capacity(2), backend.capacity(8)) == (3, 1, 1)


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_cards_of_amd_and_intel_are_given_by_their_variables(
    attempt: Attempt, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "2,3")
    backend, second = LocalBackend(), Attempt.of(tmp_path / "second", 0)
    second.folder.parent.mkdir(parents=True)
    for each in (attempt, second):
        _start(backend, each, "sh", "-c", f"echo ${variable}")
    for each in (attempt, second):
        _end(backend, each, until)
    assert [(each.trial / "log.txt").read_text() for each in (attempt, second)] == ["2\n", "3\n"]


def test_a_trial_whose_file_hides_graphics_cards_gets_none(
    attempt: Attempt, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    backend = LocalBackend()
    backend.start(attempt, ["sh", "-c", "echo cards $CUDA_VISIBLE_DEVICES"], NO_CARDS, tmp_path, slots=1)
    _end(backend, attempt, until)
    assert (attempt.trial / "log.txt").read_text() == "cards\n"


def test_trials_share_the_cores(
    attempt: Attempt, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = LocalBackend().capacity(1)
    given = [(1, None), (1, 1), (2, 1), (cores + 1, None)]
    for number, (slots, concurrent) in enumerate(given):
        backend, each = LocalBackend(concurrent=concurrent), Attempt.of(tmp_path, number)
        backend.start(each, ["sh", "-c", "echo $OMP_NUM_THREADS"], {}, tmp_path, slots)
        _end(backend, each, until)
    expected = [1, cores, max(1, cores // 2), 1]
    assert [int(line) for line in (tmp_path / "log.txt").read_text().split()] == expected
