"""Checkpoints of files that the script writes itself.

A checkpoint is a folder `STORAGE/ID`: the script's files, as they are, under `files`, and `manifest.json` with the
metadata and the size and SHA-256 of each of them. It is written under another name beside that one, synced to the disk
and renamed. Files are copied and compared, never opened for what is in them.
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

# A name, and nothing that leads elsewhere. Ids are UUIDs; those that people give to folders are welcome, too.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")


class DownloadMode(enum.Enum):
    """How the processes of one machine share a download in Determined.

    Here storage is a folder that every process reads by itself: in either mode no process waits for another one.
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Keeps the files of a script, whole or not at all.

    Args:
        directory: Where the checkpoints are; made when the first one is written. Several processes must all reach it.
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
        """Store a copy of the files in a folder, and return its id.

        Args:
            ckpt_dir: The folder. With `shard`, None is for a process that has nothing to add.
            metadata: What `get_metadata` is to return.
            shard: Every process of the run adds its own files; all of them call this, and get the same id.
            selector: Is given each path inside of the folder, and says which ones to store.

        Raises:
            CheckpointError: It cannot be stored; with `shard`, in all processes.
        """
        with self.store_path(metadata, shard=shard) as (path, storage_id):
            if ckpt_dir is None and not shard:
                raise ConfigError("upload: ckpt_dir: expected a folder, got None, which is for shard=True")
            if ckpt_dir is not None:
                source = Path(ckpt_dir)
                if not source.is_dir():
                    raise CheckpointError(f"{source}: expected a folder to store, got none")
                left_out = None if selector is None else _leaving_out(source, selector)
                shutil.copytree(source, path, ignore=left_out, copy_function=shutil.copyfile, dirs_exist_ok=True)
        return storage_id

    @contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Lend an empty folder, and store what is in it when the block ends without an error.

        Args:
            metadata: What `get_metadata` is to return. With `shard` it may differ in what it has, but not in what it
                says.
            shard: Every process of the run adds its own files, each in a folder of its own; all of them call this.
                Without it, the chief alone stores.

        Yields:
            The folder, and the id that the checkpoint will have.

        Raises:
            CheckpointError: It cannot be stored, or two processes have stored different files under one name; with
                `shard`, in all processes. Also if any of them left the block by an error.
        """
        peers = self._distributed
        if not shard and not peers.is_chief:
            raise ConfigError(
                f"rank {peers.rank} stores a checkpoint: only rank 0 does, unless all of them store one together by "
                "shard=True"
            )
        own = _attempt(lambda: encode_plain(_checked_metadata(metadata), "metadata"))
        problem = own if isinstance(own, Exception) else None
        storage_id = str(uuid.uuid4())
        if shard:
            storage_id = self._told(storage_id, problem)[0]
        elif problem is not None:
            raise problem
        target = self.directory / storage_id
        make_parents(DISK, self.directory)
        with reserve(DISK, target) as temporary:
            (temporary / FILES).mkdir()
            digests: Digests = {}
            try:
                yield temporary / FILES, storage_id
                digests = _synced(temporary / FILES)
            except Exception as error:
                problem = error
            if shard:
                self._join_shards(temporary, own, digests, problem, target)
            elif problem is not None:
                raise problem
            else:
                _commit(temporary, own, digests, target)
        if peers.is_chief:
            sweep(DISK, self.directory)

    @contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: _Selector | None = None,
    ) -> Iterator[Path]:
        """Lend the folder with the files of a checkpoint, to be read only, after comparing each with its checksum.

        Args:
            storage_id: The checkpoint.
            download_mode: Any `DownloadMode`.
            selector: Has no effect, and is warned about: the folder has all files. `download` copies selected ones.

        Raises:
            CheckpointError: It is not there, or a file of it is damaged or missing.
        """
        DownloadMode(download_mode)
        if selector is not None:
            warnings.warn(
                "restore_path: the selector has no effect, because the folder has all files; download(selector=…) "
                "copies selected ones",
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
        """Copy the files of a checkpoint into a folder, comparing each with its checksum.

        Several processes may do so into the same folder at once: each file appears there whole.

        Args:
            storage_id: The checkpoint.
            ckpt_dir: The folder; made if it is not there. Other files in it stay.
            download_mode: Any `DownloadMode`; every process copies the files that it selects.
            selector: Is given each path inside of the checkpoint, and says which ones to copy.

        Raises:
            CheckpointError: It is not there, or a file of it is damaged or missing.
        """
        DownloadMode(download_mode)
        place, target = self._place(storage_id), Path(ckpt_dir)
        files = read_stored_files(place).files
        target.mkdir(parents=True, exist_ok=True)
        for name in filter(selector, files):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
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

        One that is damaged is passed over, with a warning.

        Args:
            where: Is given the metadata of each, and says which ones count.
        """
        found: list[tuple[datetime, str]] = []
        for name in sorted(os.listdir(self.directory)) if self.directory.is_dir() else []:
            place = self.directory / name
            if not is_temporary(name) and is_stored_files(place):
                content = _unless_damaged(read_stored_files, place)
                if content is not None and (where is None or where(content.metadata)):
                    found.append((content.created, name))
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
        """Bring what all processes have written into the chief's folder, and give it its name."""
        chief = self._distributed.is_chief
        parts = self._told({"at": temporary.name, "files": digests, "metadata": own}, problem)
        work = _attempt(lambda: _merged(parts))
        if not isinstance(work, Exception):
            metadata, owners = work
            home = temporary.with_name(parts[0]["at"]) / FILES
            moves = [name for name, owner in owners.items() if owner == self._distributed.rank and not chief]
            work = _attempt(lambda: _moved(temporary / FILES, home, moves))
        self._told(None, work if isinstance(work, Exception) else None)
        everything = {name: StoredFile(*it) for part in parts for name, it in part["files"].items()}
        done = _attempt(lambda: _commit(temporary, metadata, everything, target)) if chief else None
        self._told(None, done if isinstance(done, Exception) else None)

    def _told(self, told: Any, problem: Exception | None) -> list[Any]:
        """Return what everyone has to tell; what went wrong in one process goes wrong in all.

        Raises:
            CheckpointError: What went wrong in another process. This one's own error is raised as it is.
        """
        everyone = self._distributed.allgather(
            {"told": told, "problem": None if problem is None else f"{type(problem).__name__}: {problem}"}
        )
        if problem is not None:
            raise problem
        for rank, each in enumerate(everyone):
            if each["problem"] is not None:
                raise CheckpointError(f"rank {rank} could not store its part of a checkpoint: {each['problem']}")
        return [each["told"] for each in everyone]


def storage_directory(storage: _Path | Mapping[str, Any]) -> Path:
    """Return the folder that a setting of checkpoint storage means.

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
    # The others of Determined's keys say what to do with old checkpoints.
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


def _leaving_out(source: Path, selector: _Selector) -> Callable[[str, list[str]], list[str]]:
    """Return what tells `shutil.copytree` which files not to copy."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        files = {name: Path(folder, name) for name in names if not Path(folder, name).is_dir()}
        return [name for name, path in files.items() if not selector(path.relative_to(source).as_posix())]

    return left_out


def _synced(directory: Path) -> Digests:
    """Wait until all files in a folder are on the disk, and return what each of them is."""
    digests: Digests = {}
    for place, folders, files in os.walk(directory):
        for name in (*files, *folders):
            entry = Path(place, name)
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                inside = entry.relative_to(directory).as_posix()
                raise CheckpointError(f"{inside}: expected a file or a folder to store, got a link or something else")
        for file in files:
            path = Path(place, file)
            digests[path.relative_to(directory).as_posix()] = digest_of(path)
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
    return digests


def _merged(parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return everyone's metadata as one, and whose files the checkpoint takes."""
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


def _moved(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(source / name, target / name)


def _commit(temporary: Path, metadata: Mapping[str, Any], digests: Digests, target: Path) -> None:
    write_file(DISK, temporary / MANIFEST, [make_stored_manifest(metadata, digests)])
    for place, _, _ in os.walk(temporary):
        DISK.sync_directory(Path(place))
    DISK.rename(temporary, target)
    DISK.sync_directory(target.parent)


def _attempt(work: Callable[[], Any]) -> Any:
    """Return what some work returns, or the error that it ends with: the other processes must hear of it first."""
    try:
        return work()
    except (OSError, DovetailError) as error:
        return error


# ------------------------------------------------------------------ reading


def _unless_damaged(read: Callable[[Path], StoredFiles], place: Path) -> StoredFiles | None:
    try:
        return read(place)
    except (CheckpointError, FileNotFoundError) as error:
        # One that another process has deleted meanwhile is not damaged.
        if place.exists():
            warnings.warn(f"passed over a damaged checkpoint: {error}", CheckpointWarning, stacklevel=3)
        return None
