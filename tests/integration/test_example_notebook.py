"""The notebook of the examples, from top to bottom in a kernel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Looked for, and imported by the tests that need them: that takes as long as to collect all others.
if not all(map(find_spec, ("nbformat", "nbclient", "ipykernel"))):
    pytest.skip("nbclient or ipykernel is not installed", allow_module_level=True)

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture
def notebook() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def test_the_notebook_is_stored_without_outputs(notebook: Any) -> None:
    # So that a change of it is a change of code, and what it shows is what it does where it is run.
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[]] * len(cells)
    assert {cell.execution_count for cell in cells} == {None}


@pytest.mark.slow
def test_the_notebook_runs_and_writes_only_to_runs(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=place).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output for output in shown if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
