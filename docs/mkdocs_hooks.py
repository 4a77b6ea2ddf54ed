"""Hooks of mkdocs: links to files of the repository, which a site does not have, and docstrings."""

import re
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
REF = "main"


def on_page_markdown(markdown, page, config, **_):
    """Links out of docs/ lead to the repository; where its address is not known, text stays."""

    def absolute(link):
        text, target = link.groups()
        path = (HERE / PurePosixPath(page.file.src_uri).parent / target.partition("#")[0]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: there is no {target}")
        where = path.relative_to(HERE.parent).as_posix()
        url = (config.repo_url or "").rstrip("/")
        return f"[{text}]({url}/blob/{REF}/{where})" if url else text

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)", absolute, markdown)


def on_page_content(html, **_):
    """In docstrings a block is announced by two colons."""
    return re.sub(r"::(</p>\s*<(?:div|pre))", r":\1", html)
