"""Which demos there are, and what each of them says. It starts without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast


@dataclass(frozen=True)
class Outcome:
    """What a demo has found and written.

    Attributes:
        result: One sentence.
        files: What is in its folder, by name, and what each of them is; those that could not be made are not there.
        columns: The headings of a table, if there is one; all columns but the first are numbers.
        rows: Its cells.
    """

    result: str
    files: Mapping[str, str]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Demo:
    """A demo before it runs.

    Attributes:
        name: Its name, which is that of its module, too.
        shows: What it shows, in one sentence.
        goes_on: The next step for the user. `{folder}` stands for the folder of the demo, `{dovetail}` for the command
            line, and `{code}` for the source file of the demo.
    """

    name: str
    shows: str
    goes_on: str

    def run(self, folder: Path) -> Outcome:
        """Run it, and write into an empty folder."""
        run = cast("Callable[[Path], Outcome]", importlib.import_module(f"dovetail.demos.{self.name}").run)
        return run(folder)


DEMOS: Mapping[str, Demo] = {
    demo.name: demo
    for demo in (
        Demo(
            "classify",
            "A small convolutional network learns handwritten digits, and stops when it gets no better.",
            "{dovetail} checkpoint list {folder}/run",
        ),
        Demo(
            "gan",
            "Two networks play against each other, each with an optimizer that is stepped by hand.",
            "read how the program steps two optimizers: {code}",
        ),
        Demo(
            "experiment",
            "A search for hyperparameters: trials run as processes, and halving ends the worse ones early.",
            "edit {folder}/search.yaml, then: "
            "{dovetail} experiment create {folder}/search.yaml {folder}/code --home {folder}/home",
        ),
        Demo(
            "federated",
            "Ten clients that know two digits each train one model together, once by FedAvg and once by SCAFFOLD.",
            "{dovetail} federate --set algorithm.type=fedprox --results {folder}/fedprox",
        ),
        Demo(
            "resume",
            "A training process is killed by SIGKILL, goes on, and ends as if nothing had happened, bit for bit.",
            "sha256sum {folder}/*/ck_*/tensors.safetensors",
        ),
    )
}
"""All demos, the first one first."""
