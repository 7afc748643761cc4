"""Run the benchmarks, one after the other, and write `RESULTS.md`.

    python benchmarks/run.py                             # everything: half an hour on two cores, with peers
    python benchmarks/run.py --only loop --only ddp      # two of them; the other sections stay as they are
    python benchmarks/run.py --quick                     # to see that they work; nothing is kept
    python benchmarks/run.py --list
    python benchmarks/run.py --page                      # only write the page from what was measured before

Each script runs in a process of its own. What it writes is kept in `results/`, a file per section, so that sections
can be measured at different times; the page is made from these files. Peers of a federation need environments of their
own, which `--pfl-python` and `--flower-python` name; a peer of the loop takes part where it is installed
(`pip install '.[bench]'`).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import page
from report import Section

__all__ = ["GUIDE", "LINKS", "MARKS", "TITLES", "main", "publish", "with_tables"]

HERE = Path(__file__).parent

TITLES = {
    "loop": "The loop",
    "strategies": "Strategies",
    "layers": "Layers and mixed precision",
    "compile": "Compilation",
    "memory_format": "Memory formats",
    "ddp": "Several processes",
    "launching": "Starting processes",
    "memory_plan": "Memory plans",
    "checkpoints": "Checkpoints",
    "start": "Start-up time",
    "search": "Experiments",
    "federated": "Federations",
    "federated_memory": "Memory of a federation",
    "scaling": "Slopes",
    "rounding": "Rounding",
    "compression": "Sizes of updates",
    "algorithms": "Federated algorithms",
}

LINKS = {
    "algorithms": "What the papers claim and what we found is "
    "[a page of its own](../docs/algorithms/results.md), with its figure, made by "
    "`python benchmarks/algorithms.py --backend vectorized --compiled --output results`. "
    "It counts losses and accuracies, not seconds, and `make bench` does not repeat it.",
}

# What else a section is given, of the driver's own options.
PASSED_ON = {"federated": ("pfl_python", "flower_python")}

# Some tables stand on pages of the guide, too.
GUIDE = HERE.parent / "docs"
MARKS = re.compile(r"(<!-- measured by benchmarks/(\w+)\.py -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, write the page, and return 1 when a script failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [name for name in TITLES if name not in LINKS]
    parser.add_argument("--only", action="append", choices=names, help="only this one; may be given several times")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that they work")
    parser.add_argument("--list", action="store_true", help="name the sections, and how long each took")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page again")
    parser.add_argument("--folder", type=Path, help="where results are kept; a quick run keeps none unless told")
    parser.add_argument("--pfl-python", help="a Python that has pfl and torch")
    parser.add_argument("--flower-python", help="a Python that has flwr[simulation] and torch")
    options = parser.parse_args(arguments)

    if options.list:
        for name, section in _sections(options.folder or HERE / "results").items():
            print(f"{name:<18}{section.seconds:6.0f} s, {section.date}{', quick' * section.is_quick}")
        for name in set(names) - _sections(options.folder or HERE / "results").keys():
            print(f"{name:<18}not measured yet")
        return 0

    with tempfile.TemporaryDirectory() as passing:
        folder = options.folder or (Path(passing) if options.quick else HERE / "results")
        folder.mkdir(parents=True, exist_ok=True)
        chosen = [] if options.page else [name for name in names if not options.only or name in options.only]
        failed = [name for name in chosen if not _run(name, folder, options)]
        sections = _sections(folder)
        for name in sections if options.page else [name for name in chosen if name not in failed]:
            page.draw(sections[name], folder / f"{name}.png")
        if folder == HERE / "results":
            publish(sections)
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return int(bool(failed))


def publish(sections: dict[str, Section]) -> None:
    """Write the page, and what is ours on the pages of the guide."""
    (HERE / "RESULTS.md").write_text(page.markdown(sections, TITLES, LINKS), encoding="utf-8")
    if "scaling" in sections:
        page.draw(sections["scaling"], GUIDE / "scaling.png")
    for path in GUIDE.rglob("*.md"):
        before = path.read_text(encoding="utf-8")
        after = with_tables(before, sections)
        if after != before:
            path.write_text(after, encoding="utf-8")


def with_tables(text: str, sections: Mapping[str, Section]) -> str:
    """Return a page of the guide with the tables of sections between their marks."""
    return MARKS.sub(lambda found: f"{found[1]}\n{_tables(found[2], sections)}\n\n{found[3]}", text)


def _tables(name: str, sections: Mapping[str, Section]) -> str:
    if name not in sections:
        return f"Not measured yet: `python benchmarks/run.py --only {name}`."
    section = sections[name]
    tables = "\n\n".join(map(page.table_markdown, section.tables))
    facts = section.machine
    return (
        f"{tables}\n\n`{section.command}`, {section.date}: "
        f"{facts['cores']} cores, {facts['processor']}, {facts['memory_gb']} GB; "
        f"Python {facts['python']}, torch {facts['torch']}, {facts['threads']} thread(s), "
        f"load {facts['load']:g} before{', a quick run' * section.is_quick}."
    )


def _run(name: str, folder: Path, options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as passing:
        target = Path(passing, "section.json")
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(target)]
        command += ["--quick"] if options.quick else []
        for option in PASSED_ON.get(name, ()):
            if (value := getattr(options, option)) is not None:
                command += [f"--{option.replace('_', '-')}", value]
        print(f"==== {name}", flush=True)
        started = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        print(f"==== {name}: {time.perf_counter() - started:.0f} s, exit code {code}", flush=True)
        if target.exists():
            (folder / f"{name}.json").write_bytes(target.read_bytes())
        return code == 0


def _sections(folder: Path) -> dict[str, Section]:
    return {name: Section.load(folder / f"{name}.json") for name in TITLES if (folder / f"{name}.json").exists()}


if __name__ == "__main__":
    sys.exit(main())
