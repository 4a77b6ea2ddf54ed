"""Check a built site: `python tests/project/check_site.py build/site` (what `make docs` runs).

Every link of a page to a page, picture, script or style of the site leads to a file, and to an
anchor of it; nothing is published but what browsers read. Needs only the standard library.
"""

import re
import sys
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

TARGET = re.compile(r"<[a-z][^>]*?\s(?:href|src)=(?:\"([^\"]*)\"|([^\s>\"]+))")
ANCHOR = re.compile(r"\s(?:id|name)=(?:\"([^\"]*)\"|([^\s>\"]+))")


@cache
def anchors(page: Path) -> set[str]:
    return {unescape(a or b) for a, b in ANCHOR.findall(page.read_text())}


def problems(site: Path) -> list[str]:
    """What is wrong with the site, in lines."""
    said = [
        f"{path.relative_to(site)} is published"
        for path in sorted(site.rglob("*"))
        if path.name == "__pycache__" or path.suffix in (".py", ".pyc")
    ]
    for page in sorted(site.rglob("*.html")):
        for link in sorted({unescape(a or b) for a, b in TARGET.findall(page.read_text())}):
            url = urlsplit(link)
            # 404.html is served at any depth, so its links start at the top of the site
            if url.scheme or url.netloc or page.name == "404.html":
                continue
            target = page.parent / unquote(url.path) if url.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                said.append(f"{page.relative_to(site)}: {link} leads nowhere")
            elif url.fragment and target.suffix == ".html":
                if unquote(url.fragment) not in anchors(target):
                    said.append(f"{page.relative_to(site)}: {link} has no such anchor")
    return said


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print(*found or ["site: every link leads somewhere"], sep="\n")
    sys.exit(bool(found))
