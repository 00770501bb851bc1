"""`python -m sglang_dlite.demo.serve`: the embedded model with DLITE, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from sglang_dlite.demo.launch import ending_by_exception, prepare_models
from sglang_dlite.embedded_model import EmbeddedModelError
from sglang_dlite.server_process import ServerError, ServerProcess


def curl_line(base_url: str) -> str:
    """A request that can be pasted into another terminal."""
    body = (
        '{"messages": [{"role": "user", "content": "Write a Python function that '
        'reverses a string."}], "max_tokens": 128, "temperature": 0}'
    )
    return f"curl -s {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_dlite.demo.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=30000, help="default: %(default)s")
    args, server_args = parser.parse_known_args(argv)
    console = Console()
    try:
        with ending_by_exception():
            models = prepare_models(console)
            # The server's own log is the progress here. Arguments we do not know are SGLang's.
            with ServerProcess(
                models.target, models.drafter, port=args.port, extra_args=server_args
            ) as server:
                server.wait_ready()
                console.print("\nready; try, in another terminal:\n", style="bold")
                print(curl_line(server.base_url), end="\n\n", flush=True)
                console.print("Ctrl-C stops the server")
                status = server.wait()
        print(f"error: the server ended by itself, with status {status}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; the server is down")
        return 0
    except (EmbeddedModelError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
