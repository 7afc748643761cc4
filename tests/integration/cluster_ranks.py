"""A trial of two processes on two nodes: they meet, and the first of them reports what they know together.

They save once, and then wait for as long as the file of their argument names the step that they started after.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cluster_trial import is_held, save

from dovetail.info import get_cluster_info


def main() -> None:
    info = get_cluster_info()
    assert info is not None
    folder, done = Path(str(info.directory)), 0 if info.latest_checkpoint is None else 1
    dist.init_process_group("gloo")
    raylets = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    raylets[dist.get_rank()] = int(os.environ["RAY_RAYLET_PID"])
    dist.all_reduce(raylets)
    assert os.environ["LOCAL_RANK"] == "0"
    if dist.get_rank() == 0:
        save(folder, 1, 0.0)
    print(f"rank {dist.get_rank()} begins after {done}", flush=True)
    while is_held(Path(sys.argv[1]), done):
        time.sleep(0.01)
    if dist.get_rank() == 0:
        metrics = {"loss": info.hparams["lr"], "nodes": raylets.unique().numel(), "ranks": dist.get_world_size()}
        row = {"group": "validation", "steps_completed": 1, "metrics": metrics}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    dist.destroy_process_group()
    if info.hparams["lr"] > 0.5 and os.environ["RANK"] == "1":
        raise SystemExit(3)


if __name__ == "__main__":
    main()
