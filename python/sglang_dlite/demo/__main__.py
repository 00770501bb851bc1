"""`python -m sglang_dlite.demo`: the session with and without DLITE, as a table and as JSON."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from sglang_dlite.demo.launch import ending_by_exception, prepare_models, wait_ready
from sglang_dlite.demo.player import ChatClient, Played, RequestError, play
from sglang_dlite.demo.report import DLITE, PLAIN, Report, summarise, table, write_json
from sglang_dlite.demo.session import SESSION
from sglang_dlite.embedded_model import EmbeddedModelError
from sglang_dlite.server_process import ServerError, ServerProcess

# Both servers run on one machine: a bounded pool leaves memory for the other one. It holds one
# session at the model's full context, twice over.
SERVER_ARGS = ("--max-total-tokens", "16384")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="python -m sglang_dlite.demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=cache / "sglang-dlite" / "demo",
        help="where the servers' logs go (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="sessions per arm (default: %(default)s)"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=len(SESSION),
        help="play only the first turns of the session (default: all %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=160, help="longest reply (default: %(default)s)"
    )
    parser.add_argument("--show-replies", action="store_true", help="print DLITE's replies")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, not {args.repeats}")
    if not 1 <= args.turns <= len(SESSION):
        parser.error(f"--turns must be 1 to {len(SESSION)}, not {args.turns}")
    if args.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {args.max_tokens}")
    if args.json is not None and args.json.is_dir():
        parser.error(f"--json needs a file, {args.json} is a directory")
    return args


def run_demo(args: argparse.Namespace, console: Console) -> Report:
    """Start both servers, play the session, stop the servers."""
    models = prepare_models(console)
    # Both are up at once, so that a turn's two measurements lie seconds apart; a server without
    # a request sleeps.
    with contextlib.ExitStack() as stack:
        servers = {
            arm: ServerProcess(
                models.target,
                models.drafter if arm == DLITE else None,
                log_path=args.work_dir / f"{arm}.log",
                extra_args=SERVER_ARGS,
            )
            for arm in (DLITE, PLAIN)
        }
        for server in servers.values():
            stack.enter_context(server)
        clients = {}
        for arm, server in servers.items():
            wait_ready(server, f"the {arm} server", console)
            clients[arm] = ChatClient(server.base_url)
            stack.callback(clients[arm].close)

        played: list[Played] = []
        with console.status("warming up") as status:
            for item in play(
                clients,
                SESSION[: args.turns],
                repeats=args.repeats,
                max_tokens=args.max_tokens,
                on_turn=lambda repeat, turn, arm: status.update(
                    f"session {repeat + 1}/{args.repeats}, turn {turn}/{args.turns}, {arm}"
                ),
            ):
                played.append(item)
                console.print(progress_line(item, args), highlight=False, soft_wrap=True)
                if args.show_replies and item.arm == DLITE and item.repeat == 0:
                    console.print(f"[dim]{escape(item.reply.text)}[/]", highlight=False)
        console.print("stopping the servers")
    return summarise(played)


def progress_line(item: Played, args: argparse.Namespace) -> str:
    reply = item.reply
    line = (
        f"session {item.repeat + 1}/{args.repeats}  turn {item.turn}/{args.turns}  "
        f"{item.arm:<11}  prompt {reply.prompt_tokens:>5} ({reply.cached_tokens:>5} cached)  "
        f"output {reply.output_tokens:>4}  {reply.tok_per_s:>6.1f} tok/s"
    )
    accept_length = reply.accept_length
    return line if accept_length is None else f"{line}  accept length {accept_length:.2f}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console()
    try:
        with ending_by_exception():
            report = run_demo(args, console)
    except KeyboardInterrupt:
        console.print("stopped; the servers are down")
        return 130
    except (EmbeddedModelError, ServerError, RequestError) as error:
        # The servers' logs stay; for a server that has died the message holds the end of its log.
        print(f"error: {error}\n(server logs: {args.work_dir})", file=sys.stderr)
        return 1
    console.print(table(report))
    console.print(
        f"speed-up {report.speedup:.2f}x in output tokens per second, "
        f"accept length {report.accept_length:.2f}; "
        f"{report.same_replies} of {args.turns} replies are the same on both arms"
    )
    if args.json is not None:
        write_json(report, args.json)
        console.print(f"wrote {escape(str(args.json))}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
