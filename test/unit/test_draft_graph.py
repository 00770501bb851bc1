"""Draft step and greedy tail as graphs: the tokens of eager, static shapes, results that last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_double import Doubles
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, DraftBlock
from sglang_dlite.speculative.draft_graph import CudaRecorder, GraphedDrafter
from sglang_dlite.speculative.verify_tail import GreedyRound, VerifyTail, greedy_round
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

MakeConfig = Callable[..., DLiteConfig]
SIZES = [1, 2, 4]


class Setup:
    """A tiny random drafter with its embedding, and its graphs."""

    def __init__(self, config: DLiteConfig, device: str = "cpu", record: Any = None) -> None:
        torch.manual_seed(0)
        self.config, self.device = config, device
        self.doubles = Doubles(config.vocab_size)
        self.drafter = DLiteDrafter(config).to(device)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size, device=device)
        self.graphed = GraphedDrafter(
            self.drafter,
            self.embed,
            SIZES,
            record or self.doubles.record,
            device=device,
            dtype=torch.float32,
        )

    def inputs(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        states = torch.randn(n, config.num_pivot_states, config.hidden_size)
        group = torch.randint(config.vocab_size, (n, config.anchor_group_size))
        return states.to(self.device), group.to(self.device)

    def spoil(self) -> None:
        self.doubles.spoil_inputs(self.graphed._states, self.graphed._groups)
        self.doubles.spoil_outputs(*self.graphed._block)


@pytest.mark.parametrize("g", [1, 3])
def test_graph_equals_eager_and_results_last(make_drafter_config: MakeConfig, g: int) -> None:
    setup = Setup(make_drafter_config(anchor_group_size=g))
    played = []
    with torch.inference_mode():
        for n in (3, 1, 4, 2, 6, 0, 4):  # 6 is above the largest size
            states, group = setup.inputs(n)
            setup.spoil()
            played.append(
                (
                    setup.graphed.draft(states, group, setup.embed),
                    setup.drafter.draft(states, group, setup.embed),
                )
            )
        setup.spoil()
    for graphed, eager in played:
        assert torch.equal(graphed.token_ids, eager.token_ids)
        torch.testing.assert_close(graphed.head_vectors, eager.head_vectors)
    assert sum(graph.replays for graph in setup.doubles.graphs) == 5


def test_that_check_finds_a_returned_view(
    make_drafter_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = GraphedDrafter.draft

    def view(self: GraphedDrafter, states: Any, group: Any, embed: Any) -> DraftBlock:
        block, n = copied(self, states, group, embed), len(group)
        return DraftBlock(*(part[:n] for part in self._block)) if 0 < n <= SIZES[-1] else block

    monkeypatch.setattr(GraphedDrafter, "draft", view)
    with pytest.raises(AssertionError):
        test_graph_equals_eager_and_results_last(make_drafter_config, 1)


def test_another_embedding_is_not_the_captured_one(make_drafter_config: MakeConfig) -> None:
    setup = Setup(make_drafter_config())
    states, group = setup.inputs(2)
    other = torch.nn.Embedding(setup.config.vocab_size, setup.config.hidden_size)
    block = setup.graphed.draft(states, group, other)
    assert torch.equal(block.token_ids, setup.drafter.draft(states, group, other).token_ids)
    assert not any(graph.replays for graph in setup.doubles.graphs)


def test_what_else_is_asked_goes_to_the_drafter(make_drafter_config: MakeConfig) -> None:
    setup = Setup(make_drafter_config())
    assert setup.graphed.sequential_head is setup.drafter.sequential_head
    assert setup.graphed.config is setup.drafter.config
    with pytest.raises(AttributeError, match="no_such"):
        _ = setup.graphed.no_such


@pytest.mark.parametrize("sizes", [[], [0, 1], [-1]])
def test_sizes_are_checked(make_drafter_config: MakeConfig, sizes: list[int]) -> None:
    setup = Setup(make_drafter_config())
    with pytest.raises(ValueError, match="at least 1"):
        GraphedDrafter(
            setup.drafter,
            setup.embed,
            sizes,
            setup.doubles.record,
            device="cpu",
            dtype=torch.float32,
        )


def _round_fake(drafter_class: type[DLiteDrafter], config: DLiteConfig, n: int) -> GreedyRound:
    """The whole tail on shapes alone, where reading a value back cannot work."""
    width = config.block_size
    with FakeTensorMode():
        drafter = drafter_class(config)
        table = torch.empty(config.vocab_size, config.hidden_size)
        return greedy_round(
            torch.empty(n, width, dtype=torch.int64),
            torch.empty(n, max(config.anchor_group_size - 2, 0), dtype=torch.int64),
            torch.empty(n * width, config.vocab_size),
            torch.empty(n * width, config.num_pivot_states * config.hidden_size),
            drafter,
            lambda ids: torch.nn.functional.embedding(ids, table),
        )


@pytest.mark.parametrize("g", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 5])
def test_accept_and_draft_read_nothing_back(
    make_drafter_config: MakeConfig, g: int, n: int
) -> None:
    config = make_drafter_config(anchor_group_size=g)
    step = _round_fake(DLiteDrafter, config, n)
    assert [tuple(part.shape) for part in step] == [
        (n,),
        (n, config.block_size),
        (n, g),
        (n, config.num_drafts),
    ]


def test_that_check_finds_a_planted_sync(
    make_drafter_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_dlite.speculative import verify_tail

    match_drafts = verify_tail.match_drafts

    def stop_early(candidates: torch.Tensor, target_ids: torch.Tensor) -> Any:
        accepted = match_drafts(candidates, target_ids)
        if int(accepted.num_accepted.max()) == 0:
            return accepted
        return accepted

    monkeypatch.setattr(verify_tail, "match_drafts", stop_early)
    with pytest.raises(DataDependentOutputException):
        _round_fake(DLiteDrafter, make_drafter_config(), 2)


def test_the_tail_runs_only_where_it_is_recorded(make_drafter_config: MakeConfig) -> None:
    config = make_drafter_config()
    tail = VerifyTail(DLiteDrafter(config), lambda ids: ids, config.block_size)
    assert not tail.fits(1)
    tail(None, None, None, config.block_size)  # no graph has been asked for: nothing happens
    tail.reserve(4, "cpu")
    assert tail.fits(4) and not tail.fits(5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_equals_eager(make_drafter_config: MakeConfig) -> None:
    setup = Setup(make_drafter_config(anchor_group_size=2), "cuda", CudaRecorder())
    results = []
    for n in (3, 1, 4, 6, 2, 4):
        states, group = setup.inputs(n)
        results.append(
            (
                setup.graphed.draft(states, group, setup.embed).token_ids,
                setup.drafter.draft(states, group, setup.embed).token_ids,
            )
        )
    for graphed, eager in results:
        assert torch.equal(graphed, eager)
