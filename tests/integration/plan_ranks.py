"""What a process does in `test_memory_plan_ranks.py`: `python plan_ranks.py FOLDER`, with torchrun's variables set."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    # The benchmark imports its own neighbours by name.
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    bench: Any = import_module("memory_plan")
    cases = json.loads((folder / "cases.json").read_text())
    found = {setting: {name: bench.measure(name, setting) for name in names} for setting, names in cases.items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
