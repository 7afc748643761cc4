"""The weights of a model in one file."""

from __future__ import annotations

import argparse
import os
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest
import torch
from safetensors.torch import load_file

from dovetail.checkpoint import export_model, load_model_file
from dovetail.checkpoint.files import Files
from dovetail.checkpoint.model_file import model_format
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError

_FORMATS: list[Literal["safetensors", "ckpt"]] = ["safetensors", "ckpt"]


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("format", _FORMATS)
def test_a_model_file_round_trips_bit_for_bit(tmp_path: Path, format: Literal["safetensors", "ckpt"]) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict()
    path = export_model(tmp_path / "deep" / f"model.{format}", state, format)
    loaded = load_model_file(path)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert os.listdir(path.parent) == [path.name]


def test_the_safetensors_package_reads_tied_weights_in_full(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    path = export_model(tmp_path / "model.safetensors", {"a": weight, "b": weight, "c": weight.T})
    assert _equal(dict(sorted(load_file(path).items())), {"a": weight, "b": weight, "c": weight.T})


def test_torch_reads_a_ckpt_file_in_its_safe_mode(tmp_path: Path) -> None:
    path = export_model(tmp_path / "model.pt", {"a": torch.ones(2)}, "ckpt")
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(2))


def test_safetensors_rejects_values_that_are_not_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra: safetensors stores tensors only, got dict: use format='ckpt'"):
        export_model(tmp_path / "model.safetensors", {"extra": {}})


def test_an_unknown_format_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown model format 'safetensor': did you mean 'safetensors'"):
        export_model(tmp_path / "model", {}, "safetensor")  # type: ignore[arg-type] # the mistake under test


class _Full(Files):
    """A disk with room for a hundred bytes."""

    room = 100

    def write(self, file: BinaryIO, data: memoryview) -> None:
        super().write(file, data[: self.room])
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("format", _FORMATS)
def test_a_full_disk_keeps_the_previous_file(tmp_path: Path, format: Literal["safetensors", "ckpt"]) -> None:
    path = export_model(tmp_path / f"model.{format}", {"a": torch.ones(2)}, format)
    with pytest.raises(CheckpointError, match="the model could not be written"):
        export_model(path, {"a": torch.zeros(1000)}, format, files=_Full())
    assert torch.equal(load_model_file(path)["a"], torch.ones(2))
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_pickle_file_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(CheckpointError, match=name):
        load_model_file(tmp_path / name)


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: the model could not be read: .*No such file"):
        load_model_file(tmp_path / "none.safetensors")


def test_the_hint_for_a_pickled_model_extracts_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    torch.save(model, "whole.pt")
    with pytest.raises(CheckpointError) as caught:
        load_model_file("whole.pt")
    (command,) = re.findall(r"torch\.save\(.*?'weights\.pt'\)", str(caught.value))
    exec(command)
    assert torch.equal(load_model_file("weights.pt")["weight"], model.weight)


def test_a_checkpoint_of_another_program_raises_with_a_conversion_hint(tmp_path: Path) -> None:
    path = tmp_path / "whole.ckpt"
    torch.save({"epoch": 1, "state_dict": {"weight": torch.ones(2)}}, path)
    with pytest.raises(CheckpointError, match=r"under 'state_dict'; save the weights alone by torch\.save\("):
        load_model_file(path)
    torch.save({"state_dict": {"weight": torch.ones(2)}, "hyper_parameters": argparse.Namespace(width=3)}, path)
    with pytest.raises(CheckpointError) as caught:
        load_model_file(path)
    assert "it contains a argparse.Namespace" in str(caught.value)
    assert "\n" not in str(caught.value)
    torch.save(torch.ones(2), path)
    with pytest.raises(CheckpointError, match=r"expected weights by name, .* got a Tensor"):
        load_model_file(path)


@pytest.mark.parametrize("name", ["model", "model.v2"])
@pytest.mark.parametrize("format", _FORMATS)
def test_the_content_decides_the_format_of_an_unknown_suffix(
    tmp_path: Path, name: str, format: Literal["safetensors", "ckpt"]
) -> None:
    state = torch.nn.Linear(3, 2).state_dict()
    assert _equal(load_model_file(export_model(tmp_path / name, state, format)), dict(state))


def test_a_suffix_of_another_format_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"\(b\.onnx\) '\.onnx': .* export\(path\) of a trainer .* \(known: .*\.safetensors\)",
    ):
        model_format("b.onnx")
    with pytest.raises(UnknownNameError, match=r"'\.safetensor': did you mean '\.safetensors'\?"):
        model_format("model.safetensor")
    assert model_format("MODEL.PT") == "ckpt"


def test_the_format_follows_from_the_suffix_and_may_not_contradict_it(tmp_path: Path) -> None:
    state = {"a": torch.ones(2)}
    assert torch.equal(torch.load(export_model(tmp_path / "model.pt", state), weights_only=True)["a"], state["a"])
    with pytest.raises(ConfigError, match=r"model\.pt: the suffix is not one of format='safetensors'"):
        export_model(tmp_path / "model.pt", state, "safetensors")
    with pytest.raises(UnknownNameError, match=r"'\.onnx'"):
        export_model(tmp_path / "model.onnx", state)
