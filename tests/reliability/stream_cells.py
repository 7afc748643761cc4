"""Measures what a library's stream guarantees: the cells of the table in `docs/streams.md`.

`python stream_cells.py LIBRARY FOLDER` prints them as JSON, for a library that needs a separate process.
"""

from __future__ import annotations

import importlib
import json
import random
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dovetail.data.streams import StreamLoader, as_stream_loader
from dovetail.data.streams.loader import join_states
from dovetail.trainers import Trainer
from dovetail.units import Batches, Epochs

NUM_SAMPLES, NUM_SHARDS, BATCH_SIZE = 120, 5, 8
# The functions of `tests/vision.py`, which is not on the path of tests.
VISION = runpy.run_path(str(Path(__file__).parents[1] / "vision.py"))
COLUMNS = (
    "resumed, no workers",
    "resumed, 2 workers",
    "resumed with another number of workers",
    "1 → 2 → 3 → 1 processes",
    "samples read again",
)


class Numbers(IterableDataset[Any]):
    """The stream that the documentation shows, as a user writes it."""

    def __init__(self, following: int = 0, step: int = 1) -> None:
        self.following, self.step = following, step

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.following < NUM_SAMPLES:
            number, self.following = self.following, self.following + self.step
            yield {"id": _read(number)}

    def split(self, rank: int, world: int) -> Numbers:
        return Numbers(self.following + rank * self.step, self.step * world)

    def state_dict(self) -> dict[str, int]:
        return {"following": self.following, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.following, self.step = state["following"], state["step"]


def hugging_face(folder: Path) -> Any:
    datasets = importlib.import_module("datasets")
    table = datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))}).to_iterable_dataset(num_shards=NUM_SHARDS)
    return table.map(_named)


def hugging_face_shuffled(folder: Path) -> Any:
    datasets = importlib.import_module("datasets")
    table = datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))}).to_iterable_dataset(num_shards=NUM_SHARDS)
    return table.shuffle(seed=3, buffer_size=16, max_buffer_input_shards=1).map(_named)


def webdataset(folder: Path) -> Any:
    webdataset = importlib.import_module("webdataset")
    size, urls = NUM_SAMPLES // NUM_SHARDS, [str(folder / f"{shard}.tar") for shard in range(NUM_SHARDS)]
    for shard, url in enumerate(urls):
        if not Path(url).exists():
            with webdataset.TarWriter(url) as writer:
                for number in range(shard * size, (shard + 1) * size):
                    writer.write({"__key__": f"{number:04d}", "number.cls": number})
    pipeline = webdataset.WebDataset(urls, shardshuffle=NUM_SHARDS).shuffle(10).decode()
    return pipeline.rename(number="number.cls").map(_named)


def litdata(folder: Path) -> Any:
    litdata = importlib.import_module("litdata")
    if not (folder / "index.json").exists():
        cache = importlib.import_module("litdata.streaming.cache").Cache(
            str(folder), chunk_size=NUM_SAMPLES // NUM_SHARDS
        )
        for number in range(NUM_SAMPLES):
            cache[number] = {"number": number}
        cache.done()
        cache.merge()
    return litdata.StreamingDataset(str(folder), shuffle=True, transform=_named)


def mosaic(folder: Path) -> Any:
    streaming = importlib.import_module("streaming")
    base: Any = streaming.StreamingDataset

    class Named(base):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            return _named(super().__getitem__(at))

    if not (folder / "index.json").exists():
        with streaming.MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=300) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"number": number})
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()
    return Named(local=str(folder), shuffle=True, batch_size=BATCH_SIZE)


LIBRARIES: dict[str, Callable[[Path], Any]] = {
    "your own stream": lambda folder: Numbers(),
    "Hugging Face `IterableDataset`": hugging_face,
    "… after `shuffle`": hugging_face_shuffled,
    "webdataset": webdataset,
    "litData": litdata,
    "MosaicML streaming": mosaic,
}

_reads = 0


def _read(number: int) -> int:
    """Return the number of a sample, and count that it was read."""
    global _reads
    _reads += 1
    return number


def _named(sample: Mapping[str, Any]) -> dict[str, int]:
    return {"id": _read(int(sample["number"]))}


def cells(library: str, folder: Path) -> dict[str, str]:
    """Return the row of a library: what is exact, and how many samples a resumed run reads again."""
    make = partial(LIBRARIES[library], folder)
    values = (
        "exact" if _is_exact(make, folder, num_workers=0, num_epochs=2, cuts=(1, 7)) else "NOT EXACT",
        "exact" if _is_exact(make, folder, num_workers=2, num_epochs=1, cuts=(3,)) else "NOT EXACT",
        _once(make, sizes=(1, 1, 1, 1), workers=(2, 0, 1, 2)),
        _once(make, sizes=(1, 2, 3, 1), workers=(0, 0, 0, 0)),
        "none" if _num_read_again(make) <= BATCH_SIZE else "the shards that were started",
    )
    return dict(zip(COLUMNS, values, strict=True))


def _augmented(samples: list[dict[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that draws from every generator that transforms use."""
    noise = torch.randn(len(samples), 4) + random.random() + float(np.random.normal())
    numbers = torch.tensor([sample["id"] for sample in samples])
    return noise + numbers[:, None] / NUM_SAMPLES, numbers % 3


def _is_exact(make: Callable[[], Any], folder: Path, num_workers: int, num_epochs: int, cuts: tuple[int, ...]) -> bool:
    """Whether runs that are cut and continued by new objects end as the run that was not cut."""

    def trainer() -> Trainer:
        random.seed(9)
        np.random.seed(9)
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        loader: Any = DataLoader(make(), batch_size=BATCH_SIZE, num_workers=num_workers, collate_fn=_augmented)
        return Trainer(model, "cpu", train_dataset=loader, seed=11, checkpoint_dir=folder / "runs", verbose=False)

    whole = trainer()
    whole.fit(max_length=Epochs(num_epochs))
    expected = [*whole.history.losses, *(value for it in whole.model.parameters() for value in it.flatten().tolist())]
    for cut in cuts:
        first = trainer()
        first.fit(max_length=Batches(cut))
        path = first.save_checkpoint(folder / "runs" / f"at-{cut}")
        second = trainer()
        second.fit(max_length=Epochs(num_epochs), resume=path)
        values = [value for it in second.model.parameters() for value in it.flatten().tolist()]
        if [*second.history.losses, *values] != expected:
            return False
    return True


def _once(make: Callable[[], Any], sizes: tuple[int, ...], workers: tuple[int, ...]) -> str:
    """Read an epoch in several runs with other numbers of processes and workers, and count every sample."""
    data, state, seen = make(), None, list[int]()
    for size, num_workers, steps in zip(sizes, workers, (3, 2, 1, None), strict=True):
        states = []
        for rank in range(size):
            loader = _loader(data, num_workers).share(rank, size, 0)
            loader.set_epoch(1)
            if state is not None:
                loader.load_state_dict(state)
            for step, batch in enumerate(loader, start=1):
                seen += batch["id"].tolist()
                if step == steps:
                    break
            states.append(loader.state_dict())
        # As in a checkpoint, which holds no objects.
        state = json.loads(json.dumps(join_states(states)))
    return "each sample once" if sorted(seen) == list(range(NUM_SAMPLES)) else "NOT ONCE"


def _num_read_again(make: Callable[[], Any]) -> int:
    """Return the samples that are read for the first batch after 7 of them."""
    global _reads
    first = _loader(make(), 0)
    for step, _ in enumerate(first, start=1):
        if step == 7:
            break
    second = _loader(make(), 0)
    second.load_state_dict(first.state_dict())
    _reads = 0
    next(iter(second))
    return _reads


def _loader(data: Any, num_workers: int) -> StreamLoader:
    loader = as_stream_loader(data, batch_size=BATCH_SIZE, num_workers=num_workers)
    assert loader is not None
    return loader


if __name__ == "__main__":
    VISION["enable"]()
    # The library imports the SDKs of clouds, whose warnings are not about it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(cells(sys.argv[1], Path(sys.argv[2]))))
