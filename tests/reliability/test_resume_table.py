"""Runs that are killed and resumed with every loader, by other numbers of data workers and processes.

`PYTHONPATH=tests/reliability python tests/reliability/test_resume_table.py` rewrites the table in
`docs/reproducibility.md`.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import forked
import pytest
import resume_cells
from resume_cells import CASES, LOADERS

pytestmark = [pytest.mark.full_size, pytest.mark.slow, pytest.mark.usefixtures("forking")]

PAGE = Path(__file__).parents[2] / "docs" / "reproducibility.md"
MARK = "<!-- written by tests/reliability/test_resume_table.py -->"
_MODULES = {
    "a Hugging Face dataset with a transform": "datasets",
    "torchdata's `StatefulDataLoader`": "torchdata.stateful_dataloader",
}
# One cell for each kind of column, of different loaders; `make torture` measures all of them.
_SUBSET = {
    "torch's `DataLoader`, `shuffle=True`": ["killed, 2 workers"],
    "a dataset given to the trainer": ["killed, 1 → 2 → 1 processes, no workers"],
}
_CHECKED = {name: list(CASES) for name in LOADERS} if os.environ.get("DOVETAIL_TORTURE") == "1" else _SUBSET


def _cells(loader: str, cases: list[str], folder: Path) -> dict[str, str]:
    done = forked.run(Path(resume_cells.__file__), loader, folder, *cases, folder=folder, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _shown() -> dict[str, dict[str, str]]:
    """Return the cells of the table in the documentation, by loader and column."""
    lines = PAGE.read_text(encoding="utf-8").partition(MARK)[2].strip().partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


@pytest.mark.parametrize("loader", _CHECKED)
def test_a_killed_run_resumes_as_the_table_says(loader: str, tmp_path: Path) -> None:
    pytest.importorskip(_MODULES.get(loader, "torch"))
    found = _cells(loader, _CHECKED[loader], tmp_path)
    assert not [cell for cell in found.values() if "NOT" in cell]
    assert found == {case: _shown()[loader][case] for case in _CHECKED[loader]}


def test_the_table_has_a_row_for_every_loader_and_a_column_for_every_case() -> None:
    assert {loader: list(cells) for loader, cells in _shown().items()} == {loader: list(CASES) for loader in LOADERS}


if __name__ == "__main__":
    table = ["| loader | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    for name in LOADERS:
        with tempfile.TemporaryDirectory() as place:
            cells = _cells(name, list(CASES), Path(place))
        table.append(f"| {name} | " + " | ".join(cells[case] for case in CASES) + " |")
        print(table[-1], flush=True)
    before, _, after = PAGE.read_text(encoding="utf-8").partition(MARK)
    after = after.strip()
    if after.startswith("| loader"):
        after = after.partition("\n\n")[2]
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(table) + f"\n\n{after}\n", encoding="utf-8")
