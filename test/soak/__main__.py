"""`make soak`: minutes of random traffic, every reply checked against the target alone.

A tiny random fp32 target, an oracle drafter and small K/V pools. Random arrivals,
lengths and priorities; penalties, bias, minimal lengths, stops, log-probabilities, grammars, logit
processors, n > 1, sampling; aborts, hang-ups, flushes, pauses. Greedy replies must be, token for
token, those of an engine without DLITE; of sampled ones the structure is checked. The scheduler
checks its pools after each step. Ends with a summary on the screen and in summary.json, and with
status 1 if anything was wrong.

    python test/soak --minutes 10 --seed 0
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "server"))

import tiny_models  # noqa: E402
from engines import environment  # noqa: E402
from oracle_engine import oracle_environment  # noqa: E402
from sglang_dlite.server_process import ServerProcess  # noqa: E402
from soak_canary import Canary  # noqa: E402
from soak_cases import Case, record_cases  # noqa: E402
from soak_report import Leg, Summary  # noqa: E402
from soak_traffic import Traffic  # noqa: E402
from tqdm import tqdm  # noqa: E402


class Setting(NamedTuple):
    """One leg's server."""

    name: str
    env: dict[str, str]
    options: tuple[str, ...]


STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
COMMON = (
    *("--dtype", "float32", "--random-seed", "0", "--log-level", "warning"),
    *("--max-running-requests", "16"),
    *("--enable-priority-scheduling", "--enable-custom-logit-processor"),
)
SETTINGS = (
    Setting(
        "overlap scheduler, pages of 16, too small a pool",
        # More are admitted than fit: an admission counts one token of output.
        {"DLITE_CPU_OVERLAP": "1", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"},
        ("--chunked-prefill-size", "32", "--page-size", "16", "--max-total-tokens", "1536"),
    ),
    Setting(
        # With mixed chunks decoding rows may take what a prompt's next chunk needs, and SGLang
        # stops: here all that runs fits, and only the cache does not.
        "no overlap, pages of 1, mixed chunks",
        {},
        ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--max-total-tokens", "6144"),
    ),
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """--minutes, --seed, --work-dir."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and traffic (default 0)")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("work/soak"), help="for summary.json and server logs"
    )
    args = parser.parse_args(argv)
    if not 0 < args.minutes < float("inf"):
        parser.error(
            f"--minutes is {args.minutes}; allowed is a number above 0. Give some minutes."
        )
    return args


def soak(
    setting: Setting, cases: list[Case], models: Path, log_path: Path, seconds: float, seed: int
) -> Leg:
    """One server's share: canary, traffic, canary."""
    leg = Leg(setting.name)
    folder = Path(tempfile.mkdtemp(dir=models))
    server = ServerProcess(
        models / "target",
        models / "drafter",
        log_path=log_path,
        extra_args=(*COMMON, *setting.options),
    )
    oracle = oracle_environment(models / "table.safetensors", folder)
    started = time.monotonic()
    try:
        with environment(**STRICT, **oracle, **setting.env), server:
            server.wait_ready()
            canary = Canary(server.base_url, cases, folder / "pattern")
            canary.sing("start", leg)
            bar = tqdm(total=round(seconds), desc=setting.name, unit="s", smoothing=0)

            def tick(now: float) -> None:
                bar.n = min(round(now), bar.total)
                bad = leg.counts["mismatch"] + leg.counts["failure"]
                bar.set_postfix(requests=leg.counts["requests"], wrong=bad, refresh=False)
                bar.refresh()

            asyncio.run(Traffic(server.base_url, cases, seed, leg).run(seconds, tick))
            bar.close()
            canary.sing("end", leg)
            server.require_alive()
            leg.healthy = True
    except Exception as error:  # a server that died is a finding, and the other leg goes on
        leg.problem("unhealthy", f"{type(error).__name__}: {error}")
    leg.seconds = time.monotonic() - started
    leg.read_log(log_path.read_text(errors="replace"))
    return leg


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    summary = Summary(args.minutes, args.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        models = Path(scratch)
        tiny_models.make_target(models / "target")
        tiny_models.make_drafter(models / "drafter")
        print("recording the target's own replies ...", flush=True)
        cases = record_cases(models / "target", args.seed, models / "table.safetensors")
        for number, setting in enumerate(SETTINGS):
            summary.legs.append(
                soak(
                    setting,
                    cases,
                    models,
                    args.work_dir / f"server-{number}.log",
                    args.minutes * 60 / len(SETTINGS),
                    args.seed + number,
                )
            )
    summary.write(args.work_dir / "summary.json")
    print(summary.text())
    print(f"written: {args.work_dir / 'summary.json'}")
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())
