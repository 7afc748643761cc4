"""A script with its own loop that uses the Core API for hyperparameters, checkpoints, metrics and preemption.

Stop it by Ctrl-C or SIGTERM and run it again: it resumes, and ends with the same numbers. In two processes:
`python -m dovetail.launch --slots 2 --hparam learning_rate=0.2 examples/core_api.py`
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail import checkpoint, core

DEFAULTS = {"learning_rate": 0.1, "global_batch_size": 32, "steps": 200}


def make_data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, :4].sum(dim=1) > inputs[:, 4:].sum(dim=1)).float()


def average(context: core.Context, gradients: list[Tensor]) -> None:
    everyone = context.distributed.allgather(gradients)
    for gradient, others in zip(gradients, zip(*everyone, strict=True), strict=True):
        gradient.copy_(torch.stack(others).mean(dim=0))


def main(context: core.Context) -> None:
    given = context.info.hparams if context.info is not None else {}
    hparams = {**DEFAULTS, **given}
    batch_size = context.distributed.shard_batch_size(hparams["global_batch_size"])

    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams["learning_rate"], momentum=0.9)
    order = torch.Generator().manual_seed(context.distributed.rank)
    inputs, targets = make_data(1024, seed=1)
    step = 0

    latest = context.checkpoint.latest()
    if latest is not None:
        with context.checkpoint.restore_path(latest) as path:
            state = checkpoint.load(path / f"state-{context.distributed.rank}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"])
        step = state["step"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "order": order.get_state()}
        with context.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
            checkpoint.save(path / f"state-{context.distributed.rank}", {**state, "step": step})

    while step < hparams["steps"]:
        rows = torch.randint(len(inputs), (batch_size,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs[rows])[:, 0], targets[rows])
        loss.backward()
        average(context, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()
        step += 1
        if step % 20 == 0:
            context.train.report_training_metrics(step, {"loss": loss})
            context.train.report_progress(step / hparams["steps"])
            if step % 100 == 0:
                save()
            if context.preempt.should_preempt():
                save()
                print(f"stopped after {step} steps; run me again to go on")
                return

    with torch.no_grad():
        held_out, answers = make_data(512, seed=2)
        scores = model(held_out)[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(scores, answers)
        accuracy = ((scores > 0) == answers.bool()).float().mean()
    context.train.report_validation_metrics(step, {"loss": loss, "accuracy": accuracy})
    if context.distributed.is_chief:
        print(f"result: held-out loss {loss:.6f}, accuracy {accuracy:.1%} after {step} steps")


if __name__ == "__main__":
    with core.init(checkpoint_storage="runs/core_api") as core_context:
        main(core_context)
