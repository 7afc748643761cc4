"""Probe of torch, gloo and the compiler, printed as lines of JSON: `python -m dovetail.cli.probe`.

It is a separate process, because a broken torch may crash or hang. Torch is imported by `main` only.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from threading import Thread
from typing import Any

_PATIENCE = timedelta(seconds=10)


def main() -> None:
    """Print one line per entry of `PROBES` as soon as it is finished: the result, or the error."""
    warnings.simplefilter("ignore")
    for name, probe in PROBES.items():
        try:
            line = {"name": name, "found": probe()}
        except Exception as error:
            line = {"name": name, "error": f"{type(error).__name__}: {error}"}
        # Flushed line by line: if a later probe crashes the process, earlier results are not lost.
        print(json.dumps(line), flush=True)


def _torch() -> dict[str, Any]:
    torch, accelerators = import_module("torch"), import_module("dovetail.accelerators")
    accelerator = accelerators.current_accelerator()
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "accelerators": [] if accelerator is None else accelerators.device_names(accelerator.type),
        "built_for": torch.version.cuda or torch.version.hip or "",
    }


def _gloo() -> float:
    """Return the sum over a group of two members that connect over the loopback, as the processes of a run do."""
    torch, dist = import_module("torch"), import_module("torch.distributed")
    # Use a loopback socket: the store's own would listen on all network interfaces.
    listener = socket.create_server(("127.0.0.1", 0))
    place = "127.0.0.1", listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    first = dist.TCPStore(*place, timeout=_PATIENCE, **options)
    second = dist.TCPStore(*place, is_master=False, timeout=_PATIENCE)
    sums: list[float] = []
    errors: list[Exception] = []

    def join(rank: int, store: Any) -> None:
        try:
            # Directly, without `init_process_group`, which allows one group per process.
            group = dist.ProcessGroupGloo(store, rank, 2, _PATIENCE)
            tensor = torch.tensor([rank + 1.0])
            group.allreduce([tensor]).wait()
            sums.append(tensor.item())
        except Exception as error:
            errors.append(error)

    members = [Thread(target=join, args=each) for each in enumerate((first, second))]
    for member in members:
        member.start()
    for member in members:
        member.join()
    if errors:
        raise errors[0]
    if sums != [3.0, 3.0]:
        raise ArithmeticError(f"1 + 2 is {sums}")
    return sums[0]


def _compiler() -> str:
    from dovetail.trainers.whole_step import check_compiler

    check_compiler()
    return str(import_module("torch._inductor.cpp_builder").get_cpp_compiler())


PROBES: dict[str, Callable[[], Any]] = {"torch": _torch, "gloo": _gloo, "compiler": _compiler}
"""The probes, in order."""


if __name__ == "__main__":
    main()
    # Threads of a group that cannot be ended would keep the interpreter running.
    os._exit(0)
