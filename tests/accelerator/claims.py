"""Claims about training on an accelerator, checked on the pretend device in one process: `python claims.py`.

It prints a line of JSON for every claim, with the traceback of a claim that does not hold. A separate process, because
torch cannot forget a device that was registered.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from copy_claims import COPY_CLAIMS
from memory_claims import MEMORY_CLAIMS
from precision_claims import PRECISION_CLAIMS
from pretend_device import PretendDevice
from run_claims import RUN_CLAIMS
from styles import EPOCHS, FEATURES, NUM_BATCHES, STYLES, Net

# A trial has Determined's callbacks: there is none for an average of the weights, and the searcher stops a trial early.
MISSING = {("trial", "ema"), ("trial", "early_stopping")}


def check_cell(style: str, name: str) -> None:
    feature = FEATURES[name]
    # A trial has its own seed, so its dropout differs.
    dropout = 0.0 if style == "trial" else 0.2
    expected = STYLES["keywords"]("cpu", Net(None, dropout), feature)
    with PretendDevice() as device:
        model = Net(device, dropout)
        trained = STYLES[style]("pretend", model, feature)
        marks, events = model.marks, list(device.events)
        found = {key: value.cpu() for key, value in trained.state_dict().items()}
    assert len(marks) == EPOCHS * NUM_BATCHES
    reads = [events[start:stop] for start, stop in pairwise(marks[1:])]
    # The last step of an epoch is followed by the report, the validation and the checks at the start of the next one.
    inside = [each for number, each in enumerate(reads, 1) if (number + 1) % NUM_BATCHES]
    waits = [event for each in inside for event in each if event.waits]
    # Torch's scaler reads one flag per update, to decide whether the optimizer steps.
    allowed = ["aten._local_scalar_dense.default"] * len(inside) if name == "fp16" else []
    assert [event.cause for event in waits] == allowed, waits
    copies = [[event for event in each if event.kind == "to_device"] for each in inside]
    assert {len(each) for each in copies} <= {0, 2}, copies
    assert expected.state_dict().keys() == found.keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(value, found[key]), f"{key} differs from the CPU's"


CLAIMS: dict[str, Callable[[], None]] = {
    f"{style} {name}": partial(check_cell, style, name)
    for style in STYLES
    for name in FEATURES
    if (style, name) not in MISSING
} | {**RUN_CLAIMS, **COPY_CLAIMS, **PRECISION_CLAIMS, **MEMORY_CLAIMS}


def main(names: list[str]) -> None:
    warnings.simplefilter("error")
    for name, claim in CLAIMS.items():
        if names and not any(it in name for it in names):
            continue
        error = None
        try:
            claim()
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
