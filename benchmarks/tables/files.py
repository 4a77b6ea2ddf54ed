"""Result files, by topic: <card>-<topic>.json, the newest of several cards.

A file whose run ended early names in its meta what is `missing`, and is taken if there is no other.
"""

import json

from benchmarks import ROOT

AWAITED = "*Not measured yet.*"  # a table whose file, or its rows in it, are not there


def path_of(topic, device=None):
    """Path of the newest result file of a topic, optionally only those of `device`; None if there
    is none. GPU results are in <card>-<topic>.json, CPU results (topic cpu-...) in <topic>.json."""
    folder = ROOT / "benchmarks/results"
    if topic.startswith("cpu-"):
        found = [folder / f"{topic}.json"]
    else:
        found = [p for p in folder.glob(f"*-{topic}.json") if is_card(p.name, topic)]
    found = [path for path in found if path.exists()]
    found = [path for path in found if device in (None, read(path)[0]["device"])]
    found = [path for path in found if "missing" not in read(path)[0]] or found
    return max(found, key=lambda path: (read(path)[0]["date"], path.name), default=None)


def topics(prefix):
    """The topics of GPU result files that begin so."""
    names = (p.stem.partition("-")[2] for p in (ROOT / "benchmarks/results").glob("*.json"))
    return sorted({name for name in names if name.startswith(prefix)})


def is_card(name, topic):
    card = name.removesuffix(f"-{topic}.json")
    return "-" not in card and card != "cpu"


def other_devices(topic):
    """The cards whose files of a topic are not the newest."""
    paths = (ROOT / "benchmarks/results").glob(f"*-{topic}.json")
    found = {read(path)[0]["device"] for path in paths if is_card(path.name, topic)}
    return sorted(found - {card(topic)} if found else ())


def read(path):
    content = json.loads(path.read_text())
    return content["meta"], content["cases"]


used = {}  # {path: meta} of the files that were loaded


def load(topic, device=None):
    path = path_of(topic, device)
    used[path], rows = read(path)
    return used[path], rows


def used_by(make):
    """What `make` returns, and the meta of the files that it loaded."""
    used.clear()
    return make(), list(used.values())


def card(topic):
    """The GPU or CPU that a file was measured on."""
    return read(path_of(topic))[0]["device"]


def rows_of(topic, device=None):
    """Empty before it was measured."""
    return load(topic, device)[1] if path_of(topic, device) else []


def source(topic, device=None):
    path = path_of(topic, device)
    if path is None:
        return AWAITED
    meta, _ = read(path)
    about = ", ".join((meta["device"], f"torch {meta['torch']}", meta["commit"], meta["date"]))
    return f"`benchmarks/results/{path.name}`, {about}:\n\n```\n{meta['command']}\n```"
