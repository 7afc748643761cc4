"""A report in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest

from dovetail.search.records import ExperimentRecord, TrialRecord
from dovetail.search.report import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="NOT TESTED: there is no chromium (apt-get install chromium)"),
]

# Runs in the page, after its own script: clicks a heading, and lights up a trial.
CLICKS = """
document.querySelectorAll("th")[2].click();
document.body.dataset.ascending = [...document.querySelectorAll("tbody tr")].map(row => row.dataset.trial).join(" ");
document.querySelectorAll("th")[2].click();
document.body.dataset.descending = [...document.querySelectorAll("tbody tr")].map(row => row.dataset.trial).join(" ");
document.querySelector('tr[data-trial="12"]').dispatchEvent(new Event("pointerenter"));
document.body.dataset.lit = document.querySelectorAll(".on").length;
const table = document.querySelector("table");
document.body.dataset.tableCut = table.scrollWidth > table.parentElement.clientWidth;
document.body.dataset.tooWide = document.documentElement.scrollWidth > innerWidth;
"""

NASTY = "<script>document.body.dataset.hacked = 1</script><img src=x onerror='document.body.dataset.hacked = 1'>"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    start = datetime(2026, 1, 2, tzinfo=timezone.utc)
    losses = [3.0, 1.0, None, 10.0, 2.0, 0.5]
    trials = [
        TrialRecord(
            id=10 + number,
            number=number,
            experiment_id=1,
            state="ERROR" if loss is None else "COMPLETED",
            hparams={"lr": 0.1 * (number + 1), NASTY: NASTY * number},
            directory=tmp_path,
            best=loss,
            latest=loss,
            values={} if loss is None else {10: 2 * loss, 20: loss},
            reason=NASTY,
        )
        for number, loss in enumerate(losses)
    ]
    config = {"description": NASTY, "searcher": {"name": "random", "metric": "loss"}}
    record = ExperimentRecord(1, NASTY, "COMPLETED", config, tmp_path, start, start, trials=tuple(trials))
    return report(record, tmp_path / "report.html")[0]


def browse(page: Path, *options: str) -> str:
    assert BROWSER is not None
    profile = page.parent / "profile"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    command += [*options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def with_clicks(page: Path) -> Path:
    # The policy of the page lets no script run but its own: for the test, one more.
    digest = base64.b64encode(hashlib.sha256(CLICKS.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ")
    clicked = page.with_name("clicked.html")
    clicked.write_text(text.replace("</body>", f"<script>{CLICKS}</script></body>"), encoding="utf-8")
    return clicked


def test_the_page_shows_a_row_and_lines_for_every_trial(page: Path) -> None:
    shown = browse(page, "--dump-dom")
    assert shown.count("<tr data-trial=") == 6
    assert len(re.findall(r'<g class="trial" data-trial="15"', shown)) == 3


def test_user_text_never_becomes_a_script_or_an_element(page: Path) -> None:
    for shown in (browse(page, "--dump-dom"), browse(with_clicks(page), "--dump-dom")):
        assert "data-hacked" not in shown
        assert "<img" not in shown


def test_a_click_sorts_rows_and_highlights_trials(page: Path) -> None:
    shown = browse(with_clicks(page), "--dump-dom")
    # By the loss; the trial without one stays below.
    assert 'data-ascending="15 11 14 10 13 12"' in shown
    assert 'data-descending="13 10 14 11 15 12"' in shown
    # Its row: a trial without a value is in no picture.
    assert 'data-lit="1"' in shown


def test_a_narrow_screen_scrolls_charts_and_not_the_page(page: Path) -> None:
    assert 'data-too-wide="false"' in browse(with_clicks(page), "--window-size=500,900", "--dump-dom")


@pytest.mark.parametrize("width", [1280, 800])
def test_the_table_of_a_search_fits_its_page(tmp_path: Path, width: int) -> None:
    start = datetime(2026, 1, 2, tzinfo=timezone.utc)
    why = "stopped by the searcher for its value after 120 batches"
    hparams = {"learning_rate": 0.0006224, "width": 39, "dropout": 0.2852}
    trials = tuple(
        TrialRecord(
            *(12 + number, number, 1, "STOPPED", {name: value * (1 + number) for name, value in hparams.items()}),
            *(tmp_path, 0.669, 120, 0.669, 1080),
            started=start,
            ended=start,
            values={120: 0.669},
            reason=why,
        )
        for number in range(2)
    )
    config = {"searcher": {"name": "async_halving", "metric": "accuracy"}}
    record = ExperimentRecord(1, "spirals", "COMPLETED", config, tmp_path, start, start, trials=trials)
    page = with_clicks(report(record, tmp_path / "report.html")[0])
    assert 'data-table-cut="false"' in browse(page, f"--window-size={width},900", "--dump-dom")


def test_the_charts_of_the_page_are_rendered(page: Path, tmp_path: Path) -> None:
    target = tmp_path / "shot.png"
    browse(page, f"--screenshot={target}", "--window-size=1200,1600")
    assert target.read_bytes().startswith(b"\x89PNG")
    # An empty page of that size has a tenth of it.
    assert target.stat().st_size > 50_000
