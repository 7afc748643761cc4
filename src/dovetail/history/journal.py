"""Journal of a run: when it started and ended, its process, its settings, and the time of each row of its history.

The file `<name>_run.jsonl` is beside the history. A page or a command reads it to find out whether the run still works:

    {"dovetail_run": 1}
    {"start": 1767312000.0, "pid": 71, "born": 1767311990.5, "host": "a", "boot": "5f…", "settings": {"lr": 0.1}, …}
    {"rows": 1, "time": 1767312009.5}
    {"end": 1767312020.0, "state": "finished"}

A run that resumes adds a further start. No line is written during a step, only with a row of the history. Samples of
the running run are in a file of their own, see `samples.py`.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import psutil

from dovetail.history.lines import encode
from dovetail.history.samples import Probe, Sampler, samples_path

RunState: TypeAlias = Literal["running", "finished", "failed", "interrupted", "killed", "unknown"]
"""The state of a run. `killed`: its process has ended without a word; `unknown`: the run has no journal."""

HEADER = "dovetail_run"
VERSION = 1
_LONGEST_ERROR = 500
# Seconds after which the state of a large repository counts as unknown.
_GIT_PATIENCE = 2.0
# A line without an end is skipped: it would fill the memory.
_CHUNK = 8 << 20
# Seconds without a row after which a run on another machine counts as killed, if its rows are usually more frequent.
PATIENCE = 900.0


def journal_path(history: Path) -> Path:
    """Return the path of the journal that belongs to a history file.

    Example:
        >>> journal_path(Path("runs/ck_history.jsonl")).name
        'ck_run.jsonl'
    """
    return history.with_name(f"{history.stem.removesuffix('_history')}_run.jsonl")


class RunJournal:
    """Writes the journal of a run. A disk that cannot be written never stops the run.

    Attributes:
        path: The file.
        sampler: Writes the samples beside it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "ck_run.jsonl"
        >>> journal = RunJournal(path)
        >>> journal.start({"settings": {"lr": 0.1}}, is_new=True)
        >>> journal.mark(1)
        >>> journal.end("finished")
        >>> read = JournalReader(path)
        >>> read.update()
        True
        >>> read.state(), read.settings, len(read.times)
        ('finished', {'lr': 0.1}, 1)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sampler = Sampler(samples_path(path))

    def start(self, facts: Mapping[str, Any], *, is_new: bool, num_losses: int = 0, probe: Probe | None = None) -> None:
        """Write the start of a run, and start its samples.

        Args:
            facts: Values that JSON can represent: `settings`, `explain`, `run`, ….
            is_new: True if the run starts from scratch: the journal of an earlier run is replaced.
            num_losses: The number of batch losses that the history has already.
            probe: Further values of each sample; None means none.
        """
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            before = b"" if is_new or not self.path.exists() else self.path.read_bytes()
            if not before:
                self.path.write_bytes(_line({HEADER: VERSION}))
            elif not before.endswith(b"\n"):
                # A killed process has left half a line.
                with self.path.open("ab") as file:
                    file.write(b"\n")
        self._append({"start": time.time(), **process_facts(), **facts})
        self.sampler.start(is_new=is_new, num_losses=num_losses, probe=probe)

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a further line, such as a round of a federation, with the current time."""
        self._append({**row, "time": round(time.time(), 3)})

    def mark(self, rows: int) -> None:
        """Write the current time as the time of the newest row of the history."""
        self._append({"rows": rows, "time": round(time.time(), 3)})

    def end(self, state: RunState, error: str | None = None) -> None:
        """Write the end of a run, with the first line of its error, if any."""
        self.sampler.end()
        reason = {} if error is None else {"error": error.strip().partition("\n")[0][:_LONGEST_ERROR]}
        self._append({"end": time.time(), "state": state, **reason})

    def _append(self, row: Mapping[str, Any]) -> None:
        with suppress(OSError), self.path.open("ab") as file:
            file.write(_line(row))


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(_strict(row), allow_nan=False, default=str).encode() + b"\n"


def _strict(value: Any) -> Any:
    """Return a value without NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else encode(value)


def process_facts() -> dict[str, Any]:
    """Return what identifies this process, and the versions that it runs with."""
    libraries = {name: str(module.__version__) for name in ("torch", "numpy") if (module := sys.modules.get(name))}
    return {
        **_identity(os.getpid()),
        "command": sys.argv,
        "folder": os.getcwd(),
        "versions": {"python": platform.python_version(), "dovetail": _release(), **libraries},
        "system": platform.platform(),
        **git_state(Path.cwd()),
    }


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "born": psutil.Process(pid).create_time(), "host": platform.node(), "boot": _boot()}


def _boot() -> str:
    """Return an identifier of this start of the machine, or of its container; empty if there is none."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            # Two containers have different process numbers, which the link to the namespace shows.
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
    return " ".join(parts)


def _release() -> str:
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version("dovetail")
    return "unknown"


@functools.cache
def git_state(folder: Path) -> dict[str, Any]:
    """Return `git`, the commit of a folder, its `branch`, and `dirty`: whether tracked files have changed since.

    Cached, because a process runs the code that it has imported first. None means unknown, or no repository; `branch`
    and `dirty` need git.
    """
    commit = git_commit(folder)
    found: dict[str, Any] = {"git": commit, "branch": None, "dirty": None}
    if commit is None:
        return found
    # A repository may configure a command that `status` starts; and a lock would disturb the user's own git.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v1", "--branch"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        done = subprocess.run(  # noqa: S603 - the command is fixed
            [*command, "--untracked-files=no", "--ignore-submodules"],
            cwd=folder,
            env=environment,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_PATIENCE,
            text=True,
        )
        head, *changes = done.stdout.splitlines()
        branch = head.removeprefix("## ").partition("...")[0]
        found |= {"branch": None if "(no branch)" in branch else branch, "dirty": bool(changes)}
    return found


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, without starting git; None if it is not in a repository."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        with suppress(OSError, UnicodeDecodeError):
            if git.is_file():
                # A work tree has a file with the path of its repository's folder.
                git = place / git.read_text().removeprefix("gitdir: ").strip()
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head[:40]
            return _reference(git, head.removeprefix("ref: "))
    return None


def _reference(git: Path, name: str) -> str | None:
    common = git
    with suppress(OSError):
        common = git / (git / "commondir").read_text().strip()
    for place in (git, common):
        with suppress(OSError):
            return (place / name).read_text().strip()[:40]
    with suppress(OSError):
        for line in (common / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line[:40]
    return None


class GrowingLines:
    """Reads the JSON objects of a file line by line while it grows; a subclass stores them.

    Lines that are no objects are left out. A file that was cut or replaced is read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._file: tuple[int, int] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all lines."""
        raise NotImplementedError

    def take(self, row: dict[str, Any]) -> None:
        """Store the object of one line."""
        raise NotImplementedError

    def update(self) -> bool:
        """Read new lines, and return whether there were any."""
        try:
            # A FIFO would block without O_NONBLOCK, which Windows does not have.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except OSError:
            had = self._file is not None
            self.restart(None)
            return had
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            identity = (found.st_dev, found.st_ino)
            if not stat.S_ISREG(found.st_mode):
                return False
            if found.st_size < self._at or identity != self._file:
                self.restart(identity)
            has_new = False
            while self._at < found.st_size:
                file.seek(self._at)
                content = file.read(_CHUNK)
                complete = content if len(content) == _CHUNK and b"\n" not in content else _whole_lines(content)
                if not complete:
                    break
                self._at, has_new = self._at + len(complete), True
                self._parse(complete)
            return has_new

    def _parse(self, content: bytes) -> None:
        for line in content.splitlines():
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    self.take(row)

    def restart(self, identity: tuple[int, int] | None = None) -> None:
        """Forget all lines, so that the next `update` reads the file from its start."""
        self._at, self._file = 0, identity
        self.clear()


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


class JournalReader(GrowingLines):
    """Reads a journal while it grows.

    Attributes:
        path: The file.
        start: The newest start; empty if there is none.
        end: The end that follows it; empty while the run works.
        times: The time of each row of the history, by its number, from 1.
        num_starts: How often the run was started.
        first_start: The time of the first start; None if there is none.
    """

    start: dict[str, Any]
    end: dict[str, Any]
    times: dict[int, float]
    num_starts: int
    first_start: float | None

    def clear(self) -> None:
        self.start, self.end, self.times, self.num_starts, self.first_start = {}, {}, {}, 0, None

    def take(self, row: dict[str, Any]) -> None:
        if _is_time(row.get("time")) and isinstance(row.get("rows"), int):
            self.times[row["rows"]] = float(row["time"])
        elif _is_time(row.get("start")):
            self.start, self.end, self.num_starts = row, {}, self.num_starts + 1
            self.first_start = row["start"] if self.first_start is None else self.first_start
        elif _is_time(row.get("end")):
            self.end = row

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run by name."""
        settings = self.start.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def last_sign(self) -> float | None:
        """The time of the newest line; None if the journal is empty."""
        signs = [self.start.get("start"), self.end.get("end"), next(reversed(self.times.values()), None)]
        return max((float(each) for each in signs if each is not None), default=None)

    def state(self, now: float | None = None) -> RunState:
        """Return the state of the run.

        On the machine of the run, its process is looked up. On another machine, a run without a row for a long time
        counts as killed: `PATIENCE`, or five times the longest time between two rows.
        """
        if not self.start:
            return "unknown"
        if self.end:
            state = self.end.get("state")
            return cast(RunState, state) if state in ("finished", "failed", "interrupted") else "unknown"
        if self.start.get("host") == platform.node() and self.start.get("boot") == _boot():
            return "running" if self.process() is not None else "killed"
        times = [float(self.start["start"]), *self.times.values()]
        gaps = [after - before for before, after in pairwise(times)]
        silence = (time.time() if now is None else now) - (self.last_sign or 0.0)
        return "running" if silence < max(PATIENCE, 5 * max(gaps, default=0.0)) else "killed"

    def process(self) -> psutil.Process | None:
        """Return the process of the run, if it works on this machine."""
        pid, born = self.start.get("pid"), self.start.get("born")
        if self.end or not isinstance(pid, int) or not _is_time(born):
            return None
        with suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(pid)
            # The number may belong to another process by now. A zombie process has ended.
            if abs(process.create_time() - born) < 1.0 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def _is_time(value: Any) -> TypeGuard[float]:
    # A whole number may be too large for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
