"""Times of the live page: first view, comparison of 100 runs, an update, and memory, with 1,000 runs of 10,000 points.

Every run has 10,000 losses of batches and 100 rows of training and validation. `--rows` makes 10,000 rows of each run
instead, which no trainer writes by itself. Chromium draws the page; the times end when the table or the chart is drawn.

    python benchmarks/live_page.py --json page.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from dovetail.history import History
from dovetail.history.journal import RunJournal, journal_path
from dovetail.ui.runs import short_id

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROWS = "document.querySelectorAll('.ag-center-cols-container .ag-row').length > 10"
BARS = {
    "first view, new server and browser": 1.5,
    "first view": 1.5,
    "comparison of 100": 2.0,
    "update": 1.0,
    "memory in MB": 500.0,
}


def write_runs(folder: Path, runs: int, points: int, by_rows: bool) -> None:
    lines = []
    for number in range(50):
        loss, epochs = random.uniform(1, 3), points if by_rows else 50
        history = History()
        for epoch in range(1, epochs + 1):
            batches = epoch if by_rows else epoch * points // 50
            if not by_rows:
                history.extend_losses(loss / (1 + batch / 500) + random.gauss(0, 0.05) for batch in range(points // 50))
            value = loss / (1 + epoch / 10)
            history.record("train", {"loss": value, "lr": 0.1}, epoch=epoch, batches=batches, updates=batches)
            if not by_rows:
                history.record("valid", {"loss": value * 1.1}, epoch=epoch, batches=batches, updates=batches)
        path = folder / f"sample{number}.jsonl"
        history.save(path)
        lines.append(path.read_bytes())
        path.unlink()
    for number in range(runs):
        path = folder / f"run{number:04}" / "ck_history.jsonl"
        path.parent.mkdir()
        path.write_bytes(lines[number % len(lines)])
        journal = RunJournal(journal_path(path))
        journal.start({"settings": {"lr": random.choice([0.1, 0.01]), "seed": number, "batch_size": 32}}, is_new=True)
        journal.end("finished")


def start(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "dovetail", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match = re.match(r"page: (\S+)", process.stdout.readline())
    assert match is not None
    return process, match[1], time.perf_counter() - begun


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def cold_view(folder: Path) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, until a new browser shows the table of a new server that reads files."""
    from playwright.sync_api import sync_playwright

    process, address, _ = start(folder)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        # On a busy machine, a slow view is a result and not an error.
        page.set_default_timeout(300_000)
        before, begun = cpu_seconds(process), time.perf_counter()
        page.goto(address)
        page.wait_for_function(ROWS)
        found = time.perf_counter() - begun, cpu_seconds(process) - before
        browser.close()
    stop(process)
    return found


def measure(folder: Path, runs: int, repeats: int, by_rows: bool) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    cold = [cold_view(folder) for _ in range(repeats)]
    process, address, to_start = start(folder)
    base = address.partition("?")[0].rstrip("/")
    metric = "train_loss" if by_rows else "batch_loss"
    ids = ",".join(short_id(f"0:run{number:04}/ck_history.jsonl") for number in range(min(runs, 100)))
    found: dict[str, Any] = {
        "start": to_start,
        "first view, new server and browser": statistics.median(seconds for seconds, _ in cold),
        "CPU seconds, new server and browser": statistics.median(seconds for _, seconds in cold),
    }
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        # On a busy machine, a slow view is a result and not an error.
        page.set_default_timeout(300_000)

        def opened(path: str, ready: str, spent: list[float] | None = None) -> float:
            before = cpu_seconds(process)
            begun = time.perf_counter()
            page.goto(base + path if path else address)
            page.wait_for_function(ready)
            taken = time.perf_counter() - begun
            if spent is not None:
                spent.append(cpu_seconds(process) - before)
            return taken

        # An empty canvas does not count.
        drawn = """() => { const it = document.querySelector('canvas'); if (!it || !it.width) return false;
          const content = it.getContext('2d').getImageData(0, 0, it.width, it.height).data;
          return content.some((value, index) => index % 4 === 3 && value > 0); }"""
        opened("", ROWS)
        begun = time.perf_counter()
        read = f"document.body.innerText.includes('{runs} finished') && !document.body.innerText.includes('reading')"
        page.wait_for_function(read, timeout=300_000)
        found["until all files are read"] = time.perf_counter() - begun
        first: list[float] = []
        compared: list[float] = []
        found["first view"] = statistics.median(opened("/", ROWS, first) for _ in range(repeats))
        found["comparison of 100"] = statistics.median(
            opened(f"/compare?runs={ids}&metric={metric}", drawn, compared) for _ in range(repeats)
        )
        found["CPU seconds of the first view"] = statistics.median(first)
        found["CPU seconds of the comparison"] = statistics.median(compared)
        found["update"] = statistics.median(update(page, base, folder, number) for number in range(repeats))
        browser.close()
    found["memory in MB"] = psutil.Process(process.pid).memory_info().rss / 1e6
    stop(process)
    return found


def cpu_seconds(server: subprocess.Popen[str]) -> float:
    """Return the CPU time of the server and the browser so far, which does not depend on other programs."""
    processes = [psutil.Process(server.pid), *psutil.Process().children(recursive=True)]
    total = 0.0
    for each in {process.pid: process for process in processes}.values():
        with contextlib.suppress(psutil.Error):
            spent = each.cpu_times()
            total += spent.user + spent.system
    return total


def update(page: Any, base: str, folder: Path, number: int) -> float:
    """Return the seconds from a written row until the open page shows its value."""
    path = folder / f"live{number}" / "ck_history.jsonl"
    history, journal = History(), RunJournal(journal_path(path))
    history.attach(path, journal)
    journal.start({}, is_new=True)
    history.record("valid", {"loss": 1.0}, epoch=1, batches=1)
    time.sleep(4)
    page.goto(f"{base}/run?id={short_id(f'0:live{number}/ck_history.jsonl')}")
    page.wait_for_selector("canvas")
    value = 0.1 + number / 1000
    history.record("valid", {"loss": value}, epoch=2, batches=2)
    begun = time.perf_counter()
    page.wait_for_function(f"document.body.innerText.includes('last valid_loss {value:.4g}')", polling=20)
    journal.end("finished")
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--rows", action="store_true", help="10,000 rows instead of losses of batches")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dovetail-page-"))
    try:
        write_runs(folder, options.runs, options.points, options.rows)
        found = measure(folder, options.runs, options.repeats, options.rows)
    finally:
        shutil.rmtree(folder)
    found["load average"] = os.getloadavg()[0]
    for name, value in found.items():
        bar = BARS.get(name)
        print(f"{name:46} {value:8.2f}" + (f"   bar {bar:g}: {'met' if value <= bar else 'MISSED'}" if bar else ""))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
