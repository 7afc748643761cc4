"""Trials, trained by however many processes there are; each writes what it saw. Started by `test_trial_ranks.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))

import torch
from trials import NUM_VALIDATED, Classifier, make_data

from dovetail import checkpoint, pytorch
from dovetail.pytorch import Batch, Epoch, PyTorchTrialContext, Reducer


class Shared(Classifier):
    """The classifier with its batches shared by all processes, and metrics of every kind."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        self.rows = context.wrap_reducer(lambda values: sorted(values), name="rows")

    def build_training_data_loader(self) -> Any:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(make_data(44), size, shuffle=self.context.get_hparams().get("shuffle", True))

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(make_data(NUM_VALIDATED, seed=8), 2)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == self.context.get_hparams().get("stop_at") and self.context.distributed.rank == 1:
            self.context.set_stop_requested(True)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> Any:
        for value in batch[0][:, 0].tolist():
            self.rows.update(value)
        metrics = super().evaluate_batch(batch)
        return {**metrics, "sum": metrics["accuracy"] * len(batch[1]), "max": batch[0].max(), "min": batch[0].min()}

    def evaluation_reducer(self) -> Any:
        return {"sum": Reducer.SUM, "max": Reducer.MAX, "min": Reducer.MIN}


class Full(Shared):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch
    evaluation_reducer = pytorch.PyTorchTrial.evaluation_reducer

    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return {"loss": sum(float(super(Shared, self).evaluate_batch(batch)["loss"]) for batch in data_loader)}


def train(
    folder: Path | None = None, length: Any = None, resume: Any = None, trial_class: Any = Shared, **settings: Any
) -> dict[str, Any]:
    hparams = {"global_batch_size": 8, **settings.pop("hparams", {})}
    context = pytorch.init(hparams=hparams, checkpoint_dir=folder, verbose=False, **settings)
    trial = context.build_trial(trial_class)
    reports: list[Any] = []

    class Reports(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
            reports.append(avg_metrics["loss"])

    trial.callbacks = {"reports": Reports()}
    metrics = context.fit(
        trial,
        max_length=length or Epoch(3),
        latest_checkpoint=resume,
        reporting_period=Batch(4),
        checkpoint_policy="none",
    )
    predictions = context.predict(trial, pytorch.DataLoader(make_data(9, seed=9), 2))
    return {
        "weights": [parameter.tolist() for parameter in trial.model.parameters()],
        "metrics": metrics,
        "reports": reports,
        "batches": len(trial.seen),
        "predictions": predictions.tolist(),
    }


def paused(folder: Path) -> dict[str, Any]:
    hparams = {"dropout": 0.5}
    train(folder, Batch(8), hparams=hparams)
    return train(folder, Epoch(3), "auto", hparams=hparams)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda folder: train(hparams={"shuffle": False}),
    "shuffled": lambda folder: train(),
    "aggregated": lambda folder: train(aggregation_frequency=4),
    "full dataset": lambda folder: train(trial_class=Full),
    "stopped": lambda folder: train(folder, hparams={"stop_at": 7}),
    "straight": lambda folder: train(hparams={"dropout": 0.5}),
    "paused": paused,
}


def main(folder: Path) -> None:
    found = {name: case(folder / name.replace(" ", "_")) for name, case in CASES.items()}
    with pytorch.init(hparams={"global_batch_size": 8}, checkpoint_dir=None) as context:
        rank = context.distributed.rank
        found["places"] = {
            "rank": rank,
            "size": context.distributed.size,
            "gathered": context.distributed.gather(10 * rank),
            "told": context.distributed.broadcast("chief" if rank == 0 else "other"),
            "share": context.get_per_slot_batch_size(),
        }
    if rank == 0:
        found["kept"] = [info.path.name for info in checkpoint.list_checkpoints(folder / "stopped" / "trial_0")]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
