"""A runtime per verify width: what is built at start-up, and what a pass finds in place."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_spec, max_speculative_num_draft_tokens
from sglang_dlite.speculative.width_runtimes import WidthRuntimes, has_graphs

WIDTHS = (1, 2, 4, 8)


class Runner:
    """Upstream's ModelRunner, as far as it is asked; remembers what was built under which width."""

    device, gpu_id, init_new_workspace = "cpu", 0, False

    def __init__(self, graphs: bool) -> None:
        self.attn_backend = ("attention", 8)
        self.decode_cuda_graph_runner: Any = SimpleNamespace(capture_bs=[1, 2] if graphs else [])
        self.reserves: set[int | None] = set()

    def _get_attention_backend(self, init_new_workspace: bool) -> Any:
        assert init_new_workspace  # graphs keep its addresses
        self.init_new_workspace = True
        self.reserves.add(max_speculative_num_draft_tokens())
        return ("attention", get_spec().speculative_num_draft_tokens)

    def _decode_cuda_graph_runner_cls(self) -> Any:
        def capture(runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int) -> Any:
            assert runner is self and attn_backend == ("attention", speculative_num_draft_tokens)
            assert get_spec().speculative_num_draft_tokens == speculative_num_draft_tokens
            return ("graphs", speculative_num_draft_tokens)

        return capture


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolved configuration with D = 8."""
    from sglang.srt.runtime_context import get_context

    fields = {"speculative_num_draft_tokens": 8, "max_speculative_num_draft_tokens": 8}
    with get_context().override_server_args(), get_spec().override(**fields):
        yield


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize("graphs", [True, False])
def test_a_pass_finds_what_was_made_for_its_width(graphs: bool) -> None:
    runner = Runner(graphs)
    own = runner.decode_cuda_graph_runner
    runtimes = WidthRuntimes(runner, WIDTHS)
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == (("attention", 8), own)
    assert not runner.init_new_workspace and get_spec().speculative_num_draft_tokens == 8
    # The scheduler reserves K/V slots for the largest, whatever is being built.
    assert runner.reserves == {8}
    for width in (1, 8, 4, 4, 2, 8):
        runtimes.use(width)
        assert runner.attn_backend == ("attention", width)
        expected = ("graphs", width) if graphs and width < 8 else own
        assert runner.decode_cuda_graph_runner == expected
    assert runtimes.seconds >= 0 and runtimes.memory_gb <= 1


def test_an_eager_runner_has_no_graphs() -> None:
    assert not has_graphs(SimpleNamespace(decode_cuda_graph_runner=None))
    assert not has_graphs(SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=[])))


def test_upstream_still_takes_what_is_passed() -> None:
    assert "init_new_workspace" in inspect.signature(ModelRunner._get_attention_backend).parameters
    options = inspect.signature(DecodeCudaGraphRunner.__init__).parameters
    assert {"attn_backend", "speculative_num_draft_tokens"} <= set(options)
