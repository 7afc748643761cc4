"""A trial that takes a moment: it reports, keeps its place in a file, and says in a ledger when it has finished.

Without torch, and without Dovetail: what a trial process has to do is read one file and append to another.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

info = json.loads(Path(os.environ["DOVETAIL_TRIAL"]).read_text())
folder, rate = Path(info["directory"]), info["hparams"]["lr"]
attempt = int(Path(os.environ["DOVETAIL_ATTEMPT"]).name)


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def main() -> None:
    ledger = Path(info["config"]["data"]["ledger"])
    append(ledger, {"trial": info["trial_id"], "attempt": attempt, "begun": True})
    if rate > 0.6:
        append(folder / "metrics.jsonl", {"exited": "INVALID_HP"})
        return
    if info["config"]["data"].get("fails_once") and attempt == 0 and rate < 0.4:
        raise SystemExit(1)
    place = folder / "place"
    done = int(place.read_text()) if place.exists() else 0
    for step in range(done + 1, 6):
        time.sleep(0.02)
        row = {"group": "validation", "steps_completed": step, "metrics": {"loss": rate / step, "epochs": step}}
        append(folder / "metrics.jsonl", row)
        # Renamed into place, as checkpoints are.
        (folder / "place.tmp").write_text(str(step))
        (folder / "place.tmp").replace(place)
    append(ledger, {"trial": info["trial_id"], "attempt": attempt, "begun": False})


main()
