"""Trials as processes: start, poll and stop them, with all state in files.

A trial may be started several times. Each attempt is a folder `attempts/<n>` in the folder of the trial, and its whole
state is in files there, so that the next runner after one that was killed can continue.

    wrapper       the id of the shell that runs the command
    pid           the id of the command
    asked         the kind of exit request: pause, stop or cancel
    signalled     exists if it has received SIGTERM for that
    hparams_read  exists if the script has read its hyperparameters with this library
    preempted     exists if the script exits with code 0 because of an exit request
    exit          the exit code of the command

The shell creates the folder first, and exits if the folder exists. So if several processes start the same attempt, one
of them runs the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, cast

import psutil

from dovetail.info import ATTEMPT, HPARAMS_READ, PREEMPTED
from dovetail.runtime.cores import NO_CARDS, Cards, graphics_cards, num_cores, threads_per_process

ExitRequest = Literal["pause", "stop", "cancel"]
"""The kind of exit request: `stop` comes from the searcher, the others from the user."""

# Seconds after which a killed process is assumed to hang in the kernel.
_PATIENCE = 5.0

# TERM has an empty handler instead of being ignored, because the command would inherit ignoring. A number is written
# with one call, so that a reader finds all of it or nothing.
_SHELL = """
mkdir "$1" 2>/dev/null || exit 75
exec >>"$1/../../log.txt" 2>&1
trap : TERM INT HUP
echo $$ >"$1/wrapper"
sh -c 'echo $$ >"$0/pid"; [ -e "$0/asked" ] && exit 143; exec "$@"' "$@"
code=$?
echo $code >"$1/exit"
exit $code
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code, 128 + signal after a signal; None if it was killed together with its shell.
    """

    code: int | None


@dataclass(frozen=True)
class Attempt:
    """One start of a trial, represented by its files.

    Attributes:
        folder: `attempts/<n>` in the folder of the trial.

    Example:
        >>> import tempfile
        >>> attempt = Attempt.of(Path(tempfile.mkdtemp()), 0)
        >>> attempt.has_started, attempt.exit_code
        (False, None)
        >>> attempt.request_exit("pause")
        >>> attempt.exit_request
        'pause'
    """

    folder: Path

    @classmethod
    def of(cls, trial: Path, number: int) -> Attempt:
        """Return an attempt of the trial in a folder."""
        return cls(trial / "attempts" / str(number))

    @classmethod
    def all_of(cls, trial: Path) -> list[Attempt]:
        """Return the attempts of a trial that have started, in order."""
        with suppress(FileNotFoundError):
            numbers = sorted(int(name) for name in os.listdir(trial / "attempts") if name.isdecimal())
            return [cls.of(trial, number) for number in numbers]
        return []

    @property
    def trial(self) -> Path:
        """The folder of the trial."""
        return self.folder.parent.parent

    @property
    def number(self) -> int:
        """Its number, from 0."""
        return int(self.folder.name)

    @property
    def has_started(self) -> bool:
        """Whether a shell has started it."""
        return self.folder.is_dir()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command, once it has ended."""
        return _number(self.folder / "exit")

    @property
    def exit_request(self) -> ExitRequest | None:
        """The kind of exit request; None means that there was none."""
        with suppress(OSError):
            return cast(ExitRequest, (self.folder / "asked").read_text())
        return None

    @property
    def exit_requested_at(self) -> float:
        """The time of the exit request, in seconds since the epoch."""
        return (self.folder / "asked").stat().st_mtime

    @property
    def was_signalled(self) -> bool:
        """Whether it has received SIGTERM because of an exit request."""
        return (self.folder / "signalled").exists()

    def note_signal(self) -> None:
        """Record that it has received SIGTERM."""
        (self.folder / "signalled").touch()

    @property
    def was_preempted(self) -> bool:
        """Whether the script has recorded that it exits because of an exit request."""
        return (self.folder / PREEMPTED).exists()

    @property
    def has_read_hparams(self) -> bool:
        """Whether the script has read its hyperparameters with this library."""
        return (self.folder / HPARAMS_READ).exists()

    def request_exit(self, request: ExitRequest) -> None:
        """Record an exit request. An attempt that has not started will not start after this."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / "asked.tmp"
        unfinished.write_text(request)
        unfinished.replace(self.folder / "asked")


class Backend(Protocol):
    """A place that runs the processes of trials. All state of an attempt is in its files."""

    def capacity(self, slots: int) -> int:
        """Return how many trials with this number of slots can run at the same time, at least one."""

    def start(self, attempt: Attempt, command: Sequence[str], env: Mapping[str, str], cwd: Path, slots: int) -> None:
        """Start an attempt; do nothing if it was started before.

        Args:
            attempt: Its folder is created by the started process, not before.
            command: The program and its arguments.
            env: Environment variables in addition to this process's own.
            cwd: The folder to run in.
            slots: How many processes the command starts; the backend reserves resources for all of them.
        """

    def poll(self, attempt: Attempt) -> Ended | None:
        """Return how an attempt ended, when none of its processes is left; None while it runs or starts."""

    def stop(self, attempt: Attempt, kill: bool = False) -> None:
        """Send SIGTERM to the command, or kill all processes, after `Attempt.request_exit`."""

    def adopt(self, attempt: Attempt) -> bool:
        """Take over an attempt that another process may have started; return False if it has not started."""


class LocalBackend(Backend):
    r"""Runs trials on this machine.

    A slot is a graphics card if there are any, else a CPU core. Each trial gets its own cards with
    `CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES` or `ZE_AFFINITY_MASK`, and a share of the cores with
    `OMP_NUM_THREADS`, unless the experiment sets these.

    Args:
        slots: The number of slots; None means to count them.
        concurrent: The largest number of trials at the same time; None means as many as there are slots for.

    Example:
        >>> import tempfile, time
        >>> trial = Path(tempfile.mkdtemp())
        >>> backend, attempt = LocalBackend(), Attempt.of(trial, 0)
        >>> backend.start(attempt, ["echo", "hello"], {}, trial, slots=1)
        >>> while (ended := backend.poll(attempt)) is None:
        ...     time.sleep(0.01)
        >>> ended, (trial / "log.txt").read_text()
        (Ended(code=0), 'hello\n')
    """

    def __init__(self, slots: int | None = None, concurrent: int | None = None) -> None:
        self._given_slots = slots
        self._concurrent = concurrent
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        self._cards_of: dict[Path, list[str]] = {}

    @cached_property
    def _cards(self) -> Cards:
        # Not at the start: it may take seconds to count them.
        return graphics_cards()

    def capacity(self, slots: int) -> int:
        return max(1, (self._given_slots or len(self._cards.names) or num_cores()) // slots)

    def start(self, attempt: Attempt, command: Sequence[str], env: Mapping[str, str], cwd: Path, slots: int) -> None:
        attempt.folder.parent.mkdir(parents=True, exist_ok=True)
        fit = self.capacity(slots)
        threads = threads_per_process(slots * min(fit, self._concurrent or fit))
        # In this order: a variable of the user's shell or of the experiment replaces the computed number of threads.
        variables = {"OMP_NUM_THREADS": str(threads), **os.environ, **env, ATTEMPT: str(attempt.folder)}
        # If the experiment sets the variable, keep it: `slots_per_trial: 0` hides all cards.
        cards = self._cards.names
        if cards and not {*NO_CARDS, *self._cards.variables} & env.keys():
            taken = {card for each in self._cards_of.values() for card in each}
            free = [card for card in cards if card not in taken]
            # If no card is free, share the first ones: an empty variable would hide all cards from the trial.
            self._cards_of[attempt.folder] = free[:slots] or cards[:slots]
            chosen = ",".join(self._cards_of[attempt.folder])
            variables |= dict.fromkeys(self._cards.variables, chosen)
        # A new session, so that Ctrl-C at the terminal reaches the runner only.
        self._started[attempt.folder] = subprocess.Popen(  # noqa: S603 - the user's own command
            shell_command(attempt, command), cwd=cwd, env=variables, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def poll(self, attempt: Attempt) -> Ended | None:
        code = attempt.exit_code
        if code is None and self._is_at_work(attempt):
            return None
        # It may have ended between the two checks.
        code = attempt.exit_code
        if code != 0:
            # A killed launcher or shell leaves its children running.
            _end_all(attempt)
        self._cards_of.pop(attempt.folder, None)
        if (process := self._started.pop(attempt.folder, None)) is not None:
            process.wait()
        return Ended(code)

    def stop(self, attempt: Attempt, kill: bool = False) -> None:
        if kill:
            _end_all(attempt)
            return
        # While the shell waits for the command, no other process has the command's id. If there is none yet, the
        # command will find the exit request before it starts.
        pid = _number(attempt.folder / "pid")
        if pid is not None and self._is_at_work(attempt):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def adopt(self, attempt: Attempt) -> bool:
        if self._cards.names and (pid := _number(attempt.folder / "pid")) is not None:
            with suppress(psutil.Error):
                # The previous runner assigned the cards; without this, the next trial would get the same ones.
                visible = psutil.Process(pid).environ().get(self._cards.variables[0], "")
                self._cards_of[attempt.folder] = visible.split(",")
        return attempt.has_started

    def _is_at_work(self, attempt: Attempt) -> bool:
        process = self._started.get(attempt.folder)
        if process is not None and process.poll() is None:
            return True
        # Another process may have started it, even if this process tried at the same time.
        return is_at_work(attempt)


def is_at_work(attempt: Attempt) -> bool:
    """Return whether a shell of this machine runs an attempt that has started."""
    wrapper = _number(attempt.folder / "wrapper")
    # The shell has created the folder but not written its number yet, so it is searched by its command.
    if wrapper is None:
        return any(_is_wrapper(each, attempt) for each in psutil.process_iter())
    with suppress(psutil.Error):
        return _is_wrapper(psutil.Process(wrapper), attempt)
    return False


def shell_command(attempt: Attempt, command: Sequence[str]) -> list[str]:
    """Return the command of the shell that starts an attempt, runs a command and records its exit code."""
    return ["sh", "-c", _SHELL, "dovetail-trial", str(attempt.folder), *command]


def _is_wrapper(process: psutil.Process, attempt: Attempt) -> bool:
    # The number alone may belong to another process by now.
    with suppress(psutil.Error):
        return process.cmdline()[3:5] == ["dovetail-trial", str(attempt.folder)]
    return False


def _end_all(attempt: Attempt) -> None:
    """Kill every process of an attempt, also those that have left its session, and wait until they have ended."""
    deadline = time.monotonic() + _PATIENCE
    # Repeat this: a killed process may have just started another one.
    while (found := list(_processes(attempt))) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)


def _processes(attempt: Attempt) -> Iterator[psutil.Process]:
    # A zombie process has no environment any more.
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            # The variable is inherited by all descendants, also by those in another session or process group.
            if process.environ().get(ATTEMPT) == str(attempt.folder) and process.pid != os.getpid():
                yield process


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file does not exist or is being written."""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        return int(path.read_text())
    return None
