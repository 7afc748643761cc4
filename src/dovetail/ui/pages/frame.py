"""Frame of every view: header, theme, notices, and pieces that several views use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from nicegui import ui

from dovetail.history.journal import JournalReader
from dovetail.printing import printable
from dovetail.ui.charts import shortened
from dovetail.ui.library import Library
from dovetail.ui.pages.tables import SCRIPT
from dovetail.ui.runs import Run

REFRESH_SECONDS = 0.4
SYMBOLS = {
    "running": "▶ running",
    "finished": "✓ finished",
    "failed": "✕ failed",
    "killed": "† killed",
    "interrupted": "‖ interrupted",
    "unknown": "? unknown",
}
_STYLE = """
.nicegui-content { padding: 0.75rem; gap: 0.75rem; }
.dt-card { border: 1px solid rgba(128,128,128,.28); border-radius: 8px; padding: .6rem .8rem; min-width: 0; }
.dt-grid { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  width: 100%; }
.dt-mono { font-family: ui-monospace, monospace; font-size: .78rem; white-space: pre; overflow: auto; max-width: 100%; }
.dt-wrap { overflow-wrap: anywhere; unicode-bidi: isolate; }
.dt-h { font-size: .95rem; font-weight: 600; margin: 0 0 .3rem; line-height: 1.3; }
.dt-s-running { color: #0b63a5; } .dt-s-finished { color: #1b7f4b; } .dt-s-failed, .dt-s-killed { color: #b3261e; }
.dt-s-interrupted { color: #8a5a00; }
.body--dark .dt-s-running { color: #8ecdf5; } .body--dark .dt-s-finished { color: #7fd6a8; }
.body--dark .dt-s-failed, .body--dark .dt-s-killed { color: #ff9c94; } .body--dark .dt-s-interrupted { color: #f0c36a; }
/* In this layer, because Quasar's important rules are in a later one, which would win over rules without a layer. */
@layer overrides { .body--dark .text-primary { color: #8ecdf5 !important; }
  .body--dark .text-negative { color: #ff9c94 !important; } }
.dt-state { font-weight: 600; }
a { color: #0b63a5; } .body--dark a { color: #8ecdf5; }
.q-header { background: #1d3b53 !important; }
a:focus-visible, button:focus-visible { outline: 3px solid #E69F00; outline-offset: 2px; }
.nicegui-echart { width: 100%; }
.dt-heading { width: 100%; height: 100%; }
.dt-group { width: 100%; height: 100%; padding: 0 12px; text-align: left; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; background: rgba(128,128,128,.13); }
.dt-group:focus-visible { outline-offset: -3px; }
"""
# A module that is imported by a script of nicegui is only found after that script: this starts its download at once.
_IMPORT = '<script type="module" async>import "{}"</script>'
# Draws numbers as a small line, without any markup from data.
SPARK = """(params) => {
  const values = params.value || [];
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 100 28"); svg.setAttribute("width", "100"); svg.setAttribute("height", "28");
  svg.setAttribute("aria-hidden", "true");
  if (values.length > 1) {
    const low = Math.min(...values), high = Math.max(...values), span = (high - low) || 1;
    const line = document.createElementNS(ns, "polyline");
    line.setAttribute("points", values.map((v, i) => `${2 + 96 * i / (values.length - 1)},${25 - 22 * (v - low) / span}`).join(" "));
    line.setAttribute("fill", "none"); line.setAttribute("stroke", "#0072B2"); line.setAttribute("stroke-width", "1.6");
    svg.appendChild(line);
  }
  return svg;
}"""  # noqa: E501
NUMBER = "(p) => p.value == null ? '' : (typeof p.value === 'number' ? (+p.value.toPrecision(4)).toString() : p.value)"
DURATION = """(p) => { if (p.value == null) return ''; const s = Math.round(p.value);
  return s < 60 ? s + ' s' : s < 3600 ? Math.floor(s / 60) + ' min ' + s % 60 + ' s'
  : Math.floor(s / 3600) + ' h ' + Math.floor(s % 3600 / 60) + ' min'; }"""


@dataclass(frozen=True)
class Site:
    """What all views share.

    Attributes:
        library: The runs, experiments and federations.
        read_only: True if nothing may be changed.
    """

    library: Library
    read_only: bool = False

    def run(self, run_id: str) -> Run | None:
        """Return the run with an identifier from an address, or None."""
        return next((run for run in self.library.runs.values() if run.id == run_id), None)

    def refuse(self) -> bool:
        """Notify the user, and return True, if nothing may be changed."""
        if self.read_only:
            ui.notify("this page is read-only", type="warning")
        return self.read_only


@contextmanager
def frame(site: Site, request: Request, title: str, *, modules: Sequence[str] = ("nicegui-echart",)) -> Iterator[None]:
    """Build the header of a view; the block builds its content.

    Args:
        site: What all views share.
        request: The request for the view.
        title: The title of the tab.
        modules: The libraries of its charts and tables, by the names that nicegui gives them.
    """
    ui.page_title(f"{shortened(title, 60)} · Dovetail")
    ui.add_head_html(f"<script>{SCRIPT}</script>" + "".join(map(_IMPORT.format, modules)))
    ui.add_css(_STYLE)
    theme = request.cookies.get("dovetail-theme", "")
    dark = ui.dark_mode({"dark": True, "light": False}.get(theme))
    ui.colors(primary="#0072B2", secondary="#56B4E9", accent="#CC79A7", negative="#B3261E")
    with ui.header().classes("items-center gap-2 px-3 py-1"):
        ui.link("Dovetail", "/").classes("!text-white text-lg font-semibold no-underline").props(
            "aria-label='All runs'"
        )
        for name, target in (("Runs", "/"), ("Experiments", "/#experiments"), ("Federations", "/#federations")):
            ui.link(name, target).classes("!text-white no-underline px-1 max-sm:hidden")
        ui.space()
        if site.read_only:
            ui.label("read-only").classes("text-white text-xs")
        _theme_button(dark)
    yield


def _theme_button(dark: Any) -> None:
    def change(value: str) -> None:
        dark.value = {"dark": True, "light": False}.get(value)
        ui.run_javascript(f"document.cookie = 'dovetail-theme={value}; path=/; SameSite=Strict; max-age=31536000'")

    with ui.button(icon="contrast").props("flat round color=white aria-label='Theme'"), ui.menu():
        for value in ("auto", "light", "dark"):
            ui.menu_item(value, lambda value=value: change(value))


def missing(what: str) -> None:
    """Show that an address leads to nothing."""
    ui.label(f"There is no such {what}. Its files may have been moved or removed.").classes("text-lg")
    ui.link("All runs", "/")


def card(title: str = "", classes: str = "") -> Any:
    """Return a frame with a heading, for the parts of a view."""
    box = ui.element("section").classes(f"dt-card {classes}")
    if title:
        with box, ui.element("h2").classes("dt-h dt-wrap"):
            ui.label(shortened(title, 80))
    return box


def chart(options: dict[str, Any], height: str = "18rem", label: str = "") -> Any:
    """Return a chart of fixed height, so that nothing moves when data arrive, and a button that saves it."""
    with ui.element("div").classes("relative w-full").style(f"height: {height}"):
        drawn = ui.echart(options).style(f"height: {height}").props("role=img")
        drawn.props["aria-label"] = f"chart: {shortened(label, 80)}"

        async def save() -> None:
            url = await drawn.run_chart_method(
                "getDataURL", {"type": "png", "pixelRatio": 2, "backgroundColor": "#ffffff"}, timeout=10
            )
            import base64

            ui.download.content(base64.b64decode(str(url).partition(",")[2]), "chart.png")

        ui.button(icon="image", on_click=save).props("flat dense size=sm aria-label='Save as PNG'").classes(
            "absolute top-0 right-0 opacity-50 hover:opacity-100"
        )
    return drawn


def update_chart(drawn: Any, options: dict[str, Any]) -> None:
    """Replace the options of a chart in place."""
    drawn.options.clear()
    drawn.options.update(options)
    drawn.update()


def text_block(text: str, height: str = "20rem") -> Any:
    """Return a block of text from a file, with its line breaks and without any markup."""
    return ui.label(printable(text, lines=True)).classes("dt-mono").style(f"max-height: {height}").props("tabindex=0")


def facts(rows: Sequence[tuple[str, Any]]) -> None:
    """Show names and values as a table."""
    with ui.element("dl").classes("grid gap-x-4 gap-y-1 text-sm").style("grid-template-columns: max-content 1fr"):
        for name, value in rows:
            with ui.element("dt").classes("opacity-70"):
                ui.label(shortened(str(name), 40))
            with ui.element("dd").classes("dt-wrap m-0"):
                ui.label(printable(str(value))[:2000])


_GIT = {True: "dirty: tracked files have changes that are not committed", False: "clean"}


def environment(journal: JournalReader) -> list[tuple[str, Any]]:
    """Return machine, process, versions and git state of the newest start in a journal."""
    start = journal.start
    versions, command = start.get("versions"), start.get("command")
    return [
        ("started", moment(journal.first_start)),
        *([("starts", journal.num_starts)] if journal.num_starts > 1 else []),
        ("machine", start.get("host", "")),
        ("process", start.get("pid", "")),
        ("command", " ".join(map(str, command)) if isinstance(command, list) else ""),
        ("folder", start.get("folder", "")),
        *(versions.items() if isinstance(versions, dict) else ()),
        ("system", start.get("system", "")),
        ("git commit", start.get("git") or "none"),
        *([("git branch", start["branch"])] if start.get("branch") else []),
        *([("git state", _GIT[start["dirty"]])] if isinstance(start.get("dirty"), bool) else []),
    ]


def state_label(state: str) -> Any:
    """Show the state of a run with a symbol, because colour alone is not enough."""
    return ui.label(SYMBOLS.get(state, state)).classes(f"dt-state dt-s-{state}")


def duration_text(seconds: float | None) -> str:
    """Return a duration for people.

    Example:
        >>> duration_text(5), duration_text(3725)
        ('5 s', '1 h 2 min')
    """
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(stamp: float | None) -> str:
    """Return a time for people, in the local time zone."""
    return "–" if stamp is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def follow(version: Callable[[], Any], update: Callable[[], Any]) -> None:
    """Call `update` in this view whenever the result of `version` has changed."""
    seen = version()

    def check() -> None:
        nonlocal seen
        now = version()
        if now != seen:
            seen = now
            update()

    ui.timer(REFRESH_SECONDS, check)


def address(path: str, **values: Any) -> str:
    """Return the address of a view with its settings; empty ones are left out.

    Example:
        >>> address("/compare", runs="a,b", log_y="", x="epoch")
        '/compare?runs=a%2Cb&x=epoch'
    """
    kept = {name: value for name, value in values.items() if value not in ("", None, False)}
    return f"{path}?{urlencode(kept)}" if kept else path
