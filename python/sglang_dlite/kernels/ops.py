"""The kernels as torch operators `torch.ops.sglang_dlite.*`.

On CUDA an operator launches its kernel; on a CPU it is the torch reference, or, under Triton's
interpreter (TRITON_INTERPRET=1), the kernel as well. Shapes alone (meta and fake tensors) take the
plan without the launch, so that a draft step can be traced without a device. No gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from sglang_dlite.kernels import activation, attention, norms, projection, recurrence
from sglang_dlite.kernels.projection import Sampling

NAMESPACE = "sglang_dlite"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(schema: str, plan: Callable[..., Any], reference: Callable[..., Any]) -> None:
    """Register one operator; plan(...) -> (Launch, outputs) and reference(...) -> outputs."""
    name = schema.split("(", 1)[0]

    def launch(*args: Any) -> Any:
        planned, outputs = plan(*args)
        planned.run()
        return outputs

    def shapes(*args: Any) -> Any:
        return plan(*args)[1]

    _library.define(schema)
    _library.impl(name, launch, "CUDA")
    _library.impl(name, launch if triton.knobs.runtime.interpret else reference, "CPU")
    _library.impl(name, shapes, "Meta")


def _plan_project(
    vectors: Tensor, weight: Tensor, temperatures: Tensor | None, seeds: Tensor | None
) -> Any:
    return projection.plan_project(vectors, weight, _sampling(temperatures, seeds))


def _project_reference(
    vectors: Tensor, weight: Tensor, temperatures: Tensor | None, seeds: Tensor | None
) -> Any:
    return projection.project_reference(vectors, weight, _sampling(temperatures, seeds))


def _sampling(temperatures: Tensor | None, seeds: Tensor | None) -> Sampling | None:
    if temperatures is None or seeds is None:
        return None
    return Sampling(temperatures, seeds)


_define("norm(Tensor x, Tensor weight, float eps) -> Tensor", norms.plan_norm, norms.norm_reference)
_define(
    "context_norm(Tensor states, Tensor depth, Tensor weight, float eps) -> Tensor",
    norms.plan_context_norm,
    norms.context_norm_reference,
)
_define(
    "add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)",
    norms.plan_add_norm,
    norms.add_norm_reference,
)
_define(
    "final_norm(Tensor x, Tensor delta, Tensor weight, float eps, int num_rows) -> Tensor",
    norms.plan_final_norm,
    norms.final_norm_reference,
)
_define(
    "silu_mul(Tensor gate_up) -> Tensor", activation.plan_silu_mul, activation.silu_mul_reference
)
_define(
    "attention(Tensor qkv, Tensor context, Tensor q_norm, Tensor k_norm, Tensor cos, Tensor sin,"
    " int num_heads, int num_kv_heads, float eps) -> Tensor",
    attention.plan_attention,
    attention.attention_reference,
)
_define(
    "advance(Tensor? values, Tensor ids, Tensor? state, Tensor embedding, Tensor weight,"
    " Tensor bias) -> (Tensor, Tensor)",
    recurrence.plan_advance,
    recurrence.advance_reference,
)
_define(
    "combine(Tensor state, Tensor weight, Tensor projected) -> Tensor",
    recurrence.plan_combine,
    recurrence.combine_reference,
)
_define(
    "project(Tensor vectors, Tensor weight, Tensor? temperatures, Tensor? seeds)"
    " -> (Tensor, Tensor)",
    _plan_project,
    _project_reference,
)
_define(
    "pick(Tensor values, Tensor ids) -> Tensor", recurrence.plan_pick, recurrence.pick_reference
)

ops = getattr(torch.ops, NAMESPACE)
