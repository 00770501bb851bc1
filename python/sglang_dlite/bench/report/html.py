"""A document as one HTML file that needs nothing else: styles and drawings are inside."""

from __future__ import annotations

import itertools
from html import escape

from sglang_dlite.bench.report.content import (
    Block,
    Code,
    Document,
    Figure,
    Items,
    Section,
    Table,
    Text,
    TokenRun,
)
from sglang_dlite.plot_style import svg

_STYLE = """
:root { color-scheme: light; --ink: #1d2939; --soft: #667085; --line: #e4e7ec; --blue: #1f6feb; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial,
  sans-serif; color: var(--ink); background: #f7f8fa; }
header { background: #101828; color: #fff; padding: 28px max(24px, calc(50vw - 560px)); }
header h1 { margin: 0 0 4px; font-size: 26px; font-weight: 650; }
header p { margin: 0; color: #cdd5df; }
nav { padding: 10px max(24px, calc(50vw - 560px)); background: #fff;
  border-bottom: 1px solid var(--line); font-size: 13px; }
nav a { color: var(--blue); text-decoration: none; margin-right: 16px; white-space: nowrap; }
main { max-width: 1168px; margin: 0 auto; padding: 8px 24px 64px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 24px 22px; margin-top: 20px; }
h2 { margin: 0 0 12px; font-size: 19px; }
h3 { margin: 18px 0 6px; font-size: 14px; font-weight: 600; }
p { margin: 10px 0; color: #475467; max-width: 95ch; }
.wide { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line);
  padding: 5px 12px 5px 0; vertical-align: bottom; }
td { text-align: right; border-bottom: 1px solid var(--line); padding: 5px 12px 5px 0;
  white-space: nowrap; vertical-align: top; }
th.left, td.left { text-align: left; }
td.long { white-space: normal; min-width: 22ch; overflow-wrap: anywhere; }
tbody tr:hover { background: #f9fafb; }
.figures { display: flex; flex-wrap: wrap; gap: 8px 28px; align-items: flex-end; }
figure { margin: 8px 0 14px; max-width: 100%; }
figure svg { display: block; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 13px; }
pre { background: #f2f4f7; padding: 10px 12px; border-radius: 6px; font-size: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 10px 0; font-size: 13px; color: #475467; }
summary { cursor: pointer; }
.prompt { color: var(--soft); border-left: 3px solid var(--line); padding-left: 10px;
  font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }
.tokens { font: 13px/2 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens > span, .legend span { border-radius: 3px; padding: 2px 0; box-shadow: inset -1px 0 #fff; }
.legend span { padding: 2px 8px; margin-right: 10px; font-size: 13px; }
.break { color: #98a2b3; }
.draft { background: #b7ebc6; } .target { background: #ffe2bf; } .prefill { background: #d6deea; }
"""

_LEGEND = (
    '<p class="legend"><span class="draft">drafted and accepted</span>'
    '<span class="target">the target\'s own token of a pass</span>'
    '<span class="prefill">first token, from the prefill</span></p>'
)
_FOLDED_FROM = 4  # items
_LONG_CELL = 40  # characters


def page(document: Document) -> str:
    """The whole page."""
    links = "".join(
        f'<a href="#s{number}">{escape(section.title)}</a>'
        for number, section in enumerate(document.sections)
    )
    body = "\n".join(
        f'<section id="s{number}">\n<h2>{escape(section.title)}</h2>\n'
        f"{_blocks(section)}\n</section>"
        for number, section in enumerate(document.sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(document.title)}</h1><p>{escape(document.subtitle)}</p></header>\n"
        f"<nav>{links}</nav>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _blocks(section: Section) -> str:
    parts = []
    legend_is_due = True
    for kind, group in itertools.groupby(section.blocks, key=type):
        if kind is TokenRun and legend_is_due:
            parts.append(_LEGEND)
            legend_is_due = False
        made = "\n".join(map(_block, group))
        parts.append(f'<div class="figures">{made}</div>' if kind is Figure else made)
    return "\n".join(parts)


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Items(heading, items):
            listed = "".join(f"<li>{escape(item)}</li>" for item in items)
            state = "" if len(items) >= _FOLDED_FROM else " open"
            return (
                f"<details{state}><summary>{escape(heading)}</summary><ul>{listed}</ul></details>"
            )
        case Table():
            return _table(block)
        case Figure(_, caption, drawing):
            return f"<figure>{svg(drawing)}<figcaption>{escape(caption)}</figcaption></figure>"
        case TokenRun():
            return _token_run(block)


def _table(table: Table) -> str:
    def cell(kind: str, column: int, text: str) -> str:
        classes = []
        if column < table.left:
            classes.append("left")
        if kind == "td" and len(text) > _LONG_CELL:
            classes.append("long")
        named = f' class="{" ".join(classes)}"' if classes else ""
        return f"<{kind}{named}>{escape(text)}</{kind}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(table.headings))
    rows = "".join(
        f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>\n"
        for row in table.rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _token_run(run: TokenRun) -> str:
    tokens = "".join(
        f'<span class="{token.kind}" title="{escape(token.hint)}">{_shown(token.text)}</span>'
        for token in run.tokens
        if token.text
    )
    prompt = f'<div class="prompt">{escape(run.prompt)}</div>' if run.prompt else ""
    return f'<h3>{escape(run.heading)}</h3>{prompt}<div class="tokens">{tokens}</div>'


def _shown(piece: str) -> str:
    """A token's text, with a mark for each line break: many a draft is one."""
    return escape(piece).replace("\n", '<span class="break">↵</span>\n')
