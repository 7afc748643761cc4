"""The live page in a real browser."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsed import BROWSER, Served, Tab, place, run_id, start_browser, start_page, stop_page, texts, until

from dovetail.callbacks import Callback
from dovetail.history import History, samples
from dovetail.history.journal import RunJournal, journal_path
from dovetail.search.store import Store
from dovetail.servers import fedavg
from dovetail.trainers import Trainer

pytest.importorskip("nicegui")
pytest.importorskip("playwright.sync_api")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="NOT TESTED: there is no chromium (apt-get install chromium)"),
]

HOSTILE = {
    "html": "<img src=x onerror='document.body.dataset.hacked=1'><script>document.body.dataset.hacked=1<",
    "long": "long-" + "x" * 240,
    "rtl": "a\u202egnp.exe",
    "newline": "line\nbreak",
    "colon": ":document.body.dataset.hacked=1",
}

EXPERIMENT = """
name: <b>waiting</b>
entrypoint: python3 train.py
hyperparameters: {lr: {type: double, minval: 0.25, maxval: 0.5, count: 2}}
searcher: {name: grid, metric: loss}
max_restarts: 0
"""

TRIAL = """
import json, os, time

info = json.load(open(os.environ["DOVETAIL_TRIAL"]))
print("<b>learning</b>", flush=True)
with open(os.path.join(info["directory"], "metrics.jsonl"), "a") as file:
    row = {"group": "validation", "steps_completed": 10, "metrics": {"loss": info["hparams"]["lr"]}}
    file.write(json.dumps(row) + "\\n")
while True:
    time.sleep(0.05)
"""


class Wait(Callback):
    """Waits after each epoch until a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, context: Any, metrics: Any) -> None:
        until((self.folder / f"go-{context.progress.epoch}").exists, 300)


def train_slowly(folder: Path) -> None:
    x, y = torch.randn(8, 2), torch.tensor([0, 1] * 4)
    options: dict[str, Any] = {"batch_size": 4, "num_epochs": 9, "verbose": False, "callbacks": [Wait(folder)]}
    data: dict[str, Any] = {"train_dataset": (x, y), "val_dataset": (x, y)}
    Trainer(torch.nn.Linear(2, 2), "cpu", checkpoint_dir=folder / "live", **data, **options).fit()


def write_run(folder: Path, name: str, settings: dict[str, Any]) -> None:
    path = folder / "ck_history.jsonl"
    history, journal = History(), RunJournal(journal_path(path))
    history.attach(path, journal)
    journal.start({"settings": settings, "explain": name}, is_new=True)
    for epoch in (1, 2):
        history.record("valid", {"loss": 1.0 / epoch, name[:40]: 0.5}, epoch=epoch, batches=epoch)
    (folder / "out.log").write_text(f"{name}\nthe end\n")
    journal.end("failed", f"ValueError: {name}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs, a federation, an experiment, and runs with hostile names."""
    folder = tmp_path_factory.mktemp("data")
    x, y = torch.randn(16, 2), torch.tensor([0, 1] * 8)
    for seed, rate in ((1, 0.1), (2, 0.1), (1, 0.01)):
        run = folder / "runs" / f"seed{seed}-lr{rate}"
        options: dict[str, Any] = {
            "batch_size": 4,
            "num_epochs": 3,
            "verbose": False,
            "learning_rate": rate,
            "seed": seed,
        }
        with pytest.MonkeyPatch.context() as patch:
            # A sample at every report.
            for name in ("FIRST", "SHORTEST", "_COST_FACTOR"):
                patch.setattr(samples, name, 0.0)
            Trainer(
                torch.nn.Linear(2, 2), "cpu", train_dataset=(x, y), val_dataset=(x, y), checkpoint_dir=run, **options
            ).fit()
    for name in HOSTILE.values():
        write_run(folder / "hostile" / name.replace("/", "∕"), name, {name: name, "lr": 0.5})
    fedavg.Server(rounds=2, total_clients=3, per_round=2, checkpoint_path=str(folder / "federation")).run()
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text(TRIAL)
    (code / "config.yaml").write_text(EXPERIMENT)
    return folder


@pytest.fixture(scope="module")
def served(data: Path) -> Iterator[Served]:
    page = start_page(data)
    yield page
    stop_page(page)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with start_browser() as started:
        yield started


@pytest.fixture(scope="module")
def shared_tab(browser: Any, served: Served) -> Iterator[Tab]:
    """One tab for all tests: a new one would load all scripts again."""
    opened = Tab(browser, served)
    yield opened
    opened.context.close()


@pytest.fixture
def tab(shared_tab: Tab) -> Iterator[Tab]:
    shared_tab.problems.clear()
    shared_tab.open("/", ".ag-row")
    yield shared_tab
    shared_tab.check()


REAL = [run_id(f"runs/seed{seed}-lr{rate}") for seed, rate in ((1, 0.1), (2, 0.1), (1, 0.01))]


def test_all_runs_are_listed_searched_and_sorted(tab: Tab) -> None:
    page = tab.page
    page.get_by_text("8 runs: 3 finished, 5 failed").wait_for()
    page.get_by_label("Search runs").fill("runs/seed")
    until(lambda: len(texts(page, "name")) == 3)
    until(lambda: "search=runs" in place(page))
    page.locator(".ag-header-cell[col-id='name']").click()
    until(lambda: texts(page, "name") == ["runs/seed1-lr0.01", "runs/seed1-lr0.1", "runs/seed2-lr0.1"])
    assert set(texts(page, "state")) == {"✓ finished"}
    assert page.locator(".ag-row svg polyline").count() == 3


def test_selected_runs_are_compared_by_their_differences(tab: Tab) -> None:
    page = tab.page
    page.get_by_label("Search runs").fill("runs/seed")
    until(lambda: len(texts(page, "name")) == 3)
    page.locator(".ag-row input[type=checkbox]").nth(0).check()
    page.locator(".ag-row input[type=checkbox]").nth(1).check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("canvas")
    assert page.locator(".ag-row").count() == 4  # two rows, each in the pinned and in the other part
    page = tab.open(f"/compare?runs={','.join(REAL)}&metric=valid_loss&x=epoch&baseline={REAL[0]}&bands=true")
    headings = page.locator(".ag-header-cell-text").all_inner_texts()
    assert {"learning_rate", "seed"} <= set(headings)
    assert "batch_size" not in headings
    assert page.get_by_role("checkbox", name="bands over seeds").get_attribute("aria-checked") == "true"
    assert texts(page, "delta")[0] == "0"


def test_a_link_opens_the_same_view_again(tab: Tab) -> None:
    page = tab.open(f"/compare?runs={','.join(REAL)}")
    page.get_by_role("checkbox", name="log y").click()
    until(lambda: "log_y=true" in place(page))
    page.goto(place(page))
    page.wait_for_selector("canvas")
    assert page.get_by_role("checkbox", name="log y").get_attribute("aria-checked") == "true"


def test_a_run_shows_settings_parts_and_verified_checkpoints(tab: Tab) -> None:
    page = tab.open(f"/run?id={REAL[0]}")
    page.get_by_text("next epoch: 1 of 3").wait_for()
    assert page.get_by_text("optimizer.weight_decay").count() == 1
    assert page.locator("canvas").count() == 7
    headings = page.locator("h2").all_inner_texts()
    assert {"CPU, percent", "Memory of the process and its children, GB", "Memory of the machine, GB"} <= set(headings)
    assert page.get_by_text("git commit").count() == 1
    page.get_by_role("button", name="Verify").first.click()
    page.get_by_text("✓ intact").wait_for()


def test_a_federation_shows_rounds_and_clients(tab: Tab) -> None:
    page = tab.page
    page.locator("a[href^='/federation?']").click()
    page.wait_for_selector("canvas")
    assert page.get_by_text("FedAvg · 2 of 2 rounds").count() == 1
    assert page.get_by_text("✓ finished").count() == 1
    assert page.locator("h2").first.inner_text() == "Samples of each label at 3 clients"
    assert texts(page, "round") == ["1", "2"]
    with page.expect_download() as download:
        page.get_by_text("Partition as CSV").click()
    assert len(Path(download.value.path()).read_text().splitlines()) == 4


def test_hostile_names_are_text_in_every_view(tab: Tab) -> None:
    ids = [run_id(f"hostile/{name.replace('/', '∕')}") for name in HOSTILE.values()]
    for each in ids[:3]:
        page = tab.open(f"/run?id={each}")
        page.locator("canvas").first.hover()
        assert page.get_by_text("the end").count() == 1
        assert page.evaluate("document.body.dataset.hacked") is None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page = tab.open(f"/compare?runs={','.join(ids)}&everything=true")
    box = page.locator("canvas").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.get_by_text("0.5").first.wait_for()
    assert page.locator("img[src=x]").count() == 0
    # A script of the browser's own extensions would also be an error: the two failed loads of `x` would be seen here.
    assert tab.problems == []


def test_tags_are_edited_in_the_table_and_stored(tab: Tab, data: Path) -> None:
    page = tab.page
    page.get_by_label("Search runs").fill("seed2")
    until(lambda: len(texts(page, "name")) == 1)
    page.evaluate("document.querySelector('.ag-body-horizontal-scroll-viewport').scrollLeft = 900")
    cell = page.locator(".ag-row [col-id='tags']")
    cell.dblclick()
    page.keyboard.type("good, <b>best</b>")
    page.keyboard.press("Enter")
    stored = data / ".dovetail-notes.json"
    until(stored.exists)
    key = "runs/seed2-lr0.1/ck_history.jsonl"
    assert json.loads(stored.read_text())["runs"] == {key: {"tags": ["good", "<b>best</b>"], "note": ""}}


def test_a_run_is_followed_live_and_then_shown_as_killed(tab: Tab) -> None:
    folder = tab.served.folder / "following"
    folder.mkdir()
    # Forked, because a new interpreter takes seconds to import torch.
    process = multiprocessing.get_context("fork").Process(target=train_slowly, args=(folder,))
    process.start()
    page = tab.page
    page.get_by_label("Search runs").fill("following")
    until(lambda: texts(page, "state") == ["▶ running"])
    page.locator(".ag-row [col-id='name']").click()
    page.wait_for_selector("canvas")
    drawn = "getComputedStyle(document.querySelector('canvas')) && document.querySelectorAll('.nicegui-echart').length"
    assert page.evaluate(drawn) >= 3
    page.get_by_text("of memory").wait_for()
    for epoch in (1, 2):
        (folder / f"go-{epoch}").touch()
    until(lambda: len(History.load(folder / "live" / "ck_history.jsonl").rows) == 6)
    last = History.load(folder / "live" / "ck_history.jsonl").get_latest_metric("valid_accuracy")
    page.get_by_text(f"last valid_accuracy {last:.4g}").wait_for()
    process.kill()
    process.join()
    page.get_by_text("† killed").wait_for()
    shutil.rmtree(folder)


def test_buttons_kill_a_trial_and_pause_resume_and_kill_its_experiment(tab: Tab, data: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "experiment", "create", "config.yaml", ".", "--detach"]
    home = data / "code" / ".dovetail"
    environment = {**os.environ, "DOVETAIL_HOME": str(home)}
    subprocess.run(command, cwd=data / "code", env=environment, check=True, capture_output=True)
    page = tab.page
    page.locator("a[href^='/experiment?']").click()
    page.wait_for_selector(".ag-row")
    until(lambda: "0.25" in texts(page, "best"))
    page.locator(".ag-row [col-id='id']").first.click()
    page.get_by_text("<b>learning</b>").wait_for()
    page.get_by_role("button", name="Kill this trial").click()
    page.get_by_role("button", name="Yes").click()
    until(lambda: texts(page, "state")[0] == "CANCELED")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("PAUSED", exact=True).wait_for()
    until(lambda: page.get_by_role("button", name="Resume").is_enabled())
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("ACTIVE", exact=True).wait_for()
    page.get_by_role("button", name="Kill").first.click()
    page.get_by_role("button", name="Yes").click()
    # Its first trial is canceled already, so the text alone says nothing about the experiment.
    store = Store.open(home)
    until(lambda: store.experiment(1).state == "CANCELED" and not store.experiment(1).is_running)
    until(lambda: not page.get_by_role("button", name="Resume").is_enabled())


def test_no_view_is_wider_than_a_phone_in_dark_and_light(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 800})
    views = {"/": ".ag-row", f"/run?id={REAL[0]}": "canvas", f"/compare?runs={','.join(REAL)}": "canvas"}
    for (path, selector), scheme in zip(views.items(), ("dark", "light", "dark"), strict=True):
        tab.page.emulate_media(color_scheme=scheme)
        page = tab.open(path, selector)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert page.evaluate("document.body.classList.contains('body--dark')") is (scheme == "dark")
    tab.page.emulate_media(color_scheme="light")
    tab.page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.torture
def test_a_read_only_page_changes_nothing(browser: Any, data: Path) -> None:
    page = start_page(data / "runs", "--read-only")
    try:
        tab = Tab(browser, page)
        assert tab.page.get_by_text("read-only").count() == 1
        tab.page.evaluate("document.querySelector('.ag-body-horizontal-scroll-viewport').scrollLeft = 900")
        tab.page.locator(".ag-row [col-id='tags']").first.dblclick()
        assert tab.page.locator(".ag-cell-inline-editing").count() == 0
        tab.check()
        tab.context.close()
    finally:
        stop_page(page)
    assert not (data / "runs" / ".dovetail-notes.json").exists()


# The guard


def ask(served: Served, path: str, **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=names)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_requests_without_token_or_from_another_site_are_rejected(served: Served) -> None:
    cookie = f"dovetail-{served.port}={served.token}"
    for path in ("/", "/download/runs.json", "/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/openapi.json"):
        assert ask(served, path)[0] == 401
        assert ask(served, path, Cookie=cookie, Host="evil.example")[0] == 403
        assert ask(served, path, Cookie=cookie, Origin="http://evil.example")[0] == 403
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
        assert ask(served, path, Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==", **upgrade)[0] == 403
    status, content, headers = ask(served, "/download/runs.json", Cookie=cookie)
    assert (status, headers["X-Frame-Options"]) == (200, "DENY")
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert len(json.loads(content)) >= 8
    status, _, headers = ask(served, served.address.partition(str(served.port))[2])
    assert (status, headers["Location"]) == (303, "/")


@pytest.mark.parametrize(
    "path", ["/run?id=../../etc/passwd", "/download/run.csv?id=..%2F..%2Fetc%2Fpasswd", "/../../etc/passwd"]
)
def test_no_address_leads_to_a_file_outside(served: Served, path: str) -> None:
    status, content, _ = ask(served, path, Cookie=f"dovetail-{served.port}={served.token}")
    assert status in (200, 404)
    assert b"root:" not in content


def test_downloads_have_every_row(served: Served) -> None:
    cookie = f"dovetail-{served.port}={served.token}"
    _, content, headers = ask(served, f"/download/run.csv?id={REAL[0]}", Cookie=cookie)
    assert headers["Content-Disposition"] == 'attachment; filename="run.csv"'
    assert len(content.splitlines()) == 7
    _, content, _ = ask(
        served, f"/download/compare.json?runs={','.join(REAL)}&metric=valid_loss&x=epoch", Cookie=cookie
    )
    assert [row["epoch"] for row in json.loads(content)] == [1, 2, 3] * 3
