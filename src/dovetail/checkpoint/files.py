"""File operations of checkpoints, and their temporary names.

Every change of the disk is a call of `Files`, with one small method per operation. Tests replace it by an
implementation that simulates a power failure after any operation, or a broken disk.
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
"""Number of bytes that are hashed and written at a time: small for a model, large for a system call."""

# A `.tmp-` directory is garbage once its writer has ended. An `.old-` directory is always a complete checkpoint: it was
# renamed immediately before the new checkpoint took its name.
_BESIDE = re.compile(r"\.(?P<kind>tmp|old)-(?P<name>.+)\.[0-9a-f]{8}", re.DOTALL)
_MAX_SIZE = 1 << 62
_DAMAGED = re.compile(r".+\.damaged-[0-9a-f]{8}", re.DOTALL)


class Files:
    """The operations with which a checkpoint is written to the disk."""

    def make_directory(self, path: Path) -> None:
        """Create a directory that does not exist yet."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """Create a file that does not exist yet and open it, unbuffered, for writing."""
        return open(path, "xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Write all of `data`."""
        while data:
            # An unbuffered file may write less than requested.
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        """Wait until the content of `file` is on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in the directory `path` are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target` atomically."""
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory if it exists."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()

    def remove(self, path: Path) -> None:
        """Remove a directory with its content if it exists."""
        if path.is_dir():
            for name in sorted(os.listdir(path)):
                inner = path / name
                # A symbolic link is removed as a link: the content of its target stays.
                (self.remove if inner.is_dir() and not inner.is_symlink() else self.remove_file)(inner)
            self.remove_directory(path)

    def free_space(self, path: Path) -> int:
        """Return the number of free bytes on the disk of `path`."""
        return shutil.disk_usage(path).free

    def lock(self, path: Path) -> int:
        """Lock a file and return its descriptor. The lock shows that the writer is alive.

        The kernel releases the lock when the process ends for any reason. Unlike a process id it has the same meaning
        in every container and is never reused.

        Raises:
            BlockingIOError: Another writer holds the lock.
            OSError: The file system does not support locks.
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
    """The locks that this process holds. Forked processes close them at once.

    A forked process, such as a data worker, shares the locks that are held when it is forked. If this process were
    killed while it writes a checkpoint, its orphaned workers would keep the lock, and no process could remove the
    temporary files.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._access = threading.RLock()
        self._follows_forks = False

    def open(self, path: Path) -> int:
        with self._access:
            if not self._follows_forks:
                self._follows_forks = True
                # A fork waits until no thread is between opening a lock and recording it.
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
        # Acquired before the fork; the child has its own copy of the lock.
        self._access.release()


_LOCKS = _Locks()
DISK = Files()


class StoredFile(NamedTuple):
    """The size and the SHA-256 of a file in a manifest."""

    size: int
    sha256: str

    @classmethod
    def parse(cls, name: str, entry: Any, where: str) -> StoredFile:
        """Return the size and the SHA-256 of an entry in a manifest.

        Raises:
            CheckpointError: The entry has another form; the message has the name of the file and the manifest.
        """
        match entry:
            case {"size": int(size), "sha256": str(digest), **rest} if (
                not rest and type(size) is int and 0 <= size < _MAX_SIZE
            ):
                return cls(size, digest)
        raise CheckpointError(f"{where}: {name}: expected a size and a SHA-256")

    def check(self, found: StoredFile, file: Path) -> None:
        """Raise if a file does not have the size and SHA-256 of the manifest."""
        if found != self:
            raise CheckpointError(f"{file}: the file is damaged: its SHA-256 is not the one in the manifest")


class Digest:
    """Size and SHA-256 of a stream of bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = sha256()

    def update(self, data: memoryview | bytes) -> None:
        """Count and hash `data`."""
        self.size += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        """The hash of all bytes so far, as hexadecimal digits."""
        return self._hash.hexdigest()

    @property
    def stored(self) -> StoredFile:
        """The size and the hash of all bytes so far."""
        return StoredFile(self.size, self.sha256)


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a regular file; raise for other files such as a FIFO, without blocking."""

    # A FIFO would block, and a link could lead to a file outside of the checkpoint.
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
    """Write a new file, wait until it is on the disk, and return its size and SHA-256."""
    digest = Digest()
    with files.create(path) as file:
        for chunk in chunks:
            files.write(file, memoryview(chunk))
            digest.update(chunk)
        files.sync(file)
    return digest.stored


def make_parents(files: Files, directory: Path) -> None:
    """Create `directory` and its missing parents, and sync them so that they survive a power failure."""
    # From the outside in. The name of a new folder is an entry of its parent, so the parent is synced.
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_directory(place)
        files.sync_directory(place.parent)


@contextlib.contextmanager
def reserve(files: Files, target: Path) -> Iterator[Path]:
    """Yield a new, locked temporary directory beside `target`, and remove it afterwards if it still exists."""
    while True:
        # Creating and locking are two steps. If a sweep of another process removes the folder in between, try again.
        temporary = _beside("tmp", target)
        files.make_directory(temporary)
        try:
            lock = files.lock(temporary)
        except (BlockingIOError, FileNotFoundError):
            continue  # a sweep of another process removed it between the two calls
        except OSError:
            lock = None  # without locks no process sweeps either
        if temporary.exists():
            break
        if lock is not None:
            files.unlock(lock)
    try:
        yield temporary
    finally:
        try:
            with contextlib.suppress(OSError):
                # Still locked, so that no sweep of another process interferes.
                files.remove(temporary)
        finally:
            if lock is not None:
                files.unlock(lock)


@contextlib.contextmanager
def replacing(files: Files, target: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file, which afterwards takes the name `target` and replaces the old file.

    A reader finds the old file or the new one, never a part. After an error the old file is unchanged.
    """
    make_parents(files, target.parent)
    sweep(files, target.parent)
    with reserve(files, target) as temporary:
        yield temporary / target.name
        files.rename(temporary / target.name, target)
        # Otherwise a power failure could undo the rename.
        files.sync_directory(target.parent)


def aside_name(target: Path) -> Path:
    """Return an unused name for the old checkpoint `target` while the new one takes its name."""
    return _beside("old", target)


def resolve(path: Path) -> Path:
    """Return the directory of the checkpoint `path`.

    This is `path` itself, unless a save was interrupted between renaming the old checkpoint and giving its name to the
    new one. In that case it is the old checkpoint.
    """
    if not path.parent.is_dir():
        return path
    # At any time the name or an `.old-` directory exists, so search both in a single listing.
    names = os.listdir(path.parent)
    asides = [place for place, kind, name in _temporaries(path.parent, names) if (kind, name) == ("old", path.name)]
    if path.name in names or not asides:
        return path
    # Several remain if several saves were interrupted; the newest counts.
    return max(asides, key=_set_aside_at)


def names_in(directory: Path) -> list[str]:
    """Return the names in `directory` except temporary and damaged ones; an `.old-` folder has its original name."""
    names = os.listdir(directory)
    temporaries = _temporaries(directory, names)
    aside = {name for _, kind, name in temporaries if kind == "old"}
    named = {name for name in names if not _DAMAGED.fullmatch(name)}
    return sorted((named - {place.name for place, _, _ in temporaries}) | aside)


def is_temporary(name: str) -> bool:
    """Return whether `name` has the form of this module's names for temporary and damaged files."""
    return _BESIDE.fullmatch(name) is not None or _DAMAGED.fullmatch(name) is not None


def damaged_name(target: Path) -> Path:
    """Return an unused name beside `target` for damaged content, which is kept for the user but never read again."""
    return target.with_name(f"{target.name}.damaged-{secrets.token_hex(4)}")


def discard(files: Files, path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no process sees a half-removed checkpoint."""
    rubbish = _beside("tmp", path)
    files.rename(path, rubbish)
    # The checkpoint is already gone; the next sweep removes the remaining files.
    with contextlib.suppress(OSError):
        files.remove(rubbish)


def sweep(files: Files, directory: Path) -> None:
    """Remove the files of ended writers from `directory`. Failures are ignored: the next save tries again."""
    for place, kind, name in _temporaries(directory, os.listdir(directory)):
        with contextlib.suppress(OSError):
            if kind == "tmp":
                # Raises if a living writer holds the lock; the folder is then skipped.
                lock = files.lock(place)
                try:
                    files.remove(place)
                finally:
                    files.unlock(lock)
            # Checked after the listing: by now the process that renamed this one has put a new checkpoint in place.
            elif (directory / name).exists():
                discard(files, place)


def _set_aside_at(place: Path) -> int:
    try:
        return place.stat().st_ctime_ns
    except FileNotFoundError:
        return 0  # its writer has just finished


def _beside(kind: str, target: Path) -> Path:
    match = _BESIDE.fullmatch(target.name)
    # The original name of a renamed checkpoint: prefixes must not add up.
    name = match["name"] if match else target.name
    return target.with_name(f".{kind}-{name}.{secrets.token_hex(4)}")


def _temporaries(directory: Path, names: Iterable[str]) -> list[tuple[Path, str, str]]:
    """Return path, kind (`tmp` or `old`) and original name of all temporary directories among some names."""
    matches = [_BESIDE.fullmatch(name) for name in sorted(names)]
    return [
        (directory / match[0], match["kind"], match["name"])
        for match in matches
        # As paths, these two names would be the folder itself and its parent.
        if match and match["name"] not in (".", "..")
    ]
