"""Cells, tables and sentences of cases."""

import re
import textwrap

from benchmarks import ROOT
from benchmarks.tables.columns import CASE, RATIOS, TABLES
from benchmarks.tables.files import AWAITED, card, rows_of


def known_models():
    """{key: (name, number of experts)} of moelora.bench.shapes.MODELS, read from its source."""
    source = (ROOT / "moelora/bench/shapes.py").read_text()
    found = re.findall(r'"([\w.-]+)": Model\("([^"]+)", (\d+),', source)
    return {key: (name, int(experts)) for key, name, experts in found}


MODELS = known_models()


def cases(name):
    """The rows of a table of TABLES."""
    topic, wanted, _ = TABLES[name]
    return [row for row in rows_of(topic) if wanted(row)]


def cell(row, field):
    value = row
    for name in field.split("."):
        value = value.get(name) if value else None
    if field == "model" and value in MODELS:
        name, experts = MODELS[value]
        cut = row.get("experts", experts) < experts
        return f"{name} ({row['experts']} experts)" if cut else name
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return "" if value is None else str(value)
    text = f"{value:.2f}" if field in RATIOS else f"{value:.{0 if value > 99.9 else 1}f}"
    return f"**{text}**" if field == "ours_us" else text


def markdown(titles, rows):
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(text or "-" for text in line) + " |" for line in lines)


def table(name):
    topic, _, columns = TABLES[name]
    rows = cases(name)
    return f"{card(topic)}:\n\n{made_of(columns, rows)}" if rows else AWAITED


def made_of(columns, rows):
    """A table of cases; columns without a value are left out."""
    pairs = [column.strip().split(": ") for column in f"{CASE}, {columns}".split(",")]
    cells = [[cell(row, field) for _, field in pairs] for row in rows]
    kept = [i for i in range(len(pairs)) if any(row[i] for row in cells)]
    return markdown([pairs[i][0] for i in kept], [[row[i] for i in kept] for row in cells])


def span(values, digits=2):
    values = [v for v in values if v is not None]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def thousands(*numbers):
    return [f"{n:,}" if n else "" for n in numbers]


def over(a, b):
    return f"{a / b:.2f}" if a and b else ""


def wrapped(text):
    text = " ".join(text.split())
    return textwrap.fill(text, 104, break_long_words=False, break_on_hyphens=False)
