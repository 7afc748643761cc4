from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problem import Problem
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dovetail import Batches, Epochs, Trainer
from dovetail.callbacks import EMA
from dovetail.errors import CheckpointError, ConfigError, DataError, UnknownNameError
from dovetail.trainers import AMPTrainer, DDPTrainer


class Tied(nn.Module):
    """Two inputs by name, a buffer, and one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor, offset: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids).mean(dim=1) * self.scale + offset)
        return out


class Noisy(Dataset[Any]):
    """Samples with noise from the dataset's own generator and from the global ones."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.generator = problem, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.problem.x)

    def __getitem__(self, index: int) -> Any:
        noise = float(self.generator.normal()) + float(torch.rand(()))
        return self.problem.x[index] + noise, self.problem.y[index]


def make(problem: Problem, *callbacks: Any, **options: Any) -> Trainer:
    settings = {"seed": 0, "verbose": False, "batch_size": 8, "learning_rate": 0.1, **options}
    return Trainer(problem.model(dropout=0.2), "cpu", callbacks=callbacks, **settings)


def trained(problem: Problem, *callbacks: Any, **options: Any) -> Trainer:
    trainer = make(problem, *callbacks, **options)
    trainer.fit((problem.x, problem.y), max_length=Batches(3))
    return trainer


def assert_equal(found: dict[str, Tensor], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


# ---------------------------------------------------------------------- safetensors


@pytest.mark.parametrize(
    "layer",
    [
        lambda it: it,
        lambda it: AMPTrainer(it, precision="bf16"),
        DDPTrainer,
    ],
)
def test_safetensors_holds_the_weights_under_the_names_of_the_model(
    problem: Problem, tmp_path: Path, layer: Callable[[Trainer], Trainer]
) -> None:
    trainer = layer(make(problem))
    trainer.fit((problem.x, problem.y), max_length=Batches(1))
    path = trainer.export(tmp_path / "new" / "folder" / "weights", format="safetensors")
    assert [it.name for it in path.parent.iterdir()] == ["weights"]
    assert_equal(load_file(path), trainer.model.state_dict())


def test_tied_weights_are_complete_under_both_names(tmp_path: Path) -> None:
    trainer = Trainer(Tied().bfloat16(), "cpu")
    path = trainer.export(tmp_path / "tied.safetensors")
    assert_equal(load_file(path), trainer.model.state_dict())
    with safe_open(path, "pt") as file:
        assert len(json.dumps(file.metadata() or {})) < 100


def test_an_export_has_the_training_weights_until_the_average_is_applied(problem: Problem, tmp_path: Path) -> None:
    ema = EMA(decay=0.5)
    trainer = trained(problem, ema)
    assert_equal(load_file(trainer.export(tmp_path / "m.safetensors")), trainer.model.state_dict())
    average = ema.average_state_dict()
    assert not torch.equal(average["0.weight"], trainer.model.state_dict()["0.weight"])
    ema.apply_to(trainer.model)
    # The file of the first export is replaced.
    assert_equal(load_file(trainer.export(tmp_path / "m.safetensors")), average)
    assert len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------------- graphs


def test_a_torch_export_file_computes_the_same_for_any_batch_size(problem: Problem, tmp_path: Path) -> None:
    trainer = trained(problem)
    path = trainer.export(tmp_path / "graph", format="torch.export")
    with path.open("rb") as file:
        program = torch.export.load(file)
    graph = program.module()
    trainer.model.eval()
    for rows in (1, 5, 96):
        assert torch.equal(graph(problem.x[:rows]), trainer.model(problem.x[:rows]))
    # The file contains the example, which must not be data of the user.
    ((example,), _) = program.example_inputs
    assert example.shape == (8, 6)
    assert not example.any()


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_named_inputs_of_an_example_are_named_inputs_of_the_graph(tmp_path: Path, suffix: str) -> None:
    model = Tied().eval()
    trainer = Trainer(model, "cpu")
    # A batch of one still gives a graph for any size.
    example = {"ids": torch.ones(1, 3, dtype=torch.long), "offset": torch.ones(1, 4)}
    path = trainer.export(tmp_path / f"tied{suffix}", example=example)
    ids, offset = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 1]]), torch.randn(3, 4)
    if suffix == ".pt2":
        found = torch.export.load(path).module()(ids=ids, offset=offset)
        assert torch.equal(found, model(ids, offset))
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        assert {each.name: each.shape for each in session.get_inputs()} == {"ids": ["batch", 3], "offset": ["batch", 4]}
        (numbers,) = session.run(None, {"ids": ids.numpy(), "offset": offset.numpy()})
        assert torch.allclose(torch.from_numpy(numbers), model(ids, offset), atol=1e-5)


@pytest.mark.slow
def test_onnxruntime_computes_the_same_and_nothing_is_printed(
    problem: Problem, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    trainer = trained(problem)
    model = copy.deepcopy(trainer.model).eval()
    # As `CompiledTrainer` does in its mode "model".
    trainer.model.compile(backend="eager")
    path = trainer.export(tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert [it.name for it in tmp_path.iterdir()] == ["model.onnx"]
    assert_equal(load_file(trainer.export(tmp_path / "model.safetensors")), model.state_dict())
    session = runtime.InferenceSession(path)
    (entry,) = session.get_inputs()
    for rows in (1, 5):
        (found,) = session.run(None, {entry.name: problem.x[:rows].numpy()})
        assert torch.allclose(torch.from_numpy(found), model(problem.x[:rows]), atol=1e-5)


@pytest.mark.parametrize("in_batches", [False, True])
def test_an_export_in_the_middle_of_an_epoch_does_not_change_training(
    problem: Problem, tmp_path: Path, in_batches: bool
) -> None:
    def train(exports: bool) -> Trainer:
        trainer = make(problem)
        data: Any = Noisy(problem)
        if in_batches:
            data = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
        trainer.fit(data, max_length=Batches(5))
        if exports:
            trainer.export(tmp_path / "model.pt2")
        trainer.fit(max_length=Epochs(2))
        return trainer

    one, other = train(exports=True), train(exports=False)
    assert_equal(one.model.state_dict(), other.model.state_dict())


def test_a_model_that_cannot_be_traced_leaves_the_old_file(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    path = tmp_path / "model.pt2"
    path.write_text("old")
    with pytest.raises(Exception, match=r".") as caught:
        Trainer(Branching(), "cpu").export(path, example=torch.ones(2, 3))
    assert any("could not trace Branching" in note for note in caught.value.__notes__)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_data_that_can_be_read_only_once_is_no_example(problem: Problem, tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        yield from problem.batches

    trainer = make(problem, train_dataset=batches())
    with pytest.raises(DataError, match="export: there is no data to read example inputs from; give them as example="):
        trainer.export(tmp_path / "model.pt2")


# ---------------------------------------------------------------------- Hugging Face


@pytest.mark.slow
def test_a_hugging_face_model_is_written_by_its_own_method(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=10, **size)).eval()
    folder = AMPTrainer(Trainer(model, "cpu")).export(tmp_path / "new" / "bert", format="huggingface")
    assert {it.suffix for it in folder.iterdir()} == {".json", ".safetensors"}
    loaded = transformers.BertModel.from_pretrained(folder).eval()
    assert_equal(loaded.state_dict(), model.state_dict())


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("m", {"format": "onx"}, UnknownNameError, "unknown export format 'onx': did you mean 'onnx'?"),
        ("m", {"format": "torchscript"}, UnknownNameError, "did you mean 'torch.export'?"),
        ("m.bin", {}, ConfigError, r"has none of the suffixes .safetensors \(safetensors\), .pt2"),
        ("m.onnx", {"format": "torch.export"}, ConfigError, "the suffix is the one of format='onnx'"),
        ("m", {"format": "huggingface"}, ConfigError, "needs a model with save_pretrained, and Sequential has none"),
        ("m.safetensors", {"example": 1}, ConfigError, "format='safetensors' needs no example"),
        ("m.pt2", {}, DataError, "no data to read example inputs"),
        (".", {"format": "onnx"}, ConfigError, "expected the path of a file, got a folder"),
    ],
)
def test_a_mistake_is_one_sentence(
    problem: Problem, tmp_path: Path, name: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(problem).export(tmp_path / name, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_an_error_with_the_path(problem: Problem, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = make(problem, val_dataset=TensorDataset(problem.x, problem.y))
    for name in ("m.safetensors", "m.pt2"):
        with pytest.raises(CheckpointError, match=rf"file/{name}: the model could not be written"):
            trainer.export(tmp_path / "file" / name)
