"""Trials whose processes are on several nodes of a Ray cluster.

    python -m dovetail.search.spread SLOTS RESOURCE COMMAND…

A keeper runs this instead of `dovetail.launch`. Ray Train places every process on a node and assigns its rank, and this
module starts the same command everywhere, with the variables of `torchrun`. The command runs in a separate process, not
inside of Ray's worker, so that it has a main thread which receives signals.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.info import ATTEMPT
from dovetail.runtime.ray_cluster import connect
from dovetail.search.processes import Attempt

_EVERY = 0.05
# Ray's preemption watcher and metrics are not used and cost seconds; a failed process should be noticed soon.
_SETTINGS = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
}
_LAUNCHER = ["-m", "dovetail.launch", "--slots"]


def spread(command: Sequence[str], slots: int, resource: str) -> list[str]:
    """Return the command that runs the processes of a trial on several nodes instead of one.

    Raises:
        ConfigError: The command is not one of `dovetail.launch`.

    Example:
        >>> spread(["python3", "-m", "dovetail.launch", "--slots", "2", "train.py"], 2, "CPU")[4:]
        ['2', 'CPU', 'python3', '-m', 'dovetail.launch', 'train.py']
    """
    words = list(command)
    if not is_spreadable(words):
        raise ConfigError(
            f"slots_per_trial: no node of the cluster has {slots} slots, and only an entrypoint such as "
            f"'python3 train.py' can be spread over several, got {' '.join(words)!r}"
        )
    at = _place_of_launcher(words)
    # Each process gets the command of a launcher with one slot.
    single = [*words[:at], "-m", "dovetail.launch", *words[at + 4 :]]
    return [words[0], "-u", "-m", "dovetail.search.spread", str(slots), resource, *single]


def is_spreadable(command: Sequence[str]) -> bool:
    """Return whether `spread` supports a command.

    Example:
        >>> is_spreadable(["python3", "-m", "dovetail.launch", "--slots", "2", "train.py"]), is_spreadable(["torchrun"])
        (True, False)
    """
    return _place_of_launcher(command) >= 0


def main(arguments: Sequence[str]) -> int:
    """Run a command in several processes of one group, each with one resource; the exit code is 1 if one fails."""
    slots, resource, *command = arguments
    attempt = Attempt(Path(os.environ[ATTEMPT]))
    # The processes receive the exit request themselves; this process must exit last.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    ray = connect("auto")
    train, data_parallel = require("ray.train", "ray"), require("ray.train.v2.api.data_parallel_trainer", "ray")
    # The processes get the environment of the keeper; the settings are for Ray Train alone.
    work = {"command": list(command), "env": dict(os.environ), "cwd": os.getcwd(), "attempt": str(attempt.folder)}
    trainer = data_parallel.DataParallelTrainer(
        _run_rank,
        train_loop_config=work,
        scaling_config=train.ScalingConfig(
            num_workers=int(slots), use_gpu=resource == "GPU", resources_per_worker={resource: 1}
        ),
        run_config=train.RunConfig(name="train", storage_path=str(attempt.folder)),
    )
    os.environ.update({**_SETTINGS, **os.environ})
    try:
        trainer.fit()
    except Exception as error:
        if attempt.exit_request is not None:
            return 128 + signal.SIGTERM
        print(f"dovetail: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    return 0


def _place_of_launcher(command: Sequence[str]) -> int:
    return next((at for at in range(len(command)) if list(command[at : at + 3]) == _LAUNCHER), -1)


def _run_rank(work: Mapping[str, Any]) -> None:
    """Run one process of a group on this node, until it ends."""
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    from dovetail.search.cluster import start_guard

    context, attempt = train.get_context(), Attempt(Path(work["attempt"]))
    host, port = broadcast_from_rank_zero(_meeting_point() if context.get_world_rank() == 0 else None)
    # The variables that torchrun sets.
    place = {
        "RANK": context.get_world_rank(),
        "LOCAL_RANK": context.get_local_rank(),
        "GROUP_RANK": context.get_node_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    # The variables of this node: its graphics cards, and the sockets of its Ray.
    own = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "RAY_"))}
    env = {**work["env"], **own, **{name: str(value) for name, value in place.items()}}
    if host.startswith("127."):
        # All processes are on this machine. Gloo would choose an interface by the host's name, which may not resolve.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(attempt.trial / "log.txt", "ab") as log:
        process = subprocess.Popen(  # noqa: S603 - the user's own command
            work["command"], cwd=work["cwd"], env=env, stdout=log, stderr=log, start_new_session=True
        )
    # Otherwise its remaining processes would wait for the other processes of the group.
    guard = start_guard(attempt, process.pid)
    was_asked = False
    while (code := process.poll()) is None:
        if not was_asked and attempt.exit_request is not None:
            was_asked = True
            process.send_signal(signal.SIGTERM)
        time.sleep(_EVERY)
    if code != 0:
        # Ray Train then stops the other processes of the group. The guard stays, and kills what is left of this one.
        raise RuntimeError(f"rank {context.get_world_rank()} ended with exit code {code}")
    guard.communicate(b"over")


def _meeting_point() -> tuple[str, int]:
    host = require("ray.util", "ray").get_node_ip_address()
    with socket.create_server((host, 0)) as free:
        return host, free.getsockname()[1]


if __name__ == "__main__":
    # Import it by its module name, because nodes import the function that Ray Train calls there.
    from dovetail.search.spread import main as imported

    raise SystemExit(imported(sys.argv[1:]))
