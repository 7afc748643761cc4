"""The guides to migration are true: both programs of a pair have the same losses, and every new name exists."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "migration").glob("*.md"))

# Libraries whose names are names here: their programs run with other imports.
IMPORTS = {"plato": ("plato.", "dovetail."), "determined": ("determined", "dovetail")}
IMPORTS["zae_engine"] = ("zae_engine.trainer", "dovetail.compat.zae_engine")


def programs(guide: str) -> tuple[str, str]:
    """Return the two programs of a guide: the other library's and ours."""
    text = (ROOT / "docs" / "migration" / f"{guide}.md").read_text(encoding="utf-8")
    theirs, ours, *_ = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return theirs, ours


def losses_of(program: str) -> list[float]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(program, namespace)
    return [float(loss) for loss in namespace["losses"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "library", ["lightning", pytest.param("transformers", marks=pytest.mark.torture), "accelerate", "keras"]
)
def test_a_migrated_run_has_the_same_losses_as_the_original_library(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"NOT COMPARED with {library}: it is not installed, pip install {library}")
    monkeypatch.chdir(tmp_path)
    theirs, ours = programs(library)
    # In a separate folder, because its files must not be replaced by ours.
    folder = tmp_path / library
    folder.mkdir()
    script = folder / "theirs.py"
    script.write_text(f"{theirs}\nimport json\njson.dump(losses, open('losses.json', 'w'))\n", encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    assert losses_of(ours) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("library", ["lightning", "transformers", "accelerate", "keras"])
def test_a_migration_guide_names_the_pinned_version(library: str) -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(rf"^{library}==(\S+)$", pins, re.MULTILINE)
    guide = (ROOT / "docs" / "migration" / f"{library}.md").read_text(encoding="utf-8")
    assert f"with {library} {pinned}" in guide.lower()


@pytest.mark.parametrize("library", IMPORTS)
def test_a_program_with_changed_imports_runs_here(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = programs(library)
    before, after = IMPORTS[library]
    changed = re.sub(rf"^from {re.escape(before)}", f"from {after}", theirs, flags=re.MULTILINE)
    assert changed != theirs
    assert losses_of(changed) == pytest.approx(losses_of(ours), abs=1e-6)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every class, function, parameter and field of the source."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src" / "dovetail").rglob("*.py"))
    return set(re.findall(r"(?:class|def) (\w+)", source)) | set(re.findall(r"(\w+)(?:: | = |=)", source))


# Names in the tables that belong to Python, torch, torchmetrics or the other library.
FOREIGN = {
    *("True", "False", "BatchNorm", "DataLoader", "Dataset", "LambdaLR", "Module", "MulticlassF1Score", "SGD"),
    *("BCEWithLogitsLoss", "CrossEntropyLoss", "HuberLoss", "MSELoss", "Adam", "lr_lambda"),
    *("get_scheduler", "save_pretrained"),
}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_new_name_of_the_migration_tables_exists(guide: Path, known: set[str]) -> None:
    rows = [line.split("|") for line in guide.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    if guide.stem == "index":
        rows = [row for row in rows if len(row) > 4]  # the first table is one of guides
    new = " ".join(row[2] for row in rows)
    kept = " ".join(row[1] for row in rows if row[2].startswith(" the same"))
    code = " ".join(re.findall(r"`([^`]+)`", f"{new} {kept}"))
    classes = set(re.findall(r"\b[A-Z]\w*[a-z]\w*\b", code))
    keywords = set(re.findall(r"\b([a-z_]+)=", code))
    verbs = set(re.findall(r"\b(?:on|get|set|load|save|train|test|val)_\w+\b", code))
    assert (classes | keywords | verbs) - known - FOREIGN == set()
