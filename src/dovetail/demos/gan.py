"""Demo `dovetail demo gan`: a generative adversarial network for points in the plane."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam, Optimizer

from dovetail.callbacks import Callback
from dovetail.data.models import mlp
from dovetail.demos.catalogue import Outcome
from dovetail.demos.pictures import BLUE, GREY, picture
from dovetail.history.drawing import INK
from dovetail.trainers import Trainer

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

_NUM_LATENT = 8
_NUM_CLOUDS = 8
_RADIUS = 2.0
_SPREAD = 0.08
_SHOWN = 1000


def run(folder: Path, *, num_epochs: int = 20) -> Outcome:
    """Train for a multiple of 5 epochs, and draw the generator's output for the same noise at six epochs."""
    print(f"the data: {_NUM_CLOUDS} clusters of points on a ring, which the generator never sees")
    real = _ring(24576, torch.Generator().manual_seed(0))
    snapshots = _Snapshots(every=num_epochs // 5)
    trainer = _Adversaries(_networks, "cpu", batch_size=256, num_epochs=num_epochs, callbacks=[snapshots], seed=0)
    trainer.fit(real)

    picture(folder / "samples.png", (10.5, 7.4), partial(_draw, snapshots.outputs, real[:_SHOWN]))
    results = [_evaluate(points) for points in snapshots.outputs.values()]
    near, found = results[-1]
    rows = [
        [str(epoch), f"{near:.0%}", f"{found} of {_NUM_CLOUDS}"]
        for epoch, (near, found) in zip(snapshots.outputs, results, strict=True)
    ]
    return Outcome(
        f"{near:.0%} of the generated points are in a cluster, and {found} of {_NUM_CLOUDS} clusters are covered",
        {"samples.png": "the generator's output for the same noise, at six epochs"},
        ("epoch", "points in a cluster", "clusters covered"),
        rows,
    )


class _Adversaries(Trainer):
    """One step of each network per batch. The step is manual, because it calls `context.backward`."""

    def get_optimizer(self, model: Any) -> list[Optimizer]:
        rates = {"discriminator": 4e-3, "generator": 2e-3}
        return [Adam(model[name].parameters(), lr=rate, betas=(0.5, 0.99)) for name, rate in rates.items()]

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        (real,) = batch
        context, generator, discriminator = self.context, self.model["generator"], self.model["discriminator"]
        discriminator_optimizer, generator_optimizer = context.optimizers
        fake = generator(torch.randn(len(real), _NUM_LATENT))

        # The penalty below is the gradient of the scores with respect to the data.
        real.requires_grad_()
        scores = discriminator(real)
        # The gradient penalty of Mescheder et al. (2018): without it the generator covers only one cluster at a time.
        (slopes,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        # Detached: this loss trains the discriminator only.
        d_loss = softplus(-scores).mean() + softplus(discriminator(fake.detach())).mean()
        context.backward(d_loss + 0.05 * slopes.square().sum(dim=1).mean())
        context.step(discriminator_optimizer)

        g_loss = softplus(-discriminator(fake)).mean()
        # With `inputs`, this loss adds no gradient to the discriminator, which it must not move.
        context.backward(g_loss, inputs=list(generator.parameters()))
        context.step(generator_optimizer)
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}


class _Snapshots(Callback):
    """Records the generator's output for the same noise, before training and every few epochs."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.outputs: dict[int, Tensor] = {}
        # A separate generator, so that the snapshots do not change the training.
        self._noise = torch.randn(_SHOWN, _NUM_LATENT, generator=torch.Generator().manual_seed(1))

    def on_train_start(self, context: TrainingContext) -> None:
        self._record(context)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        if context.progress.epoch % self.every == 0:
            self._record(context)

    def _record(self, context: TrainingContext) -> None:
        model: Any = context.model
        with torch.inference_mode():
            self.outputs[context.progress.epoch] = model["generator"](self._noise)


def _networks() -> nn.Module:
    return nn.ModuleDict({"generator": mlp(_NUM_LATENT, 2, (64, 64)), "discriminator": mlp(2, 1, (64, 64))})


def _centres() -> Tensor:
    angles = torch.arange(_NUM_CLOUDS) * (2 * math.pi / _NUM_CLOUDS)
    return _RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


def _ring(count: int, generator: torch.Generator) -> Tensor:
    cloud = torch.randint(_NUM_CLOUDS, (count,), generator=generator)
    return _centres()[cloud] + _SPREAD * torch.randn(count, 2, generator=generator)


def _evaluate(points: Tensor) -> tuple[float, int]:
    """Return the share of points within three deviations of a centre, and the number of covered centres."""
    distance, nearest = torch.cdist(points, _centres()).min(dim=1)
    near = distance < 3 * _SPREAD
    counts = torch.bincount(nearest[near], minlength=_NUM_CLOUDS)
    # A cluster counts as covered if it has a quarter of its fair share of the points.
    return float(near.double().mean()), int((counts > len(points) / _NUM_CLOUDS / 4).sum())


def _draw(outputs: Mapping[int, Tensor], real: Tensor, figure: Any) -> None:
    for axes, (epoch, points) in zip(figure.subplots(2, 3).flat, outputs.items(), strict=True):
        axes.scatter(*real.T.numpy(), s=6, color=GREY, linewidths=0)
        axes.scatter(*points.T.numpy(), s=6, color=BLUE, alpha=0.45, linewidths=0)
        near, found = _evaluate(points)
        title = f"epoch {epoch}: {found} of {_NUM_CLOUDS} clusters, {near:.0%} inside" if epoch else "before training"
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.set(xlim=(-2.8, 2.8), ylim=(-2.8, 2.8), aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_color(GREY)
    figure.supxlabel("grey: data; blue: output of the generator, always for the same noise", fontsize=9, color=INK)
