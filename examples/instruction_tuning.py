"""Instruction tuning: packed examples whose prompts are masked, and a loss that is a mean over answers' tokens.

The instructions change a word: reverse it, repeat it, or write it in capitals. The tokens are characters. An example is
never cut, and the model attends within an example only.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail import Epochs
from dovetail.data import PackedRows, pack
from dovetail.trainers import Trainer

CHARACTERS = "abcdeABCDE:> "
PAD, END, ROW, MASKED = 0, 1, 48, -100
TASKS = {"b": lambda word: word[::-1], "d": lambda word: word + word, "c": str.upper}


def tokens(text: str) -> list[int]:
    return [2 + CHARACTERS.index(character) for character in text]


def text_of(ids: list[int]) -> str:
    return "".join(CHARACTERS[token - 2] for token in ids if token > END)


def examples(number: int, seed: int) -> list[tuple[str, str]]:
    """Return prompts and answers: `b: abc>` has the answer `cba`."""
    chooser = random.Random(seed)
    words = ["".join(chooser.choices("abcde", k=chooser.randint(2, 3))) for _ in range(number)]
    return [(f"{task}: {word}>", TASKS[task](word)) for word in words for task in [chooser.choice(sorted(TASKS))]]


def packed(pairs: list[tuple[str, str]]) -> PackedRows:
    ids = [tokens(prompt + answer) for prompt, answer in pairs]
    labels = [[MASKED] * len(prompt) + tokens(answer) for prompt, answer in pairs]
    return pack(ids, ROW, end=END, labels=labels, split=False)


def llama() -> LlamaForCausalLM:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2 + len(CHARACTERS), **size, **ends))


@torch.inference_mode()
def answer_to(model: LlamaForCausalLM, prompt: str) -> str:
    ids = torch.tensor([tokens(prompt)])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return text_of(written[0, ids.shape[1] :].tolist())


def main() -> None:
    train, valid = packed(examples(3000, seed=0)), packed(examples(200, seed=1))
    trainer = Trainer(
        llama,
        "cpu",
        optimizer=partial(AdamW, lr=5e-3, weight_decay=0.01),
        # Rows have different numbers of answers' tokens; the loop weights the two batches of an update by them.
        accumulation_steps=2,
        batch_size=8,
        metrics=["perplexity"],
        num_workers=0,
        seed=0,
    )
    trainer.fit(train, valid, max_length=Epochs(5))

    model, unseen = trainer.model.eval(), examples(60, seed=2)
    answers = [answer_to(model, prompt) for prompt, _ in unseen]
    for (prompt, expected), answer in list(zip(unseen, answers, strict=True))[:5]:
        print(f"{prompt} {answer} (expected: {expected})")
    correct = sum(answer == expected for (_, expected), answer in zip(unseen, answers, strict=True)) / len(unseen)
    print(f"result: {correct:.0%} of the answers to new instructions are correct")
    assert correct > 0.8


if __name__ == "__main__":
    main()
