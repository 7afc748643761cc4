"""Checkpoint store: saving, listing, verifying and loading checkpoints in a folder.

The steps of a save, and what a reader finds if the save is interrupted:

1. The files are written to `.tmp-NAME.xxxxxxxx`, the manifest last. Each file is synced, then the directory.
2. If NAME exists, it is renamed to `.old-NAME.xxxxxxxx`. Until the next rename NAME does not exist, and a reader of
   NAME uses the `.old-` directory, which is always complete.
3. The temporary directory is renamed to NAME and the parent directory is synced: the save is complete.
4. Temporary files of this save and of interrupted ones are removed.

If several processes hold parts of one state, they write it together: the first process does all of the above, and each
process writes its own parts to the temporary directory.

A writer holds a lock on its temporary directory. The kernel releases it when the process ends; the next save removes
temporary directories without a lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dovetail.checkpoint.encoding import Encoded, decode_text, encode
from dovetail.checkpoint.files import (
    DISK,
    Digest,
    Files,
    StoredFile,
    aside_name,
    damaged_name,
    digest_of,
    discard,
    is_temporary,
    make_parents,
    names_in,
    reserve,
    resolve,
    sweep,
    write_file,
)
from dovetail.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    SHARDS,
    STATE,
    TENSORS,
    CheckpointInfo,
    is_checkpoint,
    is_damaged_checkpoint,
    is_replaceable,
    is_shard_file,
    looks_like_checkpoint,
    make_manifest,
    next_sequence,
    read_manifest,
    shard_file,
    summarize,
)
from dovetail.checkpoint.shards import Peers, parse_index, plan_shards, read_shards, run_in_all_processes
from dovetail.checkpoint.tensors import read_tensors, stream, stream_size
from dovetail.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_Path = str | os.PathLike[str]
_OnError = Literal["raise", "warn"]

# Space for the manifest, the directory and the rounding of file sizes to blocks.
_MARGIN = 1 << 20
_ATTEMPTS = 10

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""For every format version except the current one, a function that converts its state to the next version."""


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and skipped or renamed, or could not be written."""


@overload
def save(
    path: _Path,
    state: Mapping[str, Any],
    *,
    summary: Mapping[str, Any] | None = None,
    on_error: Literal["raise"] = "raise",
    files: Files = DISK,
    peers: Peers | None = None,
) -> Path: ...
@overload
def save(
    path: _Path,
    state: Mapping[str, Any],
    *,
    summary: Mapping[str, Any] | None = None,
    on_error: _OnError,
    files: Files = DISK,
    peers: Peers | None = None,
) -> Path | None: ...
def save(
    path: _Path,
    state: Mapping[str, Any],
    *,
    summary: Mapping[str, Any] | None = None,
    on_error: _OnError = "raise",
    files: Files = DISK,
    peers: Peers | None = None,
) -> Path | None:
    """Write `state` to the directory `path`, completely or not at all.

    An existing checkpoint is replaced; until the new one is safely on the disk, the old one remains valid. Tensors are
    written directly from their memory, without a copy of the state.

    Args:
        path: The directory to write. Missing parents are created.
        state: Nested dicts, lists and tuples of tensors, numpy arrays and scalars, numbers, strings, bools,
            bytes and None. Tensors that share their elements are stored once and share them again when
            loaded. Instances of subclasses are loaded as the plain type (an OrderedDict as a dict, a Parameter
            as a tensor), except Counter.
        summary: Information that can be read without loading the state: counters such as `"batches"`, by which the
            checkpoints of one `"run"` are ordered, and numbers by name under `"metrics"`.
        on_error: Whether a failure of the disk raises an error or gives a warning. State that cannot be stored
            raises in either case.
        files: The file operations; tests replace them by failing ones.
        peers: The processes that hold parts of the state (`DTensor`), if there are several. All of them save
            together: each writes its own parts, and the first one everything else.

    Returns:
        `path`, or None if the checkpoint could not be written and `on_error` is `"warn"`.

    Raises:
        CheckpointError: The checkpoint could not be written; an existing one is unchanged.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = save(f"{directory}/first", {"weight": torch.ones(2)}, summary={"batches": 7})
        ...     load(path), inspect(path).step
        ({'weight': tensor([1., 1.])}, 7)
    """
    target = Path(path)
    check_on_error(on_error)
    encoded = encode(state)
    described = summarize(summary)
    try:
        write(target, encoded, described, files, peers)
    except CheckpointError as error:
        if on_error == "raise":
            raise
        warnings.warn(CheckpointWarning(str(error)), stacklevel=2)
        return None
    return target


def load(
    path: _Path, *, map_location: str | torch.device = "cpu", verify: bool = True, peers: Peers | None = None
) -> dict[str, Any]:
    """Return the state of the checkpoint `path`.

    Nothing in it is executed, unpickled or imported. Tensors that several processes wrote in parts are loaded whole.

    Args:
        path: A checkpoint.
        map_location: The device of the tensors. Each tensor owns its memory.
        verify: Whether to compare every byte with the checksums of the manifest.
        peers: The processes that load it together, if tensors should be divided into parts again. Their number may
            differ from the number of processes that wrote them.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the message has the name of the file.
    """

    def read() -> dict[str, Any]:
        return _reading(Path(path), lambda directory: _load(directory, Path(path), map_location, verify, peers))

    if peers is None:
        return read()
    found: list[dict[str, Any]] = []
    run_in_all_processes(peers, lambda: found.append(read()))
    return found[0]


def verify(path: _Path) -> None:
    """Read every byte of the checkpoint `path` and compare it with the manifest. Does not need torch.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the message has the name of the file.
    """
    _reading(Path(path), lambda directory: _verify(directory, Path(path)))


def inspect(path: _Path) -> CheckpointInfo:
    """Return the content of the manifest of the checkpoint `path`, without reading other files. Does not need torch.

    Raises:
        CheckpointError: There is no checkpoint, its manifest is damaged, or a file is missing or has another size.
    """
    return _reading(Path(path), lambda directory: read_manifest(directory, Path(path)))


def list_checkpoints(directory: _Path) -> list[CheckpointInfo]:
    """Return the checkpoints in `directory`, oldest first: ordered by `"run"` of the summary, then by step and time.

    A checkpoint with an unreadable manifest gives a warning and is left out. Symbolic links and other content are
    ignored. A directory that does not exist contains none.
    """
    infos, damaged = scan(Path(directory))
    _warn_about(damaged, stacklevel=3)
    return infos


def latest(directory: _Path) -> Path | None:
    """Return the newest intact checkpoint in `directory`, or None. Damaged ones give a warning."""
    newest = _newest(Path(directory), lambda path: verify(path))
    return newest and newest[0]


def load_latest(
    directory: _Path, *, map_location: str | torch.device = "cpu", peers: Peers | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and the state of the newest intact checkpoint in `directory`, or None.

    The result equals loading `latest(directory)`, but the files are read only once.
    """
    return _newest(Path(directory), lambda path: load(path, map_location=map_location, peers=peers))


def scan(directory: Path) -> tuple[list[CheckpointInfo], list[CheckpointError]]:
    """Return the checkpoints in `directory`, oldest first, and the errors of the unreadable ones."""
    if not directory.is_dir():
        return [], []
    _reject_checkpoint(directory)
    infos, damaged = [], []
    for path in (directory / name for name in names_in(directory)):
        if path.is_symlink():
            continue
        try:
            infos.append(inspect(path))
        except CheckpointError as error:
            if looks_like_checkpoint(resolve(path)):
                damaged.append(error)
    return _oldest_first(infos), damaged


def _reject_checkpoint(directory: Path) -> None:
    """Reject a checkpoint given as a folder of checkpoints: it contains none, and writing there would damage it."""
    if is_checkpoint(directory):
        raise CheckpointError(f"{directory}: is a checkpoint itself: give the folder around it, {directory.parent}")


def _oldest_first(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    # Within a run, order by progress, because clocks of machines differ. A later run that started from scratch in the
    # same folder follows all of an earlier run, even if the earlier one had made more progress. It must also follow if
    # a clock was set back: only checkpoints without a sequence number are ordered by their times alone.
    last_of_run: dict[object, tuple[int, datetime]] = {}
    for info in infos:
        run, written = info.summary.get("run"), (info.sequence, info.created)
        last_of_run[run] = max(written, last_of_run.get(run, written))
    return sorted(
        infos,
        key=lambda info: (
            last_of_run[info.summary.get("run")],
            -1 if info.step is None else info.step,
            (info.sequence, info.created),
        ),
    )


def write(target: Path, encoded: Encoded, summary: Any, files: Files, peers: Peers | None = None) -> None:
    """Write encoded state to the directory `target`.

    Raises:
        CheckpointError: The disk failed; the original error is the cause.
    """
    if peers is not None:
        _write_together(target, encoded, summary, files, peers)
        return
    if encoded.shards:
        raise CheckpointError(f"{min(encoded.shards)}: several processes hold parts of it and must save together")
    with _open_temporary(target, encoded, files) as temporary:
        _commit(temporary, target, encoded, summary, files, {})


def _write_together(target: Path, encoded: Encoded, summary: Any, files: Files, peers: Peers) -> None:
    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            if peers.rank != 0:
                return None
            return os.path.abspath(stack.enter_context(_open_temporary(target, encoded, files)))

        # Every step ends with an exchange, so that a failure in one process ends the save in all of them.
        temporary = Path(run_in_all_processes(peers, begin)[0])
        blocks, index = plan_shards(encoded.shards, peers)
        file = shard_file(peers.rank, peers.size)

        def write_own() -> list[Any]:
            with _naming_checkpoint(target):
                written = write_file(files, temporary / file, stream(blocks))
            return [file, *written]

        shards = {name: StoredFile(size, sha256) for name, size, sha256 in run_in_all_processes(peers, write_own)}

        def finish() -> None:
            if peers.rank == 0:
                with stack.pop_all(), _naming_checkpoint(target):
                    indexed = write_file(files, temporary / SHARDS, [index])
                    _commit(temporary, target, encoded, summary, files, {**shards, SHARDS: indexed})

        run_in_all_processes(peers, finish)


@contextlib.contextmanager
def _open_temporary(target: Path, encoded: Encoded, files: Files) -> Iterator[Path]:
    """Yield a temporary directory in which a checkpoint can be written, and clean up afterwards."""
    if is_temporary(target.name):
        raise CheckpointError(f"{target}: this form of name is reserved for temporary files; choose another")
    _reject_checkpoint(target.parent)
    with _naming_checkpoint(target):
        make_parents(files, target.parent)
        sweep(files, target.parent)
        needed = (
            stream_size(encoded.blocks) + len(encoded.text) + sum(shard.nbytes for shard in encoded.shards.values())
        )
        _check_free_space(files, target, needed + _MARGIN)
        with reserve(files, target) as temporary:
            yield temporary
        files.sync_directory(target.parent)
        sweep(files, target.parent)


def _commit(
    temporary: Path, target: Path, encoded: Encoded, summary: Any, files: Files, written: Mapping[str, StoredFile]
) -> None:
    """Write everything except the shards, and rename the temporary directory to its final name."""
    written = {
        **written,
        TENSORS: write_file(files, temporary / TENSORS, stream(encoded.blocks)),
        STATE: write_file(files, temporary / STATE, [encoded.text]),
    }
    # The manifest last: a directory without one is not a checkpoint.
    manifest = make_manifest(written, summary, next_sequence(target.parent))
    write_file(files, temporary / MANIFEST, [manifest])
    files.sync_directory(temporary)
    _take_name(files, temporary, target)


@contextlib.contextmanager
def _naming_checkpoint(target: Path) -> Iterator[None]:
    """Convert errors of the disk to an error with the name of the checkpoint."""
    try:
        yield
    # torch and its C++ code report some failures of a disk or a device as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target}: the checkpoint could not be written: {error}") from error


def check_on_error(on_error: str) -> None:
    """Raise unless `on_error` has a valid value."""
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error: expected 'raise' or 'warn', got {on_error!r}")


def migrate(
    state: dict[str, Any],
    version: int,
    current: int = FORMAT_VERSION,
    steps: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = MIGRATIONS,
) -> dict[str, Any]:
    """Return the state of a checkpoint of format `version`, converted to the `current` version."""
    for number in range(version, current):
        state = steps[number](state)
    return state


def remove(path: Path, files: Files = DISK) -> bool:
    """Remove a checkpoint, and an older one of the same name that an interrupted save may have left.

    Returns:
        Whether this call removed anything; another process may have removed it first.
    """
    removed = False
    try:
        while (place := resolve(path)).exists():
            # Another process that prunes the same folder may remove it between these two lines.
            with contextlib.suppress(FileNotFoundError):
                discard(files, place)
                removed = True
    except OSError as error:
        raise CheckpointError(f"{path}: the checkpoint could not be removed: {error}") from error
    return removed


def is_unchanged(info: CheckpointInfo) -> bool:
    """Return whether a checkpoint is still the listed one: other processes may have removed or replaced it."""
    try:
        now = inspect(info.path)
    except CheckpointError:
        return False
    return (now.sequence, now.created, now.files) == (info.sequence, info.created, info.files)


def _check_free_space(files: Files, target: Path, needed: int) -> None:
    free = files.free_space(target.parent)
    if needed > free:
        raise CheckpointError(
            f"{target}: the disk is too full: the checkpoint needs {needed:,} bytes, {free:,} are free"
        )


def _take_name(files: Files, temporary: Path, target: Path) -> None:
    damaged: list[Path] = []
    while True:
        # It does not exist if it is new, or if another writer of the same name has just renamed it.
        with contextlib.suppress(FileNotFoundError):
            if is_replaceable(target):
                files.rename(target, aside_name(target))
            elif is_damaged_checkpoint(target):
                # This happens when a run is resumed from an older checkpoint; files of other programs are kept.
                place = damaged_name(target)
                files.rename(target, place)
                damaged.append(place)
            else:
                raise CheckpointError(f"{target}: not a checkpoint of Dovetail, so it is not replaced")
        try:
            files.rename(temporary, target)
            break
        except OSError as error:
            # Another writer of the same name was faster between the two renames: rename its checkpoint, too.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    for place in damaged:
        sentence = f"{target}: a damaged checkpoint had this name; it is kept as {place.name}"
        warnings.warn(CheckpointWarning(sentence), stacklevel=2)


def _load(directory: Path, name: Path, map_location: Any, verified: bool, peers: Peers | None = None) -> dict[str, Any]:
    info = read_manifest(directory, name)
    # The text is decoded last, when both files are verified.
    text = (directory / STATE).read_bytes()
    if verified:
        digest = Digest()
        digest.update(text)
        info.files[STATE].check(digest.stored, name / STATE)
    digest = Digest()
    with open(directory / TENSORS, "rb", buffering=0) as file:
        tensors = read_tensors(file, info.files[TENSORS].size, str(name / TENSORS), digest)
    if verified:
        info.files[TENSORS].check(digest.stored, name / TENSORS)
    if SHARDS in info.files:
        tensors |= _load_shards(directory, name, info, map_location, verified, peers)
    state = decode_text(text, str(name / STATE), tensors, map_location)
    if not isinstance(state, dict):
        raise CheckpointError(f"{name / STATE}: expected a dict, got {type(state).__name__}")
    return migrate(state, info.format_version)


def _load_shards(
    directory: Path, name: Path, info: CheckpointInfo, map_location: Any, verified: bool, peers: Peers | None
) -> dict[str, torch.Tensor]:
    import torch

    if verified:
        info.files[SHARDS].check(digest_of(directory / SHARDS), name / SHARDS)
        # Processes that load together verify some of the files each.
        first, step = (0, 1) if peers is None else (peers.rank, peers.size)
        for file in sorted(filter(is_shard_file, info.files))[first::step]:
            info.files[file].check(digest_of(directory / file), name / file)

    def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=map_location)

    index = parse_index((directory / SHARDS).read_bytes(), info.files, str(name / SHARDS))
    return read_shards(index, directory, name, zeros if peers is None else peers.zeros)


def _verify(directory: Path, name: Path) -> None:
    for file, stored in read_manifest(directory, name).files.items():
        stored.check(digest_of(directory / file), name / file)


def _reading(path: Path, read: Callable[[Path], _T]) -> _T:
    """Read a checkpoint that another process may be replacing at the same time."""
    for attempt in range(_ATTEMPTS):
        directory = resolve(path)
        before = _identity(directory)
        try:
            return read(directory)
        except (OSError, CheckpointError) as error:
            # A mix of files of the old and the new checkpoint looks damaged: try again.
            replaced = before is None or _identity(resolve(path)) != before
            if replaced and attempt < _ATTEMPTS - 1:
                continue
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: the checkpoint could not be read: {error}") from error
    raise AssertionError("the last attempt returns or raises")


def _identity(directory: Path) -> tuple[Path, int, int] | None:
    try:
        found = directory.stat()
    except OSError:
        return None
    return directory, found.st_ino, found.st_mtime_ns


def _newest(directory: Path, read: Callable[[Path], _T]) -> tuple[Path, _T] | None:
    infos, damaged = scan(directory)
    found = None
    for info in reversed(infos):
        try:
            found = info.path, read(info.path)
            break
        except CheckpointError as problem:
            damaged.append(problem)
    _warn_about(damaged, stacklevel=4)
    return found


def _warn_about(damaged: list[CheckpointError], stacklevel: int) -> None:
    for error in damaged:
        warnings.warn(CheckpointWarning(f"skipping a damaged checkpoint: {error}"), stacklevel=stacklevel)
