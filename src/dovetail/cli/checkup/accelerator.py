"""Checks of training on an accelerator, from the output of the process `dovetail.accelerator_checks`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from dovetail.cli.checkup.check import Check, shortened
from dovetail.cli.checkup.torch_build import probing
from dovetail.errors import ConfigError

# Time limit in seconds of the process. It starts no check in its last 40 seconds.
_PATIENCE = 180
_MODULE = "dovetail.accelerator_checks"


def check_accelerator(report: Path, module: str = _MODULE, patience: float = _PATIENCE) -> list[Check]:
    """Return the checks of the accelerator, and write them with all measurements to a file of JSON.

    Args:
        report: The file.
        module: Prints a line of JSON per check, in a separate process: a driver may crash or hang.
        patience: Seconds after which the process is stopped.

    Raises:
        ConfigError: This machine has no accelerator, or the file cannot be written.
    """
    try:
        # Now, and not after three minutes.
        report.write_text("")
        report.unlink()
    except OSError as error:
        raise ConfigError(f"--report: {report} cannot be written ({error.strerror}); name another file") from error
    start = time.monotonic()
    with probing(module) as process:
        try:
            out, log = process.communicate(timeout=patience)
            last = shortened(log.strip().rpartition("\n")[2])
            end = f"the process ended with exit code {process.returncode}: {last}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, log = process.communicate()
            end = f"the process was stopped after {patience:.0f} seconds"
    end, log = _without_paths(end), _without_paths(log)
    lines: list[dict[str, Any]] = [
        _without_paths(json.loads(line)) for line in out.splitlines() if line.startswith("{")
    ]
    if lines and lines[0].get("device", ...) is None:
        raise ConfigError(
            f"no accelerator: torch {lines[0]['torch']} finds only the CPU; run this command on a machine with a "
            "GPU or another accelerator, and with a build of torch for it"
        )
    checks = [Check("accelerator", line["name"], line["status"], line["found"]) for line in lines]
    is_complete = process.returncode == 0
    if not is_complete:
        checks.append(Check("accelerator", "process", "problem", end))
    content = {
        "format": 1,
        "ok": all(check.status != "problem" for check in checks),
        "seconds": round(time.monotonic() - start, 1),
        "checks": lines,
        **({} if is_complete else {"end": end, "log": log[-4000:]}),
    }
    report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return checks


# A path in quotes, which may contain spaces, or a path without spaces. A URL and a fraction such as 1/2 are none.
_PATH = re.compile(
    r"""(?<=["'])(?:~?/|[A-Za-z]:\\)[^"'\n]+(?=["'])"""
    r"""|(?<![\w.:/~])(?:~?(?:/[^\s/"':,;()<>]+){2,}|[A-Za-z]:(?:\\[^\s\\"':,;()<>]+)+)"""
)
_PACKAGES = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")


def _without_paths(value: Any) -> Any:
    """Return text, or plain values with text, in which a path is shortened to its file or its place in a package."""
    if isinstance(value, dict):
        return {name: _without_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    home = os.path.expanduser("~")
    # It may contain spaces. In a container it may be the root of all paths.
    return _PATH.sub(_shortened, value.replace(home, "~") if len(home) > 1 else value)


def _shortened(match: re.Match[str]) -> str:
    path = match[0]
    inside = _PACKAGES.sub("", path)
    return "…/" + (inside if inside != path else re.split(r"[\\/]", path)[-1])
