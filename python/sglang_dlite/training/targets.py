"""The frozen target: its shape, which classes are supported, and its states at chosen rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.training.config import ModelSection, TargetSection, TrainConfigError

# The classes whose states are compared with SGLang's in test/training/test_parity.py.
SUPPORTED_TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

# SmolLM2's <reponame>: a special token of pre-training that the tokenizer splits no text into.
_EMBEDDED_MASK = 4

_LAW_ROWS = 256  # rows of full-vocabulary logits at a time
_FINGERPRINT_VALUES = 256  # of each weight


class TargetError(ValueError):
    """A target cannot be trained for; the message says why."""


@dataclass(frozen=True)
class TargetShape:
    """What a drafter's shape follows from."""

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_hf(cls, config: Any) -> TargetShape:
        """From a transformers config. Raises `TargetError` for an unsupported class."""
        architecture = (config.architectures or [type(config).__name__])[0]
        if architecture not in SUPPORTED_TARGETS:
            raise TargetError(
                f"target class {architecture!r} is not supported; supported are "
                f"{', '.join(SUPPORTED_TARGETS)}"
            )
        theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        head_dim = getattr(config, "head_dim", None)
        return cls(
            architecture=architecture,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=float(config.rms_norm_eps),
            rope_theta=float(theta),
        )

    @classmethod
    def from_section(cls, section: TargetSection) -> TargetShape | None:
        """The shape that the config itself states; None where it does not state all of it."""
        values = {f.name: getattr(section, f.name) for f in fields(cls)}
        if any(value is None for value in values.values()):
            return None
        if values["architecture"] not in SUPPORTED_TARGETS:
            raise TargetError(
                f"target.architecture = {values['architecture']!r} is not supported; supported "
                f"are {', '.join(SUPPORTED_TARGETS)}"
            )
        return cls(**values)

    def check_stated(self, section: TargetSection) -> None:
        """Raise `TargetError` where the config states another shape than the target has."""
        for f in fields(self):
            stated, found = getattr(section, f.name), getattr(self, f.name)
            if stated is not None and stated != found:
                raise TargetError(
                    f"target.{f.name} = {stated!r}, but {section.path} has {found!r}: remove the "
                    "key, or give the target that it was written for"
                )


def select_target_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """The S layers whose outputs condition the drafter: first, last, and S-2 spread over [1, L-2].

    The rule of the DLite release; e.g. L=36, S=14 -> 0,1,4,7,10,13,16,19,22,25,28,31,34,35.
    """
    if count < 1 or count > num_layers:
        raise TrainConfigError(
            f"model.pivot_states = {count}: must be in 1..{num_layers}, the target's layers"
        )
    if count == 1:
        return (num_layers - 1,)
    inner = count - 2
    if inner == 1:
        middle = [1 + round((num_layers - 3) * 0.5)]
    else:
        middle = [1 + round(i * (num_layers - 3) / (inner - 1)) for i in range(inner)]
    return (0, *middle, num_layers - 1)


def drafter_config(shape: TargetShape, model: ModelSection) -> DLiteConfig:
    """The drafter's config for this target. Raises `DrafterConfigError` for what cannot be."""
    layer_ids = model.target_layer_ids or select_target_layers(
        shape.num_hidden_layers, model.pivot_states
    )
    return DLiteConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=model.num_layers,
        num_target_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=model.intermediate_size or shape.intermediate_size,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        block_size=model.block_size,
        architecture_version="dlite_v1" if model.group_size == 1 else "dlite_v2",
        model_role="pivot_q_student",
        anchor_group_size=model.group_size,
        target_layer_ids=layer_ids,
        sequential_head="rnn",
        sequential_rank=model.rank,
        mask_token_id=(_EMBEDDED_MASK if model.mask_token_id is None else model.mask_token_id),
    )


def target_path(path: str | None) -> str:
    """The path or name; None is the embedded model, which is unpacked if need be.

    Raises `TargetError` where that cannot be had.
    """
    from sglang_dlite.embedded_model import EmbeddedModelError, prepare_embedded_model

    try:
        return path or str(prepare_embedded_model())
    except EmbeddedModelError as error:
        raise TargetError(str(error)) from error


def _from_pretrained(loader: Any, path: str | None, **options: Any) -> Any:
    """What a transformers loader makes of the target. Raises `TargetError`."""
    name = target_path(path)
    try:
        return loader.from_pretrained(name, **options)
    except (OSError, ValueError) as error:  # absent, unreachable, or of an unknown kind
        raise TargetError(
            f"target {name!r} cannot be read: {error}. Give an HF directory or a name on a hub "
            "that this machine reaches"
        ) from error


def load_tokenizer(path: str | None) -> Any:
    """The target's tokenizer; `path` as in `target_path`. Raises `TargetError`."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, path)


def read_shape(section: TargetSection) -> TargetShape:
    """The shape from the target's own config, checked against what the section states."""
    from transformers import AutoConfig

    shape = TargetShape.from_hf(_from_pretrained(AutoConfig, section.path))
    shape.check_stated(section)
    return shape


class Rows(NamedTuple):
    """Rows of some sequences, and the layers whose outputs are wanted there."""

    sequence: np.ndarray  # [m] int64, index of the sequence in the batch
    row: np.ndarray  # [m] int64, token position
    layer_ids: tuple[int, ...]


class FrozenTarget:
    """A transformers model that only computes states and laws. No gradients, any dtype."""

    def __init__(self, model: Any) -> None:
        self.shape = TargetShape.from_hf(model.config)
        self.model = model.requires_grad_(False).eval()
        self._wanted: dict[int, list[tuple[int, int, Tensor]]] = {}
        self._found: dict[tuple[int, int], Tensor] = {}
        last = self.shape.num_hidden_layers - 1
        for index, layer in enumerate(model.model.layers):
            # Layer L-1 means the state after the final norm.
            (model.model.norm if index == last else layer).register_forward_hook(self._hook(index))

    @classmethod
    def load(cls, section: TargetSection, device: str = "cpu") -> FrozenTarget:
        """Load the section's target. Raises `TargetError` for an unsupported or other target."""
        from transformers import AutoModelForCausalLM

        read_shape(section)
        model = _from_pretrained(
            AutoModelForCausalLM, section.path, dtype=getattr(torch, section.dtype)
        )
        return cls(model.to(device))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> str:
        """As `target.dtype` has it."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def fingerprint(self) -> str:
        """A hash over a sample of every weight, cheap: a fine-tuned copy has the names, shapes and
        file sizes of its origin."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.named_parameters()):
            sample = weight.detach().flatten()[:_FINGERPRINT_VALUES].float().cpu().numpy()
            digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
        return digest.hexdigest()[:16]

    @property
    def embedding(self) -> Tensor:
        """The input embedding [V, h]."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> Tensor:
        """The output projection [V, h]."""
        return self.model.get_output_embeddings().weight

    def _hook(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            flat = hidden.reshape(-1, hidden.shape[-1])
            for request, slot, place in self._wanted.get(layer, ()):
                self._found[request, slot] = flat[place]

        return hook

    @torch.no_grad()
    def states(self, sequences: Sequence[np.ndarray], requests: Sequence[Rows]) -> list[Tensor]:
        """One forward pass; per request the states [m, len(layer_ids), h] in the target's dtype.

        sequences: token ids [T_i]. They are padded on the right, where no real token looks.
        """
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for index, tokens in enumerate(sequences):
            ids[index, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        self._wanted = {}
        for number, rows in enumerate(requests):
            place = torch.from_numpy(rows.sequence * longest + rows.row).to(self.device)
            for slot, layer in enumerate(rows.layer_ids):
                self._wanted.setdefault(layer, []).append((number, slot, place))
        try:
            self.model.model(input_ids=ids.to(self.device), use_cache=False)
            return [
                torch.stack([self._found[number, slot] for slot in range(len(rows.layer_ids))], 1)
                for number, rows in enumerate(requests)
            ]
        finally:
            self._wanted, self._found = {}, {}

    @torch.no_grad()
    def top_law(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The top_k likeliest next tokens of rows [m, h]: ids int64, log-probabilities fp32."""
        ids, logprobs = [], []
        for chunk in hidden.split(_LAW_ROWS):
            logits = (chunk @ self.lm_head.T).float()
            top, best = logits.topk(top_k, dim=-1)  # sorted: the first is the argmax
            ids.append(best)
            logprobs.append(top - logits.logsumexp(-1, keepdim=True))
        return torch.cat(ids), torch.cat(logprobs)
