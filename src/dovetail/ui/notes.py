"""Tags and notes of runs, in a small file in the folder that was given to the page."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from dovetail.history.lines import write_atomically

FILE = ".dovetail-notes.json"
_LONGEST_TAG = 40
_MOST_TAGS = 20
_LONGEST_NOTE = 4000


@dataclass(frozen=True)
class Note:
    """Tags and text of a user about a run."""

    tags: tuple[str, ...] = ()
    text: str = ""


class Notes:
    """The tags and notes of the runs below a folder.

    A change is written completely or not at all. The file is read before every change, because another page may have
    changed it.

    Example:
        >>> import tempfile
        >>> notes = Notes(Path(tempfile.mkdtemp()))
        >>> notes.change("a/ck_history.jsonl", tags=["good", " good", ""], text="lr was too high")
        >>> Notes(notes.path.parent).get("a/ck_history.jsonl")
        Note(tags=('good',), text='lr was too high')
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = Lock()
        self._stamp: tuple[int, int] | None = None
        self._notes: dict[str, Note] = {}

    def get(self, key: str) -> Note:
        """Return the note of a run; an empty one if there is none."""
        with self._lock:
            self._refresh()
            return self._notes.get(key, Note())

    def change(self, key: str, tags: list[str] | None = None, text: str | None = None) -> None:
        """Store the tags or the text of a run; None keeps what is stored.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            self._refresh()
            before = self._notes.get(key, Note())
            note = Note(before.tags if tags is None else _clean(tags), before.text if text is None else _cut(text))
            notes = {**self._notes, key: note}
            plain = {name: {"tags": list(it.tags), "note": it.text} for name, it in notes.items() if it != Note()}
            content = json.dumps({"dovetail_notes": 1, "runs": plain}, indent=1)
            write_atomically(self.path, content.encode() + b"\n")
            self._notes = notes

    def _refresh(self) -> None:
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp == self._stamp:
                return
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            self._notes, self._stamp = {}, None
            return
        except (OSError, ValueError, RecursionError):
            # A damaged file is not overwritten by reading; its content counts as empty.
            self._notes, self._stamp = {}, None
            return
        self._stamp = stamp
        self._notes = {}
        runs = content.get("runs") if isinstance(content, dict) else None
        for key, value in runs.items() if isinstance(runs, dict) else ():
            with suppress(TypeError, AttributeError):
                self._notes[str(key)] = Note(_clean(value.get("tags", [])), _cut(str(value.get("note", ""))))


def _clean(tags: Any) -> tuple[str, ...]:
    words = [" ".join(str(tag).split())[:_LONGEST_TAG] for tag in tags]
    return tuple(dict.fromkeys(word for word in words if word))[:_MOST_TAGS]


def _cut(text: str) -> str:
    return text[:_LONGEST_NOTE]
