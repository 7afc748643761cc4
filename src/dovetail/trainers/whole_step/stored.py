"""Compiled code on disk, found by a description of the step, so that a new process needs no trace and no compiler."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import ConfigError
from dovetail.trainers.whole_step.draws import build_draw, describe_draws
from dovetail.trainers.whole_step.sharing import Code
from dovetail.trainers.whole_step.spelling import spell


def load_code(key: Any) -> Code | None:
    """Return the code that an earlier process stored for a key; None if there is none.

    Code is loaded only from a folder that belongs to the user and that no other user can write to.
    """
    folder, name = _folder(), _name_of(key)
    if folder is None or name is None:
        return None
    library, facts = folder / f"{name}.so", folder / f"{name}.json"
    try:
        found = json.loads(facts.read_text(encoding="utf-8"))
        call = library_call(library)
        with suppress(OSError):
            # The code that was used last is kept longest.
            os.utime(library)
        return Code(
            call,
            tuple(map(bool, found["is_used"])),
            tuple(map(build_draw, found["draws"])),
            names=tuple(map(str, found["names"])),
            fixed=tuple((str(name), value) for name, value in found["fixed"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        # Not there, or damaged: the step is traced and compiled.
        return None


def store_code(key: Any, code: Code) -> None:
    """Store code for later processes, unless it belongs to this process only."""
    folder, name = _folder(), _name_of(key)
    if folder is None or name is None or code.library is None or code.constants or code.sizes:
        return
    draws = describe_draws(code.draws)
    if draws is None:
        return
    if code.library.with_suffix(".json").exists():
        # It calls operations that need a second file.
        return
    limit = _limit()
    facts = {"is_used": code.is_used, "names": code.names, "fixed": code.fixed, "draws": draws}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            copy = Path(shutil.copy(code.library, Path(scratch) / "library"))
            os.replace(copy, folder / f"{name}.so")
            # Last, because a process that finds it expects the library.
            written = Path(scratch) / "facts"
            written.write_text(json.dumps(facts), encoding="utf-8")
            os.replace(written, folder / f"{name}.json")
        _remove_oldest(folder, limit)
    except OSError:
        # A full or read-only disk costs time only.
        return


def _limit() -> int:
    """Return the largest size of all stored code in bytes."""
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return _LIMIT
    try:
        return max(0, int(float(text) * 1e9))
    except (ValueError, OverflowError):
        raise ConfigError(f"{LIMIT}: expected a number of gigabytes, such as 2 or 0.5, got {text!r}") from None


# The environment variable with the largest size of all stored code, in gigabytes.
LIMIT = "DOVETAIL_COMPILE_CACHE_GB"
_LIMIT = 2_000_000_000


def _remove_oldest(folder: Path, limit: int) -> None:
    """Remove the code that was not used for the longest time, until the rest fits into a limit in bytes."""
    found = []
    for library in folder.glob("*.so"):
        # Another process may remove it at the same time.
        with suppress(OSError):
            facts = library.stat()
            found.append((facts.st_mtime_ns, facts.st_size, library))
    total = sum(size for _, size, _ in found)
    for _, size, library in sorted(found):
        if total <= limit:
            return
        # First, because a process that finds it expects the library.
        library.with_suffix(".json").unlink(missing_ok=True)
        library.unlink(missing_ok=True)
        total -= size


def library_call(path: Path) -> Callable[..., Any]:
    """Return the function of a library that Inductor compiled ahead of time."""
    if not path.is_file():
        raise FileNotFoundError(path)
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    run: Callable[[Any], Any] = runner.run

    def call(*inputs: Any) -> Any:
        return run(inputs)

    return call


def _folder() -> Path | None:
    """Return the folder of stored code inside of Inductor's cache; None if another user could write to it."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is None:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        given = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    folder = Path(given) / "dovetail"
    if os.name != "posix":
        return None
    for each in (folder.parent, folder):
        try:
            found = each.lstat()
        except FileNotFoundError:
            continue
        except OSError:
            return None
        # Otherwise another user could make this process run code.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            return None
    return folder


def _name_of(key: Any) -> str | None:
    """Return a file name for a key; None if the key contains code that may differ in another process."""
    if key is None:
        return None
    spelled = spell(key)
    if spelled is None:
        return None
    choices = sorted(f"{name}={value}" for name, value in os.environ.items() if _is_choice(name))
    return hashlib.sha256("\n".join((_environment(), *choices, *spelled)).encode()).hexdigest()


def _is_choice(name: str) -> bool:
    """Return whether an environment variable is a setting of the compiler."""
    return name.startswith(_CHOICES) and name != "TORCHINDUCTOR_CACHE_DIR"


# The beginnings of the names of environment variables that Inductor reads.
_CHOICES = ("TORCHINDUCTOR_", "TORCH_COMPILE", "AOT_INDUCTOR_", "AOTINDUCTOR_", "ATEN_CPU_CAPABILITY", "CXX")


@cache
def _environment() -> str:
    """Return a text about everything outside of a step that determines its compiled code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    capability = torch.backends.cpu.get_cpu_capability()
    facts = (torch.__version__, platform.python_version(), platform.machine(), processor, capability)
    return repr((*facts, digest.hexdigest()))
