"""Tables of the views: sorting, filters, columns and closed groups are part of the address."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nicegui import ui

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams

# Nothing here builds markup from text: names only become text and parts of the address.
SCRIPT = """
window.dt = {
  closed: new URLSearchParams(location.search).getAll("closed"),
  // Changes some parameters of the address; an empty value removes one.
  link(changes) {
    const url = new URL(location.href);
    for (const [name, value] of Object.entries(changes)) {
      url.searchParams.delete(name);
      for (const each of Array.isArray(value) ? value : [value])
        if (each !== "" && each !== null && each !== false) url.searchParams.append(name, each);
    }
    history.replaceState(history.state, "", url);
  },
  table({api, context}) {
    const columns = api.getColumnState().filter((each) => !each.colId.startsWith("ag-Grid"));
    const shown = columns.filter((each) => !each.hide).map((each) => each.colId);
    const sorted = columns.filter((each) => each.sort).sort((a, b) => a.sortIndex - b.sortIndex);
    const filter = api.getFilterModel();
    dt.link({
      sort: sorted.map((each) => (each.sort === "desc" ? "-" : "") + each.colId),
      column: shown.join("\\n") === context.shown.join("\\n") ? [] : shown,
      filter: Object.keys(filter).length ? JSON.stringify(filter) : "",
    });
  },
  // Puts every group below its heading, in the order of their first rows; rows of closed groups are left out.
  arrange({nodes}) {
    const heads = new Map(), groups = new Map();
    for (const node of nodes) {
      if (node.data.is_group) heads.set(node.data.group, node);
      else if (groups.has(node.data.group)) groups.get(node.data.group).push(node);
      else groups.set(node.data.group, [node]);
    }
    if (!heads.size) return;
    nodes.length = 0;
    for (const [group, rows] of groups) {
      const head = heads.get(group);
      if (head) nodes.push(head);
      if (!head || !dt.closed.includes(head.data.id)) for (const row of rows) nodes.push(row);
    }
  },
  toggle({api, data}) {
    dt.closed = dt.closed.includes(data.id) ? dt.closed.filter((each) => each !== data.id) : [...dt.closed, data.id];
    dt.link({closed: dt.closed});
    api.refreshClientSideRowModel("sort");
  },
  heading(params) {
    const cell = document.createElement("div"), button = document.createElement("button");
    const name = document.createElement("strong");
    const write = () => {
      const isOpen = !dt.closed.includes(params.data.id);
      button.setAttribute("aria-expanded", isOpen);
      name.textContent = (isOpen ? "▾ " : "▸ ") + params.data.name;
      button.replaceChildren(name, " · " + params.data.text);
    };
    button.type = "button";
    button.className = "dt-group";
    button.onclick = () => { dt.toggle(params); write(); };
    write();
    // A row of a grid may only have cells.
    cell.setAttribute("role", "gridcell");
    cell.className = "dt-heading";
    cell.appendChild(button);
    return cell;
  },
  // Enter does what a click on the first link of the row does; cells that can be edited keep their meaning of Enter.
  // A heading that was reached with the arrow keys has the focus on its row, not on its button.
  key({event, node, column}) {
    if (node.data?.is_group && ["Enter", " "].includes(event.key)) event.target.querySelector(".dt-group")?.click();
    else if (event.key === "Enter" && column && !column.getColDef().editable)
      event.target.closest(".ag-root")?.querySelector(`[row-index="${node.rowIndex}"] .cursor-pointer`)?.click();
  },
};
"""
_CONDITION = ("filterType", "type", "filter", "filterTo", "dateFrom", "dateTo", "operator")


@dataclass(frozen=True)
class TableLink:
    """The state of a table as it is written in an address.

    Attributes:
        sort: Columns by which the table is sorted; a minus means descending.
        columns: The visible columns in their order; empty means the default.
        filters: The filters by column.

    Example:
        >>> from starlette.datastructures import QueryParams
        >>> link = TableLink.of(QueryParams("sort=-best&column=name&column=best"))
        >>> link.sort, link.columns
        (('-best',), ('name', 'best'))
    """

    sort: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    filters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, query: QueryParams) -> TableLink:
        """Return the state in the parameters of an address; invalid ones are left out."""
        return cls(tuple(query.getlist("sort")), tuple(query.getlist("column")), filter_model(query.get("filter", "")))

    def visible(self, columns: list[dict[str, Any]]) -> list[str]:
        """Return the fields of the visible columns, in order."""
        known = {column["field"] for column in columns}
        given = [name for name in dict.fromkeys(self.columns) if name in known]
        return given or [column["field"] for column in columns if not column.get("hide")]

    def columns_of(self, columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return definitions of columns in the order, with the visibility and the sorting of this state."""
        visible = self.visible(columns)
        place = {name: index for index, name in enumerate(visible)}
        directions = {name.removeprefix("-"): "desc" if name.startswith("-") else "asc" for name in self.sort}
        ordered = (
            sorted(columns, key=lambda column: place.get(column["field"], len(place))) if self.columns else columns
        )
        found = []
        for column in ordered:
            name = column["field"]
            kept = {key: value for key, value in column.items() if key != "hide"}
            if name in directions:
                kept |= {"initialSort": directions[name], "initialSortIndex": list(directions).index(name)}
            found.append({**kept, "initialHide": name not in place})
        return found

    def options(self, columns: list[dict[str, Any]]) -> dict[str, Any]:
        """Return options of a grid that restore this state, and write every change of it into the address."""
        known = {column["field"] for column in columns}
        filters = {name: model for name, model in self.filters.items() if name in known}
        changes = ("SortChanged", "FilterChanged", "ColumnVisible", "ColumnMoved")
        return {
            "columnDefs": self.columns_of(columns),
            "initialState": {"filter": {"filterModel": filters}} if filters else {},
            "context": {"shown": TableLink().visible(columns)},
            "defaultColDef": {"sortable": True, "filter": True, "resizable": True},
            "suppressFieldDotNotation": True,
            ":onCellKeyDown": "(event) => dt.key(event)",
            **{f":on{change}": "(event) => dt.table(event)" for change in changes},
        }


def group_options() -> dict[str, Any]:
    """Return options of a grid whose rows with `is_group` are headings of the rows with the same `group`."""
    return {
        ":isFullWidthRow": "(params) => Boolean(params.rowNode.data?.is_group)",
        ":fullWidthCellRenderer": "(params) => dt.heading(params)",
        ":alwaysPassFilter": "(node) => Boolean(node.data?.is_group)",
        ":postSortRows": "(params) => dt.arrange(params)",
    }


def filter_model(text: str) -> dict[str, Any]:
    """Return the filters of an address. Only known keys with plain values are kept, because an address is not trusted.

    Example:
        >>> filter_model('{"best": {"filterType": "number", "type": "lessThan", "filter": 1, ":x": "alert(1)"}}')
        {'best': {'filterType': 'number', 'type': 'lessThan', 'filter': 1}}
        >>> filter_model("[")
        {}
    """
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    kept = {name: _condition(model) for name, model in found.items() if isinstance(model, dict)}
    return {name: model for name, model in kept.items() if model.get("filterType") in ("text", "number")}


def _condition(model: Mapping[str, Any], *, is_inner: bool = False) -> dict[str, Any]:
    kept = {key: model[key] for key in _CONDITION if isinstance(model.get(key), (str, int, float))}
    inner = model.get("conditions")
    if not is_inner and isinstance(inner, list):
        kept["conditions"] = [_condition(each, is_inner=True) for each in inner[:10] if isinstance(each, dict)]
    return kept


def set_link(**changes: Any) -> None:
    """Write settings of this view into its address; empty ones are removed."""
    ui.run_javascript(f"dt.link({json.dumps(changes)})")


def column_menu(
    columns: Sequence[tuple[str, str]], visible: Collection[str], change: Callable[[str, bool], Any]
) -> None:
    """Show a menu with one checkbox per column.

    Args:
        columns: The fields and names of the columns.
        visible: The fields that are visible at first.
        change: Called with a field, and whether it is visible now.
    """
    with ui.button("Columns", icon="view_column").props("flat no-caps"), ui.menu().classes("p-2"):
        for name, text in columns:
            ui.checkbox(text, value=name in visible, on_change=lambda e, name=name: change(name, e.value)).props(
                "dense"
            ).classes("block")
