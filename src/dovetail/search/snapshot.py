"""Copy of the code that trials run, taken once: later changes of the code affect only later experiments."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import ConfigError

IGNORE_FILES = (".detignore", ".dovetailignore")
"""Files at the top of the folder with patterns of files to leave out, one per line, like `.gitignore`."""

MAX_BYTES = 95 << 20
"""The largest size of a code folder in bytes; larger ones contain data."""

_NEVER = {".git", ".dovetail", "__pycache__"}


def take_snapshot(source: Path, target: Path, leave_out: Iterable[Path] = (), max_bytes: int = MAX_BYTES) -> int:
    """Copy a folder of code to a new folder, and return its size in bytes.

    The copy does not contain the paths in `leave_out`, files that `.detignore` and `.dovetailignore` list, `.git`,
    `.dovetail`, `__pycache__`, checkpoints, and special files. Links are copied as links; if they lead out of
    the folder, their target is made absolute.

    Raises:
        ConfigError: There is no such folder, or it is too large.
    """
    if not source.is_dir():
        what = "is not a folder" if source.exists() else "does not exist"
        raise ConfigError(f"context directory: expected a folder with the code, but {str(source)!r} {what}")
    rules = IgnoreRules.of(source)
    # The target may be inside of the source, and would be copied into itself.
    forbidden = {path.resolve() for path in (*leave_out, target)}
    entries = list(_entries(source, source, rules, forbidden))
    total = sum(entry.size for entry in entries)
    # Checked before anything is copied, so that a folder with a large dataset fails at once.
    if total > max_bytes:
        largest = max(entries, key=lambda entry: entry.size)
        raise ConfigError(
            f"context directory {str(source)!r} has {_megabytes(total)}; at most {_megabytes(max_bytes)} can "
            f"be copied for an experiment; the largest is {str(largest.name)!r} with {_megabytes(largest.size)}: list "
            f"what trials do not need in {' or '.join(IGNORE_FILES)}, and give data by their path"
        )
    target.mkdir(parents=True)
    for entry in entries:
        copy = target / entry.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if entry.leads_to is not None:
            copy.symlink_to(entry.leads_to)
        elif entry.is_folder:
            copy.mkdir(exist_ok=True)
        else:
            shutil.copy2(source / entry.name, copy)
    return total


@dataclass(frozen=True)
class IgnoreRules:
    """Patterns like in `.gitignore`: the last matching pattern decides, and `!` negates it.

    Example:
        >>> rules = IgnoreRules.parse(["*.ckpt", "/data/", "!small.ckpt"])
        >>> rules.ignores("runs/a.ckpt"), rules.ignores("small.ckpt"), rules.ignores("data", is_folder=True)
        (True, False, True)
        >>> rules.ignores("data"), rules.ignores("src/data", is_folder=True)
        (False, False)
    """

    patterns: Sequence[_Pattern]

    @classmethod
    def of(cls, folder: Path) -> IgnoreRules:
        """Return the rules of a folder."""
        lines: list[str] = []
        for name in IGNORE_FILES:
            with suppress(FileNotFoundError):
                lines += (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        return cls.parse(lines)

    @classmethod
    def parse(cls, lines: Iterable[str]) -> IgnoreRules:
        """Return the rules in lines of text; empty lines and lines with `#` are ignored."""
        return cls([_pattern(line) for line in lines if line.strip().strip("/!") and not line.startswith("#")])

    def ignores(self, name: str, is_folder: bool = False) -> bool:
        """Return whether to leave out a file or folder, given by its path relative to the top, with `/`."""
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.only_folders) and pattern.regex.fullmatch(name):
                return not pattern.takes_back
        return False


@dataclass(frozen=True)
class _Pattern:
    regex: re.Pattern[str]
    only_folders: bool
    takes_back: bool


def _pattern(line: str) -> _Pattern:
    # Spaces at the end count only after a backslash.
    text = re.sub(r"(?<!\\)\s+$", "", line)
    takes_back = text.startswith("!")
    text = text[takes_back:]
    only_folders = text.endswith("/")
    text = text.rstrip("/")
    # A slash at the start or in the middle anchors a pattern at the top; others may match at any depth.
    anywhere = "" if "/" in text else "(?:.*/)?"
    try:
        regex = re.compile(anywhere + _translated(text.lstrip("/")), re.DOTALL)
    except re.error as error:
        raise ConfigError(f"the pattern {line!r} of {' or '.join(IGNORE_FILES)} is invalid: {error}") from error
    return _Pattern(regex, only_folders, takes_back)


_PARTS = re.compile(r"\*\*/|/\*\*$|\*+|\?|\[!?\]?[^\]]*\]|\\.|.", re.DOTALL)


def _translated(text: str) -> str:
    if text == "**":
        return ".*"
    regex = ""
    for part in _PARTS.findall(text):
        if part == "**/":
            regex += "(?:.*/)?"
        elif part == "/**":
            regex += "/.*"
        elif part.startswith("*"):
            regex += "[^/]*"
        elif part == "?":
            regex += "[^/]"
        elif part.startswith("[") and len(part) > 2:
            negated = part[1] == "!"
            inside = re.sub(r"([\\\[\]^&|~])", r"\\\1", part[1 + negated : -1])
            regex += f"(?!/)[{'^' if negated else ''}{inside}]"
        else:
            regex += re.escape(part.removeprefix("\\") or part)
    return regex


@dataclass(frozen=True)
class _Entry:
    name: Path
    size: int = 0
    is_folder: bool = False
    leads_to: str | None = None


def _entries(folder: Path, root: Path, rules: IgnoreRules, forbidden: set[Path]) -> Iterator[_Entry]:
    for found in sorted(os.scandir(folder), key=lambda found: found.name):
        path = Path(found.path)
        name = path.relative_to(root)
        is_folder = found.is_dir(follow_symlinks=False)
        if found.name in _NEVER or rules.ignores(name.as_posix(), is_folder) or path.resolve() in forbidden:
            continue
        if found.is_symlink():
            yield _Entry(name, leads_to=_destination(path, root))
        elif is_folder:
            if not _is_checkpoint(path):
                yield _Entry(name, is_folder=True)
                yield from _entries(path, root, rules, forbidden)
        elif stat.S_ISREG((status := found.stat(follow_symlinks=False)).st_mode):
            yield _Entry(name, size=status.st_size)


def _destination(link: Path, root: Path) -> str:
    text = os.readlink(link)
    # A relative link within the folder is copied as it is: it then leads to the copy, not to the original.
    inside = not os.path.isabs(text) and link.resolve().is_relative_to(root.resolve())
    return text if inside else str(link.resolve())


def _is_checkpoint(folder: Path) -> bool:
    with suppress(OSError):
        return b'"format": "dovetail-' in (folder / "manifest.json").read_bytes()[:1024]
    return False


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MB"
