"""Checks of torch, gloo and the compiler, from the output of the process `dovetail.cli.probe`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.cli.checkup.check import Check, shortened
from dovetail.runtime.cores import num_cores
from dovetail.units import counted

TESTED_TORCH = "2.13.0"
"""The version of torch that the tests run with."""

# Time limit in seconds: importing torch from a cold disk can take twenty.
_PATIENCE = 90


@contextmanager
def probing(module: str = "dovetail.cli.probe") -> Iterator[subprocess.Popen[str]]:
    """Run a module that checks torch in another process, and remove its temporary files afterwards."""
    with tempfile.TemporaryDirectory(prefix="dovetail-doctor-") as scratch:
        environment = {**os.environ, "TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch, "PYTHONWARNINGS": "ignore"}
        if paths := environment.get("PYTHONPATH"):
            # The process runs in another folder, where relative paths would lead elsewhere.
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        # Not in the current folder: a user's file with the name of a module would be imported instead of the module.
        with subprocess.Popen(  # noqa: S603 - a module of this library
            [sys.executable, "-m", module],
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def answers_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the results of the process by name, or an error for each missing result."""
    try:
        out, said = process.communicate(timeout=_PATIENCE)
        last = said.strip().rpartition("\n")[2]
        silence = f"its process ended with exit code {process.returncode}: {last}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, silence = process.communicate()[0], f"no result in {_PATIENCE} seconds"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    answers = {line["name"]: line for line in lines}
    return {name: answers.get(name, {"error": silence}) for name in ("torch", "gloo", "compiler")}


def check_torch(answers: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Return the checks of torch, its threads and devices, gloo and a compiler from the output of `dovetail.cli.probe`.

    Args:
        answers: For `"torch"`, `"gloo"` and `"compiler"` the result as `"found"`, or the `"error"`.
    """
    torch = answers["torch"]
    if "error" in torch:
        found = f"cannot be imported: {shortened(torch['error'])}"
        return [Check("torch", "torch", "problem", found, f"pip install torch=={TESTED_TORCH}")]
    found = torch["found"]
    return [_version(found), _threads(found), _devices(found), _gloo(answers["gloo"]), _compiler(answers["compiler"])]


def _version(found: Mapping[str, Any]) -> Check:
    version = str(found["version"])
    if version.partition("+")[0] == TESTED_TORCH:
        return Check("torch", "torch", "ok", f"{version}, the tested version")
    other = f"{version}; the tested version is {TESTED_TORCH}"
    return Check("torch", "torch", "note", other, f"pip install torch=={TESTED_TORCH}")


def _threads(found: Mapping[str, Any]) -> Check:
    threads, cores = int(found["threads"]), num_cores()
    said = os.environ.get("OMP_NUM_THREADS")
    text = f"{counted(threads, 'torch thread')} on {counted(cores, 'core')}"
    text += f" (OMP_NUM_THREADS={said})" if said else ""
    if threads <= cores:
        return Check("torch", "threads", "ok", text)
    return Check("torch", "threads", "note", f"{text}: more threads than cores", f"export OMP_NUM_THREADS={cores}")


def _devices(found: Mapping[str, Any]) -> Check:
    if found["accelerators"]:
        return Check("torch", "devices", "ok", ", ".join([*found["accelerators"], "cpu"]))
    if found["built_for"]:
        text = f"cpu; torch is built for graphics cards ({found['built_for']}), but finds none"
        return Check("torch", "devices", "note", text, "nvidia-smi" if Path("/dev/nvidiactl").exists() else "")
    if Path("/dev/nvidiactl").exists():
        text = "cpu; there is a graphics card, but this build of torch cannot use it"
        return Check(
            "torch", "devices", "note", text, "pip install --force-reinstall torch  # from the index for your CUDA"
        )
    return Check("torch", "devices", "ok", "cpu")


def _gloo(answer: Mapping[str, Any]) -> Check:
    if "found" in answer:
        return Check("torch", "gloo", "ok", "two processes can connect and add numbers")
    # Gloo's message starts with a line of its source code.
    problem = shortened(re.sub(r"\[enforce fail at [^\]]*\] ", "", answer["error"]))
    remedy = f"export GLOO_SOCKET_IFNAME={'lo0' if sys.platform == 'darwin' else 'lo'}"
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        problem, remedy = f"{problem} (GLOO_SOCKET_IFNAME={name})", "unset GLOO_SOCKET_IFNAME"
    return Check("torch", "gloo", "problem", f"processes cannot form a group: {problem}", remedy)


def _compiler(answer: Mapping[str, Any]) -> Check:
    if "found" in answer:
        return Check("torch", "compiler", "ok", f"{answer['found']}, for CompiledTrainer")
    text = f"{shortened(answer['error'].partition(': ')[2])}: CompiledTrainer runs uncompiled"
    remedy = (
        "xcode-select --install"
        if sys.platform == "darwin"
        else "apt-get install g++  # or with another package manager"
    )
    return Check("torch", "compiler", "note", text, remedy)
