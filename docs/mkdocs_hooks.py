"""mkdocs hooks: generated tables, links to files of the repository, and docstrings."""

import os
import re
import sys
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
REF = os.environ.get("MOELORA_DOCS_REF", "main")  # whose files pages link to

sys.path.insert(0, str(HERE.parent))
from benchmarks import tables  # noqa: E402


def on_page_markdown(markdown, page, config, **_):
    """Inserts tables. Points links out of docs/ to the repository, or drops them if unknown."""
    url = (config.repo_url or "").rstrip("/")

    def absolute(link):
        text, target = link.groups()
        path = (HERE / PurePosixPath(page.file.src_uri).parent / target.partition("#")[0]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: there is no {target}")
        where = path.relative_to(HERE.parent).as_posix()
        return f"[{text}]({url}/blob/{REF}/{where})" if url else text

    text = re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)", absolute, tables.for_site(markdown))
    return text.replace("https://github.com/OWNER/moelora", url) if url else text


def on_page_content(html, **_):
    """In docstrings, two colons announce a code block."""
    return re.sub(r"::(</p>\s*<(?:div|pre))", r":\1", html)
