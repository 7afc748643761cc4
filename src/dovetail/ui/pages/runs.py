"""View of all runs, with the lists of experiments and federations."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from nicegui import events, ui

from dovetail.errors import DovetailError
from dovetail.printing import printable
from dovetail.ui.charts import shortened
from dovetail.ui.compare import varied_settings
from dovetail.ui.experiments import cell, finite
from dovetail.ui.pages.frame import DURATION, NUMBER, SPARK, SYMBOLS, Site, address, card, follow, frame, moment
from dovetail.ui.pages.tables import TableLink, column_menu, group_options, set_link
from dovetail.ui.runs import Run, short_id

_MOST_SETTINGS = 40
_STATE_CLASS = "(p) => 'dt-state dt-s-' + (p.data || {}).state_key"
_ON_WIDE = "window.innerWidth > 600 ? {} : {}"


def add(site: Site) -> None:
    """Register the view."""

    @ui.page("/")
    def show(request: Request, search: str = "", group: str = "", flat: bool = False) -> None:
        with frame(site, request, "Runs", modules=["nicegui-aggrid"]):
            _Runs(site, TableLink.of(request.query_params), search, group, flat)


def row_of(site: Site, run: Run, names: list[str]) -> dict[str, Any]:
    """Return a run as a row of the table. No key starts with text of a user."""
    it, note = run.summary(), site.library.note(run)
    return {
        "id": run.id,
        "name": printable(it.name)[:300],
        "group": printable(it.group)[:200],
        "state": SYMBOLS[it.state],
        "state_key": it.state,
        "metric": it.metric[:100],
        "best": finite(it.best),
        "last": finite(it.last),
        "spark": list(it.spark),
        "epochs": it.epochs,
        "batches": it.batches,
        "started": moment(it.started) if it.started else "",
        "seconds": it.seconds and round(it.seconds),
        "tags": ", ".join(note.tags),
        "note": note.text,
        "error": printable(it.error)[:300],
        **{f"hp:{name}": cell(run.settings.get(name)) for name in names},
    }


def _heading(group: str, states: list[str]) -> dict[str, Any]:
    """Return the heading of a group; its identifier is part of the address if the group is closed."""
    name = group or "Runs without an experiment"
    return {"id": f"g{short_id(group)}", "is_group": True, "group": group, "name": name, "text": _counts(states)}


def _counts(states: list[str]) -> str:
    known = [f"{states.count(state)} {state}" for state in SYMBOLS if state in states]
    return f"{len(states)} run{'s' * (len(states) != 1)}" + (f": {', '.join(known)}" if known else "")


class _Runs:
    """The table and its controls."""

    def __init__(self, site: Site, link: TableLink, search: str, group: str, flat: bool) -> None:
        self.site, self.link = site, link
        self.group, self.flat = group, flat
        self.names = self._setting_names()
        self.rows = {row["id"]: row for row in self._all_rows()}
        self._controls(search)
        self.grid = ui.aggrid(self._options(search), auto_size_columns=False).classes("w-full")
        self.grid.style("height: max(20rem, calc(100vh - 15rem))").props("aria-label='Runs'")
        self.grid.on("cellValueChanged", self._edit)
        self.grid.on("cellClicked", self._open, ["colId", "data"])
        self._lists()
        follow(lambda: (site.library.version, self._clock()), self._refresh)

    def _clock(self) -> int:
        # The duration of running runs changes every few seconds without a change of a file.
        import time

        return int(time.time() / 5) if any(row.get("state_key") == "running" for row in self.rows.values()) else 0

    def _runs(self) -> list[Run]:
        runs = [run for run in self.site.library.runs.values() if not self.group or run.group == self.group]
        return sorted(runs, key=lambda run: run.summary().started or 0.0, reverse=True)

    def _all_rows(self) -> list[dict[str, Any]]:
        rows = [row_of(self.site, run, self.names) for run in self._runs()]
        groups: dict[str, list[str]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row["state_key"])
        if self.flat or self.group or not any(groups):
            return rows
        return [*(_heading(group, states) for group, states in groups.items()), *rows]

    def _setting_names(self) -> list[str]:
        settings = [run.settings for run in self.site.library.runs.values()]
        return list(varied_settings(settings))[:_MOST_SETTINGS]

    def _controls(self, search: str) -> None:
        with ui.row().classes("w-full items-center gap-2"):
            find = ui.input("Search runs", value=search, on_change=lambda e: self._search(e.value)).props(
                "dense outlined clearable debounce=150"
            )
            find.classes("grow max-w-md")
            groups = sorted({run.group for run in self.site.library.runs.values() if run.group})
            if groups:
                options = {"": "all runs", **{name: shortened(name, 50) for name in groups}}
                ui.select(options, value=self.group if self.group in options else "", label="Experiment").props(
                    "dense outlined"
                ).on_value_change(lambda e: self._reopen(group=e.value)).classes("min-w-[12rem]")
            if groups and not self.group:
                ui.checkbox("groups", value=not self.flat).props("dense").on_value_change(
                    lambda e: self._reopen(flat="" if e.value else "true", closed="")
                )
            ui.button("Compare", icon="stacked_line_chart", on_click=self._compare).props("no-caps")
            column_menu(
                [(each["field"], shortened(each["headerName"], 40)) for each in self._columns()[1:]],
                self.link.visible(self._columns()),
                lambda field, is_shown: self.grid.run_grid_method("setColumnsVisible", [field], is_shown),
            )
            ui.button("CSV", on_click=lambda: ui.navigate.to("/download/runs.csv")).props("flat no-caps")
            ui.button("JSON", on_click=lambda: ui.navigate.to("/download/runs.json")).props("flat no-caps")
        self.count = ui.label(self._count_text()).classes("text-sm opacity-80").props("role=status")

    def _reopen(self, **changes: str) -> None:
        """Open the view again with some other settings; those of the table stay."""
        set_link(**changes)
        ui.navigate.reload()

    def _count_text(self) -> str:
        pending = sum(not run.is_read for run in self.site.library.runs.values())
        more = f" · reading {pending} more" if pending else ""
        return _counts([row["state_key"] for row in self.rows.values() if not row.get("is_group")]) + more

    def _columns(self) -> list[dict[str, Any]]:
        number = {":valueFormatter": NUMBER, "type": "rightAligned", "filter": "agNumberColumnFilter", "width": 105}
        can_edit = not self.site.read_only
        columns: list[dict[str, Any]] = [
            {"field": "name", "headerName": "Run", ":pinned": _ON_WIDE.format("'left'", "null"), "width": 220,
             "cellClass": "cursor-pointer underline", "tooltipField": "name"},
            {"field": "state", "headerName": "State", "width": 125, ":cellClass": _STATE_CLASS,
             "tooltipField": "error"},
            {"field": "spark", "headerName": "Curve", ":cellRenderer": SPARK, "width": 125, "sortable": False,
             "filter": False, "cellDataType": False, ":getQuickFilterText": "() => ''"},
            {"field": "best", "headerName": "Best", **number},
            {"field": "last", "headerName": "Last", **number},
            {"field": "metric", "headerName": "Metric", "width": 140},
            {"field": "epochs", "headerName": "Epochs", **number, "width": 95},
            {"field": "batches", "headerName": "Batches", **number},
            {"field": "seconds", "headerName": "Time", **number, ":valueFormatter": DURATION, "width": 115},
            {"field": "started", "headerName": "Started", "width": 170},
            {"field": "group", "headerName": "Experiment", "width": 190, "hide": not self.flat,
             "tooltipField": "group"},
            {"field": "tags", "headerName": "Tags", "editable": can_edit, "width": 150},
            {"field": "note", "headerName": "Note", "editable": can_edit, "width": 220, "tooltipField": "note"},
            {"field": "error", "headerName": "Error", "width": 260, "hide": True},
        ]  # fmt: skip
        for index, name in enumerate(self.names):
            columns.append({"field": f"hp:{name}", "headerName": shortened(name, 40), "width": 130, "hide": index >= 4,
                            ":valueFormatter": NUMBER})  # fmt: skip
        return columns

    def _options(self, search: str) -> dict[str, Any]:
        return {
            **self.link.options(self._columns()),
            **group_options(),
            "rowData": list(self.rows.values()),
            "rowSelection": {"mode": "multiRow", "enableClickSelection": False, "selectAll": "filtered",
                             ":isRowSelectable": "(node) => !node.data?.is_group"},
            "selectionColumnDef": {":pinned": _ON_WIDE.format("'left'", "null"), "width": 44},
            ":getRowId": "(p) => p.data.id",
            "quickFilterText": search,
            "includeHiddenColumnsInQuickFilter": True,
            "tooltipShowDelay": 300,
            "rowHeight": 36,
            "overlayNoRowsTemplate": "No runs yet: a trainer with a checkpoint_dir writes them.",
        }  # fmt: skip

    async def _search(self, text: str | None) -> None:
        self.grid.run_grid_method("setGridOption", "quickFilterText", text or "")
        set_link(search=text or "")

    async def _compare(self) -> None:
        chosen = await self.grid.get_selected_rows()
        if not chosen:
            ui.notify("select runs in the first column")
        elif len(chosen) > 100:
            ui.notify(f"{len(chosen)} runs are selected: at most 100 can be compared", type="warning")
        else:
            ui.navigate.to(address("/compare", runs=",".join(row["id"] for row in chosen)))

    def _open(self, event: events.GenericEventArguments) -> None:
        if event.args.get("colId") == "name":
            ui.navigate.to(address("/run", id=event.args["data"]["id"]))

    def _edit(self, event: events.GenericEventArguments) -> None:
        if self.site.refuse():
            return
        row, column = event.args["data"], event.args["colId"]
        run = self.site.run(row["id"])
        if run is None or column not in ("tags", "note"):
            return
        try:
            if column == "tags":
                self.site.library.set_note(run, tags=str(row.get("tags") or "").split(","))
            else:
                self.site.library.set_note(run, text=str(row.get("note") or ""))
        except (OSError, DovetailError) as error:
            ui.notify(f"the note is not stored: {error}", type="negative")

    def _refresh(self) -> None:
        names = self._setting_names()
        if names != self.names:
            self.names = names
            options = self.link.options(self._columns())
            for name in ("columnDefs", "context"):
                self.grid.run_grid_method("setGridOption", name, options[name])
        rows = {row["id"]: row for row in self._all_rows()}
        before, self.rows = self.rows, rows
        change = {
            "update": [row for key, row in rows.items() if key in before and before[key] != row],
            "add": [row for key, row in rows.items() if key not in before],
            "remove": [{"id": key} for key in before if key not in rows],
        }
        if any(change.values()):
            self.grid.run_grid_method("applyTransaction", change)
        self.count.text = self._count_text()
        self._lists.refresh()

    @ui.refreshable_method
    def _lists(self) -> None:
        library = self.site.library
        records = [(source, record) for source in library.sources for record in source.records.values()]
        for source in library.sources:
            if source.problem:
                ui.label(f"{shortened(source.label, 80)}: {printable(source.problem)}").classes("text-red-700")
        ui.link_target("experiments")
        if records:
            with card("Experiments", "w-full"):
                for source, record in sorted(records, key=lambda pair: pair[1].created, reverse=True)[:200]:
                    with ui.row().classes("items-center gap-3 w-full py-1"):
                        ui.link(
                            shortened(record.name, 60), address("/experiment", store=f"{source.place}", id=record.id)
                        )
                        state = record.state + ("" if record.is_running or record.state != "ACTIVE" else " (no runner)")
                        ui.label(f"{state} · {len(record.trials)} trials").classes("text-sm")
        ui.link_target("federations")
        if library.federations:
            with card("Federations", "w-full"):
                for each in library.federations.values():
                    with ui.row().classes("items-center gap-3 w-full py-1"):
                        ui.link(shortened(each.name, 80), address("/federation", id=each.id))
                        ui.label(f"{each.algorithm} {len(each.rounds)} rounds").classes("text-sm")
