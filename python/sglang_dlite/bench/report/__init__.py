"""The report: one content, written as a self-contained HTML page, as Markdown and as PNG files."""
