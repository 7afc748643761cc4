r"""The ImageNet recipe on a folder of images: augmentation in workers, ResNet, mixed precision, processes, EMA.

By default it draws some tiny images and trains a tiny network on them, in seconds. For ImageNet, give it a folder with
`train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`. A ResNet-50 on eight GPUs:

    torchrun --nproc-per-node 8 imagenet.py --data /data/imagenet --blocks 3 4 6 3 --width 64 --size 224 --epochs 90 \
        --warmup 5 --batch-size 128 --learning-rate 2 --ema 0.9999 --workers 12

`--batch-size` is the size per process, `--learning-rate` fits the sum over all processes. `--resume` resumes a run.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn, rand
from torch.utils.data import Dataset

from dovetail.callbacks import EMA
from dovetail.data import DataLoader
from dovetail.trainers import AMPTrainer, DDPTrainer, Trainer, accuracy
from dovetail.trainers.strategies import CosineAnnealingLRSchedulerStrategy, WarmupSchedulerStrategy


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Square images as bytes: with `augment`, random crops, half of them mirrored; otherwise centre crops."""

    def __init__(self, root: Path, size: int, augment: bool) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.files = [(path, it) for it, name in enumerate(self.classes) for path in sorted((root / name).iterdir())]
        self.size, self.augment = size, augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        image = Image.open(path).convert("RGB")
        width, height = image.size
        w = h = 0.875 * min(width, height)
        left, top, scale, shape, turn = rand(5).tolist() if self.augment else (0.5,) * 5
        if self.augment:  # a random crop: 8 % to 100 % of the area, aspect ratio from 3:4 to 4:3
            area, ratio = (0.08 + 0.92 * scale) * width * height, (4 / 3) ** (2 * shape - 1)
            w, h = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
        box = left * (width - w), top * (height - h), left * (width - w) + w, top * (height - h) + h
        square = np.array(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box, reducing_gap=2.0))
        pixels = torch.from_numpy(square).permute(2, 0, 1)
        return pixels.flip(2) if turn < 0.5 else pixels, label


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(inputs, width, 1), convolution(width, width, 3, stride)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), convolution(width, 4 * width, 1))
        nn.init.zeros_(self.body[-1][1].weight)  # initially, a block returns its shortcut
        self.shortcut = nn.Identity() if inputs == 4 * width else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.body(x))


class ResNet(nn.Sequential):
    """A ResNet for images of bytes, which are copied to the device four times as fast as floats.

    `ResNet([3, 4, 6, 3], 64, 1000)` is a ResNet-50.
    """

    def __init__(self, blocks: list[int], width: int, num_classes: int) -> None:
        super().__init__(convolution(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        inputs = width
        for stage, place in ((stage, place) for stage, number in enumerate(blocks) for place in range(number)):
            self.append(Bottleneck(inputs, width * 2**stage, stride=2 if stage and place == 0 else 1))
            inputs = 4 * width * 2**stage
        self.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)])

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images - 116.0) / 58.0)  # approximate mean and standard deviation of photographs


def top5(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.topk(5).indices == targets[:, None]).any(dim=1).double().mean()


def train(options: argparse.Namespace, root: Path) -> None:
    images, unseen = (ImageFolder(root / name, options.size, augment=name == "train") for name in ("train", "val"))
    workers = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loader = partial(DataLoader, batch_size=options.batch_size, pin_memory=torch.cuda.is_available(), **workers)
    training, validation = loader(images, shuffle=True, drop_last=True, seed=0), loader(unseen)
    cosine, ema = CosineAnnealingLRSchedulerStrategy(T_max=options.epochs - options.warmup), EMA(options.ema)
    single = Trainer(
        lambda: ResNet(options.blocks, options.width, len(images.classes)),
        optimizer=partial(torch.optim.SGD, lr=options.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-5),
        lr_scheduler_strategy=WarmupSchedulerStrategy(options.warmup, options.learning_rate / 10, cosine),
        criterion=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics={"accuracy": accuracy, "top5": top5},
        callbacks=[ema],
        num_epochs=options.epochs,
        memory_format="channels_last",
        seed=0,
        checkpoint_dir="runs/imagenet",
        keep_last=2,
    )
    trainer = DDPTrainer(AMPTrainer(single))  # one process, or the processes that torchrun has started
    trainer.fit(training, validation, resume="auto" if options.resume else None)
    ema.apply_to(trainer.model)
    trainer.save_model("runs/imagenet/model.safetensors")
    metrics = trainer.evaluate(validation)
    if trainer.context.process.is_main:
        print(f"\n{__doc__}")
        print(f"result: top-1 {metrics['accuracy']:.1%}, top-5 {metrics['top5']:.1%} of {len(unseen)} images")
    assert options.data or metrics["accuracy"] > 0.7


def draw_images(root: Path) -> Path:
    """Write images of stripes, with a colour and a direction for each of ten classes, and return their folder."""
    random, stripes = np.random.default_rng(0), np.mgrid[:40, :40]
    for label, colour in enumerate([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)] * 2):
        for place in range(24):
            (folder := root / ("train" if place < 16 else "val") / str(label)).mkdir(parents=True, exist_ok=True)
            wave = np.sin(stripes[label // 5] * random.uniform(0.8, 1.2) + random.uniform(0, 7))[..., None]
            noisy = 128 + 60 * wave * colour + 60 * random.normal(size=(40, 40, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{place}.png")
    return root


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with train/CLASS/… and val/CLASS/…; None to draw images")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 1], help="of each stage of the network")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    numbers = {"width": 8, "size": 32, "epochs": 6, "warmup": 1, "batch-size": 16, "workers": 2}
    for name, default in {**numbers, "learning-rate": 0.1, "ema": 0.9}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="a number")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        train(options, root=options.data or draw_images(Path(folder)))


if __name__ == "__main__":
    main()
