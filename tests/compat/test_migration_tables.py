"""Tables of the migration pages: tests use every name of a table "Runs unchanged"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("lernomatic", "marlin", "zae_engine")
# plato's page also has paths and keys of files, which tests hold as text.
PLATO_TESTS = (
    "compat/test_plato.py",
    "compat/test_plato_names.py",
    "compat/plato/test_servers.py",
    "federated/clients/test_simple.py",
    "federated/servers/test_building.py",
    "federated/servers/test_plato_files.py",
    "federated/servers/test_reading.py",
    "federated/test_postprocess_codecs.py",
    "trainers/test_composable.py",
    "trainers/test_basic.py",
    "test_config.py",
    "test_history.py",
)


def promised(page: str) -> set[str]:
    """Return the names in the first column of the table "Runs unchanged" of a page."""
    text = (ROOT / "docs" / "migration" / f"{page}.md").read_text(encoding="utf-8")
    section = text.partition("## Runs unchanged\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    code = re.findall(r"`([^`]+)`", " ".join(rows[2:]))
    return {name for piece in code if piece[0] not in "\"'-" for name in re.findall(r"[A-Za-z_]\w*", piece)}


def used(path: Path) -> Iterator[str]:
    """Return every name that a module reads, calls, passes or overrides; imports alone do not count.

    Keys of dictionaries count, because tests pass and assign options by them.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.arg(arg=name):
                yield name
            case ast.Dict(keys=keys):
                yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@pytest.mark.parametrize("page", PAGES)
def test_every_name_listed_as_unchanged_is_used_by_a_test(page: str) -> None:
    names = promised(page)
    assert len(names) > 5
    assert names - set(used(Path(__file__).with_name(f"test_{page}.py"))) == set()


def test_every_plato_name_listed_as_unchanged_is_used_by_a_test() -> None:
    text = "\n".join((ROOT / "tests" / name).read_text(encoding="utf-8") for name in PLATO_TESTS)
    assert promised("plato") - set(re.findall(r"[A-Za-z_]\w*", text)) == set()
