"""The worker on graphs: a toy target, real graph code, and a double that spoils static memory.

The toy knows its own future, so every token and every acceptance count is known by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_double import DoubleBackend, Doubles
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang_dlite.drafter import DLiteConfig, DraftBlock
from sglang_dlite.speculative import target_tokens, verify_tail, worker
from sglang_dlite.speculative.cuda_graph import TAIL_VARIANT, BothVariants
from sglang_dlite.speculative.draft_graph import GraphedDrafter
from sglang_dlite.speculative.verify_logits import VerifyLogits
from sglang_dlite.speculative.verify_tail import VerifyTail
from sglang_dlite.speculative.worker import DLiteWorker

V = 50
SAMPLED = 7  # a sampled token is the greedy one plus this, so that no draft of the toy equals it
SIZES = [1, 2, 4]
MakeConfig = Callable[..., DLiteConfig]


def next_token(token: Any, position: Any) -> Any:
    """The target's law: the token after `token` at `position`; on ints and on tensors."""
    return (7 * token + 3 * position + 1) % V


def num_right(anchor: Any, position: Any, num_drafts: int) -> Any:
    """How many drafts after the anchor at `position` the toy drafter gets right."""
    return (anchor + position) % (num_drafts + 1)


class ToyDrafter:
    """Right for as long as the plan says, if its pivot states and token group belong together."""

    def __init__(self, config: DLiteConfig) -> None:
        self.config = config

    def draft(self, pivot_states: torch.Tensor, token_group: torch.Tensor, embed: Any) -> Any:
        token, position = (pivot_states[:, -1, i].nan_to_num(-1).long() for i in (0, 1))  # [n]
        anchor = token_group[:, -1]
        known = (pivot_states[:, 0, :2] == pivot_states[:, -1, :2]).all(dim=1)
        known &= anchor == next_token(token, position)
        if token_group.shape[1] > 1:
            known &= token_group[:, -2] == token
        if token_group.shape[1] > 2:  # before the prompt's first token the group repeats it
            known &= (position == 0) | (next_token(token_group[:, -3], position - 1) == token)
        right = torch.where(known, num_right(anchor, position + 1, self.config.num_drafts), 0)
        drafts, last = [], anchor
        for k in range(self.config.num_drafts):
            last = next_token(last, position + 1 + k)
            drafts.append(torch.where(k < right, last, (last + 1) % V))
        ids = torch.stack(drafts, dim=1)
        return DraftBlock(ids, ids[:, :, None].float())


class ToyRunner:
    """Stands for SGLang's decode graph runner: static inputs, padding, two variants per size."""

    def __init__(self, target: ToyTarget, width: int, tail: VerifyTail | None) -> None:
        self.capture_bs, self.max_bs, self.width = SIZES, SIZES[-1], width
        rows = self.max_bs * width
        self.input_ids = torch.zeros(rows, dtype=torch.int64)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.backend: Any = DoubleBackend()
        backend = self.backend
        if tail is not None:
            tail.reserve(self.max_bs, "cpu")
            backend = BothVariants(backend, tail)
        for size in reversed(SIZES):
            batch = SimpleNamespace(
                input_ids=self.input_ids[: size * width], positions=self.positions[: size * width]
            )

            def forward(batch: Any = batch, rows: int = size * width) -> Any:
                output = target.logits(batch)
                if tail is not None:
                    tail(self, output, batch, rows)
                return output

            backend.capture_one(ShapeKey(size=size), forward)

    def run(self, batch: Any) -> Any:
        rows = batch.input_ids.shape[0]
        size = next(s for s in SIZES if s * self.width >= rows)
        self.input_ids[:rows].copy_(batch.input_ids)
        self.positions[:rows].copy_(batch.positions)
        label = TAIL_VARIANT if batch.greedy_tail else None
        output = self.backend.replay(ShapeKey(size=size, variant_label=label), batch)
        return LogitsProcessorOutput(
            next_token_logits=output.next_token_logits[:rows],
            hidden_states=output.hidden_states[:rows],
        )


class ToyTarget:
    """SGLang's target worker, as far as DLiteWorker uses it."""

    def __init__(self, config: DLiteConfig) -> None:
        self.config = config
        self.graphs: ToyRunner | None = None
        self.model_runner = SimpleNamespace(sampler=self._sample)

    @staticmethod
    def _sample(output: Any, *rest: Any) -> torch.Tensor:
        return (output.next_token_logits.argmax(-1) + SAMPLED) % V

    def logits(self, batch: Any) -> LogitsProcessorOutput:
        """A row's state says in every layer which token stands where."""
        config, rows = self.config, batch.input_ids.shape[0]
        state = torch.zeros(rows, config.num_pivot_states, config.hidden_size)
        state[..., 0] = batch.input_ids[:, None].float()
        state[..., 1] = batch.positions[:, None].float()
        logits = torch.zeros(rows, V)
        logits[torch.arange(rows), next_token(batch.input_ids, batch.positions)] = 1
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=state.flatten(1))

    def forward_batch_generation(
        self, batch: Any, forward_batch: Any = None, **options: Any
    ) -> GenerationBatchResult:
        if batch is not None:  # an extend: the last row of each request
            last = torch.tensor(batch.extend_lens).cumsum(0) - 1
            positions = torch.cat([torch.arange(length) for length in batch.extend_lens])
            output = self.logits(
                SimpleNamespace(input_ids=batch.input_ids[last], positions=positions[last])
            )
            ids = output.next_token_logits.argmax(-1)
            return GenerationBatchResult(logits_output=output, next_token_ids=ids)
        rows = forward_batch.input_ids.shape[0]
        graphs = self.graphs
        replay = graphs is not None and rows <= graphs.max_bs * graphs.width
        return GenerationBatchResult(
            logits_output=graphs.run(forward_batch) if replay else self.logits(forward_batch),
            can_run_cuda_graph=replay,
        )


class ToyWorker(DLiteWorker):
    """The real worker but for its construction, which needs a server."""

    def __init__(self, config: DLiteConfig, width: int, doubles: Doubles | None) -> None:
        BaseSpecWorker.__init__(self)
        self._target_worker: Any = ToyTarget(config)
        self.device, self.width, self.num_drafts = "cpu", width, width - 1
        self._offsets = torch.arange(width)
        self.embed, self.config = (lambda ids: ids), config
        self.drafter: Any = ToyDrafter(config)
        self.capture: Any = SimpleNamespace(_table=None)
        self.rejection = self.adaptive = self.runtimes = None
        self.options = VerifyLogits(width, lambda: torch.zeros(16, 64))
        self.tail = None
        if doubles is not None:
            self.tail = VerifyTail(self.drafter, self.embed, width)
            self._target_worker.graphs = ToyRunner(self._target_worker, width, self.tail)
            self.drafter = GraphedDrafter(
                self.drafter, self.embed, SIZES, doubles.record, device="cpu", dtype=torch.float32
            )


def toy_verify_batch(
    batch: Any, candidates: Any, offsets: Any, target: Any, *, greedy_tail: bool = False
) -> Any:
    """In place of `verify_batch`, which needs a server."""
    positions = batch.seq_lens[:, None] + offsets
    return SimpleNamespace(
        input_ids=candidates.reshape(-1), positions=positions.reshape(-1), greedy_tail=greedy_tail
    )


def sampling_info(n: int, greedy: bool, **changes: Any) -> SamplingBatchInfo:
    ones = torch.ones(n)
    values: dict[str, Any] = {
        "temperatures": ones[:, None],
        "top_ps": ones,
        "top_ks": ones.int(),
        "min_ps": ones,
        "is_all_greedy": greedy,
        "is_any_greedy": greedy,
        "need_top_p_sampling": False,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
        "vocab_size": V,
    }
    return SamplingBatchInfo(**(values | changes))


class Request:
    """A prompt that follows the law, and what the server has output so far."""

    def __init__(self, first: int, length: int) -> None:
        self.prompt = [first]
        while len(self.prompt) < length:
            self.prompt.append(next_token(self.prompt[-1], len(self.prompt) - 1))
        self.output: list[int] = []
        self.accepted: list[int] = []
        self.greedy: list[bool] = []  # of each verify pass
        self.state: Any = None  # the carried draft input, one row

    def expected(self, group_size: int, num_drafts: int, width: int) -> tuple[list[int], list[int]]:
        """Output ids and accepted drafts of as many passes as were played, by arithmetic."""
        ids, accepted = list(self.prompt), []

        def follow(step: int = 0) -> None:
            ids.append((next_token(ids[-1], len(ids) - 1) + step) % V)

        def lawful(place: int) -> bool:
            return place == 0 or ids[place] == next_token(ids[place - 1], place - 1)

        follow()
        for greedy in self.greedy:
            anchor = len(ids) - 1
            known = lawful(anchor) and (group_size < 3 or lawful(anchor - 1))
            right = min(num_right(ids[anchor], anchor, num_drafts), width - 1) if known else 0
            accepted.append(right if greedy else 0)
            for _ in range(accepted[-1]):
                follow()
            follow(0 if greedy else SAMPLED)
        return ids[len(self.prompt) :], accepted


def batch_of(requests: list[Request], mode: ForwardMode, greedy: bool) -> SimpleNamespace:
    lens = torch.tensor([len(r.prompt) + max(len(r.output) - 1, 0) for r in requests])
    extend = mode == ForwardMode.EXTEND
    return SimpleNamespace(
        forward_mode=mode,
        is_extend_in_batch=extend,
        seq_lens=lens,
        reqs=[SimpleNamespace(origin_input_ids=r.prompt, output_ids=[]) for r in requests],
        prefix_lens=[0] * len(requests),
        extend_lens=[len(r.prompt) for r in requests],
        input_ids=torch.tensor([token for r in requests for token in r.prompt]),
        sampling_info=sampling_info(len(requests), greedy),
        return_logprob=False,
        has_grammar=False,
        spec_info=None
        if extend
        else SimpleNamespace(
            bonus_tokens=torch.cat([r.state.bonus_tokens for r in requests]),
            hidden_states=torch.cat([r.state.hidden_states for r in requests]),
        ),
    )


def play(server: DLiteWorker, doubles: Doubles | None, steps: int = 24) -> list[Request]:
    """Batches of 1..6 requests, greedy and not, that come and go; results are read late."""
    chance = torch.Generator().manual_seed(0)
    requests: list[Request] = []

    def step(members: list[Request], mode: ForwardMode, greedy: bool = True) -> None:
        result = server.forward_batch_generation(batch_of(members, mode, greedy))
        if doubles is not None:
            doubles.spoil(server)
        state = result.next_draft_input
        stride = result.next_token_ids.shape[0] // len(members)
        for i, request in enumerate(members):
            kept = 1 if result.accept_lens is None else int(result.accept_lens[i])
            ids = result.next_token_ids[i * stride : i * stride + kept].tolist()
            request.output += ids
            if result.accept_lens is not None:
                request.accepted.append(kept - 1)
                request.greedy.append(greedy)
                assert int(result.new_seq_lens[i]) == len(request.prompt) + len(request.output) - 1
            request.state = SimpleNamespace(
                bonus_tokens=state.bonus_tokens[i : i + 1],
                hidden_states=state.hidden_states[i : i + 1],
            )

    for number in range(steps):
        if number % 4 == 0:
            new = [Request(3 * number % V, 1 + i) for i in range(number % 3 + 1)]
            step(new, ForwardMode.EXTEND)
            requests += new
        count = int(torch.randint(1, 7, (1,), generator=chance))
        order = torch.randperm(len(requests), generator=chance)[:count].tolist()
        step([requests[i] for i in order], ForwardMode.DECODE, greedy=number % 5 != 3)
    return requests


def check(requests: list[Request], server: DLiteWorker) -> None:
    for request in requests:
        config = server.config
        expected = request.expected(config.anchor_group_size, config.num_drafts, server.width)
        assert (request.output, request.accepted) == expected


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(tp_group=SimpleNamespace(world_size=1), tp_size=1)
    monkeypatch.setattr(target_tokens, "get_parallel", lambda: parallel)
    monkeypatch.setattr(worker, "verify_batch", toy_verify_batch)


def make_worker(make_config: MakeConfig, doubles: Doubles | None, g: int, width: int) -> ToyWorker:
    return ToyWorker(make_config(anchor_group_size=g), width, doubles)


@pytest.mark.parametrize("g,width", [(1, 5), (2, 5), (3, 5), (3, 2)])
def test_graphs_give_what_arithmetic_says(
    make_drafter_config: MakeConfig, g: int, width: int
) -> None:
    doubles = Doubles(V)
    server = make_worker(make_drafter_config, doubles, g, width)
    requests = play(server, doubles)
    check(requests, server)
    assert len({count for r in requests for count in r.accepted}) == width  # 0 .. D-1 all occur
    # Both ways were gone: folded into the verify graph, and by the draft graph of its own.
    labels = {
        key.variant_label
        for key, graph in server._target_worker.graphs.backend.graphs.items()
        if graph.replays
    }
    assert labels == {None, TAIL_VARIANT}
    assert all(graph.replays for graph in doubles.graphs)


def test_eager_gives_the_same(make_drafter_config: MakeConfig) -> None:
    server = make_worker(make_drafter_config, None, 3, 5)
    check(play(server, None), server)


def _stale_states(self: GraphedDrafter, states: Any, group: Any, embed: Any) -> DraftBlock:
    stale = self._states[: len(group)].clone()
    return GraphedDrafter_draft(self, stale if len(stale) == len(group) else states, group, embed)


def _stale_group(self: GraphedDrafter, states: Any, group: Any, embed: Any) -> DraftBlock:
    stale = self._groups[: len(group)].clone()
    return GraphedDrafter_draft(self, states, stale if len(stale) == len(group) else group, embed)


def _view_round(self: VerifyTail, n: int) -> Any:
    assert self._rounds is not None
    accepted, *rest = self._rounds[:n].split(self._columns, dim=1)
    return verify_tail.GreedyRound(accepted[:, 0], *rest)


def _mixed_rows(self: ToyDrafter, states: Any, group: Any, embed: Any) -> Any:
    return ToyDrafter_draft(self, states + 0 * states.sum(), group, embed)


def _batch_minimum(*arguments: Any) -> Any:
    """An acceptance that lets a padding row decide for the others."""
    step = greedy_round(*arguments)
    return step._replace(num_accepted=step.num_accepted.min().expand_as(step.num_accepted))


GraphedDrafter_draft, ToyDrafter_draft = GraphedDrafter.draft, ToyDrafter.draft
greedy_round = verify_tail.greedy_round


@pytest.mark.parametrize(
    "owner,name,bug",
    [
        (GraphedDrafter, "draft", _stale_states),
        (GraphedDrafter, "draft", _stale_group),
        (VerifyTail, "read", _view_round),
        (VerifyTail, "stage", lambda self, earlier: None),
        (ToyDrafter, "draft", _mixed_rows),
        (verify_tail, "greedy_round", _batch_minimum),
        (worker, "is_plain_greedy", lambda batch: True),
    ],
    ids=[
        "draft-stale-states",
        "draft-stale-group",
        "tail-returns-a-view",
        "tail-stale-earlier-tokens",
        "padding-rows-reach-others",
        "padding-rows-decide",
        "tail-for-the-wrong-batches",
    ],
)
def test_a_planted_bug_shows(
    make_drafter_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    bug: Any,
) -> None:
    monkeypatch.setattr(owner, name, bug)
    doubles = Doubles(V)
    server = make_worker(make_drafter_config, doubles, 3, 5)
    with pytest.raises((AssertionError, IndexError)):
        check(play(server, doubles), server)


@pytest.mark.parametrize(
    "changes,batch",
    [
        ({"is_all_greedy": False}, {}),
        ({"has_custom_logit_processor": True}, {}),
        ({"has_watermark_candidates": True}, {}),
        ({"logit_bias": torch.zeros(1, V)}, {}),
        ({"grammar_mask": object()}, {}),
        ({"acc_additive_penalties": torch.zeros(1, V)}, {}),
        ({"acc_scaling_penalties": torch.ones(1, V)}, {}),
        ({"sampling_mask_batch_indices": torch.zeros(1)}, {}),
        ({"penalizer_orchestrator": SimpleNamespace(is_required=True)}, {}),
        ({}, {"has_grammar": True}),
        ({}, {"return_logprob": True}),
    ],
)
def test_adorned_batches_are_not_folded(changes: dict[str, Any], batch: dict[str, Any]) -> None:
    plain = {"has_grammar": False, "return_logprob": False}
    greedy = changes.pop("is_all_greedy", True)
    folded = SimpleNamespace(sampling_info=sampling_info(1, True), **plain)
    assert verify_tail.is_plain_greedy(folded)
    adorned = SimpleNamespace(sampling_info=sampling_info(1, greedy, **changes), **(plain | batch))
    assert not verify_tail.is_plain_greedy(adorned)
