"""Checks of torch, gloo and the compiler, from the answers of the process `dovetail.cli.probe`."""

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

# Seconds that torch has: from a cold disk alone it takes some twenty to import.
_PATIENCE = 90


@contextmanager
def probing() -> Iterator[subprocess.Popen[str]]:
    """Ask torch in another process, whose temporary files go with it."""
    with tempfile.TemporaryDirectory(prefix="dovetail-doctor-") as scratch:
        environment = {**os.environ, "TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch, "PYTHONWARNINGS": "ignore"}
        if paths := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        # There, and not here: a file of the user's that is named like a module would be imported in its place.
        with subprocess.Popen(
            [sys.executable, "-m", "dovetail.cli.probe"],
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
    """Return what the process has found, by name; an error where it has found nothing."""
    try:
        out, said = process.communicate(timeout=_PATIENCE)
        last = said.strip().rpartition("\n")[2]
        silence = f"its process ended with exit code {process.returncode}: {last}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, silence = process.communicate()[0], f"no answer in {_PATIENCE} seconds"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    answers = {line["name"]: line for line in lines}
    return {name: answers.get(name, {"error": silence}) for name in ("torch", "gloo", "compiler")}


def check_torch(answers: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Judge what `dovetail.cli.probe` found: torch, its threads and devices, gloo, a compiler.

    Args:
        answers: For `"torch"`, `"gloo"` and `"compiler"` what was `"found"`, or the `"error"`.
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
        return Check("torch", "torch", "ok", f"{version}, which the tests run with")
    other = f"{version}; the tests run with {TESTED_TORCH}"
    return Check("torch", "torch", "note", other, f"pip install torch=={TESTED_TORCH}")


def _threads(found: Mapping[str, Any]) -> Check:
    threads, cores = int(found["threads"]), num_cores()
    said = os.environ.get("OMP_NUM_THREADS")
    text = f"{threads} of torch on {counted(cores, 'core')}{f' (OMP_NUM_THREADS={said})' if said else ''}"
    if threads <= cores:
        return Check("torch", "threads", "ok", text)
    return Check("torch", "threads", "note", f"{text}: they take turns", f"export OMP_NUM_THREADS={cores}")


def _devices(found: Mapping[str, Any]) -> Check:
    devices = [f"cuda:{index} {name}" for index, name in enumerate(found["cuda"])] + ["mps"] * found["mps"]
    if devices:
        return Check("torch", "devices", "ok", ", ".join([*devices, "cpu"]))
    if found["built_for"]:
        text = f"cpu; torch is built for graphics cards ({found['built_for']}), but sees none"
        return Check("torch", "devices", "note", text, "nvidia-smi" if Path("/dev/nvidiactl").exists() else "")
    if Path("/dev/nvidiactl").exists():
        text = "cpu; there is a graphics card, but this build of torch cannot use it"
        return Check(
            "torch", "devices", "note", text, "pip install --force-reinstall torch  # from the index for your CUDA"
        )
    return Check("torch", "devices", "ok", "cpu")


def _gloo(answer: Mapping[str, Any]) -> Check:
    if "found" in answer:
        return Check("torch", "gloo", "ok", "two members of a group met, and added up")
    # The message of gloo starts with a line of its source.
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
        "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++  # or as your system does it"
    )
    return Check("torch", "compiler", "note", text, remedy)
