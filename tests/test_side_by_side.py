"""Ten tasks in four libraries: every program gives its result, and the page has their lines and their text.

`python tests/test_side_by_side.py` writes the tables and the programs of docs/side_by_side.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from forked import run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "side_by_side.md"
PROGRAMS = ROOT / "examples" / "side_by_side"

TASKS = {
    "classify": "train and validate a classifier from arrays",
    "finetune": "fine-tune a model of transformers, with padding",
    "accumulate": "accumulate gradients, weighted by tokens",
    "schedule": "warm-up and cosine",
    "precision": "mixed precision in bfloat16",
    "resume": "resume after `kill -9`, with noise in the data",
    "stop_early": "stop early, load the best checkpoint",
    "metrics": "F1 and AUROC of the whole validation set",
    "gan": "a GAN: two optimizers",
    "processes": "two processes",
}
# The tasks whose programs are the first one with something added.
ADDED = ("schedule", "precision", "resume", "stop_early", "metrics", "processes")
PEERS = {"lightning": "Lightning", "transformers": "transformers", "keras": "Keras"}
LIBRARIES = {"dovetail": "Dovetail", **PEERS}
IMPOSSIBLE = {("processes", "keras")}
PAIRS = [(task, peer) for task in TASKS for peer in PEERS if (task, peer) not in IMPOSSIBLE]

START = re.compile(r"<!-- generated: (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
BLOCK = re.compile(r"<!-- no-run: a test runs `examples/side_by_side/(\w+)\.py` -->\n```python\n(.*?)```", re.DOTALL)


def program(task: str, library: str) -> Path:
    return PROGRAMS / f"{task}_{library}.py"


def text_of(path: Path) -> str:
    """Return a program without the docstring at its start."""
    return re.sub(r'\A""".*?"""\n\n', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def code_lines(path: Path) -> list[str]:
    """Return the lines of a program that are neither empty nor a comment."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def number_of(task: str, library: str) -> str:
    return "–" if (task, library) in IMPOSSIBLE else str(len(code_lines(program(task, library))))


def number_added(task: str, library: str) -> str:
    """Return how many lines of a program are not in the library's first program."""
    if (task, library) in IMPOSSIBLE:
        return "–"
    first, lines = (Counter(code_lines(program(name, library))) for name in ("classify", task))
    return str((lines - first).total())


def table(title: str, rows: dict[str, list[str]]) -> str:
    head = f"| {title} | {' | '.join(LIBRARIES.values())} |\n|---|{'---|' * len(LIBRARIES)}\n"
    return head + "\n".join(f"| {task} | {' | '.join(cells)} |" for task, cells in rows.items())


def all_lines() -> str:
    rows = {
        f"[{words}](#{number}-{re.sub(r'[^a-z -]', '', TITLES[task].lower()).replace(' ', '-')})": [
            number_of(task, library) for library in LIBRARIES
        ]
        for number, (task, words) in enumerate(TASKS.items(), 1)
    }
    return table("lines of the program", rows)


def added_lines() -> str:
    return table(
        "lines that the first program does not have",
        {TASKS[task]: [number_added(task, library) for library in LIBRARIES] for task in ADDED},
    )


TITLES = {
    "classify": "A classifier from arrays",
    "finetune": "A model of transformers",
    "accumulate": "Accumulation",
    "schedule": "A schedule",
    "precision": "Mixed precision",
    "resume": "A kill",
    "stop_early": "Early stopping",
    "metrics": "Metrics",
    "gan": "A GAN",
    "processes": "Two processes",
}
TABLES = {"all": all_lines, "added": added_lines}


def generated(page: str) -> str:
    """Return the page with the tables and the programs of the files."""
    page = START.sub(lambda match: match[0].replace(match[2], TABLES[match[1]]()), page)
    return BLOCK.sub(lambda match: match[0].replace(match[2], text_of(PROGRAMS / f"{match[1]}.py")), page)


def test_the_page_has_the_numbers_and_the_programs_of_the_files() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [match[1] for match in START.finditer(page)] == list(TABLES)
    assert [match[1] for match in BLOCK.finditer(page)] == [f"{task}_dovetail" for task in TASKS]
    assert page == generated(page), "python tests/test_side_by_side.py writes it"


def test_every_task_has_a_program_of_every_library_and_a_section() -> None:
    expected = {program(task, library).name for task, library in [*((task, "dovetail") for task in TASKS), *PAIRS]}
    assert {path.name for path in PROGRAMS.glob("*_*.py")} == expected
    headings = re.findall(r"^## (\d+)\. (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [(str(number), title) for number, title in enumerate(TITLES.values(), 1)]


def test_the_page_names_the_pinned_versions() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for peer, name in PEERS.items():
        (pinned,) = re.findall(rf"^{peer}==(\S+)$", pins, re.MULTILINE)
        assert f"{name} {pinned}" in page


@pytest.mark.full_size
@pytest.mark.slow
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("task", TASKS)
def test_a_program_of_dovetail_asserts_its_result(task: str, tmp_path: Path) -> None:
    if task in ("finetune", "accumulate"):
        pytest.importorskip("transformers")
    done = run(program(task, "dovetail"), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("result: ")
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}


@pytest.mark.full_size
@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize(("task", "peer"), PAIRS)
def test_a_program_of_another_library_asserts_its_result(task: str, peer: str, tmp_path: Path) -> None:
    needed = {peer, "transformers"} if task in ("finetune", "accumulate") else {peer}
    for library in sorted(needed):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"NOT RUN with {peer}: {library} is not installed, pip install -c constraints.txt {library}")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    prefix = launcher if (task, peer) == ("processes", "transformers") else ["-W", "ignore"]
    done = subprocess.run(
        [sys.executable, *prefix, str(program(task, peer))],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "result: " in done.stdout


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
