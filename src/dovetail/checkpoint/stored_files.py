"""Reader of checkpoints with files of a script, as `core.checkpoint` writes them. It does not need torch.

Such a checkpoint is a folder with the files of the script under `files`, and `manifest.json` with the metadata and the
size and SHA-256 of each file. The content is not trusted: a name in the manifest is accepted only if the folder has a
regular file with that name, and links, devices and FIFOs are rejected without opening them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.checkpoint.encoding import decode
from dovetail.checkpoint.files import StoredFile, digest_of, file_chunks
from dovetail.checkpoint.manifest import MANIFEST
from dovetail.checkpoint.strict_json import seal, unseal
from dovetail.errors import CheckpointError

FILES = "files"
"""The folder of the script's files in a checkpoint."""

Digests = dict[str, StoredFile]
"""Each file by its path inside of the checkpoint."""

_FORMAT = "dovetail-files"
_VERSION = 1
_KEYS = {"format", "format_version", "created", "metadata", "files", "sha256"}
_MAX_MANIFEST = 64 << 20


class StoredFiles(NamedTuple):
    """The content of a manifest.

    Attributes:
        metadata: The metadata that the script gave.
        files: The size and the SHA-256 of each file.
        created: When the checkpoint was written, in UTC.
    """

    metadata: dict[str, Any]
    files: Digests
    created: datetime


def make_stored_manifest(metadata: Mapping[str, Any], files: Digests) -> bytes:
    """Return the text of a manifest for the encoded metadata of the script and its files."""
    document = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "metadata": metadata,
        "files": {name: file._asdict() for name, file in sorted(files.items())},
    }
    return seal(document)


def is_stored_files(place: Path) -> bool:
    """Return whether a folder is not a link and has a manifest that is a regular file."""
    try:
        # With `lstat`, so that a link to a manifest elsewhere does not count.
        return not place.is_symlink() and stat.S_ISREG(os.lstat(place / MANIFEST).st_mode)
    except (OSError, ValueError):
        return False


def read_stored_files(place: Path) -> StoredFiles:
    """Return the content of a checkpoint's manifest, after comparing its file names with the folder.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another kind.
        OSError: A file cannot be read.
    """
    where = str(place / MANIFEST)
    if not is_stored_files(place):
        raise CheckpointError(f"{where}: expected a regular file in a folder that is not a link")
    document = unseal(_manifest_text(place / MANIFEST), where)
    # `unseal` has verified the checksum, so a wrong value here is another kind of file, not damage.
    if document.get("format") != _FORMAT or document.get("format_version") != _VERSION or document.keys() != _KEYS:
        raise CheckpointError(f"{where}: not the manifest of stored files, version {_VERSION}")
    match document:
        case {"created": str(created), "files": dict(entries)}:
            files = {name: StoredFile.parse(name, entry, where) for name, entry in entries.items()}
        case _:
            raise CheckpointError(f"{where}: a field is missing or of the wrong type")
    try:
        # A date without a time zone is local time, as in the manifests of other checkpoints.
        moment = datetime.fromisoformat(created).astimezone(timezone.utc)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{where}: created: not a date: {created!r}") from error
    metadata = decode(document["metadata"], where)
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where}: the metadata is not a dict")
    # From here on names of the manifest are names of real files in the folder, and cannot lead out of it.
    _compare_names(place / FILES, files)
    return StoredFiles(metadata, files, moment)


def verify_stored_files(place: Path) -> StoredFiles:
    """Return the result of `read_stored_files` after comparing every byte with the checksums.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another kind.
        OSError: A file cannot be read.
    """
    content = read_stored_files(place)
    for name, stored in content.files.items():
        stored.check(digest_of(place / FILES / name), place / FILES / name)
    return content


def names_below(directory: Path) -> list[str]:
    """Return the relative paths of all files below a folder. Empty folders are not part of a checkpoint."""
    found = []
    for place, _, files in os.walk(directory):
        found += [Path(place, file).relative_to(directory).as_posix() for file in files]
    return sorted(found)


def _manifest_text(path: Path) -> bytes:
    text = bytearray()
    for chunk in file_chunks(path):
        text += chunk
        # Limited while the file is read, so that a huge file is never in memory.
        if len(text) > _MAX_MANIFEST:
            raise CheckpointError(f"{path}: more than {_MAX_MANIFEST:,} bytes are too many for a manifest")
    return bytes(text)


def _compare_names(folder: Path, files: Digests) -> None:
    """Raise unless a folder has exactly the files of a manifest, as regular files with the right sizes."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: expected a folder, got a link")
    sizes = {}
    for name in names_below(folder):
        found = os.lstat(folder / name)
        if stat.S_ISLNK(found.st_mode):
            # Ignore links, so that they are reported as missing.
            continue
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{folder / name}: not a regular file")
        sizes[name] = found.st_size
    for name in sorted(files.keys() - sizes.keys()):
        raise CheckpointError(f"{folder / name}: the file is missing")
    for name in sorted(sizes.keys() - files.keys()):
        raise CheckpointError(f"{folder / name}: a file that does not belong to the checkpoint")
    for name, size in sizes.items():
        if size != files[name].size:
            raise CheckpointError(
                f"{folder / name}: the file is damaged: {size:,} bytes instead of {files[name].size:,}"
            )
