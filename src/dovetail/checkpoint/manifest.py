"""What a checkpoint says about itself: read without torch and without opening any other file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from dovetail.checkpoint.encoding import decode, encode_plain
from dovetail.checkpoint.files import CHUNK, Digest
from dovetail.checkpoint.strict_json import seal, unseal
from dovetail.errors import CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "SHARDS",
    "STATE",
    "TENSORS",
    "CheckpointInfo",
    "StoredFile",
    "make_manifest",
    "read_manifest",
]

FORMAT_VERSION = 1
"""The version of the format that this release writes. It reads this one and all before it."""

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "tensors.safetensors"
SHARDS = "shards.json"
"""Which parts of tensors the files of `shard_file` hold, if there are any."""
USER = "user"
"""A folder for files of the user's own, which are neither read nor compared here, and go with the checkpoint."""

_FORMAT = "dovetail-checkpoint"
_CONTENTS = {STATE, TENSORS}
_SHARD = re.compile(r"shard-\d{5,9}-of-\d{5,9}\.safetensors")
_KEYS = {"format", "format_version", "dovetail_version", "created", "files", "summary", "sha256"}
_MAX_MANIFEST = 16 << 20
_STEP_KEYS = ("step", "batches", "updates", "epoch")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The size and the SHA-256 of a file, as the manifest gives them."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the manifest of a checkpoint says.

    Attributes:
        path: The checkpoint's directory.
        format_version: The version of the format that it is stored in.
        dovetail_version: The release of Dovetail that wrote it.
        created: When it was written, in UTC.
        size: The bytes of all its files.
        files: Its files but the manifest, by name.
        summary: What the writer said about it: counters of progress, and metrics by name under `"metrics"`.
    """

    path: Path
    format_version: int
    dovetail_version: str
    created: datetime
    size: int
    files: Mapping[str, StoredFile]
    summary: Mapping[str, Any]

    @property
    def step(self) -> int | None:
        """How far training had come: the first of step, batches, updates and epoch that the summary has."""
        found = (self.summary.get(key) for key in _STEP_KEYS)
        return next((value for value in found if isinstance(value, int)), None)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the summary that are real numbers. NaN is none."""
        metrics = self.summary.get("metrics")
        if not isinstance(metrics, Mapping):
            return {}
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}


def shard_file(rank: int, size: int) -> str:
    """Return the name of the file that one of `size` processes writes its parts of tensors to."""
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Whether `name` is one that `shard_file` gives."""
    return _SHARD.fullmatch(name) is not None


def make_manifest(files: Mapping[str, Digest | StoredFile], summary: Any) -> bytes:
    """Return the text of a manifest.

    Args:
        files: What was written under each name.
        summary: The JSON tree of the summary.
    """
    document: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "dovetail_version": _dovetail_version(),
        "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in files.items()},
        "summary": summary,
    }
    return seal(document)


def summarize(summary: Mapping[str, Any] | None) -> Any:
    """Return the JSON tree of a caller's summary."""
    return encode_plain({} if summary is None else summary, "summary")


def read_manifest(directory: Path, name: Path) -> CheckpointInfo:
    """Read the manifest in `directory` and compare it with the names and sizes of the files there.

    Args:
        directory: Where the files lie.
        name: What the checkpoint is called, which differs from `directory` after a save that died.

    Raises:
        CheckpointError: It is damaged, incomplete, or of a format that this release does not know.
    """
    sizes = _list_files(directory, name)
    if MANIFEST not in sizes:
        raise CheckpointError(f"{name / MANIFEST}: the file is missing")
    if sizes[MANIFEST] > _MAX_MANIFEST:
        raise CheckpointError(f"{name / MANIFEST}: {sizes[MANIFEST]:,} bytes are too many for a manifest")
    info = _parse((directory / MANIFEST).read_bytes(), name)
    for file, stored in info.files.items():
        if file not in sizes:
            raise CheckpointError(f"{name / file}: the file is missing")
        if sizes[file] != stored.size:
            raise CheckpointError(f"{name / file}: {sizes[file]:,} bytes instead of {stored.size:,}")
    return info


def verify_file(directory: Path, name: Path, file: str, stored: StoredFile) -> None:
    """Read a file and compare it with what the manifest says."""
    digest = Digest()
    with open(directory / file, "rb", buffering=0) as source:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
    check_digest(digest, name / file, stored)


def check_digest(digest: Digest, file: Path, stored: StoredFile) -> None:
    """Raise if what was read is not what the manifest says."""
    if (digest.size, digest.sha256) != (stored.size, stored.sha256):
        raise CheckpointError(f"{file}: the file is damaged: its SHA-256 is not the one in the manifest")


def is_replaceable(directory: Path) -> bool:
    """Whether `directory` holds nothing but the files of a checkpoint, intact or not.

    Raises:
        FileNotFoundError: There is nothing of that name.
    """
    try:
        names = set(os.listdir(directory))
    except NotADirectoryError:
        return False
    return not directory.is_symlink() and all(map(_belongs, names))


def looks_like_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds any file of a checkpoint."""
    return any((directory / file).exists() for file in (MANIFEST, *_CONTENTS))


def _belongs(file: str) -> bool:
    return file in {MANIFEST, SHARDS, USER, *_CONTENTS} or is_shard_file(file)


def _dovetail_version() -> str:
    try:
        return metadata.version("dovetail")
    except metadata.PackageNotFoundError:
        return "unknown"


def _list_files(directory: Path, name: Path) -> dict[str, int]:
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{name}: no checkpoint there: the path {what}")
    sizes = {}
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name == USER and entry.is_dir(follow_symlinks=False):
                continue
            if not _belongs(entry.name):
                raise CheckpointError(f"{name / entry.name}: a file that does not belong to a checkpoint")
            if not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{name / entry.name}: not a regular file")
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _parse(text: bytes, name: Path) -> CheckpointInfo:
    where = str(name / MANIFEST)
    # Every later version of the format must be sealed in the same way: whether a manifest is whole is decided before
    # its version is believed.
    document = unseal(text, where)
    version = document.get("format_version")
    if document.get("format") != _FORMAT or type(version) is not int or version < 1:
        raise CheckpointError(f"{where}: not the manifest of a Dovetail checkpoint")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format version {version} is newer than version {FORMAT_VERSION}, the newest that this "
            "release reads: upgrade dovetail"
        )
    match document:
        case {"dovetail_version": str(release), "created": str(created), "files": dict(files)} if (
            document.keys() == _KEYS
        ):
            stored = {file: _stored_file(file, entry, where) for file, entry in files.items()}
        case _:
            raise CheckpointError(f"{where}: a field is missing, unknown or of the wrong type")
    if missing := _CONTENTS - stored.keys():
        raise CheckpointError(f"{where}: does not list {min(missing)}")
    summary = decode(document["summary"], where)
    if not isinstance(summary, dict):
        raise CheckpointError(f"{where}: the summary is not a dict")
    try:
        moment = datetime.fromisoformat(created).astimezone(timezone.utc)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{where}: created: not a date: {created!r}") from error
    size = len(text) + sum(file.size for file in stored.values())
    return CheckpointInfo(name, version, release, moment, size, stored, summary)


def _stored_file(file: str, entry: Any, where: str) -> StoredFile:
    if file == MANIFEST or not _belongs(file):
        raise CheckpointError(f"{where}: lists {file!r}, which does not belong to a checkpoint")
    match entry:
        case {"size": int(size), "sha256": str(digest), **rest} if not rest and size >= 0:
            return StoredFile(size, digest)
    raise CheckpointError(f"{where}: {file}: expected a size and a SHA-256")
