"""The file operations of a checkpoint, and the temporary names beside it.

Everything that changes the disk goes through `Files`, one small method per operation. The tests put an
implementation there that cuts the power after any of them, or that fails as a broken disk does.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dovetail.errors import CheckpointError

CHUNK = 1 << 20
"""Bytes that are hashed and written at a time: small beside a model, large beside a system call."""

# `.tmp-` is rubbish as soon as its writer is dead. `.old-` is always a whole checkpoint: the one that was
# set aside a moment before its successor took the name.
_BESIDE = re.compile(r"\.(?P<kind>tmp|old)-(?P<name>.+)\.[0-9a-f]{8}", re.DOTALL)
_MAX_SIZE = 1 << 62
_DAMAGED = re.compile(r".+\.damaged-[0-9a-f]{8}", re.DOTALL)


class Files:
    """The few operations by which a checkpoint reaches the disk."""

    def make_directory(self, path: Path) -> None:
        """Create a directory that does not exist yet."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """Create a file that does not exist yet and open it, unbuffered, for writing."""
        return open(path, "xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Write all of `data`."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        """Wait until the contents of `file` are on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in the directory `path` are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, in one step."""
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove a file, if it is still there."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()

    def remove(self, path: Path) -> None:
        """Remove a directory and all that is in it, if it is still there."""
        if path.is_dir():
            for name in sorted(os.listdir(path)):
                inner = path / name
                (self.remove if inner.is_dir() and not inner.is_symlink() else self.remove_file)(inner)
            self.remove_directory(path)

    def free_space(self, path: Path) -> int:
        """Return the bytes that may still be written below `path`."""
        return shutil.disk_usage(path).free

    def lock(self, path: Path) -> int:
        """Take the lock that says "my writer is alive" and return its descriptor.

        The kernel drops the lock with the process, however it ends; unlike a process id it means the same in
        every container, and is never reused.

        Raises:
            BlockingIOError: Another writer holds it.
            OSError: The file system knows no locks.
        """
        import fcntl

        descriptor = _LOCKS.open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.unlock(descriptor)
            raise
        return descriptor

    def unlock(self, descriptor: int) -> None:
        """Release a lock."""
        _LOCKS.close(descriptor)


class _Locks:
    """The open locks of this process, which forked processes close at once.

    A forked process, such as a data worker, shares the locks that are held at that moment. If this process were killed
    while it writes a checkpoint, its orphaned workers would keep the lock, and nothing could remove the remains.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._access = threading.RLock()
        self._follows_forks = False

    def open(self, path: Path) -> int:
        with self._access:
            if not self._follows_forks:
                self._follows_forks = True
                # A fork waits until no thread is between opening a lock and noting it.
                os.register_at_fork(
                    before=self._access.acquire,
                    after_in_parent=self._access.release,
                    after_in_child=self._close_in_child,
                )
            descriptor = os.open(path, os.O_RDONLY)
            self._open.add(descriptor)
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._access:
            self._open.discard(descriptor)
            os.close(descriptor)

    def _close_in_child(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
        self._access.release()


_LOCKS = _Locks()
DISK = Files()


class StoredFile(NamedTuple):
    """The size and the SHA-256 of a file, as a manifest gives them."""

    size: int
    sha256: str

    @classmethod
    def parse(cls, name: str, entry: Any, where: str) -> StoredFile:
        """Return the file of an entry in a manifest.

        Raises:
            CheckpointError: The entry is none that a manifest has; the message names the file and the manifest.
        """
        match entry:
            case {"size": int(size), "sha256": str(digest), **rest} if (
                not rest and type(size) is int and 0 <= size < _MAX_SIZE
            ):
                return cls(size, digest)
        raise CheckpointError(f"{where}: {name}: expected a size and a SHA-256")

    def check(self, found: StoredFile, file: Path) -> None:
        """Raise if a file that was read is not the one that the manifest describes."""
        if found != self:
            raise CheckpointError(f"{file}: the file is damaged: its SHA-256 is not the one in the manifest")


class Digest:
    """The size and SHA-256 of bytes as they pass by."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = sha256()

    def update(self, data: memoryview | bytes) -> None:
        """Count and hash `data`."""
        self.size += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        """The hash of everything so far, as hexadecimal digits."""
        return self._hash.hexdigest()

    @property
    def stored(self) -> StoredFile:
        """The size and the hash of everything so far."""
        return StoredFile(self.size, self.sha256)


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a regular file; raise for anything else, without waiting for a writer."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)

    with open(path, "rb", buffering=0, opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        while chunk := file.read(CHUNK):
            yield chunk


def digest_of(path: Path) -> StoredFile:
    """Return the size and the SHA-256 of a regular file."""
    digest = Digest()
    for chunk in file_chunks(path):
        digest.update(chunk)
    return digest.stored


def write_file(files: Files, path: Path, chunks: Iterable[memoryview | bytes]) -> StoredFile:
    """Write a new file, wait until it is on the disk, and return what was written."""
    digest = Digest()
    with files.create(path) as file:
        for chunk in chunks:
            files.write(file, memoryview(chunk))
            digest.update(chunk)
        files.sync(file)
    return digest.stored


def make_parents(files: Files, directory: Path) -> None:
    """Create `directory` and its missing parents so that they outlive a power cut."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_directory(place)
        files.sync_directory(place.parent)


@contextlib.contextmanager
def reserve(files: Files, target: Path) -> Iterator[Path]:
    """Lend an unused, locked temporary directory beside `target`, and remove what is left of it."""
    while True:
        temporary = _beside("tmp", target)
        files.make_directory(temporary)
        try:
            lock = files.lock(temporary)
        except (BlockingIOError, FileNotFoundError):
            continue  # a sweep of another process came between the two lines above
        except OSError:
            lock = None  # without locks nobody sweeps either
        if temporary.exists():
            break
        if lock is not None:
            files.unlock(lock)
    try:
        yield temporary
    finally:
        try:
            with contextlib.suppress(OSError):
                files.remove(temporary)
        finally:
            if lock is not None:
                files.unlock(lock)


def aside_name(target: Path) -> Path:
    """Return an unused name for the whole checkpoint `target` while its successor takes its name."""
    return _beside("old", target)


def resolve(path: Path) -> Path:
    """Return where the checkpoint `path` lies.

    That is `path` itself, except when a save died between setting the old checkpoint aside and giving its
    name to the new one: then the old one counts.
    """
    if not path.parent.is_dir():
        return path
    # At every moment there is the name or a directory set aside, so both are looked for in one listing.
    names = os.listdir(path.parent)
    asides = [place for place, kind, name in _temporaries(path.parent, names) if (kind, name) == ("old", path.name)]
    if path.name in names or not asides:
        return path
    return max(asides, key=_set_aside_at)


def names_in(directory: Path) -> list[str]:
    """Return the names in `directory` without temporary and damaged ones; `.old-` folders count by their old names."""
    names = os.listdir(directory)
    temporaries = _temporaries(directory, names)
    aside = {name for _, kind, name in temporaries if kind == "old"}
    named = {name for name in names if not _DAMAGED.fullmatch(name)}
    return sorted((named - {place.name for place, _, _ in temporaries}) | aside)


def is_temporary(name: str) -> bool:
    """Whether `name` is one that this module gives to temporary and damaged files."""
    return _BESIDE.fullmatch(name) is not None or _DAMAGED.fullmatch(name) is not None


def damaged_name(target: Path) -> Path:
    """Return an unused name beside `target` for damaged content, which is kept for the user and never read again."""
    return target.with_name(f"{target.name}.damaged-{secrets.token_hex(4)}")


def discard(files: Files, path: Path) -> None:
    """Remove a checkpoint in such a way that nobody ever takes a half-removed one for a damaged one."""
    rubbish = _beside("tmp", path)
    files.rename(path, rubbish)
    # It is gone already; what is left of it goes with the next sweep.
    with contextlib.suppress(OSError):
        files.remove(rubbish)


def sweep(files: Files, directory: Path) -> None:
    """Remove what dead writers left in `directory`. Failing to is not an error: the next save tries again."""
    for place, kind, name in _temporaries(directory, os.listdir(directory)):
        with contextlib.suppress(OSError):
            if kind == "tmp":
                lock = files.lock(place)
                try:
                    files.remove(place)
                finally:
                    files.unlock(lock)
            # Looked up after the listing: whoever set this one aside has a successor in place by now.
            elif (directory / name).exists():
                discard(files, place)


def _set_aside_at(place: Path) -> int:
    try:
        return place.stat().st_ctime_ns
    except FileNotFoundError:
        return 0  # its writer has just finished


def _beside(kind: str, target: Path) -> Path:
    match = _BESIDE.fullmatch(target.name)
    name = match["name"] if match else target.name
    return target.with_name(f".{kind}-{name}.{secrets.token_hex(4)}")


def _temporaries(directory: Path, names: Iterable[str]) -> list[tuple[Path, str, str]]:
    matches = [_BESIDE.fullmatch(name) for name in sorted(names)]
    return [
        (directory / match[0], match["kind"], match["name"])
        for match in matches
        # As paths these two would be the folder itself and its parent.
        if match and match["name"] not in (".", "..")
    ]
