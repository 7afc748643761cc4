"""Checkpoints of files that the script writes itself.

A checkpoint is a folder `STORAGE/ID`: the script's files, as they are, under `files`, and `manifest.json` with the
metadata and the size and SHA-256 of each of them. It is written under another name beside that one, synced to the disk
and renamed. Files are copied and compared, never opened for what is in them.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.checkpoint import CheckpointWarning
from dovetail.checkpoint.encoding import decode, encode_plain
from dovetail.checkpoint.files import (
    CHUNK,
    DISK,
    Digest,
    discard,
    is_temporary,
    make_parents,
    reserve,
    sweep,
    write_file,
)
from dovetail.checkpoint.strict_json import seal, unseal
from dovetail.core.distributed import DistributedContext
from dovetail.errors import CheckpointError, ConfigError, DovetailError, UnknownNameError

__all__ = ["CheckpointContext", "storage_directory"]

_Path = str | os.PathLike[str]
_Selector = Callable[[str], bool]
_Digests = dict[str, tuple[int, str]]

_FILES = "files"
_MANIFEST = "manifest.json"
_FORMAT = "dovetail-files"
_VERSION = 1
_KEYS = {"format", "format_version", "created", "metadata", "files", "sha256"}
_MAX_MANIFEST = 64 << 20
# A name, and nothing that leads elsewhere. Ids are UUIDs; those that people give to folders are welcome, too.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")


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
            (temporary / _FILES).mkdir()
            digests: _Digests = {}
            try:
                yield temporary / _FILES, storage_id
                digests = _synced(temporary / _FILES)
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
    def restore_path(self, storage_id: str) -> Iterator[Path]:
        """Lend the folder with the files of a checkpoint, to be read only, after comparing each with its checksum.

        Raises:
            CheckpointError: It is not there, or a file of it is damaged or missing.
        """
        place = self._place(storage_id)
        _verified(place)
        yield place / _FILES

    def download(self, storage_id: str, ckpt_dir: _Path, *, selector: _Selector | None = None) -> None:
        """Copy the files of a checkpoint into a folder, comparing each with its checksum.

        Several processes may do so into the same folder at once: each file appears there whole.

        Args:
            storage_id: The checkpoint.
            ckpt_dir: The folder; made if it is not there. Other files in it stay.
            selector: Is given each path inside of the checkpoint, and says which ones to copy.

        Raises:
            CheckpointError: It is not there, or a file of it is damaged or missing.
        """
        place, target = self._place(storage_id), Path(ckpt_dir)
        files = _read_manifest(place).files
        target.mkdir(parents=True, exist_ok=True)
        for name in filter(selector, files):
            _make_place(target / name)
            unfinished = (target / name).with_name(f".{uuid.uuid4().hex}.tmp")
            try:
                digest = Digest()
                with unfinished.open("xb") as copy:
                    for chunk in _chunks(place / _FILES / name):
                        copy.write(chunk)
                        digest.update(chunk)
                _check(place / _FILES / name, (digest.size, digest.sha256), files[name])
                unfinished.replace(target / name)
            finally:
                unfinished.unlink(missing_ok=True)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        return _read_manifest(self._place(storage_id)).metadata

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
            if not is_temporary(name) and (place / _MANIFEST).is_file():
                content = _unless_damaged(_read_manifest, place)
                if content is not None and (where is None or where(content.metadata)):
                    found.append((content.created, name))
        ordered = (name for _, name in sorted(found, reverse=True))
        return next((name for name in ordered if _unless_damaged(_verified, self.directory / name)), None)

    def _place(self, storage_id: str) -> Path:
        if not isinstance(storage_id, str) or not _ID.fullmatch(storage_id):
            raise ConfigError(f"storage_id: expected the id of a checkpoint, one name without '/', got {storage_id!r}")
        place = self.directory / storage_id
        if not (place / _MANIFEST).is_file():
            raise CheckpointError(f"{place}: no checkpoint there")
        return place

    # ------------------------------------------------------------------ several processes

    def _join_shards(
        self, temporary: Path, own: dict[str, Any], digests: _Digests, problem: Exception | None, target: Path
    ) -> None:
        """Bring what all processes have written into the chief's folder, and give it its name."""
        chief = self._distributed.is_chief
        parts = self._told({"at": temporary.name, "files": digests, "metadata": own}, problem)
        work = _attempt(lambda: _merged(parts))
        if not isinstance(work, Exception):
            metadata, owners = work
            home = temporary.with_name(parts[0]["at"]) / _FILES
            moves = [name for name, owner in owners.items() if owner == self._distributed.rank and not chief]
            work = _attempt(lambda: _moved(temporary / _FILES, home, moves))
        self._told(None, work if isinstance(work, Exception) else None)
        everything: _Digests = {name: tuple(it) for part in parts for name, it in part["files"].items()}
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


def _names_below(directory: Path) -> list[str]:
    """Return the paths of all files below a folder, inside of it. Empty folders are not part of a checkpoint."""
    found = []
    for place, _, files in os.walk(directory):
        found += [Path(place, file).relative_to(directory).as_posix() for file in files]
    return sorted(found)


def _leaving_out(source: Path, selector: _Selector) -> Callable[[str, list[str]], list[str]]:
    """Return what tells `shutil.copytree` which files not to copy."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        files = {name: Path(folder, name) for name in names if not Path(folder, name).is_dir()}
        return [name for name, path in files.items() if not selector(path.relative_to(source).as_posix())]

    return left_out


def _synced(directory: Path) -> _Digests:
    """Wait until all files in a folder are on the disk, and return what each of them is."""
    digests: _Digests = {}
    for place, folders, files in os.walk(directory):
        for name in (*files, *folders):
            entry = Path(place, name)
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                inside = entry.relative_to(directory).as_posix()
                raise CheckpointError(f"{inside}: expected a file or a folder to store, got a link or something else")
        for file in files:
            path = Path(place, file)
            digests[path.relative_to(directory).as_posix()] = _digest(path)
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
        _make_place(target / name)
        os.rename(source / name, target / name)


def _make_place(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


def _commit(temporary: Path, metadata: Mapping[str, Any], digests: _Digests, target: Path) -> None:
    document = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "metadata": metadata,
        "files": {name: {"size": size, "sha256": digest} for name, (size, digest) in sorted(digests.items())},
    }
    write_file(DISK, temporary / _MANIFEST, [seal(document)])
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


class _Manifest(NamedTuple):
    metadata: dict[str, Any]
    files: _Digests
    created: datetime


def _read_manifest(place: Path) -> _Manifest:
    """Return what a checkpoint says about itself, after comparing the names of files with what is there."""
    where = str(place / _MANIFEST)
    if (size := (place / _MANIFEST).stat().st_size) > _MAX_MANIFEST:
        raise CheckpointError(f"{where}: {size:,} bytes are too many for a manifest")
    document = unseal((place / _MANIFEST).read_bytes(), where)
    if document.get("format") != _FORMAT or document.get("format_version") != _VERSION or document.keys() != _KEYS:
        raise CheckpointError(f"{where}: not the manifest of stored files, version {_VERSION}")
    try:
        files = {str(name): (int(it["size"]), str(it["sha256"])) for name, it in document["files"].items()}
        created = datetime.fromisoformat(document["created"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: a field is missing or of the wrong type") from error
    metadata = decode(document["metadata"], where)
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where}: the metadata is not a dict")
    # Names are believed only where the folder has them: none of them leads out of it.
    present = {name for name in _names_below(place / _FILES) if not (place / _FILES / name).is_symlink()}
    for name in sorted(files.keys() - present):
        raise CheckpointError(f"{place / _FILES / name}: the file is missing")
    for name in sorted(present - files.keys()):
        raise CheckpointError(f"{place / _FILES / name}: a file that does not belong to the checkpoint")
    return _Manifest(metadata, files, created)


def _verified(place: Path) -> _Manifest:
    manifest = _read_manifest(place)
    for name, stored in manifest.files.items():
        _check(place / _FILES / name, _digest(place / _FILES / name), stored)
    return manifest


def _unless_damaged(read: Callable[[Path], _Manifest], place: Path) -> _Manifest | None:
    try:
        return read(place)
    except (CheckpointError, FileNotFoundError) as error:
        # One that another process has deleted meanwhile is not damaged.
        if place.exists():
            warnings.warn(f"passed over a damaged checkpoint: {error}", CheckpointWarning, stacklevel=3)
        return None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _digest(path: Path) -> tuple[int, str]:
    digest = Digest()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.size, digest.sha256


def _check(path: Path, found: tuple[int, str], stored: tuple[int, str]) -> None:
    if found != stored:
        raise CheckpointError(f"{path}: the file is damaged: its SHA-256 is not the one in the manifest")
