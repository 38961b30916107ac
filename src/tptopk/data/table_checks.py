"""An operator's own look at a table, outside the guarantee: what training would refuse it for, and what it would pass over in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tptopk.data.columns import MISSING, parsed
from tptopk.data.tables import Schema, numbers_of, text_columns

SHOWN = 5  # records that are named of those with one fault


def unit_findings(ids: Sequence[str], schema: Schema) -> str:
    """How many units there are, and how many of them have more records than take part."""
    counts = Counter(ids)
    more = sum(count > (schema.most_rows or 0) for count in counts.values())
    return f"{len(counts)} {schema.unit_word}s, {more} of them with more than {schema.most_rows} records (the first {schema.most_rows} take part)"


def faults(path: str | Path, schema: Schema) -> list[str]:
    """Every record that training would refuse the table for, with what stands there."""
    columns = text_columns(path, [*schema.used, schema.target, *([schema.unit] if schema.unit else [])])
    found = []
    for name, texts in columns.items():
        none = [n for n, text in enumerate(texts, 1) if text.lower() in MISSING]
        if name == schema.target:
            none = [n for n in none if texts[n - 1] not in schema.classes]
            strange = sorted({n for n, text in enumerate(texts, 1) if text not in schema.classes} - set(none))
            found += _listed(none, f"no label in {name!r}", [])
            found += _listed(strange, f"a label in {name!r} that is no class", texts)
        elif name == schema.unit:
            found += _listed(none, f"no {name!r}", [])
        elif name in schema.numeric:
            strange = [n for n, text in enumerate(texts, 1) if parsed([text]).text]
            found += _listed(strange, f"what is no number in column {name!r}", texts)
    return found


def _listed(records: Sequence[int], what: str, texts: Sequence[str]) -> list[str]:
    """`2 records have no label in 'ill': record 3, record 17`, the first few, and what stands there where texts are given."""
    if not records:
        return []
    places = [f"record {n}" + (f" ({texts[n - 1]!r})" if texts else "") for n in records[:SHOWN]]
    more = [f"and {len(records) - SHOWN} more"] if len(records) > SHOWN else []
    return [
        f"{len(records)} {'record has' if len(records) == 1 else 'records have'} {what}: {', '.join([*places, *more])}"
    ]


def beyond_bounds(path: str | Path, schema: Schema) -> list[str]:
    """How many numbers lie outside the bounds that were declared for them."""
    columns, found = text_columns(path, list(schema.numeric)), []
    for name, (low, high) in schema.numeric.items():
        values = numbers_of(columns[name], name, path)
        if beyond := int(((values < low) | (values > high)).sum()):
            whose = "1 record has" if beyond == 1 else f"{beyond} records have"
            found.append(
                f"{whose} a number outside [{low:g}, {high:g}] in column {name!r}, which counts as the nearest bound"
            )
    return found
