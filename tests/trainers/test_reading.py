"""Runs that are interrupted and continued by new objects end bit for bit as runs that were not, with every loader.

`python tests/trainers/test_reading.py` rewrites the table of `docs/reproducibility.md`.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from dovetail import seed_everything
from dovetail.data import DataLoader as OwnLoader
from dovetail.errors import CheckpointError
from dovetail.trainers import Trainer
from dovetail.units import Batches, Epochs

PAGE = Path(__file__).parents[2] / "docs" / "reproducibility.md"
MARK = "<!-- written by tests/trainers/test_reading.py -->"

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 48, 8, 3
BATCHES_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
# In the first epoch, before every worker has read a batch; at the end of an epoch; in the middle of the second one.
CUTS = (1, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 3)
# Every pass forks two workers from a large test process, so `make test` cuts these runs once, in the second epoch.
WORKER_CUTS = CUTS if os.environ.get("DOVETAIL_TORTURE") == "1" else CUTS[-1:]


def _augmented(value: float, own: np.random.Generator) -> Tensor:
    """Return a sample that draws from every generator that transforms use."""
    return value + torch.randn(4) + random.random() + np.random.normal() + float(own.normal())


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return _augmented(index / NUM_SAMPLES, self.rng), index % 3


class Stream(IterableDataset[Any]):
    """Samples whose order is drawn by each worker for itself."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        order = list(range(first, NUM_SAMPLES, step))
        random.shuffle(order)
        for index in order:
            yield _augmented(index / NUM_SAMPLES, self.rng), index % 3


class Divisible(IterableDataset[Any]):
    """A stream that can be divided and continued."""

    def __init__(self, following: int = 0, step: int = 1) -> None:
        self.following, self.step = following, step
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while self.following < NUM_SAMPLES:
            index, self.following = self.following, self.following + self.step
            yield _augmented(index / NUM_SAMPLES, self.rng), index % 3

    def split(self, rank: int, world: int) -> Divisible:
        return Divisible(self.following + rank * self.step, self.step * world)

    def state_dict(self) -> dict[str, int]:
        return {"following": self.following, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.following, self.step = state["following"], state["step"]


class LazySampler(Sampler[int]):
    """Draws each index from the global generator when it is asked for it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield int(torch.randint(NUM_SAMPLES, ()))


class OwnBatches(Sampler[list[int]]):
    """Batches that are drawn from a generator of the sampler's own."""

    def __init__(self) -> None:
        self.rng = random.Random(9)

    def __len__(self) -> int:
        return BATCHES_PER_EPOCH

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES_PER_EPOCH):
            yield [self.rng.randrange(NUM_SAMPLES) for _ in range(BATCH_SIZE)]


class OwnIteration(DataLoader[Any]):
    """A loader whose batches are changed on their way."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for inputs, targets in super().__iter__():
            yield 2 * inputs, targets


def _seed_worker(worker_id: int) -> None:
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def _torch(**options: Any) -> DataLoader[Any]:
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, **options}
    return DataLoader(Augmented(), **settings)


def _stateful(dataset: Any, **options: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(dataset, batch_size=BATCH_SIZE, **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "a dataset given to the trainer": lambda num_workers: (Augmented(), num_workers),
    "torch's `DataLoader`, `shuffle=True`": _torch,
    "… with a `generator`": lambda **it: _torch(generator=torch.Generator().manual_seed(3), **it),
    "… with a `worker_init_fn`": lambda **it: _torch(worker_init_fn=_seed_worker, **it),
    "… with a sampler of torch": lambda **it: _torch(
        shuffle=None, sampler=SubsetRandomSampler(range(NUM_SAMPLES)), **it
    ),
    "… with a sampler that draws while it is read": lambda **it: _torch(shuffle=None, sampler=LazySampler(), **it),
    "… with a batch sampler that has its own generator": lambda **it: DataLoader(
        Augmented(), batch_sampler=OwnBatches(), **it
    ),
    "… over a stream": lambda **it: DataLoader(Stream(), batch_size=BATCH_SIZE, **it),
    "… over a stream with `split`": lambda **it: DataLoader(Divisible(), batch_size=BATCH_SIZE, **it),
    "a subclass with its own `__iter__`": lambda **it: OwnIteration(
        Augmented(), batch_size=BATCH_SIZE, shuffle=True, **it
    ),
    "torchdata's `StatefulDataLoader`": lambda **it: _stateful(Augmented(), shuffle=True, **it),
    "… over a stream without a state": lambda **it: _stateful(Stream(), **it),
    "`dovetail.data.DataLoader`": lambda **it: OwnLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, **it),
    "… with a `seed`": lambda **it: OwnLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, seed=4, **it),
}

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 workers, `prefetch_factor=3`": {"num_workers": 2, "prefetch_factor": 3},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}

_ONLY_NUM_WORKERS = "a dataset given to the trainer"


def _trainer(data: Any, folder: Path, **options: Any) -> Trainer:
    if isinstance(data, tuple):
        data, options["num_workers"] = data
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    settings: dict[str, Any] = {"seed": 11, "batch_size": BATCH_SIZE, "verbose": False, **options}
    return Trainer(model, "cpu", train_dataset=data, checkpoint_dir=folder, **settings)


def _result(trainer: Trainer) -> dict[str, Any]:
    """Return the weights, every loss, and what each generator would draw next."""
    following = [float(torch.rand(())), random.random(), float(np.random.random())]
    weights = [it.tolist() for it in trainer.model.parameters()]
    return {"weights": weights, "losses": list(trainer.history.losses), "following": following}


def _scrambled() -> None:
    """Leave the generators as a new process might find them."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def _is_exact(make: Callable[[], Any], folder: Path, cuts: Sequence[int] = CUTS, **options: Any) -> bool:
    """Whether runs that are cut and continued by new objects equal the one that was not cut."""
    _scrambled()
    whole = _trainer(make(), folder, **options)
    whole.fit(max_length=Epochs(NUM_EPOCHS))
    expected = _result(whole)
    assert len(set(expected["losses"])) == NUM_EPOCHS * BATCHES_PER_EPOCH
    for cut in cuts:
        _scrambled()
        first = _trainer(make(), folder, **options)
        first.fit(max_length=Batches(cut))
        path = first.save_checkpoint(folder / f"at-{cut}")
        del first
        _scrambled()
        second = _trainer(make(), folder, **options)
        second.fit(max_length=Epochs(NUM_EPOCHS), resume=path)
        if _result(second) != expected:
            return False
    return True


def _cell(loader: str, workers: str, folder: Path, worker_cuts: Sequence[int] = CUTS) -> str:
    """Return what the table says about a loader and its workers."""
    options = WORKERS[workers]
    cuts = worker_cuts if options["num_workers"] else CUTS
    if loader == _ONLY_NUM_WORKERS and len(options) > 1:
        return "–"
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        is_exact = _is_exact(lambda: LOADERS[loader](**options), folder, cuts)
    is_announced = any("may differ from an uninterrupted one" in str(it.message) for it in reported)
    if is_exact:
        return "exact"
    return "not exact, and says so" if is_announced else "NOT EXACT"


def _shown() -> dict[tuple[str, str], str]:
    """Return the cells of the table in the documentation."""
    lines = PAGE.read_text(encoding="utf-8").partition(MARK)[2].strip().partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names, cells = rows[0][1:], rows[2:]
    return {(row[0], name): cell for row in cells for name, cell in zip(names, row[1:], strict=True)}


@pytest.mark.full_size
@pytest.mark.filterwarnings("ignore:if this run is resumed")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_behaves_as_in_the_table(loader: str, workers: str, tmp_path: Path) -> None:
    cell = _cell(loader, workers, tmp_path, WORKER_CUTS)
    assert cell != "NOT EXACT"
    assert _shown()[loader, workers] == cell


class Unsized(Sampler[list[int]]):
    """Batches from the global generator, in a number that is not known."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES_PER_EPOCH):
            yield torch.randint(NUM_SAMPLES, (BATCH_SIZE,)).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda num_workers: DataLoader(Stream(), batch_size=BATCH_SIZE, num_workers=num_workers),
        lambda num_workers: DataLoader(Augmented(), batch_sampler=Unsized(), num_workers=num_workers),
    ],
    ids=["stream", "batch sampler"],
)
def test_a_prefetched_batch_is_read_again_with_the_same_random_numbers(
    make: Callable[[int], Any], num_workers: int, tmp_path: Path
) -> None:
    # Between two windows: to stop inside of one would end it early.
    cuts = (2, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 4)
    assert _is_exact(lambda: make(num_workers), tmp_path, cuts, accumulation_steps=2)


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
def test_training_on_a_torch_loader_equals_a_hand_written_loop(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = _trainer(_torch(**options), tmp_path, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer.fit(max_length=Epochs(2))
    model = _trainer(None, tmp_path).model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    loader = _torch(**options)
    seed_everything(11)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    assert list(trainer.history.losses) == losses


@pytest.mark.parametrize("persistent", [False, True])
def test_validation_with_a_random_loader_is_the_same_after_a_resume(persistent: bool, tmp_path: Path) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(8)
        return _torch(generator=generator, num_workers=2, persistent_workers=persistent)

    def trainer() -> Trainer:
        return _trainer(_torch(), tmp_path, val_dataset=make())

    whole = trainer()
    whole.fit(max_length=Epochs(NUM_EPOCHS))
    first = trainer()
    first.fit(max_length=Epochs(1))
    path = first.save_checkpoint(tmp_path / "cut")
    second = trainer()
    second.fit(max_length=Epochs(NUM_EPOCHS), resume=path)
    assert second.history.get_metric_values("valid_loss") == whole.history.get_metric_values("valid_loss")
    assert len(set(whole.history.get_metric_values("valid_loss"))) == NUM_EPOCHS


def test_a_run_continues_in_the_same_process_as_in_a_new_one(tmp_path: Path) -> None:
    whole = _trainer(_torch(num_workers=2, persistent_workers=True), tmp_path)
    whole.fit(max_length=Epochs(NUM_EPOCHS))
    halves = _trainer(_torch(num_workers=2, persistent_workers=True), tmp_path)
    for length in (Batches(4), Batches(4 + BATCHES_PER_EPOCH), Epochs(NUM_EPOCHS)):
        halves.fit(max_length=length)
    assert list(halves.history.losses) == list(whole.history.losses)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 0), (0, 2)])
def test_another_number_of_workers_warns_on_resume(before: int, after: int, tmp_path: Path) -> None:
    first = _trainer(_torch(num_workers=before), tmp_path)
    first.fit(max_length=Batches(2))
    path = first.save_checkpoint(tmp_path / "cut")
    second = _trainer(_torch(num_workers=after), tmp_path)
    with pytest.warns(UserWarning, match=rf"num_workers={before} and is continued with num_workers={after}"):
        second.fit(max_length=Epochs(1), resume=path)


def test_with_a_seed_the_number_of_workers_may_change_on_resume(tmp_path: Path) -> None:
    def make(num_workers: int) -> Trainer:
        data = TensorDataset(torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
        return _trainer(
            OwnLoader(_Noisy(data), batch_size=BATCH_SIZE, shuffle=True, seed=4, num_workers=num_workers), tmp_path
        )

    whole, first = make(2), make(2)
    whole.fit(max_length=Epochs(2))
    first.fit(max_length=Batches(4))
    path = first.save_checkpoint(tmp_path / "cut")
    second = make(1)
    second.fit(max_length=Epochs(2), resume=path)
    assert list(second.history.losses) == list(whole.history.losses)


class _Noisy(Dataset[Any]):
    """Samples with noise from the global generators only."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._data[index][0] + torch.randn(4) + random.random(), index % 3


class Lazy(Dataset[Any]):
    """Creates its generator when the first sample is read."""

    rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.rng is None:
            self.rng = np.random.default_rng(index)
        return _augmented(index, self.rng), index % 3


def test_a_generator_that_is_missing_when_workers_start_warns(tmp_path: Path) -> None:
    def make() -> Trainer:
        return _trainer(DataLoader(Lazy(), batch_size=BATCH_SIZE, num_workers=2), tmp_path)

    first = make()
    first.fit(max_length=Batches(4))
    path = first.save_checkpoint(tmp_path / "cut")
    with pytest.warns(UserWarning, match=r"the data workers do not have dataset\.rng"):
        make().fit(max_length=Epochs(1), resume=path)


def test_an_unordered_loader_warns_when_checkpoints_are_written(tmp_path: Path) -> None:
    loader = _torch(num_workers=2, in_order=False)
    with pytest.warns(UserWarning, match=r"may differ from an uninterrupted one: DataLoader\(in_order=False\)"):
        _trainer(loader, tmp_path, save_every=2).fit(max_length=Batches(2))


def test_a_forged_random_state_raises_a_one_sentence_error(tmp_path: Path) -> None:
    first = _trainer(_torch(), tmp_path)
    first.fit(max_length=Batches(2))
    state = first.state_dict()
    state["epoch_start"]["private_now"]["dataset.rng"] = {"bit_generator": "PCG64", "state": 5}
    second = _trainer(_torch(), tmp_path)
    second.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"the random state of dataset\.rng is not one of a Generator"):
        second.fit(max_length=Epochs(1))


class Unreadable(Dataset[Any]):
    """Fails at one sample."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise LookupError("sample 17 is damaged")
        return torch.ones(3), index % 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_dataset_has_its_type_and_the_number_of_the_batch(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "shuffle": False, "verbose": False}
    with pytest.raises(LookupError, match="sample 17 is damaged") as caught:
        Trainer(nn.Linear(3, 2), "cpu", **options).fit(Unreadable(), max_length=Epochs(1))
    *workers, place = caught.value.__notes__
    assert place == "while training: epoch 1, batch 5"
    assert [note[: note.index(", in")] for note in workers] == (
        [f"raised in data worker 0, which read batch 5 of the pass: {__file__}, line {_line_of('sample 17')}"]
        if num_workers
        else []
    )


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


if __name__ == "__main__":
    import tempfile

    page = PAGE.read_text(encoding="utf-8")
    before, _, after = page.partition(MARK)
    if after.lstrip().startswith("| loader"):
        after = "\n" + after.strip().partition("\n\n")[2] + "\n"
    table = ["| loader | " + " | ".join(WORKERS) + " |", "|---" * (len(WORKERS) + 1) + "|"]
    for loader in LOADERS:
        cells = []
        for workers in WORKERS:
            with tempfile.TemporaryDirectory() as folder:
                cells.append(_cell(loader, workers, Path(folder)))
            print(loader, workers, cells[-1], flush=True)
        table.append(f"| {loader} | " + " | ".join(cells) + " |")
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(table) + "\n" + after, encoding="utf-8")
    sys.exit(0)
