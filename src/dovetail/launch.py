"""Command `python -m dovetail.launch`: runs a script in several processes of this machine, with hyperparameters.

Usage:

    python -m dovetail.launch [--slots N] [--config FILE] [--hparam NAME=VALUE]… [--restarts N] SCRIPT ARGUMENTS…
    python -m dovetail.launch … -m MODULE ARGUMENTS…
    python -m dovetail.launch … MODULE:CLASS

One process without restarts runs in this process. Several processes are started by torch's elastic agent and connect
over the loopback interface; use `torchrun` for several machines. The script gets the configuration from
`get_cluster_info`. A trial class is trained by `dovetail.pytorch.entrypoint` with the settings of the configuration.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from dovetail.config import hyperparameters, load_config, locate, names_trial_class, parse_scalar, trial_length
from dovetail.errors import ConfigError, DovetailError, UnknownNameError
from dovetail.info import TEST_MODE, VARIABLE, TrialInfo, write_info
from dovetail.runtime.cores import NO_CARDS, threads_per_process

__all__ = ["main"]

# The exit code of a process that exits because another process failed: a temporary failure in sysexits.h.
_AFTER_ANOTHER = 75
_PATIENCE = 5.0
_ENTRYPOINT = "dovetail.pytorch.entrypoint"
# Port 0: the only process of the group uses any free port.
_GROUP_OF_ONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script and return its exit code: 2 for a mistake on the command line, 128 + signal after a signal."""
    options = _parser().parse_args(arguments)
    try:
        config = _config(options.config)
        if names_trial_class(options.script) and not options.module and not Path(options.script).is_file():
            _check_trial_class(options.script, options.arguments, config)
            options.script, options.module, options.arguments = _ENTRYPOINT, True, [options.script]
        else:
            _check_script(options.script, options.module)
        hparams = _hparams(config, options.hparam)
        slots = options.slots or _slots(config)
        # No slots means one process without graphics cards.
        if slots == 0:
            os.environ.update(NO_CARDS)
            slots = 1
    except DovetailError as error:
        print(f"dovetail.launch: {error}", file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="dovetail-launch-", ignore_cleanup_errors=True) as folder:
        # Otherwise the script is no trial, and `get_cluster_info` returns None.
        if options.config is not None or hparams:
            os.environ[VARIABLE] = os.path.join(folder, "trial.json")
            write_info(os.environ[VARIABLE], _info(config, hparams, slots))
        if slots == 1 and not options.restarts:
            os.environ.update(_GROUP_OF_ONE if options.group else {})
            return _run_here(options.script, options.module, options.arguments)
        # Each worker runs this command again, for one process.
        program = ["-m", "dovetail.launch", *(["-m"] if options.module else []), options.script, *options.arguments]
        return _run_workers(program, slots, options.restarts, folder)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.launch",
        description="Run a script in one or more processes of this machine.",
        allow_abbrev=False,
    )
    count, times = _number(1), _number(0)
    parser.add_argument("--slots", type=count, metavar="N", help="number of processes; default: from --config, or 1")
    parser.add_argument("--config", metavar="FILE", help="the YAML file of an experiment")
    parser.add_argument(
        "--hparam", action="append", default=[], metavar="NAME=VALUE", help="a hyperparameter; overrides --config"
    )
    parser.add_argument("--restarts", type=times, default=0, metavar="N", help="number of restarts after a failure")
    parser.add_argument(
        "--group", action="store_true", help="set the variables of torchrun, such as RANK, also for one process"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the script, the module after -m, or a trial class such as model_def:MyTrial")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")
    return parser


def _number(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
        return int(text)

    return number


# ------------------------------------------------------------------ what the script receives


def _check_script(script: str, is_module: bool) -> None:
    if is_module:
        _check_module(script, "a module after -m")
    elif not Path(script).is_file():
        raise ConfigError(f"script: expected a file, got {script!r}: there is none in {Path.cwd()}")


def _check_trial_class(name: str, arguments: Sequence[str], config: Mapping[str, Any]) -> None:
    if arguments:
        raise ConfigError(f"script: expected no arguments after the trial class {name}, got {' '.join(arguments)!r}")
    _check_module(name.partition(":")[0], f"the module of the trial class {name}")
    # In an experiment, the runner has already checked the file.
    if VARIABLE not in os.environ and TEST_MODE not in os.environ and trial_length(config) is None:
        raise ConfigError(
            f"{locate(config, 'searcher', 'max_length')}: missing: how long to train {name}, such as {{epochs: 10}}, "
            "in the file that --config names"
        )


def _check_module(name: str, expected: str) -> None:
    """Raise if a module cannot be found in the current folder or among the installed ones."""
    # `python -m` has done this already, but not a package's command that calls `main`.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is None:
        raise ConfigError(f"script: expected {expected}, got {name!r}: there is none in {Path.cwd()}, nor installed")


def _config(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return load_config(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _hparams(config: dict[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """Return the hyperparameters of a configuration, overridden by the command line."""
    is_closed = "hyperparameters" in config
    for assignment in given:
        name, equals, text = assignment.partition("=")
        if not name or not equals:
            raise ConfigError(f"--hparam: expected NAME=VALUE, got {assignment!r}")
        *parents, last = name.split(".")
        place: Any = config.setdefault("hyperparameters", {})
        for key in (*parents, last):
            if not isinstance(place, dict):
                raise ConfigError(f"--hparam {name}: cannot set {key!r}, because the name above it has a value")
            # If the file lists hyperparameters, an unknown name is more likely mistyped than new.
            if is_closed and key not in place:
                raise UnknownNameError("hyperparameter (--hparam)", key, place)
            above, place = place, place.setdefault(key, {})
        try:
            above[last] = parse_scalar(text)
        except ConfigError as error:
            raise ConfigError(f"--hparam {name}: {error}") from error
    return hyperparameters(config)


def _slots(config: Mapping[str, Any]) -> int:
    """Return the number of processes that a configuration requests; 1 by default."""
    resources = config.get("resources")
    wanted = resources if isinstance(resources, Mapping) else {}
    # The key is `slots_per_trial` for a trial and `slots` for a job.
    key = "slots_per_trial" if "slots_per_trial" in wanted else "slots"
    slots = wanted.get(key, 1)
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 0:
        raise ConfigError(f"{locate(config, 'resources', key)}: expected a whole number from 0 on, got {slots!r}")
    return slots


def _info(config: Mapping[str, Any], hparams: dict[str, Any], slots: int) -> TrialInfo:
    """Return the information that the script reads with `get_cluster_info`."""
    reproducibility, data = config.get("reproducibility"), config.get("data")
    seed = reproducibility.get("experiment_seed") if isinstance(reproducibility, Mapping) else None
    is_job = bool(config) and not hparams and "searcher" not in config
    return TrialInfo(
        trial_id=0,
        hparams=hparams,
        config=dict(config),
        user_data=dict(data) if isinstance(data, Mapping) else {},
        trial_seed=seed if isinstance(seed, int) else None,
        kind="job" if is_job else "trial",
        slots=slots,
    )


# ------------------------------------------------------------------ how the script is run


def _run_here(script: str, is_module: bool, arguments: Sequence[str]) -> int:
    """Run a script or module in this process as `__main__`, and return its exit code."""
    sys.argv = [script, *arguments]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            # As `python SCRIPT` does.
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        if _is_about_another(error):
            print(f"dovetail.launch: rank {os.environ.get('RANK')} exits: {error}", file=sys.stderr)
            # The launcher stops all processes when the first one exits. Wait, so that the failed one is the first.
            time.sleep(_PATIENCE)
            return _AFTER_ANOTHER
        error.__traceback__ = _from_script_on(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _is_about_another(error: BaseException) -> bool:
    """Return whether an error only reports that another process has failed; that process prints its own error."""
    # The module is imported already if there is such an error.
    distributed = sys.modules.get("dovetail.distributed")
    return distributed is not None and isinstance(error, distributed.PeerError)


def _from_script_on(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that Python would show if it had run the script directly."""
    runners = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in runners:
        traceback = traceback.tb_next
    return traceback


def _run_workers(program: Sequence[str], slots: int, restarts: int, folder: str) -> int:
    """Run a command in several processes, and return the exit code of the first one that failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(slots)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Imported here, because it imports torch, which a single process may not need.
    from dovetail.runtime.elastic import run_workers

    # Unbuffered: otherwise lines of several processes are mixed, and lines of a killed process are lost.
    outcome = run_workers(["-u", *program], slots, folder, restarts)
    if isinstance(outcome, int):
        return 128 + outcome
    codes = [failure.exitcode for _, failure in sorted(outcome.failures.items())]
    # Processes with these two codes ended because another one had failed.
    own = [code for code in codes if code not in (_AFTER_ANOTHER, -signal.SIGTERM)]
    code = (own or codes or [0])[0]
    # A process that a signal ended has the negative number of the signal.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
