"""DLITE's part of SGLang's decode graphs: its seams in the installed version, capture, refusals."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_double import DoubleBackend
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators import pynccl_allocator
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.model_executor.runner_utils import pool
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang_dlite.speculative import cuda_graph, refusals
from sglang_dlite.speculative.cuda_graph import (
    TAIL_VARIANT,
    BothVariants,
    capture_draft,
    decode_graph_runner_class,
    decode_runner_class,
    dummy_verify_input,
)
from sglang_dlite.speculative.pivot_capture import PivotCapture
from sglang_dlite.speculative.verify_tail import VerifyTail
from torch import nn


@pytest.mark.parametrize(
    "owner,name,parameters",
    [
        (DecodeCudaGraphRunner, "get_spec_info", ("self", "num_tokens")),
        (DecodeCudaGraphRunner, "capture", ("self",)),
        (DecodeCudaGraphRunner, "_resolve_lora_variant", ("self", "forward_batch")),
        (BaseSpecWorker, "init_cuda_graphs", ("self",)),
        (BaseCudaGraphBackend, "capture_session", ("self", "stream")),
        (
            BaseCudaGraphBackend,
            "capture_one",
            ("self", "shape_key", "forward_fn", "capture_inputs", "post_warmup_hook"),
        ),
    ],
)
def test_what_is_overridden_has_the_expected_signature(
    owner: type, name: str, parameters: tuple[str, ...]
) -> None:
    assert tuple(inspect.signature(getattr(owner, name)).parameters) == parameters


def calls(function: Any, name: str) -> list[list[str]]:
    """The arguments, as source, of every call of `name` in a function's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return [
        [ast.unparse(argument) for argument in [*node.args, *node.keywords]]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


def test_upstream_calls_the_capture_hooks_as_ours_expect() -> None:
    source = inspect.getsource(DecodeCudaGraphRunner.capture_one_shape)
    assert source.index("capture_head_hooks") < source.index("capture_tail_hooks")
    assert calls(DecodeCudaGraphRunner.capture_one_shape, "capture_hook") == [
        ["self", "forward_batch"],
        ["self", "out", "forward_batch", "num_tokens"],
    ]
    assert tuple(inspect.signature(PivotCapture.start_graph).parameters)[1:] == (
        "runner",
        "forward_batch",
    )
    assert len(inspect.signature(VerifyTail.__call__).parameters) == 1 + 4


def test_upstream_asks_for_the_variant_before_and_at_a_replay() -> None:
    """The label picks the graph, in can_run_graph and on both paths of load_batch."""
    asked = [
        len(calls(getattr(DecodeCudaGraphRunner, name), "_resolve_lora_variant"))
        for name in ("can_run_graph", "load_batch")
    ]
    assert asked == [1, 2]


def test_the_runner_class_and_the_verify_input_are_ours_for_dlite_only() -> None:
    dlite = SimpleNamespace(spec_algorithm=SimpleNamespace(name="DLITE"))
    other = SimpleNamespace(spec_algorithm=SimpleNamespace(name="EAGLE"))
    assert issubclass(decode_runner_class(), DecodeCudaGraphRunner)
    assert decode_graph_runner_class(lambda runner: int, dlite) is decode_runner_class()
    assert decode_graph_runner_class(lambda runner: int, other) is int
    verify = dummy_verify_input(lambda *a: None, dlite.spec_algorithm, None, 5, False)
    assert verify.capture_hidden_mode == CaptureHiddenMode.FULL
    assert (verify.draft_token_num, verify.custom_mask) == (5, None)
    assert dummy_verify_input(lambda *a: "theirs", other.spec_algorithm, None, 5, False) == "theirs"


def test_a_batch_picks_its_graph() -> None:
    runner = object.__new__(decode_runner_class())
    runner.record_nolora_graph = False
    for folded, label in ((True, TAIL_VARIANT), (False, None)):
        batch = SimpleNamespace(spec_info=SimpleNamespace(greedy_tail=folded), lora_ids=None)
        assert runner._resolve_lora_variant(batch) == label
    assert runner._resolve_lora_variant(SimpleNamespace(spec_info=None, lora_ids=None)) is None
    runner.record_nolora_graph = True
    adapted = SimpleNamespace(spec_info=SimpleNamespace(greedy_tail=True), lora_ids=["a", None])
    assert runner._resolve_lora_variant(adapted) == f"lora+{TAIL_VARIANT}"


def test_each_shape_is_captured_without_and_with_the_tail(make_drafter_config: Any) -> None:
    tail = VerifyTail(SimpleNamespace(config=make_drafter_config()), lambda ids: ids, 4)
    backend, recorded = DoubleBackend(), []

    def forward() -> None:
        recorded.append(tail._recording)

    both = BothVariants(backend, tail)
    both.capture_one(ShapeKey(size=2), forward, post_warmup_hook=None)
    assert list(backend.graphs) == [
        ShapeKey(size=2),
        ShapeKey(size=2, variant_label=TAIL_VARIANT),
    ]
    assert recorded == [False, False, True, True] and not tail._recording
    assert both.can_run(None, ShapeKey(size=2))


class Layer(nn.Module):
    def forward(self, positions, hidden_states, forward_batch, capture_output=None):  # type: ignore[no-untyped-def]
        if capture_output is not None:
            capture_output(hidden_states, owned=False)
        return hidden_states + 1


class LlamaForCausalLM(nn.Module):
    """As in test_pivot_capture.py: state of layer k at a row is 100 id + k + 1."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, input_ids, positions, forward_batch):  # type: ignore[no-untyped-def]
            hidden = input_ids[:, None].float().repeat(1, 2) * 100
            for layer in self.layers:
                hidden = layer(positions, hidden, forward_batch, capture_output=None)
            return hidden + 1000

    class Processor(nn.Module):
        def forward(self, input_ids, hidden_states, lm_head, forward_batch):  # type: ignore[no-untyped-def]
            return SimpleNamespace(hidden_states=None)

    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = self.Body(), self.Processor()

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.model(batch.input_ids, None, batch)
        return self.logits_processor(batch.input_ids, hidden, None, batch).hidden_states


def test_pivot_states_of_all_graphs_share_one_table() -> None:
    """A replay repeats the copies into the table; no module hook runs then."""
    model = LlamaForCausalLM()
    capture = PivotCapture(model, (0, 2))
    runner = SimpleNamespace(
        max_num_token=6,
        model_runner=SimpleNamespace(
            model_config=SimpleNamespace(hidden_size=2), dtype=torch.float32, device="cpu"
        ),
    )

    def run(ids: list[int], graph: bool) -> torch.Tensor:
        batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, input_ids=torch.tensor(ids))
        if graph:
            capture.start_graph(runner, batch)
        return model(batch)

    large, small = run([1, 2, 3, 4, 5, 6], graph=True), run([7, 8], graph=True)
    assert large.data_ptr() == small.data_ptr() and large.shape == (6, 4)
    assert small.tolist() == [[701, 701, 1703, 1703], [801, 801, 1803, 1803]]
    eager = run([9], graph=False)
    assert eager.tolist() == [[901, 901, 1903, 1903]]
    assert small[0, 0] == 701  # eager rows lie elsewhere


@pytest.mark.parametrize("graphs", [None, SimpleNamespace()])
def test_without_graphs_of_the_target_the_draft_is_eager(graphs: Any) -> None:
    runner = SimpleNamespace(decode_cuda_graph_runner=graphs)
    assert capture_draft(None, None, runner) is None  # type: ignore[arg-type]


def test_draft_graphs_lie_in_sglangs_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose id its symmetric memory must know, and whose borrowers it watches at a replay."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def scope(name: str) -> Iterator[Any]:
        seen.append(name)
        yield SimpleNamespace(stream="stream")
        seen.append(f"after {name}")

    class Recorder:
        def __init__(self, capture_stream: Any, pool: Any) -> None:
            self.capture_stream, self.pool = capture_stream, pool

        def __call__(self, function: Any) -> Any:
            with self.capture_stream() as stream:
                seen.append((stream, self.pool))
            return SimpleNamespace(replay=lambda: seen.append("replayed"))

    monkeypatch.setattr(pool, "get_or_create_global_graph_memory_pool", lambda module: "pool")
    monkeypatch.setattr(pool, "get_or_create_global_graph_capture_stream", lambda: None)
    monkeypatch.setattr(pool, "graph_pool_capture_scope", lambda: scope("capture"))
    monkeypatch.setattr(pool, "graph_pool_replay_scope", lambda: scope("replay"))
    monkeypatch.setattr(parallel_state, "graph_capture", lambda stream: scope("collectives"))
    monkeypatch.setattr(pynccl_allocator, "_graph_pool_id", None)
    monkeypatch.setattr(cuda_graph, "CudaRecorder", Recorder)

    graph = cuda_graph._cuda_recorder()(lambda: None)
    assert pynccl_allocator._graph_pool_id == "pool"
    inside = [("stream", "pool"), "after collectives", "after capture"]
    assert seen == ["capture", "collectives", *inside]
    graph.replay()
    assert seen[-3:] == ["replay", "replayed", "after replay"]


def cuda(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(device="cuda", **values)


def phases(**backends: str) -> SimpleNamespace:
    return SimpleNamespace(**{k: SimpleNamespace(backend=v) for k, v in backends.items()})


@pytest.mark.parametrize(
    "option,args,value",
    [
        ("--attention-backend", cuda(attention_backend="flex_attention"), "flex_attention"),
        ("--attention-backend", cuda(decode_attention_backend="torch_native"), "torch_native"),
        ("--attention-backend", cuda(attention_backend="fa3"), None),
        ("--attention-backend", SimpleNamespace(device="cpu", attention_backend="x"), None),
        (
            "--cuda-graph-backend-decode",
            cuda(cuda_graph_config=phases(decode="breakable")),
            "breakable",
        ),
        ("--cuda-graph-backend-decode", cuda(cuda_graph_config=phases(decode="full")), None),
        (
            "--cuda-graph-config (prefill.backend)",
            cuda(cuda_graph_config=phases(prefill="full")),
            "full",
        ),
        ("--enable-two-batch-overlap", cuda(enable_two_batch_overlap=True), True),
    ],
)
def test_graph_refusals(option: str, args: SimpleNamespace, value: Any) -> None:
    (refusal,) = (entry for entry in refusals.REFUSALS if entry.option == option)
    assert refusal.value(args) == value
