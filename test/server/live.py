"""Requests to a running engine one by one: started, watched while they run, aborted, paused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from engines import flush_when_idle
from oracle_engine import OracleEngine
from workloads import Request

T = TypeVar("T")
PATIENCE_S = 120.0


class Live:
    """An OracleEngine's requests while they run; its methods are called inside `run`."""

    def __init__(self, running: OracleEngine) -> None:
        self.running = running
        self.manager: Any = running.engine.tokenizer_manager
        self.answers: dict[str, dict[str, Any]] = {}
        """The newest piece of each request's reply, by request id: all of its output so far."""
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Play a scenario on the engine's event loop."""
        return self.running.engine.loop.run_until_complete(scenario)

    def start(self, rid: str, request: Request, priority: int | None = None) -> None:
        """Send a request; it streams in the background."""

        async def stream() -> None:
            pieces = await self.running.engine.async_generate(
                input_ids=list(request.prompt),
                sampling_params=request.sampling_params,
                rid=rid,
                priority=priority,
                stream=True,
            )
            async for piece in pieces:
                self.answers[rid] = piece

        self.tasks[rid] = asyncio.get_running_loop().create_task(stream())

    def abort(self, rid: str) -> None:
        """Ends every request whose id begins with `rid`."""
        self.manager.abort_request(rid=rid)

    async def pause(self, mode: str) -> None:
        """mode: abort, retract or in_place."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput())

    async def load_weights(self, checkpoint: Path) -> None:
        """Weights of another checkpoint of the same shape; paused requests go on with them."""
        await _load_weights(self.manager, checkpoint)

    def done(self, rid: str) -> bool:
        return self.tasks[rid].done()

    def output(self, rid: str) -> list[int]:
        """Token ids that have come back so far."""
        # A copy: upstream extends one list per request.
        return list(self.answers[rid]["output_ids"]) if rid in self.answers else []

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a state, no longer than it takes."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "the state was never reached"
            await asyncio.sleep(0.002)

    async def finish(self, rids: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """The whole replies, in the order of `rids` (all, as they were started)."""
        chosen = list(self.tasks if rids is None else rids)
        await asyncio.wait_for(asyncio.gather(*(self.tasks[rid] for rid in chosen)), PATIENCE_S)
        return [self.answers[rid] for rid in chosen]


async def _load_weights(manager: Any, checkpoint: Path) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    update = UpdateWeightFromDiskReqInput(model_path=str(checkpoint))
    success, message, _ = await manager.update_weights_from_disk(update)
    assert success, message


def load_weights(running: Any, checkpoint: Path) -> None:
    """Weights of another checkpoint of the same shape, as soon as the engine is idle."""
    assert flush_when_idle(running)
    running.loop.run_until_complete(_load_weights(running.tokenizer_manager, checkpoint))


def finish_type(answer: dict[str, Any]) -> str:
    return answer["meta_info"]["finish_reason"]["type"]
