"""A document as Markdown; drawings are links to PNG files beside it."""

from __future__ import annotations

from sglang_dlite.bench.report.content import (
    Block,
    Code,
    Document,
    Figure,
    Items,
    Table,
    Text,
    TokenRun,
)


def text(document: Document) -> str:
    """The whole file."""
    parts = [f"# {document.title}", document.subtitle]
    for section in document.sections:
        parts.append(f"## {section.title}")
        if any(isinstance(block, TokenRun) for block in section.blocks):
            parts.append("Accepted drafts are set in **bold**.")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Text(content):
            return content
        case Code(content):
            return f"```\n{content}\n```"
        case Items(heading, items):
            listed = "\n".join(f"- {' '.join(item.split())}" for item in items)
            return f"{heading}:\n\n{listed}"
        case Table():
            return table(block)
        case Figure(name, caption, _):
            return f"![{caption}]({name}.png)"
        case TokenRun(heading, _, tokens):
            shown = "".join(
                f"<b>{_in_html(token.text)}</b>" if token.kind == "draft" else _in_html(token.text)
                for token in tokens
            )
            return f"### {heading}\n\n<pre>{shown}</pre>"


def _in_html(piece: str) -> str:
    return piece.replace("&", "&amp;").replace("<", "&lt;").replace("\n\n", "\n&#8203;\n")


def table(block: Table) -> str:
    """A table in GitHub's dialect."""

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ["---" if i < block.left else "---:" for i in range(len(block.headings))]
    rows = [line(list(row)) for row in block.rows]
    return "\n".join([line(list(block.headings)), line(rule), *rows])
