"""A trial of two processes on two nodes: they meet, and the first of them reports what they know together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from dovetail.info import get_cluster_info


def main() -> None:
    info = get_cluster_info()
    assert info is not None
    dist.init_process_group("gloo")
    raylets = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    raylets[dist.get_rank()] = int(os.environ["RAY_RAYLET_PID"])
    dist.all_reduce(raylets)
    assert os.environ["LOCAL_RANK"] == "0"
    if dist.get_rank() == 0:
        metrics = {"loss": info.hparams["lr"], "nodes": raylets.unique().numel(), "ranks": dist.get_world_size()}
        row = {"group": "validation", "steps_completed": 1, "metrics": metrics}
        (Path(str(info.directory)) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    dist.destroy_process_group()
    if info.hparams["lr"] > 0.5 and os.environ["RANK"] == "1":
        raise SystemExit(3)


if __name__ == "__main__":
    main()
