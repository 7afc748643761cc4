"""`dovetail dashboard`."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui")


def opened(line: str, label: str) -> tuple[Any, str]:
    """Return a browser that has opened a printed address, and the address without its token."""
    found, _, address = line.strip().partition(": ")
    assert found == label
    assert address.startswith("http://127.0.0.1:")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(address, timeout=120) as answer:
        # The token is in a cookie now, and not in the address of the page.
        assert "token" not in answer.url
    place = address.partition("?")[0]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(place, timeout=120)
    return browser, place


def content(browser: Any, place: str) -> str:
    with browser.open(place, timeout=120) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
def test_the_dashboard_opens_the_page_of_the_store_and_tensorboard(finished: Any) -> None:
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "dovetail", "dashboard", "--port", "0", "--tensorboard"]
    command += ["--home", str(finished.home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        browser, place = opened(process.stdout.readline(), "experiments")
        deadline = time.monotonic() + 60
        while "demo · experiment 1" not in content(browser, place):
            assert time.monotonic() < deadline, "the page does not show the experiment"
        browser, place = opened(process.stdout.readline(), "TensorBoard")
        assert "data_location" in content(browser, f"{place}data/environment")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


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
