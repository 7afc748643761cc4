"""Helpers of the tests of the live page: a served page, and a tab of a real browser that looks at it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dovetail.ui.runs import short_id

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
T = TypeVar("T")


def until(check: Callable[[], T], seconds: float = 60.0) -> T:
    """Return the first true result of a function."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


@dataclass
class Served:
    """A page that is served, and the folder that it shows."""

    address: str
    folder: Path
    process: subprocess.Popen[str]

    @property
    def base(self) -> str:
        return self.address.partition("?")[0].rstrip("/")

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    @property
    def token(self) -> str:
        return self.address.rpartition("=")[2]


def start_page(folder: Path | str, *options: str) -> Served:
    """Serve a folder, or the experiments of a store."""
    command = [sys.executable, "-m", "dovetail", "ui", str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"page: (http://127\.0\.0\.1:[0-9]+/\?token=[\w-]+)\n", line)
    assert match, line
    return Served(match[1], Path(folder), process)


def stop_page(served: Served) -> None:
    """Stop a page, and check its exit code."""
    served.process.send_signal(signal.SIGINT)
    assert served.process.stdout is not None
    served.process.stdout.close()
    assert served.process.wait(30) in (0, -signal.SIGINT, 130)


@contextmanager
def start_browser(*options: str) -> Iterator[Any]:
    """Start a browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", *options])
        yield started
        started.close()


class Tab:
    """A tab that records what must not happen."""

    def __init__(self, browser: Any, served: Served) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page, self.served = self.context.new_page(), served
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda it: self.problems.append(it.text) if it.type == "error" else None)
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.goto(served.address)
        self.page.wait_for_selector(".ag-row")

    def open(self, path: str, selector: str = "canvas") -> Any:
        self.page.goto(f"{self.served.base}{path}")
        self.page.wait_for_selector(selector)
        return self.page

    def check(self) -> None:
        assert self.problems == []
        assert {host for host in self.hosts if host} == {f"127.0.0.1:{self.served.port}"}
        assert self.page.evaluate("document.body.dataset.hacked") is None


def run_id(name: str) -> str:
    return short_id(f"0:{name}/ck_history.jsonl")


# The grid keeps the order of its elements, and moves them on the screen.
CELLS = """(column) => [...document.querySelectorAll(`.ag-row [col-id='${column}']`)]
  .map((cell) => [Number(cell.closest('.ag-row').getAttribute('row-index')), cell.innerText])
  .sort((a, b) => a[0] - b[0]).map((pair) => pair[1])"""


def texts(page: Any, column: str) -> list[str]:
    return [str(each) for each in page.evaluate(CELLS, column)]


def place(page: Any) -> str:
    # `page.url` changes only while another call waits for the browser.
    return str(page.evaluate("location.href"))
