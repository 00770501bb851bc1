"""Two tensor-parallel ranks over gloo: the output of one rank, and ranks that never part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_drafter
import test_cpu_kernels as bf16
import tiny_models
import torch
from configurations import OVERLAP
from engines import engine
from logprobs import check_logprobs
from oracle import TOLERANCE
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from sglang_dlite.drafter import load_drafter
from torch.nn import functional as F
from workloads import Request, random_prompts

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks write down what their drafters were given."""
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module", params=[{}, OVERLAP], ids=["plain", "overlap"])
def running(
    request: pytest.FixtureRequest, references: References, launch_oracle: LaunchOracle, seen: Path
) -> Iterator[OracleEngine]:
    variables = {
        **request.param,
        "DLITE_DRAFTER_FACTORY": "rank_drafter:make",
        rank_drafter.FOLDER_VARIABLE: str(seen),
    }
    # Ranks that part wait for each other for ever; the watchdog makes that a failure.
    options = {"tp_size": 2, "watchdog_timeout": 120}
    with launch_oracle(references.target, references.table, env=variables, **options) as engine:
        yield engine


def requests_and_outputs(references: References) -> tuple[list[Request], list[list[int]]]:
    """A few of each kind: one of the requests is long enough to span several blocks."""
    requests = references.requests["mixed"][:10] + references.requests["boundary"][:3]
    return requests, references.expected("mixed")[:10] + references.expected("boundary")[:3]


@pytest.mark.parametrize("pattern", ["right", "cycle", "wrong"])
def test_output_and_acceptance_of_one_rank(
    running: OracleEngine, references: References, pattern: str
) -> None:
    requests, expected = requests_and_outputs(references)
    answers = running.play(requests, pattern)
    assert output_ids(answers) == expected
    assert histograms(answers) == running.predicted(requests, pattern)
    errors = [error for entry in running.log() for error in entry["errors"]]
    assert errors and max(errors) < TOLERANCE  # the states are those of transformers


def test_logprobs(running: OracleEngine, references: References) -> None:
    requests = references.requests["logprobs"]
    answers = running.play(requests, "cycle")
    for played in zip(requests, answers, references.answers["logprobs"], strict=True):
        check_logprobs(*played)


def test_ranks_never_part(running: OracleEngine, references: References, seen: Path) -> None:
    """Anchors, states and the module's drafts are equal bit for bit, sampled requests included."""
    for old in seen.iterdir():
        old.unlink()
    requests, _ = requests_and_outputs(references)
    sampled = [
        Request(r.prompt, r.sequence, 24, {"temperature": 1.5, "top_p": 0.95} if i % 2 else {})
        for i, r in enumerate(requests)
    ]
    answers = running.play(sampled, "right")
    assert all(len(ids) == 24 for ids in output_ids(answers))
    assert output_ids(answers) != output_ids(running.play(sampled, "right"))  # it really samples

    calls = sorted(path.name.partition(".")[0] for path in seen.glob("*.rank0.pt"))
    assert len(calls) > 20
    table = embedding_table(references.target)
    drafter = load_drafter(running.drafter, device="cpu", dtype=torch.float32)
    for call in calls:
        first, second = (torch.load(seen / f"{call}.rank{rank}.pt") for rank in (0, 1))
        for name in ("group", "states", "drafts"):
            assert torch.equal(first[name], second[name]), (call, name)
        alone = drafter.draft(first["states"], first["group"], lambda ids: F.embedding(ids, table))
        assert torch.equal(alone.token_ids, first["drafts"]), call


def test_bf16_on_compiled_kernels(tmp_path: Path) -> None:
    """Sharded weights are packed, and the compiled draft step looks up a sharded table."""
    pytest.importorskip("sglang_dlite_kernel", reason="the compiled kernels are not built")
    target = tiny_models.make_target(tmp_path / "target", "qwen3")
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    prompts = [list(prompt) for prompt in random_prompts(len(bf16.LENGTHS), bf16.LENGTHS)]
    variables = {"DLITE_DRAFTER_FACTORY": None}
    with engine(target, drafter, dtype="bfloat16", tp_size=2, env=variables) as running:
        answers = running.generate(
            input_ids=prompts,
            sampling_params={
                "temperature": 0,
                "max_new_tokens": bf16.NEW_TOKENS,
                "ignore_eos": True,
            },
            return_logprob=True,
        )
    bf16.check_log_probabilities(target, prompts, answers)


def embedding_table(target: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]
