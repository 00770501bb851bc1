"""Fused step against the module, kernels against their torch references, graph against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, DraftBlock
from sglang_dlite.drafter.backbone import build_constants
from sglang_dlite.gpu_check.drafters import random_drafter, random_inputs, random_table
from sglang_dlite.gpu_check.report import Report
from sglang_dlite.kernels import activation, attention, norms, projection, recurrence
from sglang_dlite.kernels.fused_drafter import FusedDrafter
from sglang_dlite.kernels.projection import Sampling

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# Largest difference, as a share of the largest value. Sums are fp32 in other orders; a bf16 result
# can tip over one rounding, an attention weight or a layer's over a few.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Comparison(NamedTuple):
    """One kernel's output and its reference's, the same shape."""

    name: str
    got: Tensor
    expected: Tensor


def _run(planned: tuple[Any, Any]) -> Any:
    launch, outputs = planned
    launch.run()
    return outputs


def kernel_comparisons(
    config: DLiteConfig, n: int, device: str, dtype: torch.dtype
) -> Iterator[Comparison]:
    """Every kernel at the shapes of `config`, n requests, on random inputs."""
    generator = torch.Generator(device).manual_seed(n)

    def random(*shape: int, scale: float = 1.0, of: torch.dtype = dtype) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(of)

    h, d, rank, vocab = (
        config.hidden_size,
        config.head_dim,
        config.sequential_rank,
        config.vocab_size,
    )
    eps, slots, drafts = config.rms_norm_eps, config.num_pivot_states, config.num_drafts
    queries = config.anchor_group_size + drafts
    heads = (config.num_attention_heads, config.num_key_value_heads)

    x, delta, weight = random(n, queries, h), random(n, queries, h), random(h) + 1
    arguments: Any = (x, weight, eps)
    yield Comparison("norm", _run(norms.plan_norm(*arguments)), norms.norm_reference(*arguments))
    arguments = (x, delta, weight, eps)
    got, expected = _run(norms.plan_add_norm(*arguments)), norms.add_norm_reference(*arguments)
    yield Comparison("add_norm, sum", got[0], expected[0])
    yield Comparison("add_norm", got[1], expected[1])
    arguments = (x, delta, weight, eps, drafts)
    yield Comparison(
        "final_norm",
        _run(norms.plan_final_norm(*arguments)),
        norms.final_norm_reference(*arguments),
    )
    arguments = (random(n, slots, h), random(slots, h), weight, eps)
    yield Comparison(
        "context_norm",
        _run(norms.plan_context_norm(*arguments)),
        norms.context_norm_reference(*arguments),
    )
    gate_up = random(n, queries, 2 * config.intermediate_size)
    yield Comparison(
        "silu_mul",
        _run(activation.plan_silu_mul(gate_up)),
        activation.silu_mul_reference(gate_up),
    )
    constants = build_constants(config)
    arguments = (
        random(n, queries, (heads[0] + 2 * heads[1]) * d),
        random(n, slots, 2 * heads[1] * d),
        *(random(d) + 1, random(d) + 1),
        *(constants.key_cos.to(device), constants.key_sin.to(device), *heads, eps),
    )
    yield Comparison(
        "attention",
        _run(attention.plan_attention(*arguments)),
        attention.attention_reference(*arguments),
    )

    embedding, output = random(vocab, rank), random(vocab, rank, scale=rank**-0.5)
    head = (embedding, random(2 * rank, 2 * rank, scale=rank**-0.5), random(2 * rank))
    vectors, state = random(n, rank), random(n, rank, of=torch.float32)
    sampling = Sampling(
        torch.arange(n, device=device) % 3 * 0.7,
        torch.randint(2**62, (n,), generator=generator, device=device),
    )
    for name, draws in (("project", None), ("project, sampled", sampling)):
        values, ids = _run(projection.plan_project(vectors, output, draws))
        expected_values, _ = projection.project_reference(vectors, output, draws)
        yield Comparison(name, values, expected_values)
        score = vectors.float() @ output.float().t()
        if draws is None:
            yield Comparison("project, ids", score.gather(1, ids), values)
        token = _run(recurrence.plan_pick(values, ids))
        yield Comparison("pick", token, recurrence.pick_reference(values, ids))
        got = _run(recurrence.plan_advance(values, ids, state, *head))
        expected = recurrence.advance_reference(values, ids, state, *head)
        yield Comparison("advance, token", got[0], expected[0])
        yield Comparison("advance", got[1], expected[1])
    mix, projected = random(rank, rank + h, scale=rank**-0.5), random(n, drafts, rank)[:, 0]
    arguments = (state, mix, projected)
    yield Comparison(
        "combine",
        _run(recurrence.plan_combine(*arguments)),
        recurrence.combine_reference(*arguments),
    )


def largest_share(got: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected value; NaN counts as infinite."""
    if not expected.numel():
        return 0.0
    difference = (got.double() - expected.double()).abs().amax()
    share = (difference / expected.double().abs().amax().clamp(min=1e-30)).item()
    return share if share == share else float("inf")


def check_kernels(
    report: Report,
    name: str,
    config: DLiteConfig,
    device: str,
    sizes: tuple[int, ...] = (1, 3, 17, 64),
) -> None:
    """Each kernel's worst difference over dtypes and batch sizes."""
    for dtype, tolerance in _TOLERANCE.items():
        worst: dict[str, float] = {}
        for n in sizes:
            for kernel, got, expected in kernel_comparisons(config, n, device, dtype):
                worst[kernel] = max(worst.get(kernel, 0.0), largest_share(got, expected))
        for kernel, share in worst.items():
            label = f"{name} {_NAMES[dtype]} {kernel}"
            report.add(label, share <= tolerance, {"error": float(f"{share:.1e}")})


def block_error(
    block: DraftBlock, module: DLiteDrafter, states: Tensor, group: Tensor, table: Tensor
) -> float:
    """How far `block` is from the fp32 module's, as a share of its vectors and of its logits.

    The module is led along the block's own tokens, so that a near tie cannot hide an error: a
    token is wrong by as much as its logit is below the best one.
    """
    if not len(group):
        return 0.0
    hidden = module.backbone(states.float(), group, lambda ids: F.embedding(ids, table).float())
    previous = torch.cat([group[:, -1:], block.token_ids[:, :-1]], dim=1)
    vectors = module.head_vectors(hidden, previous, group)
    logits = module.draft_logits(vectors)
    chosen = logits.gather(-1, block.token_ids[..., None])[..., 0]
    below = ((logits.amax(-1) - chosen).amax() / logits.abs().amax()).item()
    return max(below, largest_share(block.head_vectors, vectors))


def check_fused_step(report: Report, name: str, config: DLiteConfig, device: str) -> None:
    """The fused step against the module in fp32 of the same, perhaps rounded, weights."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
        fused = FusedDrafter(random_drafter(config, device, dtype))
        module = random_drafter(config, device, dtype).float()
        table = random_table(config, device, dtype)
        for n in (0, 1, 5, 64):
            states, group = random_inputs(config, n, device, dtype)
            block = fused.draft(states, group, lambda ids, table=table: F.embedding(ids, table))
            error = block_error(block, module, states, group, table)
            label = f"{name} {_NAMES[dtype]} fused step, n = {n}"
            report.add(label, error <= tolerance, {"error": float(f"{error:.1e}")})


def check_graph(
    report: Report, name: str, drafter: Any, table: Tensor, sizes: tuple[int, ...], capture: Capture
) -> None:
    """A replayed graph gives what an eager step gives, on inputs that it was not captured with."""
    config, device, dtype = drafter.config, str(table.device), table.dtype
    embed = lambda ids: F.embedding(ids, table)  # noqa: E731
    for n in sizes:
        states, group = random_inputs(config, n, device, dtype)
        replay = capture(lambda s=states, g=group: drafter.draft(s, g, embed))
        equal = True
        for seed in (1, 2, 3):
            for static, value in zip(
                (states, group), random_inputs(config, n, device, dtype, seed), strict=True
            ):
                static.copy_(value)
            block, eager = replay(), drafter.draft(states, group, embed)
            equal &= torch.equal(block.token_ids, eager.token_ids)
            equal &= torch.equal(block.head_vectors, eager.head_vectors)
        tokens = len(eager.token_ids.unique())
        report.add(f"{name}, graph = eager, n = {n}", equal, {"different_tokens": tokens})
