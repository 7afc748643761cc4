"""CPU cores, graphics cards and threads that this process may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # A container or `taskset` may allow fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""The environment variables that hide all graphics cards of NVIDIA and AMD from a process."""

# By the kind of torch's build: files of which one exists if the machine may have a device, and the variables that
# select its devices, of which the first one counts. CUDA under WSL2 has no folder of NVIDIA's driver. A torch for the
# CPU may belong to a runner whose trials have another one.
_BUILDS = {
    "hip": ("dev/kfd", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "xpu": ("dev/dri/renderD*", ("ZE_AFFINITY_MASK",)),
    "cuda": ("dev/dxg", ("CUDA_VISIBLE_DEVICES",)),
    "": ("", ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")),
}


class Cards(NamedTuple):
    """The graphics cards that this process may use.

    Attributes:
        names: Their names.
        variables: The environment variables that select cards for a process.
    """

    names: list[str]
    variables: tuple[str, ...] = ()


def graphics_cards(root: Path = Path("/"), build: str | None = None) -> Cards:
    """Return the graphics cards that this process may use, without importing torch.

    The names come from the variables that select cards, if one is set, or from NVIDIA's driver. Otherwise, if torch is
    built for other cards and the machine has a sign of one, a short process counts the devices of torch. So the caller
    gets no context on a card, and a machine without cards starts no process.

    Args:
        root: The folder with `proc` and `dev`.
        build: `"cuda"`, `"hip"`, `"xpu"` or `""`, for what torch is built; None means to read it from its files.
    """
    pattern, variables = _BUILDS[torch_build() if build is None else build]
    if given := [name for name in variables if name in os.environ]:
        visible = os.environ[given[0]].split(",")
        return Cards([card for card in visible if card and card != "-1"], tuple(given))
    with suppress(OSError):
        # NVIDIA's driver has one folder per card.
        folders = os.listdir(root / "proc/driver/nvidia/gpus")
        return Cards([str(number) for number, _ in enumerate(folders)], ("CUDA_VISIBLE_DEVICES",))
    if not pattern or not any(root.glob(pattern)):
        return Cards([])
    return Cards([str(number) for number in range(_num_devices())], variables)


def torch_build(folder: Path | None = None) -> str:
    """Return for which cards torch is built, by its file `version.py`: `"hip"`, `"xpu"`, `"cuda"`, or `""` for none.

    Args:
        folder: The folder of torch; None means the one that this process would import.
    """
    if folder is None:
        found = find_spec("torch")
        folder = Path(found.origin).parent if found is not None and found.origin else Path()
    with suppress(OSError):
        values = dict(re.findall(r"^(\w+)(?:: [^=\n]*)? = (.*)$", (folder / "version.py").read_text(), re.MULTILINE))
        return next((kind for kind in ("hip", "xpu", "cuda") if values.get(kind, "None") != "None"), "")
    return ""


@cache
def _num_devices() -> int:
    code = "import torch; print(torch.accelerator.device_count())"
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)  # noqa: S603
        return int(done.stdout)
    return 0


def threads_per_process(num_processes: int) -> int:
    """Return the number of threads per process, so that all processes together do not use more threads than cores."""
    return max(1, num_cores() // num_processes)
