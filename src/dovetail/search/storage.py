"""Copies of checkpoints in a storage that fsspec supports: a bucket, another file system, a server.

A checkpoint is stored as the folder `<name>-<digest>`, and then marked as complete by the file `<name>-<digest>.json`.
Folders without a mark are ignored. A name is never used for two contents, so no file is read while it is written.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from dovetail.checkpoint.files import DISK, reserve
from dovetail.checkpoint.manifest import MANIFEST
from dovetail.errors import CheckpointError, MissingExtraError, UnknownNameError
from dovetail.extras import require
from dovetail.search.checkpoints import checkpoints_of, latest_checkpoint

_STORED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.\-]{0,127})-[0-9a-f]{16}")


def push(folder: Path, url: str) -> list[str]:
    """Copy new checkpoints of a trial to its URL, remove copies of those that it has removed, and return the new names.

    A folder without checkpoints changes nothing, because they may have been lost.
    """
    files, root = open_file_system(url)
    stored = _marks(files, root)
    sent, kept = [], set()
    for checkpoint in checkpoints_of(folder):
        # The trial may remove it at the same time.
        with suppress(FileNotFoundError):
            digest = sha256((checkpoint.path / MANIFEST).read_bytes()).hexdigest()[:16]
            name = f"{checkpoint.path.name}-{digest}"
            if name not in stored:
                # The mark is written after all files: a reader never sees a copy that is incomplete.
                _send(files, checkpoint.path, f"{root}/{name}")
                number = 1 + max(stored.values(), default=-1)
                files.pipe_file(f"{root}/{name}.json", json.dumps({"number": number}).encode())
                stored[name] = number
                sent.append(checkpoint.path.name)
            kept.add(name)
    for name in stored.keys() - kept if kept else ():
        # The mark first: a copy that is removed only in part must not look complete.
        files.rm_file(f"{root}/{name}.json")
        files.rm(f"{root}/{name}", recursive=True)
    return sent


def pull(url: str, folder: Path) -> Path | None:
    """Fetch the intact checkpoints of `push` that the folder lacks, and return the newest of all, or None."""
    files, root = open_file_system(url)
    newest = None
    for stored, _ in sorted(_marks(files, root).items(), key=lambda mark: mark[1]):
        match = _STORED.fullmatch(stored)
        assert match is not None
        target = folder / match["name"]
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with reserve(DISK, target) as temporary:
                _fetch(files, f"{root}/{stored}", temporary / target.name)
                # Verified before the rename, so that a damaged copy never has the name of a checkpoint.
                if latest_checkpoint(temporary) is None:
                    continue
                (temporary / target.name).rename(target)
        newest = target
    return newest


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        MissingExtraError: The package for this kind of storage is not installed.
        UnknownNameError: The kind of storage is unknown.
    """
    fsspec = require("fsspec", "ray")
    scheme = url.partition("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        # fsspec's message names the package.
        raise MissingExtraError(f"checkpoint_storage: {scheme}:// cannot be used: {error}") from error
    except ValueError as error:
        raise UnknownNameError("kind of checkpoint_storage", scheme, fsspec.available_protocols()) from error
    files.invalidate_cache()
    return files, str(root).rstrip("/")


def _marks(files: Any, root: str) -> dict[str, int]:
    """Return the names of complete copies, and the order in which they were stored."""
    found = {}
    with suppress(FileNotFoundError):
        for path in files.ls(root, detail=False):
            name = PurePosixPath(path).name.removesuffix(".json")
            if str(path).endswith(".json") and _STORED.fullmatch(name):
                with suppress(FileNotFoundError):
                    found[name] = int(json.loads(files.cat_file(path))["number"])
    return found


def _send(files: Any, checkpoint: Path, place: str) -> None:
    # Files of a writer that was killed before it wrote the mark.
    if files.exists(place):
        files.rm(place, recursive=True)
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            target = f"{place}/{path.relative_to(checkpoint).as_posix()}"
            files.makedirs(target.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), target)


def _fetch(files: Any, place: str, target: Path) -> None:
    for path in files.find(place):
        inner = PurePosixPath(path).relative_to(place)
        # Otherwise a name in the storage could write outside of the trial's folder.
        if ".." in inner.parts:
            raise CheckpointError(f"{place}: {str(inner)!r} is not a valid name for a file of a checkpoint")
        (target / inner).parent.mkdir(parents=True, exist_ok=True)
        files.get_file(path, str(target / inner))
