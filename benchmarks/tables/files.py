"""Result files, by topic: <card>-<topic>.json, and of CPUs cpu-<...>.json, whose whole name it is.

Of several cards the newest file is taken. One whose run ended early names in its meta what is
`missing`, and is taken if there is no other.
"""

import json

import pandas as pd

from benchmarks import ROOT

used = {}  # {path: meta} of the files that were loaded


class NotMeasuredError(Exception):
    """There is no file of a topic, or it has no rows of a table."""


def read(path):
    content = json.loads(path.read_text())
    return content["meta"], content["cases"]


def topics(prefix):
    """{topic: paths}, of topics that begin so."""
    found = {}
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        card, _, topic = path.stem.partition("-")
        found.setdefault(path.stem if card == "cpu" else topic, []).append(path)
    return {topic: found[topic] for topic in sorted(found) if topic.startswith(prefix)}


def path_of(topic, device=None):
    """The file to take, optionally only of `device`."""
    found = [(read(path)[0], path) for path in topics(topic).get(topic, ())]
    found = [(meta, path) for meta, path in found if device in (None, meta["device"])]
    if not found:
        raise NotMeasuredError(topic)
    return max(found, key=lambda file: ("missing" not in file[0], file[0]["date"], file[1]))[1]


def flat(value, name=""):
    """{"rivals.vllm_base": ...} of nested dicts."""
    if not isinstance(value, dict):
        return {name: value}
    parts = [flat(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()]
    return {key: inner for part in parts for key, inner in part.items()}


def load(topic, device=None):
    """Meta, and a row per case. Integers stay integers, also where other cases have none."""
    path = path_of(topic, device)
    meta, cases = read(path)
    used[path] = meta
    return meta, pd.DataFrame(map(flat, cases), dtype=object)


def source(topic, device=None):
    """Provenance and command of a file."""
    path = path_of(topic, device)
    meta, _ = read(path)
    about = f"{meta['device']}, torch {meta['torch']}, {meta['commit']}, {meta['date']}"
    return f"`benchmarks/results/{path.name}`, {about}:\n\n```\n{meta['command']}\n```"


def on_others(topic, *tables):
    """Tables of each card whose file is not the one to take, and what was not measured there."""
    parts, taken = [], read(path_of(topic))[0]["device"]
    for device in sorted({read(path)[0]["device"] for path in topics(topic)[topic]} - {taken}):
        missing = read(path_of(topic, device))[0].get("missing")
        parts += [table(device=device) for table in tables]
        parts += [f"Not measured: {missing}."] if missing else []
        parts.append(source(topic, device))
    return "\n\n".join(parts)
