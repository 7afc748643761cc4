"""The table, the comparison and an experiment in a real browser: links, keyboard, downloads, proxies, accessibility."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from browsed import BROWSER, Served, Tab, place, run_id, start_browser, start_page, stop_page, texts, until
from postgres import start_postgres
from proxied import Proxy, start_proxy

from dovetail.config import load_config
from dovetail.history import History
from dovetail.history.journal import RunJournal, journal_path
from dovetail.ui.runs import short_id

pytest.importorskip("nicegui")
pytest.importorskip("playwright.sync_api")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="NOT TESTED: there is no chromium (apt-get install chromium)"),
]

CONFIG = """
name: search
entrypoint: python3 train.py
hyperparameters: {lr: {type: double, minval: 0.25, maxval: 1.0, count: 4}}
searcher: {name: grid, metric: loss, max_concurrent_trials: 4}
max_restarts: 0
"""
TRIAL = """
import json, os

info = json.load(open(os.environ["DOVETAIL_TRIAL"]))
with open(os.path.join(info["directory"], "metrics.jsonl"), "a") as file:
    for step in (10, 20):
        row = {"group": "validation", "steps_completed": step, "metrics": {"loss": info["hparams"]["lr"] / step}}
        file.write(json.dumps(row) + "\\n")
"""
ROUNDS = """round,selected,reported,faults,accuracy,bytes_down,bytes_up
1,1 2,1 2,,0.5,1000,1000
2,2 3,2,3 timeout,0.75,1000,500
"""
HOST = "runs.example.org"
RUNS = [run_id(f"runs/run{number}") for number in range(3)]
COMPARE = f"/compare?runs={','.join(RUNS)}"
EXPERIMENT = "/experiment?store=0&id=1"
FEDERATION = f"/federation?id={short_id('0:federation')}"
VIEWS = {"/": ".ag-row", **dict.fromkeys([f"/run?id={RUNS[0]}", COMPARE, EXPERIMENT, FEDERATION], "canvas")}


def write_run(folder: Path, number: int) -> None:
    path = folder / "ck_history.jsonl"
    history, journal = History(), RunJournal(journal_path(path))
    history.attach(path, journal)
    journal.start({"settings": {"lr": 0.1 * (number + 1), "seed": number}}, is_new=True)
    for epoch in (1, 2, 3):
        history.record("valid", {"loss": (number + 1) / epoch}, epoch=epoch, batches=10 * epoch)
    journal.end("finished")


def run_experiment(code: Path, **variables: str) -> None:
    code.mkdir()
    (code / "train.py").write_text(TRIAL)
    (code / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "dovetail", "experiment", "create", "config.yaml", "."]
    subprocess.run(command, cwd=code, env={**os.environ, **variables}, check=True, capture_output=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page of three runs and a finished experiment of four trials."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(3):
        write_run(folder / "runs" / f"run{number}", number)
    (folder / "federation").mkdir()
    (folder / "federation" / "rounds.csv").write_text(ROUNDS)
    code = folder / "code"
    run_experiment(code, DOVETAIL_HOME=str(code / ".dovetail"))
    page = start_page(folder, "--allow-host", HOST)
    yield page
    stop_page(page)


@pytest.fixture(scope="module")
def proxy(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with start_proxy(tmp_path_factory.mktemp("proxy"), HOST, "/lab/runs", served.port) as started:
        yield started


@pytest.fixture(scope="module")
def browser(proxy: Proxy) -> Iterator[Any]:
    """A browser for which the host name of the proxy is this machine."""
    with start_browser(f"--host-resolver-rules=MAP {HOST}:443 127.0.0.1:{proxy.port}") as started:
        yield started


@pytest.fixture(scope="module")
def shared_tab(browser: Any, served: Served) -> Iterator[Tab]:
    opened = Tab(browser, served)
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    until(lambda: opened.page.get_by_text("7 runs: 7 finished").count())
    yield opened
    opened.context.close()


@pytest.fixture
def tab(shared_tab: Tab) -> Iterator[Tab]:
    shared_tab.problems.clear()
    yield shared_tab
    shared_tab.check()


def parameters(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(place(page)).query)


def names(page: Any) -> list[str]:
    """Return the runs and the headings of groups, as they are on the screen."""
    rows = """() => [...document.querySelectorAll('.ag-full-width-row button strong, .ag-row [col-id=name]')]
      .map((it) => [Number(it.closest('.ag-row').getAttribute('row-index')), it.innerText])
      .sort((a, b) => a[0] - b[0]).map((pair) => pair[1].replace(/^[▾▸] /, ''))"""
    return [str(each) for each in page.evaluate(rows)]


TRIALS = [f"trial {number}" for number in (1, 2, 3, 4)]


def test_runs_are_grouped_by_experiment_and_a_link_keeps_closed_groups(tab: Tab) -> None:
    page = tab.open("/?sort=name", ".ag-row")
    everything = ["Runs without an experiment", "runs/run0", "runs/run1", "runs/run2", "search · experiment 1", *TRIALS]
    until(lambda: names(page) == everything)
    page.locator(".dt-group", has_text="search").click()
    until(lambda: names(page) == everything[:5])
    assert page.locator(".dt-group", has_text="search").get_attribute("aria-expanded") == "false"
    page.goto(place(page))
    until(lambda: names(page) == everything[:5])
    page.get_by_role("checkbox", name="groups").click()
    page.wait_for_function("document.querySelector('.ag-row') && !document.querySelector('.dt-group')")
    until(lambda: names(page) == [*everything[1:4], *TRIALS])
    assert parameters(page) == {"sort": ["name"], "flat": ["true"]}


def test_a_link_and_the_back_button_restore_sorting_filters_and_columns(tab: Tab) -> None:
    page = tab.open("/", ".ag-row")
    page.locator(".ag-header-cell[col-id='best']").click()
    until(lambda: parameters(page).get("sort") == ["best"])
    page.locator(".ag-header-cell[col-id='best']").click()
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("checkbox", name="Curve").click()
    page.keyboard.press("Escape")
    page.get_by_label("Search runs").fill("run")
    until(lambda: parameters(page).get("search") == ["run"])
    page.locator(".ag-header-cell[col-id='best'] .ag-header-cell-filter-button").click()
    page.locator(".ag-filter input").first.fill("0.5")
    until(lambda: '"filter":0.5' in parameters(page).get("filter", [""])[0])
    link = parameters(page)
    assert link["sort"] == ["-best"]
    assert "spark" not in link["column"]
    page.keyboard.press("Escape")
    # The filter accepts equal values: 2 / 3, 1 and 1 / 3 are not among them.
    until(lambda: names(page) == [])
    page.goto(place(page).replace("equals", "greaterThan"))
    wanted = ["Runs without an experiment", "runs/run2", "runs/run1"]
    until(lambda: names(page) == wanted)
    assert page.locator(".ag-header-cell[col-id='spark']").count() == 0
    page.locator(".ag-row [col-id='name']").first.click()
    page.wait_for_selector("canvas")
    page.go_back()
    until(lambda: names(page) == wanted)
    assert page.get_by_label("Search runs").input_value() == "run"


def test_a_link_with_code_as_a_filter_runs_nothing(tab: Tab) -> None:
    code = "document.body.dataset.hacked=1"
    path = f'/?filter={{"best":{{"filterType":"number",":type":"{code}"}},":x":"{code}"}}&sort=:x&column=:x'
    page = tab.open(path.replace('"', "%22"), ".ag-row")
    until(lambda: len(names(page)) == 9)
    assert page.evaluate("document.body.dataset.hacked") is None


def test_a_comparison_keeps_chart_and_table_settings_in_one_link(tab: Tab) -> None:
    page = tab.open(COMPARE)
    page.get_by_role("checkbox", name="log y").click()
    until(lambda: parameters(page).get("log_y") == ["true"])
    page.locator(".ag-header-cell[col-id='last']").click()
    until(lambda: parameters(page).get("sort") == ["last"])
    page.locator(".q-select", has_text="Baseline").click()
    page.get_by_role("option", name="runs/run1").click()
    until(lambda: parameters(page).get("baseline") == [RUNS[1]])
    assert parameters(page)["log_y"] == ["true"]
    page.goto(place(page))
    page.wait_for_selector("canvas")
    until(lambda: texts(page, "delta") == ["-0.3333", "0", "0.3333"])
    assert page.get_by_role("checkbox", name="log y").get_attribute("aria-checked") == "true"


def test_the_table_of_trials_keeps_its_sorting_in_the_link(tab: Tab) -> None:
    page = tab.open(EXPERIMENT)
    page.locator(".ag-header-cell[col-id='best']").click()
    page.locator(".ag-header-cell[col-id='best']").click()
    until(lambda: parameters(page).get("sort") == ["-best"])
    page.goto(place(page))
    until(lambda: texts(page, "best") == ["0.05", "0.0375", "0.025", "0.0125"])


def test_the_keyboard_reaches_rows_groups_and_buttons(tab: Tab) -> None:
    page = tab.open("/?sort=name", ".ag-row")
    page.get_by_label("Search runs").focus()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.innerText.trim() || document.activeElement.className"))
    assert any("Compare" in each for each in reached)
    page.locator(".ag-header-cell[col-id='name']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(lambda: names(page)[:2] == ["Runs without an experiment", "search · experiment 1"])
    page.keyboard.press("Enter")
    until(lambda: names(page)[1] == "runs/run0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("canvas")
    assert f"/run?id={RUNS[0]}" in place(page)


def test_a_chart_is_saved_as_a_png(tab: Tab) -> None:
    page = tab.open(COMPARE)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as PNG").first.click()
    assert download.value.suggested_filename == "chart.png"
    content = Path(download.value.path()).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 5000


def test_the_best_configuration_is_copied_as_yaml(tab: Tab, tmp_path: Path) -> None:
    page = tab.open(EXPERIMENT)
    page.get_by_role("button", name="Copy the best configuration").click()
    page.get_by_text("copied").wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert yaml.safe_load(text)["hyperparameters"] == {"lr": 0.25}
    (tmp_path / "best.yaml").write_text(text)
    config = load_config(tmp_path / "best.yaml")
    assert (config["hyperparameters"], config["searcher"]["name"]) == ({"lr": 0.25}, "single")


def test_nothing_moves_while_data_arrive(tab: Tab, served: Served) -> None:
    sums = {}
    for path, selector in VIEWS.items():
        page = tab.open(path, selector)
        page.evaluate("""() => { window.moved = 0; new PerformanceObserver((list) => { for (const entry of
          list.getEntries()) window.moved += entry.value; }).observe({type: 'layout-shift', buffered: true}); }""")
        if path == "/":
            write_run(served.folder / "runs" / "late", 5)
            page.get_by_text("8 runs").wait_for()
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        sums[path] = page.evaluate("moved")
    assert {path: moved for path, moved in sums.items() if moved > 0.1} == {}


def test_axe_finds_nothing_serious_in_light_and_dark(tab: Tab) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="NOT TESTED: there is no axe-core")
    # Only the contrast depends on the colours.
    options = {"light": {}, "dark": {"runOnly": {"type": "rule", "values": ["color-contrast"]}}}
    serious = {}
    for path, selector in VIEWS.items():
        page = tab.open(path, selector)
        # Otherwise the contrast is measured while a colour fades into the other one.
        page.add_style_tag(content="* { transition: none !important; }")
        for scheme, chosen in options.items():
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(
                f"document.body.classList.contains('body--dark') === {str(scheme == 'dark').lower()}"
            )
            found = axe.Axe().run(page, options={"resultTypes": ["violations"], **chosen}).response["violations"]
            for it in found:
                if it["impact"] in ("serious", "critical"):
                    serious[path, scheme, it["id"]] = [node["html"][:200] for node in it["nodes"]][:3]
        page.emulate_media(color_scheme="light")
    assert serious == {}


def test_every_view_works_below_the_path_of_a_reverse_proxy(browser: Any, served: Served) -> None:
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("websocket", lambda socket: requests.append(socket.url.replace("wss:", "https:")))
    page.goto(f"https://{HOST}/lab/runs/?token={served.token}")
    page.wait_for_selector(".ag-row")
    assert [(each["path"], each["secure"]) for each in context.cookies()] == [("/lab/runs", True)]
    page.get_by_label("Search runs").fill("run1")
    until(lambda: place(page) == f"https://{HOST}/lab/runs/?search=run1")
    until(lambda: names(page) == ["Runs without an experiment", "runs/run1"])
    page.locator(".ag-row [col-id='name']").first.click()
    page.wait_for_selector("canvas")
    assert place(page) == f"https://{HOST}/lab/runs/run?id={RUNS[1]}"
    page.get_by_role("link", name="Experiments").click()
    page.locator("a[href^='/lab/runs/experiment?']").click()
    page.get_by_role("button", name="Copy the best configuration").wait_for()
    assert [each for each in requests if not each.startswith((f"https://{HOST}/lab/runs/", "data:", "blob:"))] == []
    assert any("socket.io" in each for each in requests)
    assert problems == []
    context.close()


@pytest.mark.torture
def test_experiments_of_a_database_server_are_shown_and_copied(browser: Any, tmp_path: Path) -> None:
    with start_postgres() as url:
        run_experiment(tmp_path / "code", DOVETAIL_HOME=str(tmp_path / "home"), DOVETAIL_STORE=url)
        page = start_page(url, "--home", str(tmp_path / "home"))
        try:
            tab = Tab(browser, page)
            tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
            tab.page.locator("a[href^='/experiment?']").click()
            until(lambda: texts(tab.page, "best") == ["0.0125", "0.025", "0.0375", "0.05"])
            tab.page.get_by_role("button", name="Copy the best configuration").click()
            tab.page.get_by_text("copied").wait_for()
            text = tab.page.evaluate("navigator.clipboard.readText()")
            assert yaml.safe_load(text)["hyperparameters"] == {"lr": 0.25}
            password = url.partition("@")[0].rpartition(":")[2]
            assert password not in tab.page.content()
            tab.check()
            tab.context.close()
        finally:
            stop_page(page)
