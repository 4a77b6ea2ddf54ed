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
REPOSITORY = "https://github.com/OWNER/moelora"
# Paths in the page are of the repository's top. Jupyter starts where the notebook is, or elsewhere;
# an editable install says where the checkout is. Without one, this folder is downloaded.
ARCHIVE = f"{REPOSITORY}/archive/main.tar.gz"
UNPACK = "tar xz --strip-components 1 --wildcards '*/examples'"
START = f"""\
import os
import subprocess
from pathlib import Path

import moelora

near = Path.cwd(), *Path.cwd().parents, Path(moelora.__file__).parents[1]
folders = [folder for folder in near if (folder / "examples/demo_model").is_dir()]
if not folders:  # the demo's model and adapters
    url = "{ARCHIVE}"
    line = f"curl -fL {{url}} | {UNPACK}"
    subprocess.run(line, shell=True, check=True)
os.chdir(folders[0] if folders else Path.cwd())"""


def cells(page: str, name: str) -> list[dict]:
    colab = REPOSITORY.replace("github.com", "colab.research.google.com/github")
    of_itself = (
        f"\n[Open in Colab]({colab}/blob/main/examples/{name}), "
        f"[download]({REPOSITORY}/raw/main/examples/{name}).\n"
    )
    text = page.split("\n## The demo\n")[0]
    text = re.sub(r" The same as a\s+notebook:\s[^\n]*\n", of_itself, text)
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
        "cells": cells(page.read_text(), NOTEBOOKS[page].name),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page, path in NOTEBOOKS.items():
        path.write_text(notebook(page))
