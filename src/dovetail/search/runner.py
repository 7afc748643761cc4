"""Runner of an experiment, which can be killed at any moment.

    python -m dovetail.search HOME EXPERIMENT

One thread polls the trials. Every event goes through three stages, in this order:

1. Read the files of the trials: reports in `metrics.jsonl`, exit codes in `attempts/<n>`. They are never lost.
2. Report the event to the searcher, once and in order. The searcher's state, its decisions and the last event that it
   has received are stored as one value: a decision is stored completely or not at all.
3. Carry out the decisions: write values and states, start and stop processes. Each of these may be repeated.

So the next runner after one that was killed loads that value, repeats the third stage, and continues.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from dovetail.errors import DovetailError
from dovetail.info import TrialInfo, write_info
from dovetail.runtime.signals import collect_signals
from dovetail.search.checkpoints import latest_checkpoint, remove_surplus
from dovetail.search.databases import file_url
from dovetail.search.evidence import (
    first_metric,
    has_read_hparams,
    reset_access_time,
    sentence_about_hparams,
    sentence_about_metric,
    sentence_about_time,
)
from dovetail.search.failures import append_to_log, last_message, log_size, newest_checkpoint
from dovetail.search.processes import Attempt, Backend, Ended, ExitRequest
from dovetail.search.records import OVER, ExperimentRecord, ExperimentState, TrialRecord, TrialState, best_step
from dovetail.search.reports import LARGEST_STEP, METRICS, Reports, number, shortened
from dovetail.search.schema import read_experiment
from dovetail.search.searchers import Searcher, Suggestion, make_searcher
from dovetail.search.searchers.base import verdict
from dovetail.search.secrets import masked
from dovetail.search.space import Space
from dovetail.search.starting import backend_for, command_of, trial_seed, variables_of
from dovetail.search.store import REQUESTS, STORE, Store, experiment_record
from dovetail.units import counted

Observer = Callable[[ExperimentRecord], None]

# Seconds that a trial has to save and exit before it is killed.
_GRACE = 30.0
# Seconds between two polls: a twentieth of the time since the last event, so that waiting costs little.
_SHORTEST, _LONGEST, _SHARE = 0.005, 0.25, 0.05
_OBSERVED_EVERY = 0.25
_SHOWN_EVERY = 5.0
# Maximal number of rejected lines in the log of a trial; a broken script may write millions.
_NAMED_LINES = 20
_LONGEST_STATUS = 200
# The fields of a trial that the next runner needs and that are in no file of the trial, with their keys in the store.
_KEYS = {"searcher_steps": "told"} | {it: it for it in ("verdict", "end", "reason", "failure", "log_at", "rejected_to")}
_SIGNAL_MESSAGES = ("trials save and exit (press again to kill them)", "killing the trials")


class Runner:
    r"""Runs an experiment to its end, or until it is paused.

    Ctrl-C or SIGTERM pauses: trials save and exit, and the next run resumes them. The second signal kills the trials,
    which then resume from their last checkpoint. Other processes pause an experiment with `Store.request`.

    Args:
        store: The store of the experiment.
        experiment_id: The number of the experiment.
        backend: The backend that runs trials; None means the one of the configuration.
        observer: Receives the record of the experiment a few times a second while it runs, and at the end.

    Example:
        >>> import tempfile
        >>> from dovetail.config import parse_config
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "code").mkdir()
        >>> row = '{"group": "validation", "steps_completed": 1, "metrics": {"loss": 0.5}}'
        >>> script = f"echo '{row}' >${{DOVETAIL_TRIAL%/*}}/metrics.jsonl"
        >>> _ = (folder / "code" / "train.sh").write_text(script)
        >>> text = "entrypoint: sh train.sh\nsearcher: {name: single, metric: loss}\nhyperparameters: {lr: 0.1}\n"
        >>> store = Store.open(folder / "home")
        >>> experiment = store.create_experiment(read_experiment(parse_config(text)), text, folder / "code")
        >>> done = Runner(store, experiment.id).run()
        >>> done.state, [trial.state for trial in done.trials]
        ('COMPLETED', ['COMPLETED'])
    """

    def __init__(
        self, store: Store, experiment_id: int, backend: Backend | None = None, observer: Observer | None = None
    ) -> None:
        self.store = store
        self.experiment_id = experiment_id
        self._observer = observer
        self._backend = backend
        self._directory = store.folder(experiment_id)
        with warnings.catch_warnings():
            # The warning about ignored keys was shown when the experiment was created.
            warnings.simplefilter("ignore", UserWarning)
            self._config = read_experiment(store.config(experiment_id))
        self._space = Space(self._config.hyperparameters)
        self._signals: Sequence[int] = ()
        self._observed_at = 0.0

    def run(self, *, only_request: bool = False) -> ExperimentRecord:
        """Run the experiment, and return its record. Do nothing if it has already ended.

        With `only_request` it is not run further: only a stop request (`Store.request`) is carried out.

        Raises:
            ExperimentError: Another process runs it.
        """
        with self.store.running(self.experiment_id), collect_signals(_SIGNAL_MESSAGES) as self._signals:
            before = self.store.experiment(self.experiment_id)
            wanted = _read_request(self._directory)
            is_granted = wanted is None or (wanted == "pause" and before.state == "PAUSED")
            # Only one that was read: another one may be made right now.
            if wanted is not None and (before.state in OVER or is_granted):
                self._remove_request()
            if before.state not in OVER and not (only_request and is_granted):
                self._load(before)
                self._run_to_end()
        return self.store.experiment(self.experiment_id)

    def _run_to_end(self) -> None:
        event_at = time.monotonic()
        while (outcome := self._outcome()) is None:
            if self._look_around():
                event_at = time.monotonic()
            self._observe()
            idle = time.monotonic() - event_at
            time.sleep(min(max(_SHORTEST, idle * _SHARE), _LONGEST))
        self.store.set_state(self.experiment_id, *outcome)
        self._remove_request()
        self._log(f"experiment {outcome[0]}" + (f": {outcome[1]}" if outcome[1] else ""))
        self._observe(now=True)

    # ------------------------------------------------------------------ resuming

    def _load(self, record: ExperimentRecord) -> None:
        self._log(f"process {os.getpid()} runs experiment {record.id}")
        self._study = self.store.study(self.experiment_id)
        self._place = self.store.trials_directory(self.experiment_id)
        self._searcher: Searcher = make_searcher(self._config.searcher, self._space, self._config.seed)
        self._work = self._backend or backend_for(self._config, self._searcher.max_concurrent_trials)
        # After the backend exists: an experiment that cannot run here remains paused.
        if record.state == "PAUSED":
            self.store.set_state(self.experiment_id, "ACTIVE")
        self._trials: dict[int, _Trial] = {}
        self._folders: dict[int, Path] = {trial.number: trial.directory for trial in record.trials}
        self._ended: dict[Path, Mapping[int, float]] = {}
        self._num_failed = sum(trial.state in ("ERROR", "INVALID_HP") for trial in record.trials)
        self._request: Literal["pause", "cancel", "kill"] | None = None
        self._is_exhausted = False
        self._warnings = list(record.warnings)
        self._metric = record.metric
        memory = self.store.memory(self.experiment_id)
        if memory:
            self._searcher.load_state_dict(memory["searcher"])
        stored: Mapping[str, Any] = memory.get("trials", {})
        for each in record.trials:
            if each.ended is None:
                self._trials[each.number] = self._restore_trial(each, stored.get(str(each.number), {}))
            else:
                self._ended[each.directory] = each.values
        pending = memory.get("pending")
        if pending is not None and pending["number"] == len(record.trials):
            suggested = {name: value for name, value in pending.items() if name != "number"}
            self._create(pending["number"], Suggestion(**suggested))

    def _restore_trial(self, record: TrialRecord, stored: Mapping[str, Any]) -> _Trial:
        known = {name: stored[key] for name, key in _KEYS.items() if key in stored}
        trial = _Trial(record, Reports(record.directory / METRICS), values=dict(record.values), **known)
        attempts = Attempt.all_of(record.directory)
        if attempts and self._work.adopt(attempts[-1]):
            trial.attempt, trial.is_at_work = attempts[-1], trial.end is None
        # The last attempt is evaluated when it ends, unless that was done before.
        earlier = attempts[:-1] if trial.is_at_work or trial.end is not None else attempts
        failures = sum(attempt.exit_request is None and attempt.exit_code != 0 for attempt in earlier)
        trial.restarts = min(failures, self._config.max_restarts)
        return trial

    # ------------------------------------------------------------------ one poll

    def _look_around(self) -> bool:
        """Run the three stages in the module's docstring for all trials, and return whether there was any event."""
        self._check_requests()
        found = False
        for trial in list(self._trials.values()):
            found |= self._learn(trial)
        if found:
            self._remember()
        for trial in list(self._trials.values()):
            found |= self._act(trial)
        return self._suggest() or found

    def _learn(self, trial: _Trial) -> bool:
        """Read the files of a trial, and report its events to the searcher."""
        # Check for the end first: an attempt that has ended writes no further reports.
        ended = self._work.poll(trial.attempt) if trial.attempt is not None and trial.is_at_work else None
        found = self._read_reports(trial)
        if ended is None:
            return found
        trial.is_at_work = False
        trial.end = self._decide_end(trial, ended)
        trial.log_at = log_size(trial.folder)
        if trial.end is not None and trial.end != "CANCELED":
            self._searcher.on_exit(trial.number, trial.end)
        return True

    def _read_reports(self, trial: _Trial) -> bool:
        """Read the new reports of a trial, and return whether any of them changes the stored state."""
        found = False
        try:
            for row in trial.reports.read():
                found |= self._process_report(trial, row)
            trial.unreadable = None
        except OSError as error:
            # The other trials continue; this one fails when its attempt ends.
            trial.unreadable = f"its reports cannot be read: {error}"
            self._complain(trial, trial.unreadable)
        for line in trial.reports.rejected:
            # A runner that follows a killed one reads all lines again, but must not log them again.
            if line.end > trial.rejected_to:
                trial.rejected_to, found = line.end, True
                self._reject(trial, f"{METRICS}, line {line.number}: {line.reason}; the line is ignored")
        return found

    def _reject(self, trial: _Trial, sentence: str) -> None:
        """Log that a line of reports was ignored, in the log of its trial."""
        trial.num_rejected += 1
        if trial.num_rejected > _NAMED_LINES:
            return
        if trial.num_rejected == _NAMED_LINES:
            sentence += "; further ones are ignored without a message"
        append_to_log(trial.folder, sentence)
        self._log(f"trial {trial.id}: {sentence}")

    def _process_report(self, trial: _Trial, row: Mapping[str, Any]) -> bool:
        if row.get("exited") == "INVALID_HP":
            trial.is_invalid = True
        trial.progress = number(row, "progress") if "progress" in row else trial.progress
        trial.status = shortened(row["status"], _LONGEST_STATUS) if "status" in row else trial.status
        if "group" not in row:
            return False
        group, steps, metrics = row["group"], row["steps_completed"], row["metrics"]
        trial.steps = max(trial.steps, steps)
        trial.reported.setdefault(group, set()).update(metrics)
        if group != "validation":
            return False
        searcher = self._config.searcher
        if not self._metric and (name := first_metric(metrics)):
            self._metric = name
            self.store.set_first_metric(self.experiment_id, name)
        value = number(metrics, self._metric)
        if value is None:
            missing = repr(self._metric) if self._metric else "at all"
            self._complain(trial, f"its validation reports no number {missing}, which the searcher needs")
            return False
        if trial.values.get(steps) != value:
            trial.fresh[steps] = value
        at = float(steps) if searcher.time_metric == "batches" else number(metrics, searcher.time_metric)
        # A NaN or infinite value is accepted as a bad one, but such a time cannot be compared.
        if at is None or not 0 <= at <= LARGEST_STEP:
            self._complain(
                trial, f"its validation reports no number {searcher.time_metric!r}, which the searcher needs"
            )
            self._warn(sentence_about_time(self._metric, searcher))
            return False
        # A resumed trial repeats the reports after its checkpoint; the searcher has already received them.
        if steps <= trial.searcher_steps or trial.verdict is not None:
            return False
        trial.searcher_steps = steps
        if not self._searcher.on_validation(trial.number, int(at), value):
            trial.verdict = verdict(searcher, at)
        return True

    def _decide_end(self, trial: _Trial, ended: Ended) -> TrialState | None:
        """Return the final state of a trial whose attempt has ended; None if it is to be restarted."""
        assert trial.attempt is not None
        request = trial.attempt.exit_request
        trial.reason = None
        if trial.is_invalid:
            trial.reason = "the trial reported that its hyperparameters are invalid"
            return "INVALID_HP"
        if trial.unreadable is not None:
            trial.reason = trial.unreadable
            return "ERROR"
        # A trial that the searcher has stopped may exit with code 0 before it is done.
        if ended.code == 0 and not trial.attempt.was_preempted and (trial.verdict is None or request is None):
            missing = self._missing_metric(trial)
            if missing is None:
                return "COMPLETED"
            # Another attempt would end in the same way. After an exit request the trial may exit before its report.
            if request is None:
                trial.reason = missing
                return "ERROR"
        if trial.verdict is not None:
            return self._stopped(trial)
        if request == "cancel":
            return "CANCELED"
        if request == "pause":
            trial.failure = None
            return None
        is_hopeless = self._has_failed(trial, trial.attempt, ended)
        self._log(f"trial {trial.id}: {trial.reason}")
        if is_hopeless or trial.restarts >= self._config.max_restarts:
            return "ERROR"
        trial.restarts += 1
        return None

    def _missing_metric(self, trial: _Trial) -> str | None:
        """Return what a trial with exit code 0 has not done for the search; None if nothing is missing."""
        found = []
        names = self._space.parameters.keys()
        # On a cluster another machine reads the file, so its access time is not reliable.
        if names and self._config.cluster is None and not has_read_hparams(trial.folder, trial.folder / "info.json"):
            found.append(sentence_about_hparams(names))
        given = self._config.searcher.metric
        # If no metric is configured, a trial may report another one than the first trial did.
        if not (trial.values or trial.fresh) and (given or not self._metric or not trial.reported.get("validation")):
            found.append(sentence_about_metric(given, trial.reported))
        return "; ".join(found) or None

    def _has_failed(self, trial: _Trial, attempt: Attempt, ended: Ended) -> bool:
        """Set the reason of a failure, and return whether the previous attempt failed in the same way and place."""
        before, trial.failure = trial.failure, None
        if before is not None and before["attempt"] == attempt.number:
            # A runner that was killed before it started the next attempt has already evaluated this one.
            trial.failure, trial.reason = before, before["reason"]
            return False
        words = last_message(trial.folder, trial.log_at)
        said = f": {words}" if words else ""
        how = "was killed" if ended.code is None else f"ended with exit code {ended.code}"
        trial.reason = f"attempt {attempt.number} {how}{said}"
        # A process that was killed, by a signal or with its machine, did not fail by itself.
        if ended.code is None or not 0 < ended.code < 128:
            return False
        # Addresses of objects differ from process to process.
        plain = re.sub(r"0x[0-9a-fA-F]+", "0x", words)
        place = [ended.code, plain, trial.steps, newest_checkpoint(trial.folder)]
        trial.failure = {"attempt": attempt.number, "place": place, "reason": trial.reason}
        if before is None or before["place"] != place:
            return False
        trial.reason = (
            f"attempts {before['attempt']} and {attempt.number} ended in the same way, with exit code {ended.code} "
            f"and no progress in between{said}"
        )
        return True

    def _stopped(self, trial: _Trial) -> TrialState | None:
        # The batches of the decisive report: the trial trained further until it was stopped.
        seen = counted(trial.searcher_steps, "batch", "batches")
        trial.reason = f"stopped by the searcher for its value after {seen}" if trial.verdict == "STOPPED" else None
        return trial.verdict

    def _remember(self, pending: Mapping[str, Any] | None = None) -> None:
        trials = {
            str(it.number): {key: getattr(it, name) for name, key in _KEYS.items()} for it in self._trials.values()
        }
        memory = {"searcher": self._searcher.state_dict(), "trials": trials, "pending": pending}
        self.store.remember(self.experiment_id, memory)

    def _act(self, trial: _Trial) -> bool:
        """Carry out the decisions about a trial."""
        for steps, value in trial.fresh.items():
            self.store.add_value(trial.id, steps, value)
        trial.values |= trial.fresh
        trial.fresh = {}
        if trial.end is None and not trial.is_at_work:
            if self._request is None:
                self._start(trial)
                return True
            if self._request in ("cancel", "kill"):
                # Otherwise another runner that is about to start it could still do so.
                self._next_attempt(trial).request_exit("cancel")
                trial.end = "CANCELED"
        if trial.end is not None:
            self._finish(trial, trial.end)
            return True
        if trial.is_at_work:
            self._stop_if_requested(trial)
            self._show(trial)
        return False

    def _show(self, trial: _Trial) -> None:
        """Store the progress of a trial from time to time, for other readers of the store."""
        stored_at, *stored = trial.stored_progress
        if stored != [trial.steps, trial.progress, trial.status] and time.monotonic() - stored_at > _SHOWN_EVERY:
            self.store.update_trial(self._record_of(trial, "RUNNING"))
            trial.stored_progress = time.monotonic(), trial.steps, trial.progress, trial.status

    def _stop_if_requested(self, trial: _Trial) -> None:
        """Stop a trial if the searcher or the user has requested it."""
        attempt = trial.attempt
        assert attempt is not None
        request = "cancel" if self._request == "kill" else self._request
        wanted: ExitRequest | None = "stop" if trial.verdict is not None else request
        earlier = attempt.exit_request
        if wanted is not None and (earlier is None or (wanted == "cancel" and earlier == "pause")):
            attempt.request_exit(wanted)
        elif earlier is None:
            return
        # Only once, because trials exit immediately after a second signal.
        if not attempt.was_signalled:
            self._work.stop(attempt)
            attempt.note_signal()
        # A launcher gives its processes the same time, and then needs a moment itself.
        grace = _GRACE if self._config.slots == 1 else _GRACE + 10
        if self._request == "kill" or len(self._signals) > 1 or time.time() - attempt.exit_requested_at > grace:
            self._work.stop(attempt, kill=True)

    def _finish(self, trial: _Trial, end: TrialState) -> None:
        self.store.end_trial(self._record_of(trial, end))
        del self._trials[trial.number]
        self._ended[trial.folder] = trial.values
        self._num_failed += end in ("ERROR", "INVALID_HP")
        self._log(f"trial {trial.id} {end}" + (f": {trial.reason}" if trial.reason else ""))
        keep = self._config.checkpoint_storage
        everyone = {**self._ended, **{it.folder: it.values for it in self._trials.values()}}
        try:
            remove_surplus(
                # The best checkpoints of the experiment depend on all trials, the best of a trial on this one only.
                everyone if keep.save_experiment_best else {trial.folder: trial.values},
                list(self._ended),
                experiment_best=keep.save_experiment_best,
                trial_best=keep.save_trial_best,
                trial_latest=keep.save_trial_latest,
                smaller_is_better=self._config.searcher.smaller_is_better,
            )
        except (OSError, DovetailError) as error:
            self._log(f"trial {trial.id}: old checkpoints could not be removed: {error}")

    # ------------------------------------------------------------------ starting

    def _suggest(self) -> bool:
        """Create and start the trials that the searcher suggests now."""
        limit = min(self._searcher.max_concurrent_trials, self._work.capacity(self._config.slots))
        found = self._is_exhausted = False
        while self._request is None and len(self._trials) < limit:
            following = len(self._folders)
            suggestion = self._searcher.suggest(self._study, following)
            if suggestion is None:
                self._is_exhausted = True
                break
            self._remember({"number": following, **asdict(suggestion)})
            self._start(self._create(following, suggestion))
            found = True
        return found

    def _create(self, following: int, suggestion: Suggestion) -> _Trial:
        hparams = self._space.hparams(suggestion.params)
        trial_id = self.store.add_trial(
            self.experiment_id,
            suggestion.params,
            self._space.distributions(),
            hparams,
            suggestion.source,
            suggestion.attributes,
        )
        folder = self._place / f"trial_{trial_id}"
        record = TrialRecord(
            trial_id, following, self.experiment_id, "RUNNING", hparams, folder, source=suggestion.source
        )
        self._folders[following] = record.directory
        self._trials[following] = trial = _Trial(record, Reports(record.directory / METRICS))
        return trial

    def _start(self, trial: _Trial) -> None:
        if trial.folder.is_symlink():
            trial.end, trial.reason = "ERROR", f"its folder {str(trial.folder)!r} is a link: nothing is written there"
            self._searcher.on_exit(trial.number, "ERROR")
            return
        trial.folder.mkdir(parents=True, exist_ok=True)
        link = self._directory / "trials" / trial.folder.name
        if not (link.exists() or link.is_symlink()):
            # Trials in another folder are linked here.
            link.symlink_to(trial.folder)
        info = TrialInfo(
            trial_id=trial.id,
            experiment_id=self.experiment_id,
            hparams=trial.record.hparams,
            config=masked(self._config.raw),
            user_data=dict(self._config.data),
            latest_checkpoint=self._checkpoint_for(trial),
            trial_seed=trial_seed(self._config.seed, trial.number),
            slots=self._config.slots,
            directory=str(trial.folder),
        )
        write_info(trial.folder / "info.json", info)
        reset_access_time(trial.folder / "info.json")
        env = variables_of(self._config, self.store.home, trial.folder / "info.json")
        if trial.attempt is not None or trial.record.state == "WAITING":
            self.store.update_trial(self._record_of(trial, "RUNNING"))
        trial.attempt, trial.is_at_work = self._next_attempt(trial), True
        command = command_of(self._config.entrypoint, self._config.slots)
        self._log(
            f"trial {trial.id} starts (attempt {trial.attempt.number}, from {info.latest_checkpoint or 'the start'})"
        )
        self._work.start(trial.attempt, command, env, self._directory / "code", self._config.slots)

    def _next_attempt(self, trial: _Trial) -> Attempt:
        begun = Attempt.all_of(trial.folder)
        return Attempt.of(trial.folder, begun[-1].number + 1 if begun else 0)

    def _checkpoint_for(self, trial: _Trial) -> str | None:
        own = latest_checkpoint(trial.folder)
        if own is not None:
            return own.reference
        source = None
        if trial.record.source is not None:
            source = self._folders[trial.record.source]
        elif self._config.searcher.source_trial_id is not None:
            source = self.store.trial(self._config.searcher.source_trial_id).directory
        found = None if source is None else latest_checkpoint(source)
        if source is not None and found is None:
            self._warn(
                f"{source.name} has no intact checkpoint, so trials that should continue from it start from scratch"
            )
        if found is not None and found.is_files:
            # A script loads it by name from the folder of the new trial.
            shutil.copytree(found.path, trial.folder / found.path.name, dirs_exist_ok=True)
        return None if found is None else found.reference

    # ------------------------------------------------------------------ ending

    def _outcome(self) -> tuple[ExperimentState, str | None] | None:
        """Return the final state of the experiment, once it has ended."""
        if any(trial.is_at_work or trial.end is not None for trial in self._trials.values()):
            return None
        if self._request == "pause":
            for trial in self._trials.values():
                self.store.update_trial(self._record_of(trial, "WAITING"))
            return "PAUSED", "trials were killed" if len(self._signals) > 1 else None
        if self._trials:
            return None
        if self._request in ("cancel", "kill"):
            return "CANCELED", None
        # No trial runs, so no event can change the searcher's result.
        if not self._is_exhausted:
            return None
        if self._num_failed == len(self._folders) and self._folders:
            return "ERROR", "no trial has succeeded"
        return "COMPLETED", None

    def _check_requests(self) -> None:
        """Read requests to pause, cancel or kill the experiment."""
        wanted = _read_request(self._directory)
        if wanted is not None and wanted != self._request:
            self._log(f"{wanted} requested")
            self._request = wanted
        elif self._request is None and self._signals:
            self._log("signal received: trials save and exit")
            self._request = "pause"

    def _remove_request(self) -> None:
        (self._directory / "wish").unlink(missing_ok=True)

    # ------------------------------------------------------------------ reporting

    def _record_of(self, trial: _Trial, state: TrialState) -> TrialRecord:
        best_at = best_step(trial.values, self._config.searcher.smaller_is_better)
        return replace(
            trial.record,
            state=state,
            restarts=trial.restarts,
            reason=trial.reason,
            steps=trial.steps,
            progress=trial.progress,
            status=trial.status,
            best=None if best_at is None else trial.values[best_at],
            best_at=best_at,
        )

    def _observe(self, now: bool = False) -> None:
        if self._observer is None or not (now or time.monotonic() - self._observed_at > _OBSERVED_EVERY):
            return
        attributes = self.store.storage.get_study_user_attrs(self.experiment_id)
        record = experiment_record(self.experiment_id, attributes, self._study.get_trials(deepcopy=False))
        self._observer(replace(record, trials=tuple(map(self._live, record.trials))))
        self._observed_at = time.monotonic()

    def _live(self, record: TrialRecord) -> TrialRecord:
        """Return a trial with its progress since the last update of the store."""
        trial = self._trials.get(record.number)
        if trial is None:
            return record
        return replace(record, steps=max(record.steps, trial.steps), progress=trial.progress, status=trial.status)

    def _complain(self, trial: _Trial, sentence: str) -> None:
        if sentence not in trial.complaints:
            trial.complaints.add(sentence)
            self._log(f"trial {trial.id}: {sentence}")

    def _warn(self, sentence: str) -> None:
        """Add a warning to the experiment, once; every view of the experiment shows it."""
        if sentence not in self._warnings:
            self._warnings.append(sentence)
            self.store.set_warnings(self.experiment_id, self._warnings)
            self._log(f"warning: {sentence}")

    def _log(self, sentence: str) -> None:
        with suppress(OSError), open(self._directory / "runner.log", "a", encoding="utf-8") as log:
            log.write(f"{datetime.now().isoformat(sep=' ', timespec='milliseconds')} {sentence}\n")


@dataclass
class _Trial:
    """A trial that has not ended."""

    record: TrialRecord
    reports: Reports
    attempt: Attempt | None = None
    is_at_work: bool = False
    values: dict[int, float] = field(default_factory=dict)
    """The metric by batches, as stored."""
    fresh: dict[int, float] = field(default_factory=dict)
    """Values that are not stored yet."""
    searcher_steps: int = -1
    """The batches of the last report that the searcher has received."""
    verdict: Literal["STOPPED", "COMPLETED"] | None = None
    """The final state if the searcher has stopped it, else None."""
    is_invalid: bool = False
    end: TrialState | None = None
    reason: str | None = None
    restarts: int = 0
    failure: dict[str, Any] | None = None
    """How its last attempt failed, if it failed by itself."""
    log_at: int = 0
    """The size of the log at the end of the last attempt, where the output of the next one starts."""
    steps: int = 0
    progress: float | None = None
    status: str | None = None
    stored_progress: tuple[float, int, float | None, str | None] = field(
        default_factory=lambda: (time.monotonic(), 0, None, None)
    )
    """When the progress was last stored, and its value."""
    complaints: set[str] = field(default_factory=set)
    reported: dict[str, set[str]] = field(default_factory=dict)
    """The names of the reported metrics, by group."""
    unreadable: str | None = None
    """Why its reports cannot be read."""
    rejected_to: int = 0
    """The position, in bytes, after the last rejected line that was logged."""
    num_rejected: int = 0

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def folder(self) -> Path:
        return self.record.directory


def request(store: Store, experiment_id: int, command: str) -> ExperimentRecord:
    """Request that an experiment is paused, canceled or killed, and return its record.

    Without a runner, its remaining trials are stopped here. With one, the record may not show the request yet.
    """
    store.request(experiment_id, command)
    record = store.experiment(experiment_id)
    return record if record.is_running else Runner(store, experiment_id).run(only_request=True)


def start_detached(store: Store, experiment_id: int) -> subprocess.Popen[bytes]:
    """Start a process that runs an experiment and outlives this one; its output is in `runner.log`."""
    directory = store.folder(experiment_id)
    # Without the variable the process opens the database file in the folder.
    elsewhere = {} if store.url == file_url(store.home) else {STORE: store.url}
    with open(directory / "runner.log", "ab") as log:
        process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", "dovetail.search", str(store.home), str(experiment_id)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **elsewhere},
            start_new_session=True,
        )
    # Otherwise a zombie process remains as long as this process runs.
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an experiment in this process; the exit code is 1 if it fails."""
    parser = argparse.ArgumentParser(prog="python -m dovetail.search", description="Run an experiment.")
    parser.add_argument("home", type=Path, help="the folder of experiments")
    parser.add_argument("experiment", type=int, help="the number of the experiment")
    options = parser.parse_args(arguments)
    try:
        return int(Runner(Store.open(options.home), options.experiment).run().state == "ERROR")
    except DovetailError as error:
        print(f"dovetail: {error}", file=sys.stderr)
        return 1


def _read_request(directory: Path) -> Literal["pause", "cancel", "kill"] | None:
    with suppress(FileNotFoundError):
        wanted = (directory / "wish").read_text()
        return cast(Any, wanted) if wanted in REQUESTS else None
    return None
