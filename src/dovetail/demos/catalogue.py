"""List of the demos and their descriptions. It does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast


@dataclass(frozen=True)
class Outcome:
    """The result of a demo.

    Attributes:
        result: The result in one sentence.
        files: Descriptions of the written files and folders by name; files that could not be written are missing.
        columns: The headings of a table, if there is one.
        rows: The cells of the table.
    """

    result: str
    files: Mapping[str, str]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Demo:
    """The description of a demo.

    Attributes:
        name: The name of the demo and of its module.
        shows: A sentence about what the demo shows.
        next_step: A command to type next; `{folder}` is replaced by the folder of the demo, `{dovetail}` by the command
            line, and `{code}` by the source file of the demo.
        preparation: What to do before that, with the same replacements; empty if there is nothing to do.
    """

    name: str
    shows: str
    next_step: str
    preparation: str = ""

    def run(self, folder: Path) -> Outcome:
        """Run the demo, and write its files into an empty folder."""
        # Imported here, because the list of demos must not import torch.
        run = cast("Callable[[Path], Outcome]", importlib.import_module(f"dovetail.demos.{self.name}").run)
        return run(folder)


DEMOS: Mapping[str, Demo] = {
    demo.name: demo
    for demo in (
        Demo(
            "classify",
            "A small convolutional network learns handwritten digits, and stops when it no longer improves.",
            "{dovetail} checkpoint list {folder}/run",
        ),
        Demo(
            "gan",
            "Two networks compete, each with an optimizer that is stepped by hand.",
            "less {code}",
            "read how the program steps two optimizers:",
        ),
        Demo(
            "experiment",
            "A hyperparameter search: trials run as processes, and successive halving stops the worse ones early.",
            "{dovetail} experiment create {folder}/search.yaml {folder}/code --home {folder}/home",
            "edit {folder}/search.yaml, then search again:",
        ),
        Demo(
            "federated",
            "Ten clients with two digits each train one model together, once with FedAvg and once with SCAFFOLD.",
            "{dovetail} federate --set algorithm.type=fedprox --results {folder}/fedprox",
        ),
        Demo(
            "resume",
            "A training process is killed by SIGKILL and resumed; the result is the same, bit for bit.",
            "sha256sum {folder}/*/ck_*/tensors.safetensors",
        ),
    )
}
"""All demos, the first one first."""
