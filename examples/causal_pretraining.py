"""Pre-training of a small Llama of transformers: documents packed into blocks, perplexity, texts during training.

The documents are the Python files beside this one, and the tokens are bytes. Positions start again with each document,
so that the model attends within a document only.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributions import Categorical
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail import Updates
from dovetail.data import PackedRows, pack
from dovetail.huggingface import GenerateSamples
from dovetail.trainers import Trainer

END, VOCABULARY, BLOCK = 256, 257, 64


class ByteTokenizer:
    """Converts a text to its bytes, and back."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens.tolist() if token < END).decode(errors="replace")


def llama() -> LlamaForCausalLM:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, bos_token_id=END, eos_token_id=END, **size)
    return LlamaForCausalLM(config)


def documents() -> tuple[PackedRows, PackedRows]:
    tokenizer = ByteTokenizer()
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    return pack(tokens[3:], BLOCK, end=END), pack(tokens[:3], BLOCK, end=END)


def main() -> None:
    train, valid = documents()
    generate = GenerateSamples(["def main"], ByteTokenizer(), 60, do_sample=True, pad_token_id=END)
    trainer = Trainer(
        llama,
        "cpu",
        optimizer=partial(AdamW, lr=5e-3, weight_decay=0.1),
        lr_scheduler="cosine",
        warmup=20,
        metrics=["perplexity"],
        callbacks=[generate],
        batch_size=8,
        gradient_clip=1.0,
        num_workers=0,
        seed=0,
    )
    history = trainer.fit(train, valid, max_length=Updates(150))
    print(f"\n{generate.samples[-1]['text']}\n")

    labels = valid.tensors["labels"]
    guess = Categorical(torch.bincount(labels[labels >= 0]).double()).perplexity()
    perplexity = history.get_latest_metric("valid_perplexity")
    print(f"result: perplexity {perplexity:.2f} of a byte; {guess:.2f} from the frequencies of bytes alone")
    assert perplexity < 0.7 * guess


if __name__ == "__main__":
    main()
