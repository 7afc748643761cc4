"""Data, models and checks that the programs of all four libraries share."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 50

# ---------------------------------------------------------------- handwritten digits


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return 1,440 training images as rows of 64 floats, their labels, and 357 more of both."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    train, valid = order[:1440], order[1440:]
    return x[train], y[train], x[valid], y[valid]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def keras_network() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)]
    )


class NoisyDigits(Dataset[Any]):
    """The training images, with new noise whenever a sample is read.

    `difference_after_kill` sets at which sample the process that trains is killed.
    """

    def __init__(self) -> None:
        self.x, self.y = map(torch.from_numpy, digits()[:2])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        with _READ.get_lock():
            _READ.value += 1
        if _READ.value == _KILL_AT.value:
            os.kill(_TRAINING.value, signal.SIGKILL)
        return self.x[i] + 0.1 * torch.randn(64), self.y[i]


_READ, _KILL_AT, _TRAINING = (multiprocessing.Value("q", 0) for _ in range(3))


def difference_after_kill(train: Callable[[str], Any]) -> float:
    """Compare a run without a kill with one that is killed in its third epoch, and resumed.

    Args:
        train: Trains with `NoisyDigits` in a folder, and returns the model. If the folder has a
            checkpoint, it resumes.

    Returns:
        The largest difference between their weights.
    """
    assert _in_a_process(train, "runs/straight") == 0
    assert _in_a_process(train, "runs/killed", kill_at=2 * 1440 + 700) == -signal.SIGKILL
    assert not Path("runs/killed.npz").exists()
    assert _in_a_process(train, "runs/killed") == 0
    straight, resumed = (np.load(f"runs/{name}.npz") for name in ("straight", "killed"))
    return max(float(np.abs(straight[name] - resumed[name]).max()) for name in straight.files)


def _in_a_process(train: Callable[[str], Any], folder: str, kill_at: int = -1) -> int | None:
    def run() -> None:
        _READ.value, _KILL_AT.value, _TRAINING.value = 0, kill_at, os.getpid()
        if kill_at > 0:
            # Worker processes report that their parent is gone.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        model = train(folder)
        weights = getattr(model, "weights", None) or model.state_dict().values()
        arrays = [
            weight.numpy(force=True) if isinstance(weight, Tensor) else weight.numpy()
            for weight in weights
        ]
        np.savez(f"{folder}.npz", *arrays)

    Path(folder).mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


# ---------------------------------------------------------------- texts


def reviews() -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a tokenizer, and 400 and 80 reviews of 2 to 12 tokens, with their labels."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, **{f"word{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[PAD]")), pad_token="[PAD]"
    )
    chooser = random.Random(0)
    samples = []
    for _ in range(480):
        tokens = [chooser.randrange(1, VOCABULARY) for _ in range(chooser.randint(2, 12))]
        samples.append(
            {"input_ids": tokens, "attention_mask": [1] * len(tokens), "label": int(tokens[0] < 25)}
        )
    return tokenizer, samples[:400], samples[400:]


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=2, **size))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **size)
    return LlamaForCausalLM(config)


def documents() -> list[list[int]]:
    """Return 16 sequences of 2 to 15 tokens."""
    chooser = random.Random(0)
    return [
        [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(2, 15))] for _ in range(16)
    ]


def pad(sequences: list[list[int]]) -> dict[str, Tensor]:
    """Return a batch in which labels of padding are -100."""
    mask = torch.arange(max(map(len, sequences))) < torch.tensor([[len(it)] for it in sequences])
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor([token for it in sequences for token in it])
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.where(mask, -100)}


def difference_to_large_batches(model: nn.Module) -> float:
    """Compare with plain torch: 6 updates of SGD at 0.1, with batches of 8 documents."""
    expected, texts = llama(), documents()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        for batch in (pad(texts[:8]), pad(texts[8:])):
            expected(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


# ---------------------------------------------------------------- points for a GAN


def ring() -> np.ndarray:
    """Return 2,048 points on a circle."""
    angles = np.random.default_rng(0).uniform(0, 2 * np.pi, 2048)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def distance_to_ring(points: Any) -> float:
    """Return the mean distance of points to the circle, plus that of their mean to its centre."""
    points = np.asarray(points)
    return float(
        np.abs(np.linalg.norm(points, axis=1) - 1).mean() + np.linalg.norm(points.mean(axis=0))
    )


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))


def keras_gan() -> tuple[Any, Any]:
    import keras

    keras.utils.set_random_seed(0)

    def layers(num_inputs: int, num_outputs: int) -> Any:
        # The initial weights of torch's layers.
        start = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        hidden = keras.layers.Dense(64, activation="relu", kernel_initializer=start)
        output = keras.layers.Dense(num_outputs, kernel_initializer=start)
        return keras.Sequential([keras.layers.Input((num_inputs,)), hidden, output])

    return layers(2, 2), layers(2, 1)
