"""Other libraries at the same work, each through a small adapter in its own usual style.

An adapter trains a `Job` of `loop.py`. It is there when its library is installed, which nothing here requires, and
raises `NotImplementedError` for what its library does not do. Whatever a library prints or writes goes nowhere.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from loop import Job

__all__ = ["PACKAGES", "adapters"]

# The libraries of all adapters, as pip names them.
PACKAGES = (
    "lightning",
    "accelerate",
    "transformers",
    "keras",
    "pytorch-ignite",
    "skorch",
    "torchtnt",
    "fastai",
)

Adapter = Callable[["Job"], None]


def adapters() -> tuple[dict[str, Adapter], dict[str, str]]:
    """Return the adapters of the libraries that are here, by name, and what the others lack."""
    found, missing = {}, {}
    for name, (modules, adapter) in _ADAPTERS.items():
        absent = [module for module in modules if find_spec(module) is None]
        if absent:
            missing[name] = "not installed"
        else:
            found[name] = _quietly(adapter)
    return found, missing


def _ignite(job: Job) -> None:
    engines = import_module("ignite.engine")
    if job.clip or job.scheduler or job.valid:
        _ignite_with_everything(job, engines)
        return
    trainer = engines.create_supervised_trainer(job.model, job.optimizer, job.criterion)
    trainer.run(job.train, max_epochs=job.epochs)


def _ignite_with_everything(job: Job, engines: Any) -> None:
    metrics = import_module("ignite.metrics")

    def step(engine: Any, batch: Any) -> float:
        job.model.train()
        job.optimizer.zero_grad()
        loss = job.criterion(job.model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
        job.optimizer.step()
        return float(loss.item())

    trainer = engines.Engine(step)
    evaluator = engines.create_supervised_evaluator(
        job.model, {"loss": metrics.Loss(job.criterion), "accuracy": metrics.Accuracy()}
    )
    if (scheduler := job.scheduler) is not None:
        trainer.add_event_handler(engines.Events.ITERATION_COMPLETED, lambda: scheduler.step())
    trainer.add_event_handler(engines.Events.EPOCH_COMPLETED, lambda: evaluator.run(job.valid))
    trainer.run(job.train, max_epochs=job.epochs)


def _ignite_with_display(job: Job) -> None:
    if job.clip or job.scheduler or job.valid:
        raise NotImplementedError("measured with displays off only")
    engines, handlers = import_module("ignite.engine"), import_module("ignite.handlers")
    metrics = import_module("ignite.metrics")
    trainer = engines.create_supervised_trainer(job.model, job.optimizer, job.criterion)
    metrics.RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    handlers.ProgressBar().attach(trainer, ["loss"])
    trainer.add_event_handler(engines.Events.ITERATION_COMPLETED, handlers.TerminateOnNan())
    trainer.run(job.train, max_epochs=job.epochs)


def _accelerate(job: Job) -> None:
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(job.model, job.optimizer, job.scheduler)
    batches = accelerator.prepare(job.train) if isinstance(job.train, DataLoader) else job.train
    for _ in range(job.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = job.criterion(model(inputs), targets)
            accelerator.backward(loss)
            if job.clip:
                accelerator.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        _validate(model, job)


def _fabric(job: Job) -> None:
    fabric = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(job.model, job.optimizer)
    batches = fabric.setup_dataloaders(job.train) if isinstance(job.train, DataLoader) else job.train
    for _ in range(job.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = job.criterion(model(inputs), targets)
            fabric.backward(loss)
            if job.clip:
                fabric.clip_gradients(model, optimizer, max_norm=job.clip)
            optimizer.step()
            if job.scheduler is not None:
                job.scheduler.step()
        _validate(model, job)


def _lightning(job: Job) -> None:
    _run_lightning(job, logger=False, enable_progress_bar=False, enable_checkpointing=False)


def _lightning_as_installed(job: Job) -> None:
    _run_lightning(job)


def _run_lightning(job: Job, **settings: Any) -> None:
    lightning = import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # its type is known when it is there
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = job.criterion(self.model(batch[0]), batch[1])
            if not settings:
                self.log("loss", loss, prog_bar=True, batch_size=len(batch[1]))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            outputs = self.model(batch[0])
            loss, right = job.criterion(outputs, batch[1]), (outputs.argmax(dim=1) == batch[1]).float().mean()
            self.log_dict({"valid_loss": loss, "valid_accuracy": right}, batch_size=len(batch[1]))

        def configure_optimizers(self) -> Any:
            if job.scheduler is None:
                return job.optimizer
            return {
                "optimizer": job.optimizer,
                "lr_scheduler": {"scheduler": job.scheduler, "interval": "step"},
            }

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=job.epochs,
        gradient_clip_val=job.clip or None,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
        **settings,
    )
    # A list would be several loaders to it.
    train, valid = (_Batches(data) if isinstance(data, list) else data for data in (job.train, job.valid))
    trainer.fit(Module(), train, valid)


def _skorch(job: Job) -> None:
    skorch, callbacks = import_module("skorch"), import_module("skorch.callbacks")
    watching = []
    if job.clip:
        watching.append(callbacks.GradientNormClipping(job.clip))
    if job.scheduler is not None:
        watching.append(callbacks.LRScheduler(lambda optimizer, **_: job.scheduler, step_every="batch"))
    # It iterates over what the iterators below give; of the data sets it takes no more than their presence.
    nothing = TensorDataset(torch.zeros(1), torch.zeros(1))
    net = skorch.NeuralNet(
        job.model,
        criterion=job.criterion,
        optimizer=lambda parameters, **_: job.optimizer,
        max_epochs=job.epochs,
        iterator_train=lambda dataset, **_: job.train,
        iterator_valid=lambda dataset, **_: job.valid,
        train_split=import_module("skorch.helper").predefined_split(nothing) if job.valid else None,
        callbacks=watching,
        verbose=0,
    )
    net.fit(nothing, None)


def _torchtnt(job: Job) -> None:
    framework = import_module("torchtnt.framework")

    class Unit(framework.TrainUnit, framework.EvalUnit):  # type: ignore[misc, name-defined]  # as in _run_lightning
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = job.model, job.optimizer

        def train_step(self, state: Any, data: Any) -> None:
            self.optimizer.zero_grad()
            loss = job.criterion(self.model(data[0]), data[1])
            loss.backward()
            if job.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), job.clip)
            self.optimizer.step()
            if job.scheduler is not None:
                job.scheduler.step()

        def eval_step(self, state: Any, data: Any) -> None:
            outputs = self.model(data[0])
            job.criterion(outputs, data[1]).item()
            (outputs.argmax(dim=1) == data[1]).float().mean().item()

    if job.valid is None:
        framework.train(Unit(), job.train, max_epochs=job.epochs)
    else:
        framework.fit(Unit(), job.train, job.valid, max_epochs=job.epochs)


def _transformers(job: Job) -> None:
    transformers = import_module("transformers")
    if job.valid is not None:
        raise NotImplementedError("its evaluation gathers all outputs: that is other work")

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": job.criterion(self.model(inputs), labels)}

    class Named:
        def __len__(self) -> int:
            return len(job.train)  # type: ignore[arg-type]  # a list or a loader

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for inputs, labels in job.train:
                yield {"inputs": inputs, "labels": labels}

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]  # as in _run_lightning
        def get_train_dataloader(self) -> Any:
            return Named()

    settings = transformers.TrainingArguments(
        output_dir=os.getcwd(),
        num_train_epochs=job.epochs,
        max_grad_norm=job.clip,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    optimizers = job.optimizer, job.scheduler or LambdaLR(job.optimizer, lambda _: 1.0)
    Trainer(WithLoss(), settings, train_dataset=[0], optimizers=optimizers).train()


def _keras(job: Job) -> None:
    # Read when it is imported for the first time.
    os.environ["KERAS_BACKEND"] = "torch"
    keras = import_module("keras")
    group = job.optimizer.param_groups[0]
    if job.valid is not None or job.scheduler is not None:
        raise NotImplementedError("its loop does not take torch's schedules")

    def loss(targets: Tensor, outputs: Tensor) -> Tensor:
        # It has made floats of them, as its own losses for classes know.
        value: Tensor = job.criterion(outputs, targets.long())
        return value

    # It cannot step with an optimizer of torch's.
    optimizer = keras.optimizers.SGD(group["lr"], momentum=float(group["momentum"]))
    model = keras.Sequential([keras.layers.TorchModuleWrapper(job.model)])
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)

    class Data(keras.utils.PyDataset):  # type: ignore[misc, name-defined]  # as in _run_lightning
        def __len__(self) -> int:
            return len(job.train)  # type: ignore[arg-type]  # a list

        def __getitem__(self, index: int) -> Any:
            return job.train[index]  # type: ignore[index]  # a list

    data = Data() if isinstance(job.train, list) else job.train
    model.fit(data, epochs=job.epochs, shuffle=False, verbose=0)


def _fastai(job: Job) -> None:
    if job.scheduler is not None or job.valid is not None:
        raise NotImplementedError("it brings schedules and validation of its own")
    learner, data = import_module("fastai.learner"), import_module("fastai.data.core")
    wrapper = import_module("fastai.optimizer").OptimWrapper
    # Importing this is what gives a learner its `no_bar`.
    import_module("fastai.callback.progress")
    rate = job.optimizer.param_groups[0]["lr"]
    learn = learner.Learner(
        data.DataLoaders(job.train, []),
        job.model,
        loss_func=job.criterion,
        opt_func=lambda parameters, **_: wrapper(opt=job.optimizer),
        lr=rate,
    )
    with learn.no_bar(), learn.no_logging():
        learn.fit(job.epochs, rate)


class _Batches:
    """A list of batches that is no list."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _validate(model: Any, job: Job) -> None:
    if job.valid is None:
        return
    model.eval()
    with torch.no_grad():
        for inputs, targets in job.valid:
            outputs = model(inputs)
            job.criterion(outputs, targets).item()
            (outputs.argmax(dim=1) == targets).float().mean().item()
    model.train()


def _quietly(adapter: Adapter) -> Adapter:
    @wraps(adapter)
    def run(job: Job) -> None:
        with _nowhere():
            adapter(job)

    return run


@contextmanager
def _nowhere() -> Iterator[None]:
    """Run in a directory that goes away, with nothing printed, logged or warned of."""
    before = os.getcwd()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with (
        tempfile.TemporaryDirectory() as directory,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)
            logging.disable(level)


_ADAPTERS: dict[str, tuple[tuple[str, ...], Adapter]] = {
    "ignite, displays off": (("ignite",), _ignite),
    "ignite, display and NaN check": (("ignite", "tqdm"), _ignite_with_display),
    "accelerate": (("accelerate",), _accelerate),
    "fabric": (("lightning",), _fabric),
    "lightning, displays off": (("lightning",), _lightning),
    "lightning, as installed": (("lightning",), _lightning_as_installed),
    "skorch": (("skorch",), _skorch),
    "torchtnt": (("torchtnt",), _torchtnt),
    "transformers": (("transformers", "accelerate"), _transformers),
    "keras, on torch": (("keras",), _keras),
    "fastai": (("fastai",), _fastai),
}
