"""The text of a page that is made from its figures: paragraphs are wrapped, and tables, headings and lists stay."""

import textwrap


def wrapped(text: str) -> str:
    """Parts are apart by an empty line."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(part if part[0] in "#|!-" else textwrap.fill(part, 118) for part in parts) + "\n"
