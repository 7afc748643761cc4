"""Runs small experiments whose runner kills itself at one of its operations; the next runner ends them.

    python dying_runner.py FOLDER STRIDE

Every operation on the store and every start of a process is one to die at, or every n-th. Prints a line of JSON for
each experiment; the first is of an undisturbed one. Modules are imported once, and processes forked.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.config import parse_config
from dovetail.search.processes import Attempt, LocalBackend
from dovetail.search.runner import Runner
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store

WRITES = (
    *("create_new_trial", "set_trial_intermediate_value", "set_trial_system_attr", "set_trial_user_attr"),
    *("set_trial_state_values", "set_study_user_attr", "set_study_system_attr"),
)
CONFIG = """
entrypoint: python3 trial.py
hyperparameters:
  lr: {type: double, minval: 0, maxval: 1}
searcher: {name: random, metric: loss, max_trials: 3, max_concurrent_trials: 1}
data: {ledger: LEDGER, fails_once: true}
"""


def run(home: Path, experiment_id: int, die_at: int | None) -> int:
    """Run an experiment in a separate process, and return its exit code."""
    child = os.fork()
    if child == 0:
        store, backend = Store.open(home), LocalBackend()
        operations = itertools.count(1)

        def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
            def operate(*arguments: Any) -> Any:
                if next(operations) == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*arguments)

            return operate

        for name in WRITES:
            setattr(store.storage, name, dying(getattr(store.storage, name)))
        for name in ("start", "adopt"):
            setattr(backend, name, dying(getattr(backend, name)))
        state = Runner(store, experiment_id, backend).run().state
        os._exit(0 if state == "COMPLETED" else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, stride: int) -> None:
    code = folder / "code"
    code.mkdir(parents=True)
    (code / "trial.py").write_text(Path(__file__).with_name("killed_trial.py").read_text())
    for die_at in itertools.chain([None], itertools.count(1, stride)):
        ledger = folder / f"ledger-{die_at}.jsonl"
        text = CONFIG.replace("LEDGER", str(ledger))
        store = Store.open(folder / "home")
        record = store.create_experiment(read_experiment(parse_config(text)), text, code)
        # Nothing of a database may be shared with a child.
        store.storage.engine.dispose()  # type: ignore[attr-defined]
        first = run(store.home, record.id, die_at)
        second = run(store.home, record.id, None) if first != 0 else 0
        trials = Store.open(folder / "home").experiment(record.id).trials
        found = {
            "die_at": die_at,
            "codes": [first, second],
            "trials": [[it.number, it.state, it.hparams, it.values, it.best, it.restarts] for it in trials],
            "attempts": [[attempt.exit_code for attempt in Attempt.all_of(it.directory)] for it in trials],
            "begun": len(ledger.read_text().splitlines()),
        }
        print(json.dumps(found), flush=True)
        if die_at is not None and first == 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
