"""SGLang's own kits, from its wheel, against a DLITE server with the overlap scheduler.

The kits are upstream's and untouched. Ours are the servers, on free ports, and the sizes where
upstream's are a GPU's. docs/testing.md has the table: what applies, what does not, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import requests
import tiny_models
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.radix_cache_server_kit import gen_radix_tree
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
)
from sglang.test.kits.streaming_session_kit import (
    AbortLeakReproKitMixin,
    StreamingSessionKitMixin,
)
from sglang.test.server_fixtures import streaming_session_fixture
from sglang.test.server_fixtures.spec_eagle_fixture import PROMPTS, SpecEagleServerBase
from sglang.test.server_fixtures.streaming_session_fixture import (
    ABORT_REPRO_CHUNKED_PREFILL_SIZE,
    ABORT_REPRO_CONTEXT_LEN,
    ABORT_REPRO_PAGE_SIZE,
)
from sglang.test.test_utils import run_logprob_check
from sglang_dlite.assets import shipped_drafter_dir
from sglang_dlite.server_process import ServerError, ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.slow]

DTYPE = "bfloat16"
# What upstream's streaming-session fixture sets as well: slots are counted while requests run.
ENVIRONMENT = {
    "DLITE_CPU_OVERLAP": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
COMMON = ["--max-running-requests", "16", "--random-seed", "0", "--enable-streaming-session"]


class Watched:
    """The part of a Popen that kits ask for.

    Not a Popen: around one, upstream's CustomTestCase ends the whole run if the server dies.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server

    def poll(self) -> int | None:
        try:
            self.server.require_alive()
        except ServerError:
            return 1
        return None


class Served(SpecEagleServerBase):
    """Upstream's host of its speculative kits, on our server instead of one that it launches."""

    _tokenizer: ClassVar[Any] = None

    @classmethod
    def setUpClass(cls) -> None:
        """A fixture has launched the server."""

    @classmethod
    def tearDownClass(cls) -> None:
        """A fixture stops it."""

    def send_request(self) -> None:
        """Upstream's, of 48 tokens instead of 1024."""
        for prompt in PROMPTS:
            params = {"temperature": 0, "max_new_tokens": 48}
            body = {"text": prompt, "sampling_params": params}
            reply = requests.post(f"{self.base_url}/generate", json=body, timeout=120)
            assert reply.status_code == 200, reply.text

    def send_requests_abort(self) -> None:
        """Upstream's, hanging up after 0.2 s instead of 1 s."""
        for prompt in PROMPTS:
            params = {"temperature": 0, "max_new_tokens": 1024, "ignore_eos": True}
            body = {"text": prompt, "sampling_params": params}
            with pytest.raises(requests.exceptions.ReadTimeout):
                requests.post(f"{self.base_url}/generate", json=body, timeout=(5, 0.2))


@contextmanager
def serving(
    host: type[Served], model: Path, drafter: Path, log: Path, *args: str
) -> Iterator[None]:
    """A server that answers, and `host`'s classes pointed at it."""
    server = ServerProcess(
        model, drafter, log_path=log, extra_args=[*COMMON, *args], env=ENVIRONMENT
    )
    with server:
        server.wait_ready()
        host.model, host.base_url, host.process = str(model), server.base_url, Watched(server)
        yield
        server.require_alive()


@pytest.fixture(scope="module")
def plain_texts(
    embedded_model: Path, exact_dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The parity kit's references, of a server without speculation."""
    if exact_dtype != DTYPE:
        pytest.skip("rounding depends on the batch on this CPU (test_bf16.py has the bound)")
    log = tmp_path_factory.mktemp("plain") / "server.log"
    server = ServerProcess(embedded_model, log_path=log, extra_args=["--dtype", DTYPE])
    texts = {}
    with server:
        server.wait_ready()
        for prompt in SpecParityKit.parity_prompts:
            body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
            reply = requests.post(f"{server.base_url}/generate", json=body, timeout=120)
            texts[prompt] = reply.json()["text"]
    return texts


@pytest.fixture(scope="module")
def embedded(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The embedded model with its drafter, for all classes but the last."""
    log = tmp_path_factory.mktemp("kits") / "server.log"
    options = ["--dtype", DTYPE, "--max-total-tokens", "32768"]
    # The session kit asks for 100 000 tokens; this model's context has 8192.
    options.append("--allow-auto-truncate")
    with serving(Served, embedded_model, shipped_drafter_dir(), log, *options):
        yield


@pytest.mark.usefixtures("embedded")
class Embedded(Served):
    """Hosts of the kits that need a model that speaks."""


class TestCorrectness(Embedded, SpecCorrectnessKit):
    acc_length_thres = 1.25  # the shipped drafter's is 1.37 on the kit's prompt
    batch_accept_len_thres = 1.1


class TestParity(Embedded, SpecParityKit):
    @pytest.fixture(autouse=True)
    def references(self, plain_texts: dict[str, str]) -> None:
        self.parity_ref_outputs = plain_texts


class TestLogprobs(Embedded, SpecLogprobKit):
    def test_logprob_mixed(self) -> None:
        """Upstream's check, at a tenth of its prompt lengths, all at once."""
        cases = [
            (length, new_tokens, 0, start, return_logprob, top)
            for length in (20, 50, 100, 200)
            for new_tokens in (4, 8)
            for start in (0, 10, 30, 80, 199)
            if start < length
            for return_logprob in (True, False)
            for top in (0, 5)
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda case: run_logprob_check(self, case), cases))


class TestPenalties(Embedded, SpecPenaltyKit):
    pass


class TestFeatures(Embedded, SpecFeatureKit):
    def test_radix_attention(self) -> None:
        """Upstream's tree of prompts, of 40 nodes with up to 32 tokens instead of 400 with 256."""
        nodes = gen_radix_tree(num_nodes=40, chunk_len=32)
        params = [{"max_new_tokens": node["decode_len"], "temperature": 0} for node in nodes]
        body = {"input_ids": [node["input_ids"] for node in nodes], "sampling_params": params}
        reply = requests.post(f"{self.base_url}/generate", json=body, timeout=300)
        self.assertEqual(reply.status_code, 200, reply.text)
        self.assertIsNone(self.process.poll())


class TestGrammar(Embedded, SpecGrammarKit):
    pass


class TestMatchedStop(Embedded, MatchedStopMixin):
    def test_finish_stop_str(self) -> None:
        """Upstream's check; in a chat on a request that this model answers in lines."""
        stop = {"stop": "\n", "finish_reason": "stop", "matched_stop": "\n"}
        self._run_completions_generation(max_tokens=200, **stop)
        fruits = "List five fruits, one per line."
        self._run_chat_completions_generation(prompt=fruits, max_tokens=200, **stop)


class TestJSONSchema(Embedded, JSONConstrainedMixin):
    # Upstream's, with an end to the number: this model (HF's argmax as well) goes on writing 0.
    json_schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[\\w]{1,20}$"},
                "population": {"type": "integer", "minimum": 1, "maximum": 99999999},
            },
            "required": ["name", "population"],
            "additionalProperties": False,
        }
    )


class TestJSONMode(Embedded, JSONModeMixin):
    @property
    def client(self) -> openai.Client:
        return openai.Client(api_key="EMPTY", base_url=f"{self.base_url}/v1")


class TestRegex(Embedded, RegexConstrainedMixin):
    pass


class TestEBNF(Embedded, EBNFConstrainedMixin):
    def _run_decode_ebnf(self, ebnf: str, *args: Any, **options: Any) -> None:
        """Sampled, this model may go on with letters until the reply is cut: a word ends here."""
        super()._run_decode_ebnf(ebnf.replace("[a-z]+", "[a-z]{1,20}"), *args, **options)


class TestAPIContract(Embedded, BasicAPIContractMixin):
    pass


class TestAbortAll(Embedded, AbortAllMixin):
    abort_all_num_requests = 12
    abort_all_max_new_tokens = 2000


class TestPause(Embedded, PauseResumeInPlaceMixin):
    pause_num_requests = 8
    pause_max_new_tokens = 96
    pause_duration = 1.5
    pause_ignore_eos = True


class ChatTokenizer:
    """Makes chat messages of a kit's sentences: as they are, this model ends them at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.bos_token_id = tokenizer, tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]


class TestStreamingSessions(Embedded, StreamingSessionKitMixin):
    @pytest.fixture(autouse=True)
    def fewer_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """3 of 30 requests in each of three modes, not 10: a slot lost in one stops the server."""
        monkeypatch.setattr(streaming_session_fixture, "CONCURRENT_LOGPROB_ROUNDS", 3)

    @property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(super().tokenizer)


class Paged(Served):
    """Host of the kit that asks for a short context and large pages."""


@pytest.fixture(scope="module")
def paged(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("leak")
    drafter = tiny_models.make_drafter(folder / "drafter")
    options = {
        "--dtype": "float32",
        "--max-total-tokens": "16384",
        "--context-length": ABORT_REPRO_CONTEXT_LEN,
        "--page-size": ABORT_REPRO_PAGE_SIZE,
        "--chunked-prefill-size": ABORT_REPRO_CHUNKED_PREFILL_SIZE,
    }
    args = [str(part) for option in options.items() for part in option]
    with serving(Paged, target, drafter, folder / "server.log", *args):
        yield


@pytest.mark.usefixtures("paged")
class TestAbortLeak(Paged, AbortLeakReproKitMixin):
    pass
