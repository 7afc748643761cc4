"""Store of experiments: an Optuna study for each, and a folder for its files.

A study contains the configuration, trials, hyperparameters, metrics and states. Every tool for Optuna can open it. The
folder `.dovetail` contains

    store.db                          the studies, unless they are on a server
    experiments/<id>/                 config.yaml, config.json, code, runner.log, lock, wish
    experiments/<id>/trials/trial_<id>/   info.json, log.txt, metrics.jsonl, checkpoints, attempts
    jobs/<id>/                        config.yaml, code, info.json, log.txt, job.json, attempts
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from dovetail.errors import UnknownNameError
from dovetail.extras import require
from dovetail.printing import quiet
from dovetail.search.databases import file_url, open_file, open_server
from dovetail.search.locks import hold_lock, is_taken
from dovetail.search.processes import Attempt, is_at_work
from dovetail.search.records import (
    OVER,
    ExperimentError,
    ExperimentRecord,
    ExperimentState,
    JobRecord,
    TrialRecord,
    TrialState,
    best_step,
    no_such,
)
from dovetail.search.secrets import masked, write_private
from dovetail.search.snapshot import take_snapshot

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from dovetail.search.schema import ExperimentConfig

HOME = "DOVETAIL_HOME"
"""The environment variable with the folder of experiments."""

STORE = "DOVETAIL_STORE"
"""The environment variable with the URL of a database server, if there is one."""

REQUESTS = ("pause", "cancel", "kill")
"""Requests for a running experiment."""

# PostgreSQL counts rows with 32 bits.
_LARGEST_NUMBER = 2**31 - 1
_RECORD = "dovetail"
# The fields of a trial that Optuna cannot store itself.
_STORED_FIELDS = ("experiment_id", "hparams", "source", "state", "restarts", "reason", "steps", "progress", "status")
_STATE = "state"
_WARNINGS = "warnings"
_FIRST_METRIC = "first_metric"
_MEMORY = "dovetail:runner"


def home_directory(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of experiments: the given one, else `DOVETAIL_HOME`, else `.dovetail` here."""
    return Path(given or os.environ.get(HOME) or ".dovetail").absolute()


@dataclass(eq=False, repr=False)
class Store:
    """The store of experiments, their trials, and jobs. Use `Store.open` to create it.

    Attributes:
        home: The folder of all files.
        url: The URL of the database, for SQLAlchemy; it may contain a password.
        storage: Optuna's storage object.

    Example:
        >>> import tempfile
        >>> store = Store.open(tempfile.mkdtemp())
        >>> store.experiments(), store.jobs()
        ([], [])
    """

    home: Path
    url: str
    storage: BaseStorage

    @classmethod
    def open(cls, home: str | os.PathLike[str] | None = None, url: str | None = None) -> Store:
        """Open the store; create it if it does not exist.

        Args:
            home: The folder of experiments; see `home_directory`.
            url: A database server, such as `postgresql://user@host/name`; None means `DOVETAIL_STORE`, or else the
                file `store.db` in the folder.

        Raises:
            MissingExtraError: Optuna, or the driver of the server, is not installed.
            ExperimentError: The server does not respond.
        """
        require("optuna", "search")
        folder = home_directory(home)
        folder.mkdir(parents=True, exist_ok=True)
        address = url or os.environ.get(STORE)
        if address is not None:
            return cls(folder, address, open_server(address))
        return cls(folder, file_url(folder), open_file(folder))

    # ------------------------------------------------------------------ reading

    def experiments(self) -> list[ExperimentRecord]:
        """Return all experiments, oldest first."""
        return [self._experiment(number, attributes) for number, attributes in self.attributes().items()]

    def attributes(self) -> dict[int, Mapping[str, Any]]:
        """Return what is stored about each experiment besides its trials, by its number, oldest first."""
        studies = sorted(self.storage.get_all_studies(), key=lambda study: study._study_id)
        return {study._study_id: study.user_attrs for study in studies if _RECORD in study.user_attrs}

    def experiment(self, experiment_id: int) -> ExperimentRecord:
        """Return an experiment.

        Raises:
            ExperimentError: There is no experiment with this number.
        """
        attributes: Mapping[str, Any] = {}
        if _is_possible(experiment_id):
            with suppress(KeyError):
                attributes = self.storage.get_study_user_attrs(experiment_id)
        if _RECORD not in attributes:
            raise no_such("experiment", experiment_id, [each.id for each in self.experiments()])
        return self._experiment(experiment_id, attributes)

    def trial(self, trial_id: int) -> TrialRecord:
        """Return a trial.

        Raises:
            ExperimentError: There is no trial with this number.
        """
        if _is_possible(trial_id):
            with suppress(KeyError):
                found = self.storage.get_trial(trial_id)
                if _RECORD in found.system_attrs:
                    attributes = self.storage.get_study_user_attrs(found.system_attrs[_RECORD]["experiment_id"])
                    return trial_record(found, Path(attributes[_RECORD]["trials"]), _smaller_is_better(attributes))
        raise no_such("trial", trial_id, [trial.id for each in self.experiments() for trial in each.trials])

    def jobs(self) -> list[JobRecord]:
        """Return all jobs, oldest first."""
        return [self.job(number) for number in self._job_numbers()]

    def job(self, job_id: int) -> JobRecord:
        """Return a job.

        Raises:
            ExperimentError: There is no job with this number.
        """
        folder = self.home / "jobs" / str(job_id)
        if not _is_possible(job_id) or not (folder / "job.json").exists():
            raise no_such("job", job_id, self._job_numbers())
        stored = json.loads((folder / "job.json").read_text())
        attempt, started = Attempt.of(folder, 0), datetime.fromisoformat(stored["started"])
        code = attempt.exit_code
        # The job runs if `run_job` waits for it, or if `run_job` was killed and the process still runs.
        if code is None and (is_taken(folder / "lock") or is_at_work(attempt)):
            return JobRecord(job_id, stored["name"], "RUNNING", folder, started=started)
        # It may have ended between the two checks.
        code = attempt.exit_code
        if code is None and stored.get("is_on_cluster") and not stored.get("is_over"):
            return JobRecord(job_id, stored["name"], "UNKNOWN", folder, started=started)
        ended = None
        if code is not None:
            ended = datetime.fromtimestamp((attempt.folder / "exit").stat().st_mtime, timezone.utc)
        state: Literal["COMPLETED", "CANCELED", "ERROR"] = "COMPLETED" if code == 0 else "ERROR"
        if code != 0 and attempt.exit_request is not None:
            state = "CANCELED"
        return JobRecord(job_id, stored["name"], state, folder, code, started, ended)

    def config(self, experiment_id: int) -> dict[str, Any]:
        """Return the configuration of an experiment with its secrets, which a record does not contain.

        Raises:
            ExperimentError: Its file cannot be read.
        """
        path = self.folder(experiment_id) / "config.json"
        try:
            return cast("dict[str, Any]", json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise ExperimentError(f"experiment {experiment_id}: {path} cannot be read: {error}") from error

    # ------------------------------------------------------------------ writing

    def create_experiment(
        self, config: ExperimentConfig, text: str, context_dir: str | os.PathLike[str] = "."
    ) -> ExperimentRecord:
        """Add an experiment with a copy of its code, without running it.

        Args:
            config: The configuration.
            text: The file that it was read from, which is stored for the user.
            context_dir: The folder with the code.
        """
        experiments = self.home / "experiments"
        unfinished = experiments / f".new-{uuid.uuid4().hex}"
        storage = config.checkpoint_storage.folder
        elsewhere = None if storage is None else Path(storage).expanduser().absolute()
        try:
            take_snapshot(
                Path(context_dir), unfinished / "code", [self.home, *([] if elsewhere is None else [elsewhere])]
            )
            write_private(unfinished / "config.yaml", text)
            write_private(unfinished / "config.json", json.dumps(config.raw, indent=2) + "\n")
            (unfinished / "trials").mkdir()
            number = self.new_study(config.name, config.searcher.smaller_is_better)
            directory = experiments / str(number)
            # If the last experiment of a database was deleted, its number is used again.
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        record = {
            "name": config.name,
            "config": masked(config.raw),
            "directory": str(directory),
            "trials": str(directory / "trials" if elsewhere is None else elsewhere / _folder_name(number, directory)),
            "created": _now(),
        }
        # The experiment is listed only from here on.
        self.storage.set_study_user_attr(number, _RECORD, record)
        return self.experiment(number)

    def delete(self, experiment_id: int) -> None:
        """Delete an experiment with all its files and checkpoints.

        Raises:
            ExperimentError: It is running, or the store refers to folders outside of it.
        """
        record = self.experiment(experiment_id)
        if record.is_running or record.state == "ACTIVE":
            raise ExperimentError(f"experiment {experiment_id} is {record.state}: cancel it before it is deleted")
        folder, trials = self.folder(experiment_id), self.trials_directory(experiment_id)
        self.storage.delete_study(experiment_id)
        shutil.rmtree(trials, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)

    def set_state(self, experiment_id: int, state: ExperimentState, reason: str | None = None) -> None:
        """Store the state of an experiment."""
        value = {"state": state, "reason": reason, "ended": _now() if state in OVER else None}
        self.storage.set_study_user_attr(experiment_id, _STATE, value)

    def set_warnings(self, experiment_id: int, warnings: Sequence[str]) -> None:
        """Replace the warnings of an experiment, which commands and reports show."""
        self.storage.set_study_user_attr(experiment_id, _WARNINGS, list(warnings))

    def set_first_metric(self, experiment_id: int, name: str) -> None:
        """Store the metric that compares trials, for an experiment whose configuration has none."""
        self.storage.set_study_user_attr(experiment_id, _FIRST_METRIC, name)

    def request(self, experiment_id: int, command: str) -> None:
        """Store a request for the runner of an experiment: `pause`, `cancel` or `kill`."""
        if command not in REQUESTS:
            raise UnknownNameError("request", command, REQUESTS)
        path = self.folder(experiment_id) / "wish"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(command)
        unfinished.replace(path)

    def running(self, experiment_id: int) -> AbstractContextManager[None]:
        """Hold the lock of an experiment's runner for the duration of a block.

        Raises:
            ExperimentError: Another process holds the lock.
        """
        return hold_lock(self.folder(experiment_id) / "lock", f"experiment {experiment_id}")

    # ------------------------------------------------------------------ for the runner

    def new_study(self, name: str, smaller_is_better: bool) -> int:
        """Add a study, and return its number; if the name is in use, a number is appended to it."""
        from optuna.exceptions import DuplicatedStudyError
        from optuna.study import StudyDirection

        direction = StudyDirection.MINIMIZE if smaller_is_better else StudyDirection.MAXIMIZE
        for again in itertools.count(1):
            with suppress(DuplicatedStudyError), quiet("optuna"):
                return self.storage.create_new_study([direction], name if again == 1 else f"{name} #{again}")
        raise AssertionError("there is always a free number")

    def study(self, experiment_id: int) -> optuna.Study:
        """Return the study of an experiment."""
        import optuna

        return optuna.load_study(
            study_name=self.storage.get_study_name_from_id(experiment_id),
            storage=self.storage,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.NopPruner(),
        )

    def folder(self, experiment_id: int) -> Path:
        """Return the folder of an experiment, for writing or removing it.

        Raises:
            ExperimentError: The store refers to another folder. The database may have been changed by another
                program, or it belongs to another `home`.
        """
        named = self.experiment(experiment_id).directory
        own = (self.home / "experiments").resolve() / str(experiment_id)
        # A link instead of the folder would lead out of the store as well.
        if named.resolve() != own:
            raise ExperimentError(
                f"experiment {experiment_id}: the store names the folder {str(named)!r}, expected {str(own)!r}: "
                "nothing is written or removed there; if the experiment belongs to another folder of experiments, give "
                "that as --home"
            )
        return named

    def trials_directory(self, experiment_id: int) -> Path:
        """Return the folder with the folders of an experiment's trials, for writing or removing it.

        Raises:
            ExperimentError: The store refers to a folder that is neither in the folder of the experiment nor the one
                of the experiment in its `checkpoint_storage`.
        """
        folder = self.folder(experiment_id)
        named = Path(self.storage.get_study_user_attrs(experiment_id)[_RECORD]["trials"])
        is_inside = named.resolve() == folder.resolve() / "trials"
        if not is_inside and not self._is_stored_elsewhere(experiment_id, folder, named):
            raise ExperimentError(
                f"experiment {experiment_id}: the store names the folder {str(named)!r} for its trials, expected one "
                f"in {str(folder)!r} or in its checkpoint_storage: nothing is written or removed there"
            )
        return named

    def memory(self, experiment_id: int) -> dict[str, Any]:
        """Return the value that a runner stored with `remember`."""
        return cast("dict[str, Any]", self.storage.get_study_system_attrs(experiment_id).get(_MEMORY, {}))

    def remember(self, experiment_id: int, memory: Mapping[str, Any]) -> None:
        """Store the state that a runner needs to continue, completely or not at all."""
        self.storage.set_study_system_attr(experiment_id, _MEMORY, dict(memory))

    def add_trial(
        self,
        experiment_id: int,
        params: Mapping[str, Any],
        distributions: Mapping[str, Any],
        hparams: Mapping[str, Any],
        source: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> int:
        """Add a trial in one transaction, and return its number in the store."""
        import optuna

        trial = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=dict(params),
            distributions={name: distributions[name] for name in params},
            user_attrs=dict(attributes or {}),
            system_attrs={_RECORD: {"experiment_id": experiment_id, "hparams": hparams, "source": source}},
        )
        trial.datetime_start = datetime.now()
        return self.storage.create_new_trial(experiment_id, trial)

    def add_value(self, trial_id: int, steps: int, value: float) -> None:
        """Store the metric of a trial at a number of batches; an earlier value is replaced."""
        self.storage.set_trial_intermediate_value(trial_id, steps, value)

    def update_trial(self, trial: TrialRecord) -> None:
        """Store the state and the progress of a running trial."""
        stored = {name: getattr(trial, name) for name in _STORED_FIELDS}
        self.storage.set_trial_system_attr(trial.id, _RECORD, stored)

    def end_trial(self, trial: TrialRecord) -> None:
        """Store the final state of a trial."""
        from optuna.trial import TrialState as OptunaState

        self.update_trial(trial)
        if trial.reason is not None:
            self.storage.set_trial_user_attr(trial.id, "reason", trial.reason)
        has_value = trial.best is not None and not math.isnan(trial.best)
        state = OptunaState.FAIL
        # Optuna does not allow a completed trial without a value.
        if trial.state == "STOPPED":
            state = OptunaState.PRUNED
        elif trial.state == "COMPLETED" and has_value:
            state = OptunaState.COMPLETE
        values = [cast(float, trial.best)] if has_value and state is not OptunaState.FAIL else None
        self.storage.set_trial_state_values(trial.id, state, values)

    # ------------------------------------------------------------------ private

    def _is_stored_elsewhere(self, experiment_id: int, folder: Path, named: Path) -> bool:
        """Return whether `create_experiment` chose a folder for trials in a storage outside of the store."""
        from dovetail.search.schema import read_experiment

        with warnings.catch_warnings():
            # These warnings were shown when the experiment was created.
            warnings.simplefilter("ignore", UserWarning)
            # Use the configuration in the folder, not the one in the database, which contains the path to check.
            storage = read_experiment(self.config(experiment_id)).checkpoint_storage.folder
        if storage is None or named.name != _folder_name(experiment_id, folder) or named.is_symlink():
            return False
        place = Path(storage).expanduser()
        # A relative path depends on the folder in which the experiment was created, which is no longer known.
        return named.parent == place or (
            not place.is_absolute() and named.parent.parts[-len(place.parts) :] == place.parts
        )

    def _job_numbers(self) -> list[int]:
        with suppress(FileNotFoundError):
            folder = self.home / "jobs"
            names = [name for name in os.listdir(folder) if (folder / name / "job.json").exists()]
            return sorted(int(name) for name in names if name.isdecimal())
        return []

    def _experiment(self, number: int, attributes: Mapping[str, Any]) -> ExperimentRecord:
        return experiment_record(number, attributes, self.storage.get_all_trials(number, deepcopy=False))


def _is_possible(number: int) -> bool:
    """Return whether a database can contain a row with this number; larger numbers would be a database error."""
    return 0 <= number <= _LARGEST_NUMBER


def experiment_record(number: int, attributes: Mapping[str, Any], trials: Sequence[FrozenTrial]) -> ExperimentRecord:
    """Return the experiment of a study, from its number, attributes and trials."""
    stored, state = attributes[_RECORD], attributes.get(_STATE, {"state": "ACTIVE", "reason": None, "ended": None})
    directory, place = Path(stored["directory"]), Path(stored["trials"])
    smaller = _smaller_is_better(attributes)
    return ExperimentRecord(
        id=number,
        name=stored["name"],
        state=state["state"],
        config=stored["config"],
        directory=directory,
        created=datetime.fromisoformat(stored["created"]),
        ended=None if state["ended"] is None else datetime.fromisoformat(state["ended"]),
        reason=state["reason"],
        is_running=is_taken(directory / "lock"),
        trials=tuple(trial_record(trial, place, smaller) for trial in trials if _RECORD in trial.system_attrs),
        warnings=tuple(attributes.get(_WARNINGS, ())),
        first_metric=attributes.get(_FIRST_METRIC),
    )


def trial_record(trial: FrozenTrial, place: Path, smaller_is_better: bool) -> TrialRecord:
    """Return the record of Optuna's trial whose folder is in `place`."""
    stored: Mapping[str, Any] = trial.system_attrs[_RECORD]
    values = dict(sorted(trial.intermediate_values.items()))
    best_at = best_step(values, smaller_is_better)
    last = max(values, default=None)
    return TrialRecord(
        id=trial._trial_id,
        number=trial.number,
        experiment_id=stored["experiment_id"],
        state=cast(TrialState, stored.get("state", "RUNNING")),
        hparams=stored["hparams"],
        directory=place / f"trial_{trial._trial_id}",
        best=None if best_at is None else values[best_at],
        best_at=best_at,
        latest=None if last is None else values[last],
        steps=max(stored.get("steps", 0), last or 0),
        progress=stored.get("progress"),
        status=stored.get("status"),
        restarts=stored.get("restarts", 0),
        started=_utc(trial.datetime_start),
        ended=_utc(trial.datetime_complete),
        reason=stored.get("reason"),
        source=stored["source"],
        values=values,
    )


def is_over(attributes: Mapping[str, Any]) -> bool:
    """Return whether the experiment with these attributes of a store has ended, so that it does not change again."""
    state = attributes.get(_STATE)
    return isinstance(state, dict) and state.get("state") in OVER


def _smaller_is_better(attributes: Mapping[str, Any]) -> bool:
    return bool(attributes[_RECORD]["config"]["searcher"].get("smaller_is_better", True))


def _folder_name(number: int, directory: Path) -> str:
    """Return a folder name for a storage that several stores may share, each with an experiment 1."""
    return f"experiment_{number}-{sha256(str(directory).encode()).hexdigest()[:6]}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _utc(moment: datetime | None) -> datetime | None:
    # Optuna stores local times without a time zone.
    return None if moment is None else moment.astimezone(timezone.utc)
