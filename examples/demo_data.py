"""Text of the demo model: what it was trained on, what it is measured on, how bytes become tokens.

Every domain is text that a CPython installation carries, so training needs no download. Standard
library sources differ between Python versions; what the demo and the tests *measure* is therefore a
fixed excerpt of held-out files, committed under `demo_model/eval/` and the same everywhere.

The model's tokens are bytes. Byte 0 occurs in none of the texts and serves as padding.
"""

import sysconfig
import zlib
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "demo_model"
ADAPTERS_DIR = HERE / "demo_adapters"
EVAL_DIR = MODEL_DIR / "eval"
WINDOW = 256
EVAL_BYTES = 48 * WINDOW
HELD_OUT_SHARE = 8  # one file in this many is never trained on
STDLIB_PACKAGES = (
    *("asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "ensurepip"),
    *("html", "http", "importlib", "json", "logging", "multiprocessing", "sqlite3", "tomllib"),
    *("unittest", "urllib", "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo"),
)


DOMAINS = {  # of each, glob patterns below the standard library's folder
    "stdlib": ("LICENSE.txt", "*.py", *(f"{package}/**/*.py" for package in STDLIB_PACKAGES)),
    "reference": ("pydoc_data/topics.py",),
    "charmap": ("encodings/*.py",),
    "gui": ("turtle.py", "turtledemo/*.py", "tkinter/*.py", "idlelib/*.py"),
    "tests": ("test/test_*.py", "unittest/test/test*.py", "ctypes/test/*.py"),
}
NOT_STDLIB = ("_sysconfigdata", "turtle", "ctypes/test", "unittest/test")  # prefixes
ADAPTER_DOMAINS = tuple(name for name in DOMAINS if name != "stdlib")


def encode(text: str | bytes) -> torch.Tensor:
    data = text.encode() if isinstance(text, str) else text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def decode(ids: torch.Tensor) -> str:
    return bytes(ids.tolist()).replace(b"\0", b"").decode(errors="replace")


def _documents(domain: str) -> dict[str, bytes]:
    """Name -> text, in a fixed order."""
    if domain == "reference":
        return _reference()
    excluded = NOT_STDLIB if domain == "stdlib" else ()
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {}
    for path in sorted({p for pattern in DOMAINS[domain] for p in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        data = path.read_bytes()
        if name.startswith(excluded) or b"\0" in data:
            continue
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        documents[name] = data
    return documents


def _reference(size: int = 4096) -> dict[str, bytes]:
    """pydoc's help topics in sections. Topics repeat one another; a paragraph is taken once."""
    from pydoc_data.topics import topics

    sections = [b""]
    for paragraph in dict.fromkeys(
        p for name in sorted(topics) for p in topics[name].split("\n\n")
    ):
        if len(sections[-1]) >= size:
            sections.append(b"")
        sections[-1] += paragraph.encode() + b"\n\n"
    return {f"topics/{i}": text for i, text in enumerate(sections)}


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def training_tokens(domain: str) -> torch.Tensor:
    """All training text of one domain, concatenated."""
    texts = [text for name, text in _documents(domain).items() if not _is_held_out(name)]
    data = b"\n".join(texts)
    if len(data) < 50_000:
        raise RuntimeError(
            f"this Python carries {len(data)} bytes of the domain {domain!r}, training wants 50000 "
            f"or more; a full CPython build has the files {DOMAINS[domain]}"
        )
    return encode(data)


def draw_rows(text: torch.Tensor, count: int, length: int = WINDOW, seed: int = 0) -> torch.Tensor:
    """`(count, length)` tokens, each row from a random place of `text`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


def held_out_excerpt(domain: str, size: int = EVAL_BYTES, pieces: int = 8) -> bytes:
    """About `size` bytes of held-out text, cut at line ends: one piece from each of a few
    documents, the first piece near the document's beginning, the last near its end."""
    each = size // pieces + 1
    documents = [t for n, t in _documents(domain).items() if _is_held_out(n) and len(t) >= each]
    if len(documents) < pieces:
        raise RuntimeError(f"{domain!r}: {len(documents)} held-out documents, wanted {pieces}")
    excerpt = b""
    for piece in range(pieces):
        text = documents[piece * len(documents) // pieces]
        start = text.rfind(b"\n", 0, (len(text) - each) * piece // (pieces - 1) + 1) + 1
        end = text.find(b"\n", start + each) + 1
        excerpt += text[start : end or len(text)]
    return excerpt


def eval_windows(domain: str, count: int | None = None, folder: Path = EVAL_DIR) -> torch.Tensor:
    """`count` windows spread over the committed held-out text, `(count, WINDOW)` tokens."""
    tokens = encode((folder / f"{domain}.txt").read_bytes())
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    if count is None:
        return windows
    if not 1 <= count <= len(windows):
        raise ValueError(f"count is {count}, {domain!r} has {len(windows)} windows")
    return windows[torch.arange(count) * len(windows) // count]
