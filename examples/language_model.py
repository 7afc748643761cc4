r"""A small GPT in plain PyTorch, trained on bytes: packed documents, exact accumulation by tokens, cosine schedule.

By default it trains on the Python files in its folder, for some seconds. For your own data:

    python language_model.py --text book.txt --context 256 --width 384 --layers 6 --heads 6 --bf16 \
        --batch-size 64 --accumulation 1 --dropout 0.2 --updates 5000 --warmup 100 --learning-rate 1e-3

For texts that do not fit into memory, replace `pack` by a `Dataset` over a memory-mapped file, and the bytes by a
tokenizer; trainer and step do not change. To resume a killed run, add `--resume` to the same command.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.optim import AdamW

from dovetail import Updates
from dovetail.trainers import AMPTrainer, Trainer
from dovetail.trainers.strategies import CosineAnnealingLRSchedulerStrategy, WarmupSchedulerStrategy

VOCABULARY, END, IGNORED = 257, 256, -100  # 256 bytes, and the token at the end of a document


def pack(documents: list[bytes], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: the concatenated documents, cut into rows of equal length, and padded at the end.

    The first byte of a document is no target, because it cannot be predicted from the previous document. Therefore
    rows have different numbers of targets.
    """
    stream = torch.tensor([token for document in documents for token in (*document, END)])
    stream = pad(stream, (0, (1 - len(stream)) % length), value=END)
    inputs, following = stream[:-1].view(-1, length), stream[1:].view(-1, length)
    return inputs, following.masked_fill(inputs == END, IGNORED)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.projection(attended))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for matrix in (it for it in self.parameters() if it.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]))

    @torch.inference_mode()
    def write(self, prompt: str, number: int, temperature: float = 0.8) -> str:
        tokens = torch.tensor([list(prompt.encode())], device=self.head.weight.device)
        for _ in range(number):
            # Without END, so that the text has `number` bytes.
            logits = self(tokens[:, -self.context :])[:, -1, :END].float() / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(dim=1), 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


class Perplexity:
    """The perplexity over all tokens of a pass; batches may have different numbers of tokens."""

    def reset(self) -> None:
        self.nats, self.tokens = torch.zeros((), dtype=torch.float64), 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.nats = self.nats + token_loss(logits, targets, "sum").double()
        self.tokens = self.tokens + (targets != IGNORED).sum()

    def compute(self) -> Tensor:
        return torch.exp(self.nats / self.tokens)


def train_step(trainer: Trainer, batch: Any) -> dict[str, Tensor]:
    inputs, targets = batch
    # The loss is a mean over tokens. With `num_items`, the loop weights accumulated batches by their numbers of tokens.
    return {"loss": token_loss(trainer.model(inputs), targets), "num_items": (targets != IGNORED).sum()}


def main() -> None:
    options = arguments()
    inputs, targets = pack([path.read_bytes() for path in options.text], options.context)
    train, valid = zip(*(part.tensor_split([len(part) * 9 // 10]) for part in (inputs, targets)), strict=True)

    cosine = CosineAnnealingLRSchedulerStrategy(T_max=options.updates - options.warmup, interval="update")
    trainer: Any = Trainer(
        lambda: GPT(options.context, options.width, options.layers, options.heads, options.dropout),
        optimizer=partial(AdamW, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1),
        lr_scheduler_strategy=WarmupSchedulerStrategy(options.warmup, 0.0, cosine, interval="update"),
        criterion=token_loss,
        train_step=train_step,
        metrics={"perplexity": Perplexity()},
        batch_size=options.batch_size,
        accumulation_steps=options.accumulation,
        gradient_clip=1.0,
        seed=0,
        checkpoint_dir="runs/language_model",
        keep_last=1,
    )
    trainer = AMPTrainer(trainer, precision="bf16") if options.bf16 else trainer
    trainer.fit(train, valid, max_length=Updates(options.updates), resume="auto" if options.resume else None)

    print(f"\n{trainer.model.eval().write('def main', 200)}\n\n{__doc__}")
    guess = Categorical(torch.bincount(targets[targets != IGNORED]).double()).perplexity()
    perplexity = trainer.history.get_latest_metric("valid_perplexity")
    print(f"result: perplexity {perplexity:.2f} of a byte; {guess:.2f} from the frequencies of bytes alone")
    assert perplexity < 0.6 * guess


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    beside = sorted(Path(__file__).parent.glob("*.py"))
    parser.add_argument("--text", type=Path, nargs="+", default=beside, help="text files, each a document")
    numbers = {"context": 32, "width": 64, "layers": 2, "heads": 4, "dropout": 0.0}
    numbers |= {"batch-size": 8, "accumulation": 2, "updates": 200, "warmup": 20, "learning-rate": 5e-3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="a number")
    parser.add_argument("--bf16", action="store_true", help="use mixed precision in bfloat16")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
