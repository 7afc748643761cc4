"""Data parallelism on the pretend device, in one process of a group: `accelerator_ranks.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "accelerator"))

import torch
from pretend_device import NAME, PretendDevice
from styles import Net, make_batches, make_optimizer

from dovetail import Epochs, Trainer
from dovetail.trainers import AMPTrainer, DDPTrainer


def fit(device: str, model: Net, wrap: Any = DDPTrainer, **options: Any) -> Any:
    settings = {"seed": 1, "verbose": False, "print_every": 10**6, **options}
    trainer = wrap(Trainer(model, device, optimizer=make_optimizer, **settings))
    trainer.fit(make_batches(), max_length=Epochs(1))
    return trainer


def compare(wrap: Any = DDPTrainer, **options: Any) -> dict[str, Any]:
    """Train on the CPU and on the device; return the largest difference and what a step waited for."""
    expected = {name: it.detach() for name, it in fit("cpu", Net(None), wrap, **options).model.state_dict().items()}
    with PretendDevice() as device:
        model = Net(device)
        trainer = fit(NAME, model, wrap, **options)
        found = {name: it.cpu() for name, it in trainer.model.state_dict().items()}
        number = torch.device(trainer.context.device).index
    inside = [event for event in device.events[model.marks[1] : model.marks[-1]] if event.waits]
    difference = max(float((found[name] - it).abs().max()) for name, it in expected.items())
    return {"difference": difference, "waits": [event.cause for event in inside], "number": number}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": compare,
    "bf16": partial(compare, lambda trainer: DDPTrainer(AMPTrainer(trainer, precision="bf16"))),
    "accumulation": partial(compare, accumulation_steps=2),
    "clipping": partial(compare, gradient_clip=0.1),
}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
