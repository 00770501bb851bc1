"""DLITE in SGLang's registry: what it answers, and that it owns no draft K/V."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_dlite.speculative import algorithm
from sglang_dlite.speculative.cuda_graph import decode_graph_runner_class, dummy_verify_input
from sglang_dlite.speculative.worker import DLiteWorker


@pytest.fixture(scope="module")
def dlite() -> Any:
    algorithm.register()
    algorithm.register()  # a second call in a process changes nothing
    return SpeculativeAlgorithm.from_string("dlite")


def test_it_is_none_of_upstreams(dlite: Any) -> None:
    predicates = [name for name in dir(dlite) if name.startswith("is_")]
    true = {name for name in predicates if getattr(dlite, name)()}
    assert true == {"is_some", "is_speculative"}


def test_no_draft_kv(dlite: Any) -> None:
    assert dlite.has_draft_kv() is False
    worker = DLiteWorker.__new__(DLiteWorker)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(spec_algorithm=dlite))
    assert worker.draft_worker is None
    assert worker._draft_model_runners() == ()
    assert worker.primary_draft_kv_pool is None
    assert worker.weight_update_runners() == []


def test_graph_capture_gets_a_verify_input(dlite: Any) -> None:
    """Without one upstream captures decode graphs of the wrong kind (hooks H1 and H2)."""
    calls: list[Any] = []
    ours = decode_graph_runner_class(calls.append, SimpleNamespace(spec_algorithm=dlite))
    assert ours.__name__ == "DLiteDecodeCudaGraphRunner" and not calls
    verify = dummy_verify_input(lambda *args: calls.append(args), dlite, None, 5, False)
    assert verify.is_verify_input() and not calls
    assert verify.draft_token_num == verify.num_tokens_per_req == 5
    assert verify.capture_hidden_mode.is_full()
    # Other algorithms keep upstream's own.
    eagle = SpeculativeAlgorithm.from_string("EAGLE")
    decode_graph_runner_class(calls.append, SimpleNamespace(spec_algorithm=eagle))
    dummy_verify_input(lambda *args: calls.append(args), eagle, None, 5, False)
    assert len(calls) == 2
