"""Jobs: scripts that do not train, such as batch inference, run once with a configuration and a copy of the code."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dovetail.info import TrialInfo, write_info
from dovetail.runtime.signals import collect_signals
from dovetail.search.locks import hold_lock
from dovetail.search.processes import Attempt, Backend, LocalBackend
from dovetail.search.records import JobRecord
from dovetail.search.schema import read_experiment
from dovetail.search.secrets import masked, write_private
from dovetail.search.snapshot import take_snapshot
from dovetail.search.starting import backend_for, command_of, variables_of
from dovetail.search.store import Store

_EVERY = 0.02
_SIGNAL_MESSAGES = ("stopping the job (press again to kill it)", "killing the job")


def run_job(
    store: Store,
    path: str | os.PathLike[str],
    context_dir: str | os.PathLike[str] = ".",
    overrides: Sequence[str] = (),
    on_output: Callable[[str], None] | None = None,
    backend: Backend | None = None,
) -> JobRecord:
    r"""Run a job until it ends. Ctrl-C requests its exit, a second one kills it.

    Args:
        store: The store of jobs.
        path: The configuration.
        context_dir: The folder with the code.
        overrides: Changes of the configuration, such as `data.trial_id=3`.
        on_output: A function that receives the output of the job as it is written.
        backend: The backend that runs it; None means the one of the configuration.

    Returns:
        The record of the job.

    Raises:
        ConfigError: The configuration or the folder is invalid.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "code").mkdir()
        >>> _ = (folder / "job.yaml").write_text("entrypoint: echo hello\n")
        >>> said = []
        >>> job = run_job(Store.open(folder / "home"), folder / "job.yaml", folder / "code", on_output=said.append)
        >>> job.state, job.exit_code, said
        ('COMPLETED', 0, ['hello\n'])
    """
    config = read_experiment(Path(path), overrides, kind="job")
    command = command_of(config.entrypoint, config.slots)
    work = backend or backend_for(config, concurrent=1)
    # After the configuration is checked, so that a mistake in it leaves no folder behind.
    number, folder = _new_folder(store.home / "jobs")
    try:
        take_snapshot(Path(context_dir), folder / "code", [store.home])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    write_private(folder / "config.yaml", Path(path).read_text(encoding="utf-8"))
    info = TrialInfo(
        trial_id=number,
        config=masked(config.raw),
        user_data=dict(config.data),
        trial_seed=config.seed,
        kind="job",
        slots=config.slots,
        directory=str(folder),
    )
    write_info(folder / "info.json", info)
    content = {
        "name": config.name,
        "started": datetime.now(timezone.utc).isoformat(),
        "is_on_cluster": not isinstance(work, LocalBackend),
    }
    _write(folder / "job.json", content)
    env = variables_of(config, store.home, folder / "info.json")
    with hold_lock(folder / "lock", f"job {number}"):
        _wait(work, Attempt.of(folder, 0), command, env, config.slots, on_output)
    # A killed job has no exit code; without this mark it would count as running.
    _write(folder / "job.json", {**content, "is_over": True})
    return store.job(number)


def _wait(
    backend: Backend,
    attempt: Attempt,
    command: Sequence[str],
    env: dict[str, str],
    slots: int,
    on_output: Callable[[str], None] | None,
) -> None:
    folder = attempt.trial
    log = folder / "log.txt"
    log.touch()
    # The end of the output may be an incomplete character of several bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with collect_signals(_SIGNAL_MESSAGES) as signals, open(log, "rb") as output:
        backend.start(attempt, command, env, folder / "code", slots)
        while True:
            # Checked before the output is read, so that the last lines of an ended job are not missed.
            is_over = backend.poll(attempt) is not None
            if on_output is not None and (text := decoder.decode(output.read(), final=is_over)):
                on_output(text)
            if is_over:
                return
            if signals and attempt.exit_request is None:
                attempt.request_exit("cancel")
                backend.stop(attempt)
            if len(signals) > 1:
                backend.stop(attempt, kill=True)
            time.sleep(_EVERY)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


def _new_folder(jobs: Path) -> tuple[int, Path]:
    jobs.mkdir(parents=True, exist_ok=True)
    number = max((int(name) for name in os.listdir(jobs) if name.isdecimal()), default=0)
    while True:
        number += 1
        try:
            (jobs / str(number)).mkdir()
        # Another process has created this job at the same time.
        except FileExistsError:
            continue
        return number, jobs / str(number)
