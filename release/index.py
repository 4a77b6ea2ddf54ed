"""A package index in files: the pages that `pip install --index-url` reads (PEP 503).

    python release/index.py build/release/dist --out build/release/index
    python release/index.py dist --out site/whl --url https://…/releases/download/v0.1.0

Wheels of a version X+cpu are on an index of their own, OUT/cpu: to pip they are newer than X. Links
lead to copies of the files beside the page, or to `--url`, where a release has them; each has the
file's SHA-256, which pip compares. A page that is there keeps the files of other releases.
"""

import argparse
import hashlib
import html
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import quote

LINK = r'<a href="([^"]+)"[^>]*>([^<]+)</a>'
PYTHONS = html.escape(">=3.10")


def write_page(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    page = f"<!DOCTYPE html>\n<html><body>\n{body}\n</body></html>\n"
    path.write_text(page)


def index(files, out, url=None):
    """Writes OUT/index.html and OUT/moelora/index.html; the path of the latter."""
    page = out / "moelora" / "index.html"
    links = {}
    if page.exists():
        links = {name: target for target, name in re.findall(LINK, page.read_text())}
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        name = quote(file.name)
        where = f"{url.rstrip('/')}/{name}" if url else name
        links[file.name] = f"{where}#sha256={digest}"
        if url is None:
            page.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, page.parent)
    lines = [
        f'<a href="{target}" data-requires-python="{PYTHONS}">{name}</a><br>'
        for name, target in sorted(links.items())
    ]
    write_page(page, "\n".join(lines))
    write_page(out / "index.html", '<a href="moelora/">moelora</a>')
    return page


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with wheels and a source distribution")
    parser.add_argument("--out", type=Path, required=True, help="folder of the index")
    parser.add_argument("--url", help="where the files are (default: copied beside the page)")
    args = parser.parse_args(argv)
    files = [p for p in args.folder.iterdir() if p.name.endswith((".whl", ".tar.gz"))]
    for out, cpu in ((args.out, False), (args.out / "cpu", True)):
        print(index([p for p in files if ("+cpu-" in p.name) == cpu], out, args.url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
