"""Checkpoints of files that a user's script writes.

A checkpoint is a folder `STORAGE/ID`. It contains the script's files, unchanged, under `files`, and `manifest.json`
with the metadata and the size and SHA-256 of each file. It is written under a temporary name in the same folder,
synced to the disk and renamed. Files are copied and compared, but their content is never interpreted.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from dovetail.checkpoint import CheckpointWarning
from dovetail.checkpoint.encoding import encode_plain
from dovetail.checkpoint.files import (
    DISK,
    Digest,
    StoredFile,
    digest_of,
    discard,
    file_chunks,
    is_temporary,
    make_parents,
    reserve,
    sweep,
    write_file,
)
from dovetail.checkpoint.manifest import MANIFEST
from dovetail.checkpoint.stored_files import (
    FILES,
    Digests,
    StoredFiles,
    is_stored_files,
    make_stored_manifest,
    read_stored_files,
    verify_stored_files,
)
from dovetail.core.distributed import DistributedContext
from dovetail.errors import CheckpointError, ConfigError, DovetailError, UnknownNameError

_Path = str | os.PathLike[str]
_Selector = Callable[[str], bool]

# One file name without path separators. Ids are UUIDs; other folder names that users choose are accepted, too.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")


class DownloadMode(enum.Enum):
    """How the processes of one machine share a download in Determined.

    Here storage is a folder that every process reads directly: in either mode no process waits for another one.
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Stores files of a script as checkpoints. A checkpoint is either complete or absent.

    Args:
        directory: The folder of the checkpoints, created with the first one. All processes must have access to it.
        distributed: The processes of the run.

    Example:
        >>> import tempfile
        >>> checkpoint = CheckpointContext(tempfile.mkdtemp())
        >>> with checkpoint.store_path({"steps_completed": 3}) as (path, storage_id):
        ...     _ = (path / "weights.txt").write_text("0.5")
        >>> with checkpoint.restore_path(checkpoint.latest()) as path:
        ...     (path / "weights.txt").read_text()
        '0.5'
        >>> checkpoint.get_metadata(storage_id)
        {'steps_completed': 3}
    """

    def __init__(self, directory: _Path, distributed: DistributedContext | None = None) -> None:
        self.directory = Path(directory)
        self._distributed = DistributedContext() if distributed is None else distributed

    def upload(
        self,
        ckpt_dir: _Path | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: _Selector | None = None,
    ) -> str:
        """Store a copy of the files in a folder and return the id of the checkpoint.

        Args:
            ckpt_dir: The folder. With `shard`, None means that this process adds no files.
            metadata: The metadata that `get_metadata` returns.
            shard: If True, every process of the run adds its files; all of them call this and get the same id.
            selector: A function of a path inside of the folder that returns True for the files to store.

        Raises:
            CheckpointError: The files cannot be stored; with `shard`, raised in all processes.
        """
        with self.store_path(metadata, shard=shard) as (path, storage_id):
            if ckpt_dir is None and not shard:
                raise ConfigError("upload: ckpt_dir: expected a folder, got None, which needs shard=True")
            if ckpt_dir is not None:
                source = Path(ckpt_dir)
                if not source.is_dir():
                    raise CheckpointError(f"{source}: expected a folder to store, got none")
                left_out = None if selector is None else _make_ignore(source, selector)
                shutil.copytree(source, path, ignore=left_out, copy_function=shutil.copyfile, dirs_exist_ok=True)
        return storage_id

    @contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Yield an empty folder, and store its files when the block ends without an error.

        Args:
            metadata: The metadata that `get_metadata` returns. With `shard`, processes may give different keys, but the
                same key must have the same value.
            shard: If True, every process of the run adds files from a folder for this process; all of them call this.
                If False, only the chief stores files.

        Yields:
            The folder, and the id of the checkpoint.

        Raises:
            CheckpointError: The files cannot be stored, or two processes stored different files under one name. With
                `shard` it is raised in all processes, also if the block of one process raised an error.
        """
        peers = self._distributed
        if not shard and not peers.is_chief:
            raise ConfigError(
                f"rank {peers.rank} stores a checkpoint: only rank 0 may do this, unless all processes store one "
                "together with shard=True"
            )
        # Errors are collected, not raised: with `shard`, the other processes wait for this one in `_exchange`.
        own = _attempt(lambda: encode_plain(_checked_metadata(metadata), "metadata"))
        problem = own if isinstance(own, Exception) else None
        storage_id = str(uuid.uuid4())
        if shard:
            # All processes use the chief's id. This exchange also stops all of them if one has invalid metadata.
            storage_id = self._exchange(storage_id, problem)[0]
        elif problem is not None:
            raise problem
        target = self.directory / storage_id
        make_parents(DISK, self.directory)
        with reserve(DISK, target) as temporary:
            (temporary / FILES).mkdir()
            digests: Digests = {}
            try:
                # The user's code runs here; its errors must reach the other processes, too.
                yield temporary / FILES, storage_id
                digests = _sync_files(temporary / FILES)
            except Exception as error:
                problem = error
            if shard:
                self._join_shards(temporary, own, digests, problem, target)
            elif problem is not None:
                raise problem
            else:
                _commit(temporary, own, digests, target)
        if peers.is_chief:
            # Temporary folders of processes that were killed before they could remove them.
            sweep(DISK, self.directory)

    @contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: _Selector | None = None,
    ) -> Iterator[Path]:
        """Yield the folder with the files of a checkpoint, for reading only, after checking each file's checksum.

        Args:
            storage_id: The checkpoint.
            download_mode: Any `DownloadMode`.
            selector: Has no effect and gives a warning: the folder has all files. `download` copies selected files.

        Raises:
            CheckpointError: The checkpoint does not exist, or one of its files is damaged or missing.
        """
        DownloadMode(download_mode)
        if selector is not None:
            warnings.warn(
                "restore_path: the selector has no effect, because the folder has all files; download(selector=…) "
                "copies selected files",
                UserWarning,
                # contextlib calls this body from the `with` statement.
                stacklevel=3,
            )
        place = self._place(storage_id)
        verify_stored_files(place)
        yield place / FILES

    def download(
        self,
        storage_id: str,
        ckpt_dir: _Path,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: _Selector | None = None,
    ) -> None:
        """Copy the files of a checkpoint into a folder and check each file's checksum.

        Several processes may copy into the same folder at once: each file appears there complete.

        Args:
            storage_id: The checkpoint.
            ckpt_dir: The folder; created if it does not exist. Other files in it are unchanged.
            download_mode: Any `DownloadMode`; every process copies the files that it selects.
            selector: A function of a path inside of the checkpoint that returns True for the files to copy.

        Raises:
            CheckpointError: The checkpoint does not exist, or one of its files is damaged or missing.
        """
        DownloadMode(download_mode)
        place, target = self._place(storage_id), Path(ckpt_dir)
        files = read_stored_files(place).files
        target.mkdir(parents=True, exist_ok=True)
        for name in filter(selector, files):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # A random name, so that processes on several machines can copy into the same folder.
            unfinished = (target / name).with_name(f".{uuid.uuid4().hex}.tmp")
            try:
                digest = Digest()
                with unfinished.open("xb") as copy:
                    for chunk in file_chunks(place / FILES / name):
                        copy.write(chunk)
                        digest.update(chunk)
                files[name].check(digest.stored, place / FILES / name)
                unfinished.replace(target / name)
            finally:
                unfinished.unlink(missing_ok=True)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        return read_stored_files(self._place(storage_id)).metadata

    def delete(self, storage_id: str) -> None:
        """Remove a checkpoint."""
        discard(DISK, self._place(storage_id))

    def latest(self, where: Callable[[dict[str, Any]], bool] | None = None) -> str | None:
        """Return the id of the checkpoint that was stored last, or None if there is none.

        Damaged checkpoints are skipped, with a warning.

        Args:
            where: A function of the metadata that returns True for the checkpoints to consider; None means all.
        """
        found: list[tuple[datetime, str]] = []
        for name in sorted(os.listdir(self.directory)) if self.directory.is_dir() else []:
            place = self.directory / name
            if not is_temporary(name) and is_stored_files(place):
                content = _unless_damaged(read_stored_files, place)
                if content is not None and (where is None or where(content.metadata)):
                    found.append((content.created, name))
        # Lazily: only the newest intact checkpoint is verified, because checksums read every byte.
        ordered = (name for _, name in sorted(found, reverse=True))
        return next((name for name in ordered if _unless_damaged(verify_stored_files, self.directory / name)), None)

    def _place(self, storage_id: str) -> Path:
        if not isinstance(storage_id, str) or not _ID.fullmatch(storage_id):
            raise ConfigError(f"storage_id: expected the id of a checkpoint, one name without '/', got {storage_id!r}")
        place = self.directory / storage_id
        if not is_stored_files(place):
            raise CheckpointError(f"{place}: no checkpoint there")
        return place

    # ------------------------------------------------------------------ several processes

    def _join_shards(
        self, temporary: Path, own: dict[str, Any], digests: Digests, problem: Exception | None, target: Path
    ) -> None:
        """Move the files of all processes into the chief's folder, and rename the folder to its final name."""
        chief = self._distributed.is_chief
        # Exchange 1: every process has written and synced its files.
        parts = self._exchange({"at": temporary.name, "files": digests, "metadata": own}, problem)
        work = _attempt(lambda: _merge(parts))
        if not isinstance(work, Exception):
            metadata, owners = work
            home = temporary.with_name(parts[0]["at"]) / FILES
            # Of equal files with one name, only the lowest rank moves its copy.
            moves = [name for name, owner in owners.items() if owner == self._distributed.rank and not chief]
            work = _attempt(lambda: _move(temporary / FILES, home, moves))
        # Exchange 2: all files are in the chief's folder, so it can write the manifest.
        self._exchange(None, work if isinstance(work, Exception) else None)
        everything = {name: StoredFile(*it) for part in parts for name, it in part["files"].items()}
        done = _attempt(lambda: _commit(temporary, metadata, everything, target)) if chief else None
        # Exchange 3: the checkpoint has its final name before any process returns.
        self._exchange(None, done if isinstance(done, Exception) else None)

    def _exchange(self, value: Any, problem: Exception | None) -> list[Any]:
        """Return the values of all processes. An error in one process is raised in all of them.

        Raises:
            CheckpointError: Another process had an error. An error of this process is raised unchanged.
        """
        everyone = self._distributed.allgather(
            {"value": value, "problem": None if problem is None else f"{type(problem).__name__}: {problem}"}
        )
        if problem is not None:
            raise problem
        for rank, each in enumerate(everyone):
            if each["problem"] is not None:
                raise CheckpointError(f"rank {rank} could not store its part of a checkpoint: {each['problem']}")
        return [each["value"] for each in everyone]


def storage_directory(storage: _Path | Mapping[str, Any]) -> Path:
    """Return the folder that a setting of checkpoint storage describes.

    Args:
        storage: A path, or Determined's mapping: `{"type": "shared_fs", "host_path": …, "storage_path": …}` or
            `{"type": "directory", "container_path": …}`.

    Example:
        >>> storage_directory({"type": "shared_fs", "host_path": "/data", "storage_path": "digits"}).as_posix()
        '/data/digits'
    """
    if not isinstance(storage, Mapping):
        return Path(storage)
    kind = storage.get("type", "shared_fs")
    if kind not in ("shared_fs", "directory"):
        raise UnknownNameError("type of checkpoint_storage", str(kind), ("directory", "shared_fs"))
    key = "host_path" if kind == "shared_fs" else "container_path"
    # Determined's other keys are rules for the removal of old checkpoints.
    base, below = storage.get(key), storage.get("storage_path") or ""
    if not isinstance(base, str) or not isinstance(below, str):
        raise ConfigError(f"checkpoint_storage: expected '{key}: PATH' with type {kind!r}, got {dict(storage)}")
    return Path(base, below)


# ------------------------------------------------------------------ writing


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(metadata, Mapping | None):
        raise ConfigError(f"metadata: expected a dict, got {type(metadata).__name__}")
    found = dict(metadata or {})
    steps = found.get("steps_completed", 0)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ConfigError(f"metadata: steps_completed: expected a whole number, got {steps!r}")
    return found


def _make_ignore(source: Path, selector: _Selector) -> Callable[[str, list[str]], list[str]]:
    """Return the `ignore` function of `shutil.copytree` that leaves out files which the selector rejects."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        # Folders are always entered: the selector receives files only.
        files = {name: Path(folder, name) for name in names if not Path(folder, name).is_dir()}
        return [name for name, path in files.items() if not selector(path.relative_to(source).as_posix())]

    return left_out


def _sync_files(directory: Path) -> Digests:
    """Sync all files of a folder to the disk and return the size and SHA-256 of each."""
    digests: Digests = {}
    for place, folders, files in os.walk(directory):
        for name in (*files, *folders):
            entry = Path(place, name)
            # A link would point outside of the checkpoint, and reading a pipe would block.
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                inside = entry.relative_to(directory).as_posix()
                raise CheckpointError(f"{inside}: expected a file or a folder to store, got a link or something else")
        for file in files:
            path = Path(place, file)
            digests[path.relative_to(directory).as_posix()] = digest_of(path)
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
    return digests


def _merge(parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the joined metadata of all processes, and the rank that provides each file."""
    metadata: dict[str, Any] = {}
    said: dict[str, int] = {}
    owners: dict[str, int] = {}
    for rank, part in enumerate(parts):
        for name, value in part["metadata"].items():
            if metadata.setdefault(name, value) != value:
                raise CheckpointError(
                    f"metadata: {name!r} is {metadata[name]!r} in rank {said[name]} and {value!r} in rank {rank}"
                )
            said.setdefault(name, rank)
        for name, digest in part["files"].items():
            first = owners.setdefault(name, rank)
            if digest != parts[first]["files"][name]:
                raise CheckpointError(f"{name}: rank {first} and rank {rank} have stored different files of that name")
    return metadata, owners


def _move(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(source / name, target / name)


def _commit(temporary: Path, metadata: Mapping[str, Any], digests: Digests, target: Path) -> None:
    write_file(DISK, temporary / MANIFEST, [make_stored_manifest(metadata, digests)])
    # The order makes a checkpoint complete or absent after a power failure: files, manifest, folders, then the
    # rename.
    for place, _, _ in os.walk(temporary):
        DISK.sync_directory(Path(place))
    DISK.rename(temporary, target)
    DISK.sync_directory(target.parent)


def _attempt(work: Callable[[], Any]) -> Any:
    """Return the result of a function, or its error, so that the other processes receive it before it is raised."""
    try:
        return work()
    except (OSError, DovetailError) as error:
        return error


# ------------------------------------------------------------------ reading


def _unless_damaged(read: Callable[[Path], StoredFiles], place: Path) -> StoredFiles | None:
    try:
        return read(place)
    except (CheckpointError, FileNotFoundError) as error:
        # A checkpoint that another process has just deleted is not damaged.
        if place.exists():
            warnings.warn(f"skipped a damaged checkpoint: {error}", CheckpointWarning, stacklevel=3)
        return None
