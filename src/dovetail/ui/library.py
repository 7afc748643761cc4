"""Library of the page: all runs, experiments and federations of the given folders and stores, followed by a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError
from dovetail.search.records import ExperimentRecord
from dovetail.search.secrets import masked_url
from dovetail.ui.experiments import ExperimentSource, settings_of, trial_state
from dovetail.ui.federations import Federation, is_federation
from dovetail.ui.notes import Note, Notes
from dovetail.ui.readers import ReportsReader
from dovetail.ui.runs import Run, find_folders, run_of

if TYPE_CHECKING:
    from dovetail.search.store import Store

POLL_SECONDS = 0.25
_SCAN_SECONDS = 2.0
_STORE_SECONDS = 1.0
# Seconds after which a run that no view shows is polled every tenth time only.
_QUIET_SECONDS = 30.0
# Seconds that the reading of new runs waits after a request, and the longest wait in a row.
_REQUEST_SECONDS = 0.3
_LONGEST_WAIT = 3.0
_BUDGET = 200 << 20
# New runs that are read between two checks of the memory.
_BETWEEN_CHECKS = 50


class Library:
    """Everything that the page shows.

    Args:
        places: Folders, and URLs of stores; empty means this folder.
        home: The folder of experiments that belongs to the URLs.

    Example:
        >>> import tempfile
        >>> library = Library([tempfile.mkdtemp()])
        >>> library.scan()
        >>> library.runs, library.sources
        ({}, [])
    """

    def __init__(self, places: Sequence[str | os.PathLike[str]] = (), home: Path | None = None) -> None:
        self.roots: list[Path] = []
        self.sources: list[ExperimentSource] = []
        self.runs: dict[str, Run] = {}
        self.federations: dict[str, Federation] = {}
        self.version = 0
        self._notes: list[Notes] = []
        self._stores: set[Path] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._requested = -1e9
        self._grouped = -1
        for place in places or ["."]:
            if "://" in (text := os.fspath(place)):
                self._add_server(text, home)
            else:
                self._add_folder(Path(text))

    def _add_folder(self, folder: Path) -> None:
        root = folder.absolute()
        if not root.is_dir():
            what = "is a file" if root.exists() else "does not exist"
            raise ConfigError(f"{folder}: expected a folder or the URL of a store, but it {what}")
        self.roots.append(root)
        self._notes.append(Notes(root))

    def _add_server(self, url: str, home: Path | None) -> None:
        from dovetail.search.store import Store

        self.sources.append(ExperimentSource(partial(Store.open, home, url), masked_url(url), len(self.sources)))

    # ------------------------------------------------------------------ following

    def give_way(self) -> None:
        """Delay the reading of new runs for a moment, because a view is being built: both share one interpreter."""
        self._requested = time.monotonic()

    def _wait_for_views(self) -> None:
        deadline = time.monotonic() + _LONGEST_WAIT
        while (left := self._requested + _REQUEST_SECONDS - time.monotonic()) > 0 and time.monotonic() < deadline:
            if self._stop.wait(left):
                return

    def start(self) -> None:
        """Follow all files in a thread until `stop`."""
        self._thread = threading.Thread(target=self._follow, name="dovetail-ui", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def _follow(self) -> None:
        scanned = read = -1e9
        turn = 0
        while not self._stop.is_set():
            now = time.monotonic()
            if now - scanned > _SCAN_SECONDS:
                self.scan()
                scanned = time.monotonic()
            # New runs first: reading a thousand of them takes seconds, in which others must stay up to date.
            self.poll(everything=turn % 10 == 0)
            if now - read > _STORE_SECONDS:
                self.poll_stores()
                read = time.monotonic()
            turn += 1
            self._stop.wait(POLL_SECONDS)

    def scan(self) -> None:
        """Find new runs, stores and federations, and remove those whose files are gone."""
        found: dict[str, Run] = {}
        federations: dict[str, Federation] = {}
        for place, root in enumerate(self.roots):
            for folder in find_folders(root):
                for history in folder.histories:
                    run = run_of(history, root, place)
                    found[run.key] = self.runs.get(run.key, run)
                if "store.db" in folder.names:
                    self._add_store(folder.path)
                if is_federation(folder.names):
                    name = folder.path.relative_to(root).as_posix()
                    key = f"{place}:{name}"
                    new = Federation(key, root.name if name == "." else name, folder.path)
                    federations[key] = self.federations.get(key, new)
        trials = {key: run for key, run in self.runs.items() if key.startswith("t")}
        if found.keys() | trials.keys() != self.runs.keys() or federations.keys() != self.federations.keys():
            self.version += 1
        # Replaced as a whole, because pages read them at the same time.
        self.runs, self.federations = {**found, **trials}, federations

    def _add_store(self, home: Path) -> None:
        if home in self._stores or (home / "store.db").is_symlink():
            return
        from dovetail.search.store import Store

        self._stores.add(home)
        shown = home.parent.name if home.name == ".dovetail" else home.name
        self.sources.append(ExperimentSource(partial(_open_file, Store, home), shown, len(self.sources)))

    def poll(self, *, everything: bool = True) -> None:
        """Read what is new in all runs and federations; those that are quiet only if `everything` is set."""
        self._read_new()
        for run in list(self.runs.values()):
            if self._stop.is_set():
                return
            is_watched = run.is_running or time.monotonic() - run.used < _QUIET_SECONDS
            if (everything or is_watched) and run.poll():
                self.version += 1
        for federation in list(self.federations.values()):
            if federation.poll():
                self.version += 1
        self._save_memory()

    def _read_new(self) -> None:
        """Read runs that have not been read yet: all journals first, which takes a moment, then the newest runs."""
        new = [run for run in self.runs.values() if not run.is_read]
        if sum(run.poll_journal() for run in new):
            self.version += 1
        for number, run in enumerate(sorted(new, key=lambda run: run.started, reverse=True)):
            self._wait_for_views()
            if number % _BETWEEN_CHECKS == 0:
                self._save_memory()
            if self._stop.is_set():
                return
            run.poll()
            # Computed here instead of in the first request for the table.
            run.summary()
            self.version += 1

    def _save_memory(self) -> None:
        loaded = [(run.used, run) for run in self.runs.values()]
        total = sum(run.reader.columns.num_bytes() for _, run in loaded)
        for _, run in sorted(loaded, key=lambda pair: pair[0]):
            if total <= _BUDGET:
                return
            total -= run.reader.columns.num_bytes()
            run.release()

    def poll_stores(self) -> None:
        """Read the experiments of all stores."""
        for source in list(self.sources):
            if source.poll():
                self._set_trials(source)
                self.version += 1
        if self._grouped != self.version:
            self._group_runs()
            self._grouped = self.version

    def _group_runs(self) -> None:
        """Give a run that a trainer in a trial has written, below the folder of the trial, the group of the trial."""
        groups = {run.folder: run.group for run in self.runs.values() if run.key.startswith("t")}
        for run in self.runs.values():
            group = next((groups[folder] for folder in (run.folder, *run.folder.parents) if folder in groups), "")
            if group and run.group != group:
                run.group = group
                run.version += 1
                self.version += 1

    def _set_trials(self, source: ExperimentSource) -> None:
        prefix = f"t{source.place}-"
        found: dict[str, Run] = {}
        for record in source.records.values():
            for trial in record.trials:
                key = f"{prefix}{trial.id}"
                run = self.runs.get(key)
                if run is None:
                    reader = ReportsReader(trial.directory / "metrics.jsonl")
                    run = Run(key, f"trial {trial.id}", trial.directory, trial.directory, reader)
                    run.group = f"{record.name} · experiment {record.id}"
                state = trial_state(trial, record)
                times = tuple(None if each is None else each.timestamp() for each in (trial.started, trial.ended))
                facts = (state, times, trial.reason or "")
                if (run.trial_state, run.trial_times, run.trial_reason) != facts:
                    run.trial_state, run.trial_times, run.trial_reason = state, (times[0], times[1]), facts[2]
                    run.trial_settings = settings_of(trial)
                    run.version += 1
                found[key] = run
        others = {key: run for key, run in self.runs.items() if not key.startswith(prefix)}
        self.runs = {**others, **found}

    # ------------------------------------------------------------------ lookup

    def experiment(self, place: int, number: int) -> tuple[ExperimentSource, ExperimentRecord] | None:
        """Return an experiment and its store, or None if there is none."""
        if not 0 <= place < len(self.sources) or number not in self.sources[place].records:
            return None
        return self.sources[place], self.sources[place].records[number]

    def note(self, run: Run) -> Note:
        """Return the tags and the note of a run."""
        found = self._notes_of(run)
        return found[0].get(found[1]) if found else Note()

    def set_note(self, run: Run, tags: list[str] | None = None, text: str | None = None) -> None:
        """Store the tags or the note of a run.

        Raises:
            ConfigError: The run is a trial of a server, and no folder was given.
            OSError: The file cannot be written.
        """
        if (found := self._notes_of(run)) is None:
            raise ConfigError("give a folder to the page: notes are stored in a file there")
        found[0].change(found[1], tags, text)
        self.version += 1

    def _notes_of(self, run: Run) -> tuple[Notes, str] | None:
        if run.key.startswith("t"):
            return (self._notes[0], run.key) if self._notes else None
        place, _, key = run.key.partition(":")
        return self._notes[int(place)], key


def _open_file(store: type[Store], home: Path) -> Store:
    # The environment may name a server, which is not the store of this folder.
    from dovetail.extras import require
    from dovetail.search.databases import file_url, open_file

    require("optuna", "search")
    return store(home, file_url(home), open_file(home))
