"""View of one federation: rounds, spread over clients, faults, traffic and selection."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from nicegui import ui

from dovetail.printing import printable
from dovetail.ui import charts
from dovetail.ui.experiments import finite
from dovetail.ui.federations import Federation
from dovetail.ui.pages.frame import (
    NUMBER,
    Site,
    address,
    card,
    chart,
    environment,
    facts,
    follow,
    frame,
    missing,
    moment,
    state_label,
    update_chart,
)
from dovetail.ui.use_charts import partition, usage
from dovetail.units import counted


def add(site: Site) -> None:
    """Register the view."""

    @ui.page("/federation")
    def show(request: Request, id: str = "") -> None:
        found = next((each for each in site.library.federations.values() if each.id == id), None)
        with frame(site, request, found.name if found else "Federation"):
            if found is None:
                missing("federation")
            else:
                _FederationView(found)


class _FederationView:
    """The parts of the view; the table and the charts are updated in place."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.drawn: dict[str, Any] = {}
        self._header()
        self.area = ui.element("div").classes("dt-grid")
        self._charts()
        self._table()
        with ui.element("div").classes("dt-grid"):
            self._facts()
        follow(lambda: federation.version, self._refresh)

    @ui.refreshable_method
    def _header(self) -> None:
        it = self.federation
        with ui.row().classes("items-baseline gap-3 w-full"):
            with ui.element("h1").classes("text-xl font-semibold m-0 dt-wrap leading-tight"):
                ui.label(charts.shortened(it.name, 120))
            state_label(it.state)
            done, planned = len(it.rounds), it.num_planned
            rounds = counted(done, "round") if planned is None else f"{done} of {counted(planned, 'round')}"
            ui.label(f"{it.algorithm or 'federation'} · {rounds} · last change {moment(it.changed_at)}").classes(
                "text-sm"
            )
            for kind in ("csv", "json"):
                ui.link(f"Rounds as {kind.upper()}", address(f"/download/federation.{kind}", id=it.id)).classes(
                    "text-sm"
                )
            if it.partition is not None:
                ui.link("Partition as CSV", address("/download/partition.csv", id=it.id)).classes("text-sm")
        if it.error:
            ui.label(printable(it.error)).classes("text-red-700 dark:text-red-300 dt-wrap")

    def _charts(self) -> None:
        it = self.federation
        names = it.metrics()
        accuracies = [name for name in names if "accuracy" in name and not name.startswith("clients_")]
        losses = [name for name in names if "loss" in name]
        others = [name for name in names if name not in (*accuracies, *losses) and not name.startswith("clients_")]
        faults = {client: sum(kinds.values()) for client, kinds in it.faults_by_client().items()}
        found: dict[str, charts.Options | None] = {
            "Accuracy of the global model": charts.federation_lines(it, accuracies) if accuracies else None,
            "Loss": charts.federation_lines(it, losses) if losses else None,
            "Accuracy of clients": charts.spread(it),
            "Other metrics": charts.federation_lines(it, others) if others else None,
            "Selected clients": charts.selection_map(it) if 0 < len(it.selections()) <= 500 else None,
            "Rounds per client": charts.counts(it.selections(), "client") if it.selections() else None,
            "Faults by client": charts.counts(faults, "client") if faults else None,
            "Traffic": charts.traffic(it) if any(each.bytes_up for each in it.rounds) else None,
            "Staleness": self._staleness() if any(each.staleness for each in it.rounds) else None,
            **dict(usage(it.samples, it.journal.first_start)),
        }
        if it.partition is not None:
            title, picture = partition(it.partition)
            found = {title: picture, **found}
        for title, options in found.items():
            if options is None:
                continue
            if title in self.drawn:
                update_chart(self.drawn[title], options)
                continue
            with self.area, card(title):
                self.drawn[title] = chart(options, "17rem", title)

    def _facts(self) -> None:
        journal = self.federation.journal
        if not journal.start:
            return
        with card("Configuration"):
            facts(list(journal.settings.items()))
        with card("Environment"):
            facts(environment(journal))

    def _staleness(self) -> charts.Options:
        options = charts.axes("round")
        options["series"] = [charts.line("staleness", [[it.number, it.staleness] for it in self.federation.rounds])]
        return options

    def _table(self) -> None:
        names = self.federation.metrics()
        number = {":valueFormatter": NUMBER, "type": "rightAligned", "width": 130}
        columns = [
            {"field": "round", "headerName": "Round", **number, "width": 90},
            *({"field": f"m:{name}", "headerName": charts.shortened(name, 30), **number} for name in names),
            {"field": "selected", "headerName": "Selected", **number},
            {"field": "reported", "headerName": "Used", **number},
            {"field": "faults", "headerName": "Faults", "width": 260, "tooltipField": "faults"},
            {"field": "seconds", "headerName": "Seconds", **number},
        ]
        options = {"columnDefs": columns, "rowData": self._rows(), "suppressFieldDotNotation": True,
                   "defaultColDef": {"sortable": True, "resizable": True, "filter": True}}  # fmt: skip
        self.grid = ui.aggrid(options, auto_size_columns=False).classes("w-full").style("height: 20rem")

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "round": each.number,
                "selected": len(each.selected),
                "reported": len(each.reported),
                "faults": charts.shortened(", ".join(f"{client}: {kind}" for client, kind in each.faults), 300),
                "seconds": finite(each.seconds),
                **{f"m:{name}": finite(value) for name, value in each.metrics.items()},
            }
            for each in self.federation.rounds
        ]

    def _refresh(self) -> None:
        self._header.refresh()
        self._charts()
        self.grid.run_grid_method("setGridOption", "rowData", self._rows())
