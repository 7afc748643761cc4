"""Overlap in traces: known answers of written events, and a trace that torch's profiler recorded of two threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dovetail.accelerator_checks import judge_overlap
from dovetail.profiler_trace import Overlap, measure_overlap, overlapped, read_trace, spans


def event(cat: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 0, "tid": 7}


def copy(start: float, end: float, name: str = "Memcpy HtoD (Pinned -> Device)") -> dict[str, Any]:
    return event("gpu_memcpy", name, start, end)


def kernel(start: float, end: float, name: str = "ampere_sgemm_128x64_tn") -> dict[str, Any]:
    return event("kernel", name, start, end)


# Besides events of the device: the host's operators, copies in other directions, and a mark without a duration.
OTHERS = [
    event("cpu_op", "aten::addmm", 0, 1000),
    event("cuda_runtime", "cudaMemcpyAsync", 0, 1000),
    event("gpu_memset", "Memset (Device)", 0, 1000),
    copy(0, 1000, "Memcpy DtoH (Device -> Pageable)"),
    copy(0, 1000, "Memcpy DtoD (Device -> Device)"),
    {"ph": "i", "cat": "kernel", "name": "mark", "ts": 5},
]


def test_copies_and_collectives_overlap_with_kernels_for_the_known_times(tmp_path: Path) -> None:
    events = [
        *OTHERS,
        copy(0, 100),
        copy(200, 300),
        # Two kernels at once count once.
        kernel(50, 120),
        kernel(60, 110),
        kernel(290, 400),
        kernel(380, 480, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    found = measure_overlap(read_trace(path))
    assert found == Overlap(copies=200, hidden_copies=60, collectives=100, hidden_collectives=20, num_kernels=3)


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy HtoD (Host -> Device)",
        "Memcpy H2D (HOST -> DEVICE)",
        "Memcpy M2D (MEMORY(Unknown) -> DEVICE)",
    ],
)
def test_copies_of_cuda_rocm_and_intel_count(name: str) -> None:
    assert measure_overlap([*OTHERS, copy(0, 8, name), kernel(4, 9)]).hidden_copies == 4


@pytest.mark.parametrize(
    ("events", "status", "text"),
    [
        ([copy(0, 100), kernel(50, 150)], "ok", "50% of the time of copies to the device passes while kernels run"),
        ([copy(0, 100), kernel(51, 150)], "problem", "49% of the time of copies to the device"),
        # A collective operation is no kernel that hides a copy.
        ([copy(0, 100), kernel(0, 100, "ncclDevKernel_AllGather")], "problem", "0% of the time of copies"),
        (
            [copy(0, 10), kernel(0, 20), kernel(10, 50, "ncclDevKernel_ReduceScatter")],
            "problem",
            "100% of the time of copies to the device and 25% of the time of collective operations",
        ),
        (OTHERS, "note", "not measured: the trace contains no copy to the device"),
    ],
)
def test_a_trace_is_judged_by_the_hidden_share(events: list[Any], status: str, text: str) -> None:
    found = judge_overlap(measure_overlap(events))
    assert found[0] == status
    assert found[1].startswith(text)


def test_a_recorded_trace_of_two_threads_has_the_overlap_of_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first profiler of a process decides whether all of them print a line at their start.
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    started, copied = threading.Event(), threading.Event()
    done = threading.Event()

    def compute() -> None:
        with record_function("long computation"):
            started.set()
            copied.wait()
        done.set()

    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as recorded:
        thread = threading.Thread(target=compute)
        thread.start()
        started.wait()
        with record_function("copy during the kernel"):
            torch.ones(10).clone()
        copied.set()
        done.wait()
        with record_function("copy after the kernel"):
            torch.ones(10).clone()
        thread.join()
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    events = read_trace(path)
    kernels = spans(events, lambda it: it["name"] == "long computation")
    during = spans(events, lambda it: it["name"] == "copy during the kernel")
    after = spans(events, lambda it: it["name"] == "copy after the kernel")
    assert [len(kernels), len(during), len(after)] == [1, 1, 1]
    (start, end) = during[0]
    assert end > start
    assert overlapped(during, kernels) == end - start
    assert overlapped(after, kernels) == 0
