"""Pages of docs/ as notebooks: quick-start.md up to the demo, and tenants.md.

python examples/make_notebook.py
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
NOTEBOOKS = {  # by page
    DOCS / "quick-start.md": HERE / "quick_start.ipynb",
    DOCS / "tenants.md": HERE / "tenants.ipynb",
}
# Paths in the page are of the repository's top. Jupyter starts where the notebook is, or elsewhere;
# an editable install says where the checkout is.
START = """\
import os
from pathlib import Path

import moelora

near = Path.cwd(), *Path.cwd().parents, Path(moelora.__file__).parents[1]
checkouts = [folder for folder in near if (folder / "examples/demo_model").is_dir()]
assert checkouts, "open the notebook in a clone of moelora's repository, which has the demo's model"
os.chdir(checkouts[0])"""


def cells(page: str) -> list[dict]:
    text = page.split("\n## The demo\n")[0]
    text = re.sub(r" The same as a\s+notebook:\s[^\n]*\n", "\n", text)
    text = re.sub(r"\]\((?!\.\./|http)([^)]+)\)", r"](../docs/\1)", text)
    found = []
    for i, part in enumerate(re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)):
        if part.strip():
            found.append(cell("code" if i % 2 else "markdown", part.strip(), len(found)))
    return [found[0], cell("code", START, "start"), *found[1:]]


def cell(kind: str, text: str, name: int | str) -> dict:
    content = {"cell_type": kind, "id": f"cell-{name}", "metadata": {}}
    content |= {"execution_count": None, "outputs": []} if kind == "code" else {}
    return content | {"source": text.splitlines(keepends=True)}


def notebook(page: Path) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells(page.read_text()),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page, path in NOTEBOOKS.items():
        path.write_text(notebook(page))
