"""A plugin of SGLang that times every step of a server; asleep unless DLITE_STEP_TIMES is set.

The variable names a file. The scheduler process appends one JSON line per step of the target:
    t         Unix time of the step's start
    kind      decode | extend; a verify pass counts as decode
    n         requests in the batch
    context   tokens of all their contexts together (0 where the batch does not tell)
    target_s  the target's forward pass
    draft_s   the DLITE drafter after it (0 for other arms)
    step_s    from this step's start to the next one's; null unless both are decode steps
Other time is step_s - target_s - draft_s: the scheduler, sampling, and the drafter of another
algorithm. On a CPU the clock is the host's. On CUDA it is events on the stream, read when they
are complete, so that nothing waits for them.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

STEP_TIMES_VARIABLE = "DLITE_STEP_TIMES"
_FLUSH_EVERY = 16

Work = Callable[..., Any]


class Clock(Protocol):
    """Marks moments, and tells later how far apart two of them were."""

    def mark(self) -> Any: ...
    def is_past(self, mark: Any) -> bool: ...
    def seconds(self, start: Any, end: Any) -> float: ...


class HostClock:
    """Wall clock: right where a call returns when its work is done, as on a CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events on the current stream."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000


class _Step:
    """Marks of one step; `draft` is (start, end) if a drafter ran."""

    def __init__(self, kind: str, n: int, context: int, start: Any) -> None:
        self.t = time.time()
        self.kind, self.n, self.context = kind, n, context
        self.start, self.end = start, start
        self.draft: tuple[Any, Any] | None = None


class StepTimer:
    """Collects steps and appends them to the file in batches."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._steps: deque[_Step] = deque()

    def around_target(self, original: Work, worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        """AROUND TpModelWorker.forward_batch_generation."""
        if getattr(worker, "is_draft_worker", False):
            return original(worker, batch, *args, **kw)
        forward_batch = kw.get("forward_batch") or (args[0] if args else None)
        is_verify = kw.get("is_verify", False)
        source: Any = batch if batch is not None else forward_batch
        mode = source.forward_mode
        kind = "decode" if is_verify or mode.is_decode() else "extend"
        lengths = getattr(source, "seq_lens_cpu", None)
        step = _Step(
            kind,
            n=len(source.seq_lens),
            context=int(lengths.sum()) if lengths is not None else 0,
            start=self._clock.mark(),
        )
        result = original(worker, batch, *args, **kw)
        step.end = self._clock.mark()
        self._steps.append(step)
        if len(self._steps) > _FLUSH_EVERY:
            self._flush()
        return result

    def around_draft(self, original: Work, *args: Any, **kw: Any) -> Any:
        """AROUND DLiteWorker._draft: it belongs to the step that has just run."""
        start = self._clock.mark()
        result = original(*args, **kw)
        if self._steps:
            self._steps[-1].draft = (start, self._clock.mark())
        return result

    def _flush(self) -> None:
        # The newest step stays: its draft, and the step after it, are still to come.
        lines = []
        while len(self._steps) > 1 and self._clock.is_past(self._steps[1].end):
            step = self._steps.popleft()
            lines.append(self._line(step, self._steps[0]))
        if lines:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("".join(lines))

    def _line(self, step: _Step, following: _Step) -> str:
        seconds = self._clock.seconds
        decoding = step.kind == following.kind == "decode" and step.n == following.n
        values = {
            "t": step.t,
            "kind": step.kind,
            "n": step.n,
            "context": step.context,
            "target_s": seconds(step.start, step.end),
            "draft_s": seconds(*step.draft) if step.draft else 0.0,
            "step_s": seconds(step.start, following.start) if decoding else None,
        }
        return json.dumps(values) + "\n"


def register() -> None:
    """Entry point `sglang.srt.plugins`, called in each of SGLang's processes."""
    path = os.environ.get(STEP_TIMES_VARIABLE)
    if not path:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    timer = StepTimer(path, CudaClock() if torch.cuda.is_available() else HostClock())
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        timer.around_target,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang_dlite.speculative.worker.DLiteWorker._draft", timer.around_draft, HookType.AROUND
    )
