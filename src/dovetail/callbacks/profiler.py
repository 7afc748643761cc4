"""Profile of training steps: a trace and a table of the slowest operators."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback, is_new_run
from dovetail.units import check_count, counted

if TYPE_CHECKING:
    from torch.profiler import profile

    from dovetail.trainers.context import TrainingContext

# The profiler prints that it starts and stops, at level 5, unless this variable is set before a process first
# uses it.
_LOG_LEVEL, _QUIET = "KINETO_LOG_LEVEL", "6"


class Profiler(Callback):
    """Record some training steps with `torch.profiler`: a trace, and a table of the slowest operators.

    A cycle consists of `wait` steps that are not profiled, `warmup` steps that are recorded and dropped, and `active`
    steps that are recorded. Each complete cycle, and a last one that has started to record, writes a trace file, which
    https://ui.perfetto.dev and `chrome://tracing` can show. The profiler prints nothing and has no state.

    Args:
        folder: The folder for the traces `trace_1.json`, `trace_2.json`, ….
        wait: Steps at the start of a cycle without profiling.
        warmup: Steps in which the profiler warms up.
        active: Steps that are recorded.
        repeat: The number of cycles; 0 means no limit.
        sort_by: The column that the table is sorted by, such as `self_cpu_time_total` or `self_cuda_time_total`.
        rows: The number of rows of the table; -1 means all.
        memory: Whether to record the memory that operators allocate.
        shapes: Whether to record the shapes of their inputs.
        stacks: Whether to record the lines of Python that called them.

    Attributes:
        table: The operators of the last cycle as text, the slowest first; empty before the first cycle.
        traces: The written files.

    Example:
        >>> import tempfile, torch
        >>> from dovetail.trainers import Trainer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profiler = Profiler(folder, active=2)
        ...     trainer = Trainer(torch.nn.Linear(4, 2), "cpu", callbacks=[profiler], batch_size=8, verbose=False)
        ...     history = trainer.fit((torch.zeros(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> "aten::addmm" in profiler.table, [trace.name for trace in profiler.traces]
        (True, ['trace_1.json'])
    """

    main_rank_only = True

    def __init__(
        self,
        folder: str | Path,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        sort_by: str = "self_cpu_time_total",
        rows: int = 15,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
    ) -> None:
        self._cycle = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        for name, number in self._cycle.items():
            check_count(f"Profiler: {name}", number, least=int(name == "active"))
        check_count("Profiler: rows", rows, least=-1)
        self.folder = Path(folder)
        self.table = ""
        self.traces: list[Path] = []
        self._records: dict[str, Any] = {"profile_memory": memory, "record_shapes": shapes, "with_stack": stacks}
        self._sort_by, self._rows = sort_by, rows
        # After this step nothing is recorded, so nothing must be checked.
        self._last_step = (wait + warmup + active) * repeat
        self._steps = self._num_earlier = 0
        self._warns_if_empty = False
        self._profiler: profile | None = None
        self._sets_level = False

    def on_train_start(self, context: TrainingContext) -> None:
        from torch.profiler import profile, schedule

        self._steps, self._num_earlier = 0, len(self.traces)
        # A resumed run may have too few steps left, which is not a mistake.
        self._warns_if_empty = is_new_run(context)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sets_level = _LOG_LEVEL not in os.environ
        if self._sets_level:
            os.environ[_LOG_LEVEL] = _QUIET
        self._profiler = profile(schedule=schedule(**self._cycle), on_trace_ready=self._keep, **self._records)
        self._profiler.start()

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        if self._profiler is None:
            return
        with warnings.catch_warnings():
            # Torch warns that a new cycle clears the events of the last one, which is intended.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profiler.step()
        self._steps += 1
        if self._steps == self._last_step:
            self._stop()

    def on_train_end(self, context: TrainingContext) -> None:
        """Write the records since the last cycle, and stop; warn if there are none."""
        self._stop()
        is_empty = len(self.traces) == self._num_earlier and self._steps > 0
        if is_empty and self._warns_if_empty and context.run.stop_reason is None:
            warnings.warn(
                f"Profiler: nothing was recorded: it waits for {counted(self._cycle['wait'], 'step')} and warms up in "
                f"{self._cycle['warmup']}, and the run had {counted(self._steps, 'step')}",
                UserWarning,
                stacklevel=2,
            )

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        """Write the records since the last cycle, and stop."""
        self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        if self._sets_level:
            os.environ.pop(_LOG_LEVEL, None)
            self._sets_level = False

    def _keep(self, profiler: profile) -> None:
        path = self.folder / f"trace_{len(self.traces) + 1}.json"
        profiler.export_chrome_trace(str(path))
        self.traces.append(path)
        self.table = profiler.key_averages().table(sort_by=self._sort_by, row_limit=self._rows)
