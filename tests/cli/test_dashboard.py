"""`dovetail dashboard`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("optuna_dashboard") is None:
    pytest.skip("optuna-dashboard is not installed", allow_module_level=True)


@pytest.fixture
def server(finished: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dovetail", "dashboard", "--port", "0", "--home", str(finished.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_the_dashboard_serves_experiments_on_loopback_until_stopped(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    label, _, address = server.stdout.readline().strip().partition(": ")
    assert label == "experiments"
    assert address.startswith("http://127.0.0.1:")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(address, timeout=120) as answer:
        # The token is in a cookie now, and not in the address of the page.
        assert "token" not in answer.url
    place = address.partition("?")[0]
    with browser.open(f"{place}api/studies", timeout=120) as answer:
        (study,) = json.load(answer)["study_summaries"]
    assert study["study_name"] == "demo"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{place}api/studies", timeout=120)
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        deletion = urllib.request.Request(f"{place}api/studies/1", headers=headers, method="DELETE")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            browser.open(deletion, timeout=120)
    with browser.open(f"{place}api/studies", timeout=120) as answer:
        assert len(json.load(answer)["study_summaries"]) == 1
    server.send_signal(signal.SIGTERM)
    _, err = server.communicate(timeout=120)
    assert (server.returncode, err) == (0, "")


def test_a_port_in_use_prints_one_sentence(run: Any, finished: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run("dashboard", "--port", port, "--home", finished.home)
    assert (code, out) == (1, "")
    assert err == f"dovetail: port {port}: Address already in use: choose another --port, or 0 for any\n"


def test_the_dashboard_without_experiments_prints_a_message(run: Any, tmp_path: Path) -> None:
    code, _, err = run("dashboard", "--home", tmp_path / "none")
    assert code == 1
    assert "there are no experiments" in err


@pytest.mark.slow
def test_the_dashboard_also_starts_tensorboard(finished: Any) -> None:
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "dovetail", "dashboard", "--port", "0", "--tensorboard"]
    command += ["--home", str(finished.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        label, _, address = process.stdout.readline().strip().partition(": ")
        assert label == "TensorBoard"
        assert address.startswith("http://127.0.0.1:")
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(address, timeout=120) as answer:
            assert answer.status == 200
        with browser.open(address.partition("?")[0] + "data/environment", timeout=120) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address.partition("?")[0], timeout=120)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
