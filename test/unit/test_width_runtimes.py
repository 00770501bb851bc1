"""A runtime per verify width: what is built at start-up, and what a pass finds in place."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_spec, max_speculative_num_draft_tokens
from sglang_dlite.speculative import width_runtimes
from sglang_dlite.speculative.width_runtimes import WidthRuntimes, has_graphs

WIDTHS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Updater:
    """The part of upstream's WeightUpdater that is replaced."""

    recapture_cuda_graph: Callable[[], None]


class Runner:
    """Upstream's ModelRunner, as far as it is asked; remembers what was built under which width."""

    device, gpu_id, init_new_workspace = "cuda", 0, False

    def __init__(self, graphs: bool) -> None:
        self.graphs = graphs
        self.attn_backend = ("attention", 8)
        self.reserves: set[int | None] = set()
        self.free_gb = 10.0
        self.captures = 0
        self.recaptured_on: list[Any] = []
        self.weight_updater = Updater(self.recapture)
        self.decode_cuda_graph_runner: Any = SimpleNamespace(capture_bs=[1, 2] if graphs else [])

    def recapture(self) -> None:
        self.recaptured_on.append(self.attn_backend)
        self.decode_cuda_graph_runner = SimpleNamespace(capture_bs=[1, 2])

    def _get_attention_backend(self, init_new_workspace: bool) -> Any:
        assert init_new_workspace  # graphs keep its addresses
        self.init_new_workspace = True
        self.reserves.add(max_speculative_num_draft_tokens())
        self.free_gb -= 0.5
        return ("attention", get_spec().speculative_num_draft_tokens)

    def _decode_cuda_graph_runner_cls(self) -> Any:
        def capture(runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int) -> Any:
            assert runner is self and attn_backend == ("attention", speculative_num_draft_tokens)
            assert get_spec().speculative_num_draft_tokens == speculative_num_draft_tokens
            self.captures += 1
            return ("graphs", speculative_num_draft_tokens, self.captures)

        return capture


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    """A resolved configuration with D = 8."""
    fields = {"speculative_num_draft_tokens": 8, "max_speculative_num_draft_tokens": 8}
    with get_context().override_server_args(), get_spec().override(**fields):
        yield


def build(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> WidthRuntimes:
    free = lambda device, gpu: runner.free_gb  # noqa: E731
    monkeypatch.setattr(width_runtimes, "get_available_gpu_memory", free)
    return WidthRuntimes(runner, WIDTHS)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_pass_finds_what_was_made_for_its_width(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(graphs)
    own = runner.decode_cuda_graph_runner
    runtimes = build(runner, monkeypatch)
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == (("attention", 8), own)
    assert not runner.init_new_workspace and get_spec().speculative_num_draft_tokens == 8
    # The scheduler reserves K/V slots for the largest, whatever is being built.
    assert runner.reserves == {8}
    assert runtimes.memory_gb == 1.5  # three backends
    for width in (1, 8, 4, 4, 2, 8):
        runtimes.use(width)
        assert runner.attn_backend == ("attention", width)
        found = runner.decode_cuda_graph_runner
        assert found[:2] == ("graphs", width) if graphs and width < 8 else found is own


def test_graphs_that_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a weight update, on the backend of D whatever width ran last; then all the others."""
    runner = Runner(True)
    runtimes = build(runner, monkeypatch)
    runtimes.use(2)
    runner.weight_updater.recapture_cuda_graph()
    assert runner.recaptured_on == [("attention", 8)]
    assert runner.captures == 6
    own = runner.decode_cuda_graph_runner
    for width in WIDTHS:
        runtimes.use(width)
        assert runner.attn_backend == ("attention", width)
        found = runner.decode_cuda_graph_runner
        assert found[2] > 3 if width < 8 else found is own


def test_what_does_not_fit_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(True)

    def out_of_memory(init_new_workspace: bool) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(runner, "_get_attention_backend", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory") as error:
        build(runner, monkeypatch)
    for part in ("--speculative-adaptive", "width 4", "--mem-fraction-static"):
        assert part in str(error.value)


def test_an_eager_runner_has_no_graphs() -> None:
    assert not has_graphs(SimpleNamespace(decode_cuda_graph_runner=None))
    assert not has_graphs(SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=[])))


def test_upstream_still_takes_what_is_passed() -> None:
    assert "init_new_workspace" in inspect.signature(ModelRunner._get_attention_backend).parameters
    options = inspect.signature(DecodeCudaGraphRunner.__init__).parameters
    assert {"attn_backend", "speculative_num_draft_tokens"} <= set(options)
    assert "recapture_cuda_graph" in {field.name for field in dataclasses.fields(WeightUpdater)}
