"""Manifest of a checkpoint: version, summary and checksums, readable without torch and without other files."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from dovetail.checkpoint.encoding import decode, encode_plain
from dovetail.checkpoint.files import StoredFile
from dovetail.checkpoint.strict_json import seal, unseal
from dovetail.errors import CheckpointError

FORMAT_VERSION = 1
"""The format version that this release writes. It reads this version and all earlier ones."""

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "tensors.safetensors"
SHARDS = "shards.json"
"""The index of the parts of tensors in the files of `shard_file`, if there are any."""
USER = "user"
"""A folder for the user's files. They are not read or verified, and are removed with the checkpoint."""

_FORMAT = "dovetail-checkpoint"
_CONTENTS = {STATE, TENSORS}
_SHARD = re.compile(r"shard-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_KEYS = {"format", "format_version", "dovetail_version", "created", "files", "summary", "sha256"}
_OPTIONAL_KEYS = {"sequence"}
_MAX_MANIFEST = 16 << 20
_STEP_KEYS = ("step", "batches", "updates", "epoch")

# Printable ASCII, because commands show it.
_RELEASE = re.compile(r"[ -~]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SEQUENCE = 1 << 53
# Python does not print whole numbers with more than 4,300 digits.
_MAX_BITS = 4096
# Times in the first and last years of the calendar cannot be represented in other time zones.
_YEARS = range(1970, 9999)
# A manifest has a canonical form, in which only top-level fields are indented by two spaces.
_SEQUENCE_LINE = re.compile(rb'^  "sequence": ([0-9]{1,16}),$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The content of a checkpoint's manifest.

    Attributes:
        path: The checkpoint's directory.
        format_version: The format version of the checkpoint.
        dovetail_version: The release of Dovetail that wrote it.
        created: When it was written, in UTC.
        sequence: A number larger than the numbers of all checkpoints that were in the folder before; 0 if it was
            written by a release that did not count. It orders runs, because a clock may be set back.
        size: The total size of its files in bytes.
        files: Its files except the manifest, by name.
        summary: The summary given by the writer: counters of progress, and metrics by name under `"metrics"`.
    """

    path: Path
    format_version: int
    dovetail_version: str
    created: datetime
    size: int
    files: Mapping[str, StoredFile]
    summary: Mapping[str, Any]
    sequence: int = 0

    @property
    def step(self) -> int | None:
        """The progress of training: the first of step, batches, updates and epoch that the summary has."""
        found = (self.summary.get(key) for key in _STEP_KEYS)
        return next((int(value) for value in found if isinstance(value, Integral)), None)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the summary that are real numbers, without NaN."""
        metrics = self.summary.get("metrics")
        if not isinstance(metrics, Mapping):
            return {}
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        return {name: value for name, value in numbers.items() if not math.isnan(value)}


def shard_file(rank: int, size: int) -> str:
    """Return the name of the file in which one of `size` processes stores its parts of tensors."""
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Return whether `name` has the form that `shard_file` returns."""
    return _SHARD.fullmatch(name) is not None


def make_manifest(files: Mapping[str, StoredFile], summary: Any, sequence: int = 1) -> bytes:
    """Return the text of a manifest for files by name, the JSON tree of the summary and the checkpoint's number."""
    document: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "dovetail_version": _dovetail_version(),
        "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "sequence": sequence,
        "files": {name: file._asdict() for name, file in files.items()},
        "summary": summary,
    }
    return seal(document)


def summarize(summary: Mapping[str, Any] | None) -> Any:
    """Return the JSON tree of a caller's summary.

    Raises:
        CheckpointError: It contains a value that cannot be stored, or that `read_manifest` would reject.
    """
    summary = {} if summary is None else summary
    tree = encode_plain(summary, "summary")
    _check_summary(summary, "summary")
    metrics = summary.get("metrics", {})
    if not isinstance(metrics, Mapping):
        raise CheckpointError(f"summary.metrics: expected numbers by name, got {type(metrics).__name__}")
    for name, value in metrics.items():
        if value is not None and not isinstance(value, Real):
            raise CheckpointError(f"summary.metrics.{name}: expected a number, got {type(value).__name__}")
    return tree


def next_sequence(directory: Path) -> int:
    """Return a number larger than the numbers of all readable checkpoints in `directory`."""
    largest = 0
    with os.scandir(directory) as entries:
        folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        with contextlib.suppress(OSError):
            place = folder / MANIFEST
            # A FIFO would block the reader.
            if stat.S_ISREG(place.lstat().st_mode) and place.lstat().st_size <= _MAX_MANIFEST:
                found = _SEQUENCE_LINE.search(place.read_bytes())
                number = int(found[1]) if found else 0
                largest = max(largest, number if number < _MAX_SEQUENCE else 0)
    return min(largest + 1, _MAX_SEQUENCE - 1)


def read_manifest(directory: Path, name: Path) -> CheckpointInfo:
    """Read the manifest in `directory` and compare it with the names and sizes of the files there.

    Args:
        directory: The directory of the files.
        name: The name of the checkpoint, which differs from `directory` after an interrupted save.

    Raises:
        CheckpointError: It is damaged or incomplete, or has a format that this release does not support.
    """
    sizes = _list_files(directory, name)
    if MANIFEST not in sizes:
        raise CheckpointError(f"{name / MANIFEST}: the file is missing")
    # Checked before the file is read into memory.
    if sizes[MANIFEST] > _MAX_MANIFEST:
        raise CheckpointError(f"{name / MANIFEST}: {sizes[MANIFEST]:,} bytes are too many for a manifest")
    info = _parse((directory / MANIFEST).read_bytes(), name)
    for file, stored in info.files.items():
        if file not in sizes:
            raise CheckpointError(f"{name / file}: the file is missing")
        if sizes[file] != stored.size:
            raise CheckpointError(f"{name / file}: {sizes[file]:,} bytes instead of {stored.size:,}")
    return info


def is_replaceable(directory: Path) -> bool:
    """Return whether `directory` contains only files of a checkpoint, intact or not.

    Raises:
        FileNotFoundError: The directory does not exist.
    """
    try:
        names = set(os.listdir(directory))
    except NotADirectoryError:
        return False
    # A link is not replaced: its target may belong to another program.
    return not directory.is_symlink() and all(map(_belongs, names))


def is_damaged_checkpoint(directory: Path) -> bool:
    """Return whether `directory`, or the target of a link, contains files of a checkpoint and other files."""
    return directory.is_dir() and looks_like_checkpoint(directory)


def is_checkpoint(directory: Path) -> bool:
    """Return whether `directory` itself has the files of a checkpoint, intact or not."""
    return all((directory / file).is_file() for file in (MANIFEST, *_CONTENTS))


def looks_like_checkpoint(directory: Path) -> bool:
    """Return whether `directory` contains any file of a checkpoint, or cannot be read."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return any(file in names for file in (MANIFEST, *_CONTENTS))


def _belongs(file: str) -> bool:
    return file in {MANIFEST, SHARDS, USER, *_CONTENTS} or is_shard_file(file)


def _dovetail_version() -> str:
    try:
        return metadata.version("dovetail")
    except metadata.PackageNotFoundError:
        return "unknown"


def _list_files(directory: Path, name: Path) -> dict[str, int]:
    """Return the sizes of the files in a checkpoint; raise if it contains anything else, except the user's folder."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{name}: no checkpoint there: the path {what}")
    sizes = {}
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            # Links are not followed: they could lead to files outside of the checkpoint.
            if entry.name == USER and entry.is_dir(follow_symlinks=False):
                continue
            if not _belongs(entry.name):
                raise CheckpointError(f"{name / entry.name}: a file that does not belong to a checkpoint")
            if not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{name / entry.name}: not a regular file")
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _parse(text: bytes, name: Path) -> CheckpointInfo:
    """Return the content of a manifest; raise if its checksum, version or fields are wrong."""
    where = str(name / MANIFEST)
    # Every later version of the format must use the same checksum: a manifest is verified before its version is
    # trusted.
    document = unseal(text, where)
    version = document.get("format_version")
    if document.get("format") != _FORMAT or type(version) is not int or version < 1:
        raise CheckpointError(f"{where}: not the manifest of a Dovetail checkpoint")
    # Before the fields are checked, because a later version may have other fields.
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format version {version} is newer than version {FORMAT_VERSION}, the newest that this "
            "release reads: upgrade dovetail"
        )
    match document:
        case {"dovetail_version": str(release), "created": str(created), "files": dict(files)} if (
            # Exactly these fields: an unknown one is an error, and is not ignored.
            document.keys() - _OPTIONAL_KEYS == _KEYS and _RELEASE.fullmatch(release)
        ):
            stored = {file: _stored_file(file, entry, where) for file, entry in files.items()}
        case _:
            raise CheckpointError(f"{where}: a field is missing, unknown or of the wrong type")
    if missing := _CONTENTS - stored.keys():
        raise CheckpointError(f"{where}: does not list {min(missing)}")
    summary = decode(document["summary"], where)
    if not isinstance(summary, dict):
        raise CheckpointError(f"{where}: the summary is not a dict")
    _check_summary(summary, f"{where}: summary")
    sequence = document.get("sequence", 0)
    if type(sequence) is not int or not 0 <= sequence < _MAX_SEQUENCE:
        raise CheckpointError(f"{where}: sequence: expected a whole number from 0, got {sequence!r}")
    size = len(text) + sum(file.size for file in stored.values())
    return CheckpointInfo(name, version, release, _moment(created, where), size, stored, summary, sequence)


def _moment(created: str, where: str) -> datetime:
    """Return the time of creation in UTC; raise if it is not a date with a time zone."""
    try:
        found = datetime.fromisoformat(created)
    except ValueError as error:
        raise CheckpointError(f"{where}: created: not a date: {created!r}") from error
    if found.tzinfo is None or found.year not in _YEARS:
        raise CheckpointError(
            f"{where}: created: expected a date with a time zone, from {_YEARS[0]} to {_YEARS[-1]}, got {created!r}"
        )
    return found.astimezone(timezone.utc)


def _check_summary(summary: Mapping[Any, Any], where: str) -> None:
    """Reject values that readers of a summary cannot compare, convert to a float or print."""
    run = summary.get("run")
    if run is not None and not isinstance(run, (str, Integral)):
        raise CheckpointError(f"{where}.run: expected text or a whole number, got {type(run).__name__}")
    for key in ("run", *_STEP_KEYS):
        count = summary.get(key)
        if isinstance(count, Integral) and not -(1 << 63) <= int(count) < 1 << 63:
            raise CheckpointError(f"{where}.{key}: expected a whole number of at most 64 bits, got a larger one")
    metrics = summary.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        if not isinstance(name, str):
            raise CheckpointError(f"{where}.metrics: expected names of metrics, got {_shown(name)}")
        # The largest float has 1,024 bits.
        if isinstance(value, Integral) and int(value).bit_length() > 1000:
            raise CheckpointError(f"{where}.metrics.{name}: expected a number that fits a float, got a larger one")
    for key, value in summary.items():
        if any(number.bit_length() > _MAX_BITS for number in _whole_numbers([key, value])):
            raise CheckpointError(
                f"{where}.{key}: expected a whole number of at most {_MAX_BITS} bits, got a larger one"
            )


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield all whole numbers in a nested value, also in the keys of mappings."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _whole_numbers(item)
    elif isinstance(value, int):
        yield value


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, int) and value.bit_length() > 64 else repr(value)


def _stored_file(file: str, entry: Any, where: str) -> StoredFile:
    # Names from a file become paths, so only known names are accepted.
    if file == MANIFEST or not _belongs(file):
        raise CheckpointError(f"{where}: lists {file!r}, which does not belong to a checkpoint")
    stored = StoredFile.parse(file, entry, where)
    if not _SHA256.fullmatch(stored.sha256):
        raise CheckpointError(f"{where}: {file}: expected a size and a SHA-256")
    return stored
