"""HTML that cannot be injected into: whatever is not made here is escaped."""

from __future__ import annotations

import html
import json
import re
from itertools import zip_longest
from typing import Any

_EMPTY = {"br", "rect", "path", "line", "circle", "polyline", "polygon", "col"}


class Markup(str):
    """Text that is HTML already. Only this file makes it out of other text."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """A value as text on the page; characters that no page may hold are shown as �."""
    if isinstance(value, Markup):
        return value
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "�", text), quote=True))


def joined(*parts: object) -> Markup:
    return Markup("".join(escaped(part) for part in parts if part is not None))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """One element. `class_` is class, `aria_label` is aria-label; None leaves an attribute out, True gives it no value."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(f" {key}" if value is True else f' {key}="{escaped(value)}"')
    opening = f"<{name}{''.join(written)}"
    return Markup(f"{opening}/>" if name in _EMPTY else f"{opening}>{joined(*children)}</{name}>")


def table(head: list[str], rows: list[list[object]], caption: str | None = None) -> Markup:
    """A table that scrolls sideways by itself where it is too wide, and on a phone shows each row as a card."""
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, data_label=label) for label, cell in zip_longest(head[1 : len(row)], row[1:])),
        )
        for row in rows
        if row
    ]
    inside = tag("table", tag("caption", caption) if caption else None, tag("thead", top), tag("tbody", *body))
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption or ", ".join(head))


def as_data(value: Any) -> str:
    """Numbers for the page's script, as text of an attribute."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def from_markdown(text: str) -> Markup:
    """Headings, lists, tables, paragraphs and **strong** text: what a privacy statement is written in."""
    blocks: list[Markup] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in block.splitlines()]
        if lines[0].startswith("#"):
            level = min(6, len(lines[0]) - len(lines[0].lstrip("#")) + 2)
            blocks.append(tag(f"h{level}", lines[0].lstrip("# ")))
        elif lines[0].startswith("|") and len(lines) > 1:
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            blocks.append(table(cells[0], [[*row] for row in cells[2:]]))
        elif all(line.startswith("- ") for line in lines):
            blocks.append(tag("ul", *(tag("li", _strong(line[2:])) for line in lines)))
        else:
            blocks.append(tag("p", *(joined(_strong(line), " ") for line in lines)))
    return joined(*blocks)


def _strong(text: str) -> Markup:
    parts = text.split("**")
    return joined(*(tag("strong", part) if place % 2 else part for place, part in enumerate(parts)))
