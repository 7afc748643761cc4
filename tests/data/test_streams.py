"""Streams: what each library guarantees, what is read again, and what is rejected.

`PYTHONPATH=tests/reliability python tests/data/test_streams.py` writes the table of `docs/streams.md` again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stream_cells
import torch
from stream_cells import COLUMNS, LIBRARIES, VISION, Numbers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dovetail.data import Share
from dovetail.data.streams import IndexedStream, Stream, StreamLoader, as_stream, as_stream_loader
from dovetail.errors import DataError
from dovetail.trainers import Trainer
from dovetail.units import Batches, Epochs

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
MARK = "<!-- written by tests/data/test_streams.py -->"
# webdataset does not close the files that it has read.
_LEFT_OPEN = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO", "ignore:unclosed file")
MODULES = {"webdataset": "webdataset", "litData": "litdata", "your own stream": "torch"}


def _cells(library: str, folder: Path) -> dict[str, str]:
    if library != "MosaicML streaming":
        pytest.importorskip(MODULES.get(library, "datasets"))
        with warnings.catch_warnings():
            # The libraries use names that other libraries have deprecated.
            warnings.simplefilter("ignore")
            return stream_cells.cells(library, folder)
    VISION["skip_unless_installed"]()
    command = [sys.executable, stream_cells.__file__, library, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(library: str, cells: dict[str, str]) -> str:
    return f"| {library} | " + " | ".join(cells[column] for column in COLUMNS) + " |"


@pytest.mark.slow
@_LEFT_OPEN
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_table_of_streams_says_what_happens(library: str, tmp_path: Path) -> None:
    row = _row(library, _cells(library, tmp_path))
    assert "NOT" not in row
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def _state_after(loader: StreamLoader, num_batches: int) -> dict[str, Any]:
    for number, _ in enumerate(loader, start=1):
        if number == num_batches:
            return loader.state_dict()
    raise AssertionError("the stream is too short")


def test_a_stream_with_an_index_resumes_after_a_million_samples_without_reading_one() -> None:
    reads: list[int] = []

    def read(index: int) -> int:
        reads.append(index)
        return index

    def make(batch_size: int) -> StreamLoader:
        return StreamLoader(IndexedStream(read, lambda epoch: range(1_100_000)), batch_size)

    state = _state_after(make(1_000_000), 1)
    loader = make(4)
    loader.load_state_dict(state)
    reads.clear()
    assert next(iter(loader)).tolist() == reads == [1_000_000, 1_000_001, 1_000_002, 1_000_003]


@_LEFT_OPEN
def test_finished_shards_are_not_opened_again(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    data = stream_cells.webdataset(tmp_path)
    size = stream_cells.NUM_SAMPLES // stream_cells.NUM_SHARDS
    loader = as_stream_loader(data, batch_size=1)
    assert loader is not None
    state = _state_after(loader, 2 * size + 5)
    loader.load_state_dict(state)
    stream_cells._reads = 0
    next(iter(loader))
    assert stream_cells._reads == 6


def test_the_order_is_the_one_of_the_library_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    data = stream_cells.litdata(tmp_path)
    loader = as_stream_loader(data, batch_size=5)
    assert loader is not None
    for epoch in range(2):
        loader.set_epoch(epoch)
        found = [number for batch in loader for number in batch["id"].tolist()]
        assert found == [sample["id"] for sample in data]
        assert found != sorted(found)


def test_the_stream_of_the_documentation_is_one() -> None:
    assert isinstance(Numbers(), Stream)
    assert not isinstance(DataLoader([1]), Stream)  # type: ignore[arg-type]


def test_batches_of_workers_come_in_the_same_order_after_a_resume() -> None:
    def make() -> StreamLoader:
        loader = as_stream_loader(Numbers(), batch_size=7, num_workers=2)
        assert loader is not None
        return loader

    whole = [batch["id"].tolist() for batch in make()]
    state = _state_after(make(), 3)
    loader = make()
    loader.load_state_dict(state)
    assert [batch["id"].tolist() for batch in loader] == whole[3:]


def test_a_dataset_that_was_divided_before_is_rejected() -> None:
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    data = datasets.Dataset.from_dict({"a": [1, 2]}).to_iterable_dataset()
    with pytest.raises(DataError, match="divided by split_dataset_by_node: give the whole dataset"):
        as_stream(distributed.split_dataset_by_node(data, rank=0, world_size=2))


@_LEFT_OPEN
def test_pipelines_without_a_whole_epoch_warn_and_are_rejected_in_a_group(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    shards = webdataset.ResampledShards([str(tmp_path / "0.tar")])
    for pipeline, reason in (
        (stream_cells.webdataset(tmp_path).slice(10), "islice: this stage of a webdataset pipeline cannot run for"),
        (stream_cells.webdataset(tmp_path).with_epoch(10), "an epoch of a stream is one pass over all shards"),
        (webdataset.DataPipeline(shards), "ResampledShards: a pipeline of webdataset must start with a list"),
    ):
        with pytest.warns(UserWarning, match=f"a resumed run may lose or repeat samples: .*{reason}"):
            assert as_stream(pipeline) is None
    trainer = _trainer(stream_cells.webdataset(tmp_path).slice(10), tmp_path / "runs")
    with pytest.warns(UserWarning, match="islice"):
        trainer.fit(max_length=Epochs(1))
    trainer.context.process.share = Share(num_replicas=2)
    with pytest.raises(DataError, match="WebDataset divides its samples among processes"):
        trainer.batches("train")


@_LEFT_OPEN
def test_the_loader_of_webdataset_is_the_loader_of_its_stream(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    loader = as_stream_loader(webdataset.WebLoader(stream_cells.webdataset(tmp_path), batch_size=7), batch_size=3)
    assert loader is not None
    assert loader.batch_size == 7
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(120))


def _trainer(data: Any, folder: Path, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"seed": 1, "batch_size": 8, "drop_last": False, "verbose": False, **options}

    class Squares(Trainer):
        def train_step(self, batch: Any) -> Any:
            return {"loss": self.model(batch["id"][:, None].float() / 120).square().mean()}

    return Squares(lambda: nn.Linear(1, 1), "cpu", train_dataset=data, checkpoint_dir=folder, **settings)


@_LEFT_OPEN
def test_a_run_with_checkpoints_warns_of_samples_that_are_read_again(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    trainer = _trainer(stream_cells.webdataset(tmp_path), tmp_path / "runs", save_every=5)
    with pytest.warns(UserWarning, match="webdataset has no position inside of a shard"):
        trainer.fit(max_length=Batches(2))


def test_a_batch_that_was_read_ahead_is_not_lost(tmp_path: Path) -> None:
    def make() -> Trainer:
        return _trainer(Numbers(), tmp_path, accumulation_steps=2)

    whole, first, second = make(), make(), make()
    whole.fit(max_length=Epochs(2))
    first.fit(max_length=Batches(4))
    path = first.save_checkpoint(tmp_path / "cut")
    second.fit(max_length=Epochs(2), resume=path)
    assert list(second.history.losses) == list(whole.history.losses)
    assert len(whole.history.losses) == 2 * 15


def test_a_checkpoint_of_other_data_is_rejected(tmp_path: Path) -> None:
    batches = [{"id": torch.arange(8)}] * 4
    first = _trainer(batches, tmp_path)
    first.fit(max_length=Batches(2))
    path = first.save_checkpoint(tmp_path / "cut")
    with pytest.raises(DataError, match="within an epoch of other data than this stream"):
        _trainer(Numbers(), tmp_path).fit(max_length=Epochs(1), resume=path)


class _DividedByWorker(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for number in range(first, 120, step):
            yield {"id": number}


def test_a_torch_stream_rejects_another_number_of_workers_in_its_epoch(tmp_path: Path) -> None:
    first = _trainer(DataLoader(_DividedByWorker(), batch_size=8, num_workers=2), tmp_path)
    first.fit(max_length=Batches(3))
    path = first.save_checkpoint(tmp_path / "cut")
    second = _trainer(DataLoader(_DividedByWorker(), batch_size=8), tmp_path)
    with pytest.raises(DataError, match="0 workers would lose some samples and repeat others: expected num_workers=2"):
        second.fit(max_length=Epochs(1), resume=path)


if __name__ == "__main__":
    table = ["| data | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in LIBRARIES:
        with tempfile.TemporaryDirectory() as place:
            table.append(_row(name, _cells(name, Path(place))))
        print(table[-1], flush=True)
    before, _, after = PAGE.read_text(encoding="utf-8").partition(MARK)
    after = after.strip().partition("\n\n")[2] if after.lstrip().startswith("| data") else after.strip()
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(table) + f"\n\n{after}\n", encoding="utf-8")
