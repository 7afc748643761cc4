"""`dovetail doctor --accelerator`, without an accelerator and on the pretend device, in real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli.checkup.accelerator import check_accelerator
from dovetail.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]

PRETEND = Path(__file__).parents[1] / "accelerator"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_an_accelerator_gets_one_sentence(run: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, out, err = run("doctor", "--accelerator", "--report", report)
    assert (code, out) == (1, "")
    assert err.startswith(f"dovetail: no accelerator: torch {torch.__version__} finds only the CPU; run this")
    assert not report.exists()


def test_the_report_holds_the_measurements_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PRETEND), prepend=":")
    report = tmp_path / "report.json"
    checks = check_accelerator(report, "pretend_doctor")
    content = json.loads(report.read_text())
    assert content["ok"]
    assert [(it["name"], it["status"], it["found"]) for it in content["checks"]] == [
        (it.name, it.status, it.found) for it in checks
    ]
    by_name = {it["name"]: it["numbers"] for it in content["checks"]}
    assert by_name["device"]["devices"] == ["pretend:0", "pretend:1"]
    assert by_name["no waits"]["waits"] == 0
    assert by_name["no waits, fp16"]["waits"] == by_name["no waits, fp16"]["steps"]
    assert by_name["equal to the CPU"]["largest_difference"] == 0.0
    # The same tensors, besides some single numbers.
    assert by_name["memory"]["measured"] == pytest.approx(by_name["memory"]["planned"], rel=1e-4)
    # The pretend device has no profiler.
    assert [it.name for it in checks if it.status != "ok"] == ["overlap"]
    with pytest.raises(ConfigError, match=r"--report: .* cannot be written"):
        check_accelerator(tmp_path / "missing" / "report.json", "pretend_doctor")


def test_a_crash_keeps_the_results_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PRETEND), prepend=":")
    monkeypatch.setenv("CRASH", "1")
    report = tmp_path / "report.json"
    checks = check_accelerator(report, "pretend_doctor")
    assert [(it.name, it.status) for it in checks] == [("device", "ok"), ("process", "problem")]
    assert not json.loads(report.read_text())["ok"]


def test_the_report_has_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My Lab"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.setenv("HOME", str(folder))
    check = {
        "name": "memory",
        "status": "problem",
        "found": f"OSError: [Errno 28] No space left on device: '{tmp_path}/x y/state' after 1/2 of 24.1 MiB",
        "numbers": {"messages": ["/opt/venv/lib/python3.11/site-packages/torch/nn/init.py:7: see https://a.org/b/c"]},
    }
    lines = [f"print({json.dumps(json.dumps(check))}, flush=True)", f"open({str(folder / 'missing')!r})"]
    (folder / "broken_doctor.py").write_text("\n".join(lines))
    report = tmp_path / "report.json"
    checks = check_accelerator(report, "broken_doctor")
    content = json.loads(report.read_text())
    found = "OSError: [Errno 28] No space left on device: '…/state' after 1/2 of 24.1 MiB"
    messages = ["…/torch/nn/init.py:7: see https://a.org/b/c"]
    assert content["checks"] == [{**check, "found": found, "numbers": {"messages": messages}}]
    assert checks[0].found == found
    assert checks[1].found.endswith("FileNotFoundError: [Errno 2] No such file or directory: '…/missing'")
    assert 'File "…/broken_doctor.py", line 2' in content["log"]
    assert "My Lab" not in report.read_text()


def test_a_process_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    checks = check_accelerator(tmp_path / "report.json", patience=0.01)
    assert [(it.name, it.found) for it in checks] == [("process", "the process was stopped after 0 seconds")]
