"""Checks of files and disks, with the operations of a checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dovetail.cli.checkup.check import Check, Status
from dovetail.cli.output import bytes_text

_LITTLE_DISK, _TOO_LITTLE_DISK = 5_000_000_000, 200_000_000
_LITTLE_SHARED_MEMORY = 500_000_000
_FEW_DESCRIPTORS = 1024


def check_folder(folder: Path) -> Check:
    """Check whether a folder supports the operations of a checkpoint: write, sync, lock, rename, remove."""
    from dovetail.checkpoint.files import DISK, reserve, write_file

    place = nearest(folder)
    try:
        # If this process is killed here, the next save removes a folder with this kind of name.
        with reserve(DISK, place / "doctor") as scratch:
            DISK.make_directory(scratch / "new")
            write_file(DISK, scratch / "new" / "file", [b"dovetail"])
            DISK.sync_directory(scratch / "new")
            DISK.rename(scratch / "new", scratch / "checkpoint")
            DISK.sync_directory(scratch)
            found = f"{place}: files can be written, synced and renamed"
            try:
                DISK.unlock(DISK.lock(scratch / "checkpoint"))
            except OSError as error:
                text = f"{found}, but not locked ({error.strerror}): two runs may interfere with each other"
                return Check("files", "folder", "note", text, "dovetail doctor --folder DIR  # one on a local disk")
    except OSError as error:
        remedy = f"chmod u+rwx '{place}'  # or another: dovetail doctor --folder DIR"
        return Check("files", "folder", "problem", f"no checkpoint can be written to {place}: {error.strerror}", remedy)
    return Check("files", "folder", "ok", found)


def check_disk(name: str, folder: Path, *, little: int = _LITTLE_DISK, too_little: int = _TOO_LITTLE_DISK) -> Check:
    """Compare the free bytes on the disk of a folder with two limits: for a note, and for a problem."""
    place = nearest(folder)
    free = shutil.disk_usage(place).free
    text = f"{bytes_text(free)} free in {place}"
    if free >= little:
        return Check("files", name, "ok", text)
    status: Status = "problem" if free < too_little else "note"
    return Check("files", name, status, f"{text}: may be too little for checkpoints", f"du -sh '{place}'/* | sort -h")


def check_descriptors() -> Check:
    """Check the limit of open files per process: workers, sockets and shared tensors need some."""
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check("files", "open files", "ok", "no limit per process")
    text = f"at most {limit:,} per process"
    if limit >= _FEW_DESCRIPTORS:
        return Check("files", "open files", "ok", text)
    # A user cannot raise the limit above the hard one.
    goal = 4096 if most == resource.RLIM_INFINITY else min(4096, most)
    return Check("files", "open files", "note", f"{text}: few for loaders with many workers", f"ulimit -n {goal}")


def check_shared_memory(place: Path = Path("/dev/shm")) -> list[Check]:  # noqa: S108 - only its size is read
    """Check how much memory the workers of loaders can share, if the system has a limit."""
    if not place.exists():
        return []
    size = shutil.disk_usage(place).total
    text = f"{bytes_text(size)} in {place}"
    if size >= _LITTLE_SHARED_MEMORY:
        return [Check("files", "shared memory", "ok", text)]
    text = f"{text}: may be too little for loaders with workers"
    return [Check("files", "shared memory", "note", text, "docker run --shm-size=2g …  # if this is a container")]


def nearest(folder: Path) -> Path:
    """Return a folder, or the nearest folder above it that exists."""
    folder = folder.absolute()
    # Not `Path.exists`, which raises if this user has no permission.
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))
