"""Data parallelism and sharding on the pretend device, in one process of a group: `accelerator_ranks.py FOLDER`."""

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
from pretend_device import NAME, PretendDevice, PretendTensor
from styles import Net, make_batches, make_optimizer
from torch import Tensor, nn

from dovetail import Epochs, Trainer
from dovetail.accelerators import widest_float
from dovetail.callbacks import EMA, EarlyStopping
from dovetail.distributed import is_part, own_part, whole
from dovetail.trainers import AMPTrainer, DDPTrainer, FSDPTrainer, PowerSGD

Layer = Callable[[Any], Any]


class LanguageModel(Net):
    """A model that computes its loss over the labels that are not masked, like a model of transformers."""

    def __init__(self, device: PretendDevice | None) -> None:
        super().__init__(device)
        self.layers = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

    def forward(  # type: ignore[override]  # the trainer passes batches by name
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        logits = super().forward(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.reshape(-1, 11), labels.reshape(-1)), "logits": logits}


class NormNet(Net):
    """A classifier with a batch norm."""

    def __init__(self, device: PretendDevice | None) -> None:
        super().__init__(device)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))


def token_batches() -> list[dict[str, Tensor]]:
    generator, batches = torch.Generator().manual_seed(1), []
    for number in range(12):
        ids = torch.randint(11, (8, 5), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        # Another number of tokens in each batch.
        labels[:, : 1 + number % 3] = -100
        mask[0, : number % 3] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def fit(device: str, model: Net, wrap: Layer, callbacks: Callable[[], list[Any]], **options: Any) -> Any:
    settings = {"seed": 1, "verbose": False, "print_every": 10**6, "callbacks": callbacks(), **options}
    trainer = wrap(Trainer(model, device, optimizer=make_optimizer, **settings))
    batches: Any = token_batches() if isinstance(model, LanguageModel) else make_batches() * 2
    trainer.fit(batches, batches if settings["callbacks"] else None, max_length=Epochs(1))
    return trainer


def compare(
    wrap: Layer,
    callbacks: Callable[[], list[Any]] = list,
    kind: type[Net] = Net,
    has_float64: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train on the CPU and on the device; return the largest difference and what a step waited for."""
    on_cpu = fit("cpu", kind(None), wrap, callbacks, **options)
    expected = {name: whole(it.detach()) for name, it in on_cpu.model.state_dict().items()}
    with PretendDevice(has_float64=has_float64) as device:
        model = kind(device)
        trainer = fit(NAME, model, wrap, callbacks, **options)
        weights = {name: whole(it).cpu() for name, it in trainer.model.state_dict().items()}
        number = torch.device(trainer.context.device).index
        parts = [it for it in trainer.model.parameters() if is_part(it)]
        assert {type(own_part(it.detach())) for it in trainer.model.parameters()} == {PretendTensor}
    inside = [event for event in device.events[model.marks[1] : model.marks[-1]] if event.waits]
    difference = max(float((weights[name] - it).abs().max()) for name, it in expected.items())
    waits = [event.cause for event in inside]
    same_tokens = on_cpu.context.progress.tokens == trainer.context.progress.tokens
    found = {"difference": difference, "waits": waits, "number": number, "num_parts": len(parts)}
    return found if same_tokens else {**found, "tokens": trainer.context.progress.tokens}


def offload_on_the_cpu() -> dict[str, Any]:
    """Train on the CPU of a machine with an accelerator, outside of the block in which its memory can be pinned."""
    trainers = [fit("cpu", Net(None), partial(FSDPTrainer, cpu_offload=value), list) for value in (False, True)]
    plain, offloaded = ([whole(it.detach()) for it in trainer.model.parameters()] for trainer in trainers)
    return {"difference": max(float((it - other).abs().max()) for it, other in zip(plain, offloaded, strict=True))}


def weighted_without_float64(layer: Layer) -> dict[str, Any]:
    """Train with a weighted loss on a device that rejects float64."""
    widest_float.cache_clear()
    try:
        return compare(layer, has_float64=False, class_weight=[1.0, 2.0, 3.0], accumulation_steps=2)
    finally:
        widest_float.cache_clear()


def with_precision(layer: Any, precision: Any) -> Layer:
    return lambda trainer: layer(AMPTrainer(trainer, precision=precision))


CASES: dict[str, Callable[[], dict[str, Any]]] = {"offload on the CPU": offload_on_the_cpu}
for _name, _layer in {"data parallel": DDPTrainer, "sharded": FSDPTrainer}.items():
    CASES |= {
        f"{_name} plain": partial(compare, _layer),
        f"{_name} bf16": partial(compare, with_precision(_layer, "bf16")),
        f"{_name} fp16": partial(compare, with_precision(_layer, "fp16")),
        f"{_name} accumulation": partial(compare, _layer, accumulation_steps=2),
        f"{_name} clipping": partial(compare, _layer, gradient_clip=0.1),
        f"{_name} ema": partial(compare, _layer, lambda: [EMA(0.9)]),
        f"{_name} class_weight": partial(compare, _layer, class_weight=[1.0, 2.0, 0.5]),
        f"{_name} class_weight, accumulation": partial(
            compare, _layer, class_weight=[1.0, 2.0, 0.5], accumulation_steps=2
        ),
        f"{_name} tokens": partial(compare, _layer, kind=LanguageModel),
        f"{_name} tokens, accumulation": partial(compare, _layer, kind=LanguageModel, accumulation_steps=2),
        f"{_name} sync_batchnorm": partial(compare, partial(_layer, sync_batchnorm=True), kind=NormNet),
        f"{_name} weighted without float64": partial(weighted_without_float64, _layer),
        f"{_name} early_stopping": partial(compare, _layer, lambda: [EarlyStopping("valid_loss", patience=1)]),
    }

CASES["data parallel powersgd"] = partial(
    compare, partial(DDPTrainer, compression=PowerSGD(rank=1, warm_up=0)), class_weight=[1.0, 2.0, 0.5]
)


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
