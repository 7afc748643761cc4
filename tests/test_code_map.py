"""Code map of docs/architecture.md: the first line of every module, and the layers of imports.

`python tests/test_code_map.py` writes both parts of the page from the source and from pyproject.toml.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "dovetail"


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|").rstrip(".")


def code_map() -> str:
    """Return one table per package: its title, its modules and what each one is."""
    parts = []
    for package in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
        name = str(package.relative_to(SOURCE.parent))
        rows = [f"| `{path.relative_to(SOURCE)}` | {first_line(path)} |" for path in modules]
        title = f"**`{name}/`**: {first_line(package / '__init__.py')}"
        table = ["| file | what is in it |", "|---|---|", *rows] if rows else []
        parts.append("\n".join([title, "", *table]).rstrip())
    return "\n\n".join(parts)


def import_layers() -> str:
    """Return the layers of each import contract, the upper ones first."""
    settings: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contracts = [each for each in settings["contracts"] if each["type"] == "layers"]
    return "\n\n".join(f"{each['name']}:\n\n```text\n" + "\n".join(each["layers"]) + "\n```" for each in contracts)


PARTS = {"Code map": code_map, "Layers of imports": import_layers}


def section(heading: str) -> re.Match[str]:
    """Return the part of a section between its marks."""
    found = re.search(
        rf"(?<=\n## {heading}\n).*?<!-- generated -->\n\n(.*?)\n\n<!-- end -->",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found is not None, heading
    return found


@pytest.mark.parametrize("heading", PARTS)
def test_the_architecture_page_contains_the_generated_code_map(heading: str) -> None:
    assert section(heading)[1] == PARTS[heading](), "python tests/test_code_map.py writes it"


def test_every_module_has_a_first_docstring_line() -> None:
    assert [path for path in SOURCE.rglob("*.py") if not first_line(path)] == []


if __name__ == "__main__":
    for heading, write in PARTS.items():
        found, text = section(heading), PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text[: found.start(1)] + write() + text[found.end(1) :], encoding="utf-8")
