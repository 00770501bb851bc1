"""Pivot states: the S selected target layer outputs, taken while the target runs.

Upstream's own capture (layers/aux_hidden_states.py) cannot give them: it never captures the last
layer, and it clones every row of every captured layer before it prunes. This one takes

- layer k < L-1 on the way into layer k+1: from the callback `capture_output` that the layer
  offers, which is called with the residual sum, block k's output (a decoder layer's own return
  value is not); or, where the residual travels as an argument (Gemma3), from hidden_states +
  residual, which upstream's capture for that class leaves out;
- layer L-1 from the argument of the logits processor: the state after the final norm, as in
  HF's last `hidden_states` entry (DLite release, `dlite/utils/hidden_states.py`).

In an extend pass only each request's last row is kept, so that nothing grows with the prompt; in
a verify pass all D rows are, since the pivot is known only after acceptance. The result leaves in
`logits_output.hidden_states`, so that graph runners carry it like any other output.

Module hooks run while a CUDA graph is captured and not when it is replayed; what a replay repeats
is the copies that they made. In a graph these go to one static table that all captured batch sizes
share: it is read in the step that wrote it, on the same stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sglang_dlite import SGLANG_VERSION

# The classes whose capture is compared with HF transformers in test/server/test_pivot_capture.py.
SUPPORTED_TARGETS = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

# Of these, the ones with sliding-window layers.
WINDOWED_TARGETS = ("Gemma3ForCausalLM",)

# Classes of the pinned sglang with mamba, linear-attention or convolution layers (its
# configs/hybrid_arch.py). Their running state after D verify rows is that of all D, and DLITE does
# not wind it back to the accepted ones.
HYBRID_TARGETS = (
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JetNemotronForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "ZayaForCausalLM",
)


class UnsupportedTargetError(ValueError):
    """The target's class has no tested pivot capture."""


def require_supported_target(name: str) -> None:
    """Refuse a target class by name; raises UnsupportedTargetError."""
    if name in SUPPORTED_TARGETS:
        return
    reason = ""
    if name in HYBRID_TARGETS:
        reason = (
            " (a hybrid: the running state of its mamba or linear-attention layers cannot be wound "
            "back to the accepted drafts)"
        )
    raise UnsupportedTargetError(
        f"--speculative-algorithm DLITE: target class {name!r} is not supported{reason}; supported "
        f"are {', '.join(SUPPORTED_TARGETS)}. Serve this model without speculation."
    )


class PivotCapture:
    """Installs the capture on a target model; one per target.

    Raises:
        UnsupportedTargetError: the class is not in SUPPORTED_TARGETS, or its decoder layers take
            neither `capture_output` nor `residual` (another sglang version).
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        name = type(model).__name__
        require_supported_target(name)
        layers = model.model.layers
        parameters = inspect.signature(type(layers[0]).forward).parameters
        if "capture_output" in parameters:
            enter = self._offer_capture
        elif "residual" in parameters:
            enter = self._sum_residual
        else:
            raise UnsupportedTargetError(
                f"decoder layers of {name!r} take neither `capture_output` nor `residual` in this "
                f"sglang; sglang-dlite is made for sglang {SGLANG_VERSION}. Install that version."
            )
        self.layer_ids = tuple(layer_ids)
        self.num_layers = len(layers)
        self._rows: torch.Tensor | None = None  # extend: last row of each request
        self._states: dict[int, torch.Tensor] = {}
        self._table: torch.Tensor | None = None  # graphs: [max rows, S * h]
        self._graph_rows: torch.Tensor | None = None  # the table's rows of the graph in capture
        model.model.register_forward_pre_hook(self._start, with_kwargs=True)
        for layer_id in self.layer_ids:
            if layer_id < self.num_layers - 1:
                layers[layer_id + 1].register_forward_pre_hook(enter(layer_id), with_kwargs=True)
        model.logits_processor.register_forward_pre_hook(self._finish, with_kwargs=True)
        model.logits_processor.register_forward_hook(self._publish)

    def start_graph(self, runner: Any, forward_batch: Any) -> None:
        """One of SGLang's `capture_head_hooks`: the next forward writes to the static table.

        The table is made in the first warm-up, outside of any graph.
        """
        model, rows = runner.model_runner, runner.max_num_token
        if self._table is None or self._table.shape[0] < rows:
            size = len(self.layer_ids) * model.model_config.hidden_size
            self._table = torch.zeros(rows, size, dtype=model.dtype, device=model.device)
        self._graph_rows = self._table[: forward_batch.input_ids.shape[0]]

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward_batch: Any = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        mode = forward_batch.forward_mode
        self._states.clear()
        self._rows = None
        if mode.is_extend() and not mode.is_target_verify():
            self._rows = torch.cumsum(forward_batch.extend_seq_lens, dim=0) - 1  # [n]

    def _keep(
        self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        # In every case a copy: later layers reuse the storage of the residual stream.
        if self._graph_rows is not None:
            place = self.layer_ids.index(layer_id)
            rows = split_states(self._graph_rows, len(self.layer_ids))[:, place]
            rows.copy_(hidden if residual is None else hidden + residual)
            self._states[layer_id] = rows
            return
        if self._rows is not None:
            hidden = hidden[self._rows]
            residual = None if residual is None else residual[self._rows]
        elif residual is None:
            hidden = hidden.clone()
        self._states[layer_id] = hidden if residual is None else hidden + residual

    def _offer_capture(self, layer_id: int) -> Any:
        def capture(hidden: torch.Tensor, *, owned: bool = False) -> None:
            self._keep(layer_id, hidden)

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            kwargs["capture_output"] = capture
            return args, kwargs

        return hook

    def _sum_residual(self, layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(layer_id, kwargs["hidden_states"], kwargs["residual"])

        return hook

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.num_layers - 1 in self.layer_ids:
            self._keep(self.num_layers - 1, args[1])

    def _publish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """hidden_states of the output becomes [rows, S * h], in the order of layer_ids.

        Raises:
            RuntimeError: a layer was not captured (the model ran without its modules' hooks).
        """
        missing = [i for i in self.layer_ids if i not in self._states]
        if missing:
            raise RuntimeError(
                f"pivot capture: target layers {missing} of {list(self.layer_ids)} did not run "
                "through their hooks; DLITE cannot serve this execution mode."
            )
        if self._graph_rows is not None:
            output.hidden_states, self._graph_rows = self._graph_rows, None
        else:
            output.hidden_states = torch.cat([self._states[i] for i in self.layer_ids], dim=-1)
        self._states.clear()


def split_states(hidden_states: torch.Tensor, num_states: int) -> torch.Tensor:
    """[rows, S * h] -> [rows, S, h]."""
    return hidden_states.unflatten(-1, (num_states, -1))
