"""Pivot states: the S selected target layer outputs, taken while the target runs.

Upstream's own capture (layers/aux_hidden_states.py) cannot give them: it never captures the last
layer, and it clones every row of every captured layer before it prunes. This one takes

- layer k < L-1 from the callback `capture_output` that layer k+1 offers: it is called with the
  residual sum, which is block k's output (a decoder layer's own return value is not);
- layer L-1 from the argument of the logits processor: the state after the final norm, as in
  HF's last `hidden_states` entry (DLite release, `dlite/utils/hidden_states.py`).

In an extend pass only each request's last row is kept, so that nothing grows with the prompt; in
a verify pass all D rows are, since the pivot is known only after acceptance. The result leaves in
`logits_output.hidden_states`, so that graph runners carry it like any other output.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# The classes whose capture is compared with HF transformers in test/server/test_pivot_capture.py.
SUPPORTED_TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class UnsupportedTargetError(ValueError):
    """The target's class has no tested pivot capture."""


def require_supported_target(name: str) -> None:
    """Refuse a target class by name; raises UnsupportedTargetError."""
    if name not in SUPPORTED_TARGETS:
        raise UnsupportedTargetError(
            f"--speculative-algorithm DLITE: target class {name!r} is not supported; supported "
            f"are {', '.join(SUPPORTED_TARGETS)}. Serve this model without speculation."
        )


class PivotCapture:
    """Installs the capture on a target model; one per target.

    Raises:
        UnsupportedTargetError: the class is not in SUPPORTED_TARGETS, or its decoder layers have
            no `capture_output` (another sglang version).
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        name = type(model).__name__
        require_supported_target(name)
        layers = model.model.layers
        if "capture_output" not in inspect.signature(type(layers[0]).forward).parameters:
            raise UnsupportedTargetError(
                f"decoder layers of {name!r} take no `capture_output` in this sglang; sglang-dlite "
                "is made for sglang 0.5.23. Install that version."
            )
        self.layer_ids = tuple(layer_ids)
        self.num_layers = len(layers)
        self._rows: torch.Tensor | None = None  # extend: last row of each request
        self._states: dict[int, torch.Tensor] = {}
        model.model.register_forward_pre_hook(self._start, with_kwargs=True)
        for layer_id in self.layer_ids:
            if layer_id < self.num_layers - 1:
                layers[layer_id + 1].register_forward_pre_hook(
                    self._offer_capture(layer_id), with_kwargs=True
                )
        model.logits_processor.register_forward_pre_hook(self._finish, with_kwargs=True)
        model.logits_processor.register_forward_hook(self._publish)

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward_batch: Any = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        mode = forward_batch.forward_mode
        self._states.clear()
        self._rows = None
        if mode.is_extend() and not mode.is_target_verify():
            self._rows = torch.cumsum(forward_batch.extend_seq_lens, dim=0) - 1  # [n]

    def _keep(self, layer_id: int, hidden: torch.Tensor) -> None:
        # Either way a copy: later layers reuse the storage of the residual stream.
        self._states[layer_id] = hidden.clone() if self._rows is None else hidden[self._rows]

    def _offer_capture(self, layer_id: int) -> Any:
        def capture(hidden: torch.Tensor, *, owned: bool = False) -> None:
            self._keep(layer_id, hidden)

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            kwargs["capture_output"] = capture
            return args, kwargs

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
        output.hidden_states = torch.cat([self._states[i] for i in self.layer_ids], dim=-1)
        self._states.clear()


def split_states(hidden_states: torch.Tensor, num_states: int) -> torch.Tensor:
    """[rows, S * h] -> [rows, S, h]."""
    return hidden_states.unflatten(-1, (num_states, -1))
