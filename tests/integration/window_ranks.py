"""Cases of `test_data_parallel.py` in which the processes have unequal numbers of unequal batches, and steps by hand.

One process gets the batches of all processes, joined step by step, for each number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.trainers import AMPTrainer, DDPTrainer, FSDPTrainer, Trainer


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# The sizes of the batches of each process. The first one is idle in the last batch of the first window of three, and
# in all of the second window; the last one has batches in every step.
SIZES = {2: ([4, 2], [3, 4, 1, 4, 2]), 3: ([4, 2], [3, 4, 1, 4], [2, 2, 5, 1, 3])}


def samples(number: int, size: int, process: int) -> list[int]:
    """The numbers of the samples in a batch of a process."""
    return [(number * 7 + process * 13 + place * 3) % 60 for place in range(size)]


class OwnBatches(DistributedSampler[Any]):
    """The batches of one process."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, num_replicas=world(), rank=rank())

    def __iter__(self) -> Iterator[Any]:
        sizes = SIZES[world()][rank()]
        return iter([samples(number, size, rank()) for number, size in enumerate(sizes)])

    def __len__(self) -> int:
        # As a stream: otherwise a process would close its last window before the others.
        raise TypeError


def batches(*tensors: Tensor, size: int) -> Any:
    """The batches of this process; alone, the joined batches of each step of a group."""
    if world() > 1:
        return DataLoader(TensorDataset(*tensors), batch_size=None, sampler=OwnBatches(TensorDataset(*tensors)))
    joined = []
    for number in range(5):
        chosen = [
            it for p, all_of in enumerate(SIZES[size]) for it in samples(number, sum(all_of[number : number + 1]), p)
        ]
        joined.append(tuple(it[chosen] for it in tensors))
    return joined


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(60)
    inputs = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    # Large in the second batch of the first process only, which computes it again while it is idle.
    inputs[:, 0].clamp_(max=0.5)
    inputs[samples(1, 2, 0), 0] = 1.5
    return inputs, (inputs.sum(dim=1) > 0).long()


def ddp(trainer: Trainer) -> Any:
    return DDPTrainer(trainer, bucket_size=128) if world() > 1 else trainer


def fsdp(trainer: Trainer) -> Any:
    return FSDPTrainer(trainer) if world() > 1 else trainer


def sizes() -> tuple[int, ...]:
    """The groups whose batches this process has."""
    return (world(),) if world() > 1 else tuple(SIZES)


class Recorded(Callback):
    """The gradients in front of every step of an optimizer; an empty list is a parameter without one."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []

    def on_gradients(self, context: Any, optimizer: Any) -> None:
        for parameter in (it for group in optimizer.param_groups for it in group["params"]):
            gradient = parameter.grad
            full = getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)()
            self.gradients.append([] if full is None else full.double().flatten().tolist())


class Net(nn.Module):
    """Two layers; `rare` is used for inputs whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body, self.head, self.rare = nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(5, 2)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs).tanh())
        if self.uses_rare and (chosen := inputs[:, :1] > 1).any():
            outputs = outputs + chosen * self.rare(inputs)
        return outputs

    uses_rare = False


def train(
    size: int,
    *,
    wrap: Callable[..., Any] = ddp,
    parts: tuple[tuple[str, ...], ...] = (("body", "head", "rare"),),
    net: Callable[[], Any] = Net,
    precision: Any = None,
    callbacks: tuple[Callback, ...] = (),
    **settings: Any,
) -> dict[str, Any]:
    module = net()
    if precision is not None:
        module.float()

    class Own(Trainer):
        def get_optimizer(self, model: nn.Module) -> Any:
            chosen = [[it for part in each for it in getattr(model, part).parameters()] for each in parts]
            return [torch.optim.SGD(each, lr=0.3, momentum=0.9, weight_decay=0.1) for each in chosen]

    found = Recorded()
    settings = {"seed": 3, "drop_last": False, "verbose": False, **settings}
    trainer = wrap(Own(module, "cpu", callbacks=[found, *callbacks], **settings))
    if precision is not None:
        trainer = AMPTrainer(trainer, precision=precision, init_scale=256.0)
    inputs, targets = data()
    if precision is not None:
        inputs = inputs.float()
    trainer.fit(batches(inputs, targets, size=size), max_length=Epochs(2))
    return {"gradients": found.gradients, "progress": trainer.context.progress.state_dict()}


def loss_of(trainer: Any, batch: Any, factor: float = 1.0) -> Tensor:
    outputs: Tensor = trainer.model(batch[0])
    return nn.functional.cross_entropy(factor * outputs, batch[1])


def twice(trainer: Any, batch: Any) -> dict[str, Any]:
    for number in (1, 2):
        loss = loss_of(trainer, batch, number)
        trainer.context.backward(loss)
        trainer.context.step(zero_grad=number == 2)
    return {"loss": loss.detach()}


def in_turns(trainer: Any, batch: Any) -> dict[str, Any]:
    """A second loss reaches parameters of the first optimizer, whose gradients were kept."""
    context = trainer.context
    first, second = context.optimizers
    loss = loss_of(trainer, batch)
    context.backward(loss)
    context.step(first, zero_grad=False)
    context.backward(loss_of(trainer, batch, 3.0))
    context.step(second)
    context.step(first)
    return {"loss": loss.detach()}


def gan(trainer: Any, batch: Any) -> dict[str, Any]:
    """Two backward passes for the first optimizer, and a loss for the second one alone."""
    context, model = trainer.context, trainer.model
    first, second = context.optimizers
    inputs, targets = batch[:2]
    hidden = model.body(inputs).tanh()
    context.backward(nn.functional.cross_entropy(model.head(hidden.detach()), targets))
    context.backward(nn.functional.cross_entropy(model.head(-hidden.detach()), 1 - targets))
    context.step(first)
    loss = -nn.functional.cross_entropy(model.head(hidden), targets)
    context.backward(loss, inputs=list(model.body.parameters()))
    context.step(second)
    return {"loss": loss.detach()}


GAN = (("head",), ("body",))
TURNS = (("head", "rare"), ("body",))


def counted_by_hand(trainer: Any, batch: Any) -> dict[str, Any]:
    for number in (1, 2):
        losses = nn.functional.cross_entropy(number * trainer.model(batch[0]), batch[1], reduction="none")
        mask = batch[1] == 1
        trainer.context.run.num_items = mask.sum()
        loss = (losses * mask).sum() / mask.sum().clamp(min=1)
        trainer.context.backward(loss)
        trainer.context.step(zero_grad=number == 2)
    return {"loss": loss.detach()}


class Freezes(Callback):
    """Freezes and unfreezes layers from batch to batch, in all processes at once."""

    def on_step_start(self, context: Any, batch: Any) -> None:
        number = context.progress.batches
        context.model.head.requires_grad_(number % 3 != 1)
        context.model.body.requires_grad_(number % 4 != 2)


def frozen_at_the_step(trainer: Any, batch: Any) -> dict[str, Any]:
    """The second loss does not reach the head, which is frozen until the next batch."""
    context, head = trainer.context, trainer.model.head
    head.requires_grad_(True)
    loss = loss_of(trainer, batch)
    context.backward(loss)
    head.requires_grad_(False)
    context.backward(loss_of(trainer, batch, 3.0))
    context.step()
    return {"loss": loss.detach()}


class Rare(Net):
    uses_rare = True


# Not all combinations, because each run takes time.
_MANUAL: dict[str, dict[str, Any]] = {
    "kept": {"train_step": twice},
    "kept_in_turns": {"train_step": in_turns, "parts": TURNS},
}
_ALL: dict[str, dict[str, Any]] = {
    **_MANUAL,
    "plain": {},
    "gan": {"train_step": gan, "parts": GAN},
    "gan_in_float16": {"train_step": gan, "parts": GAN, "precision": "fp16"},
    "counted_by_hand": {"train_step": counted_by_hand},
    "rare": {"net": Rare},
    "rare_and_kept": {"net": Rare, "train_step": twice},
    "changing_layers": {"callbacks": (Freezes(),)},
    "frozen_at_the_step": {"train_step": frozen_at_the_step},
}
_ONE_BATCH = ("rare", "rare_and_kept", "frozen_at_the_step")
_CHOSEN = {
    **{f"{name}_in_windows": {**settings, "accumulation_steps": 3} for name, settings in _ALL.items()},
    **{name: _ALL[name] for name in _ONE_BATCH},
    **{f"sharded_{name}_in_windows": {**it, "accumulation_steps": 3, "wrap": fsdp} for name, it in _MANUAL.items()},
}


def run(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The results by the number of processes."""
    return {str(size): train(size, **settings) for size in sizes()}


CASES = {name: partial(run, settings) for name, settings in _CHOSEN.items()}
