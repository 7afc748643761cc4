"""Processes that are started from the kernel of a notebook, where model and data are defined in cells."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch

# Looked for, and imported by the tests that need them: that takes as long as to collect all others.
if not all(map(find_spec, ("nbformat", "nbclient", "ipykernel"))):
    pytest.skip("nbclient or ipykernel is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow]

DEFINITIONS = """
import json
import torch
from torch import nn
from torch.utils.data import Dataset
from dovetail import Epochs
from dovetail.trainers import DDPTrainer, Trainer

class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(26, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], (self.inputs[index].sum() > 0).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, inputs):
        return self.layer(inputs)

def trainer(model, batch_size):
    return Trainer(model, "cpu", learning_rate=0.1, batch_size=batch_size, drop_last=False, seed=3)
"""
TRAINING = """
model = Net()
DDPTrainer(trainer(model, 4), num_processes=2).fit(Points(), Points(), max_length=Epochs(2))
json.dumps([parameter.tolist() for parameter in model.parameters()])
"""


def shown(cell: Any) -> Any:
    """The value of the last line of a cell."""
    (text,) = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
    return json.loads(text.strip("'"))


def test_launch_returns_weights_and_output_to_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    # A kernel that finds this does not show what other processes print.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    cells = [nbformat.v4.new_code_cell(source) for source in (DEFINITIONS, TRAINING)]  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=200, kernel_name="python3").execute()  # type: ignore[no-untyped-call]
    plain: dict[str, Any] = {}
    exec(DEFINITIONS, plain)
    model = plain["Net"]()
    plain["trainer"](model, 8).fit(plain["Points"](), plain["Points"](), max_length=plain["Epochs"](2))
    for found, expected in zip(shown(cells[1]), model.parameters(), strict=True):
        torch.testing.assert_close(expected.new_tensor(found), expected.detach(), rtol=0, atol=1e-12)
    printed = "".join(output.text for output in cells[1].outputs if output.output_type == "stream")
    assert "epoch 2/2" in printed.replace("\x1b[1m", "")
