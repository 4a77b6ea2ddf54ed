"""Documentation keeps up with the code: docstrings, links, examples, commands, stubs.

Python in a page runs, block after block, from the top of the repository; what cannot has
`<!-- not run: why -->` above it.
"""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check_site
import pytest
import torch
from checkout import needs_checkout
from covering import extent

import moelora
from benchmarks import tables
from moelora import _C
from moelora.__main__ import main
from moelora.bench import shapes
from moelora.operators import tuned
from moelora.operators.docstrings import ENTRIES, GROUPS, expand

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FUNCTIONS = [name for name in moelora.__all__ if inspect.isfunction(getattr(moelora, name))]
OPERATORS = [name for name in FUNCTIONS if inspect.signature(getattr(moelora, name)).parameters]


@pytest.mark.parametrize("name", sorted(moelora.__all__))
def test_what_users_import_is_documented(name):
    value = getattr(moelora, name)
    assert isinstance(value, str) or value.__doc__
    for method, function in vars(value).items() if inspect.isclass(value) else ():
        function = function.fget if isinstance(function, property) else function
        if inspect.isfunction(function) and not method.startswith("_"):
            assert method in ("dtype", "device") or function.__doc__, method


@pytest.mark.parametrize("room", ["moelora", "moelora.integrations.transformers"])
def test_the_api_reference_has_every_public_name(room):
    """`experts_forward` is for transformers to call."""
    found = importlib.import_module(room)
    public = {name: getattr(found, name) for name in found.__all__ if name != "experts_forward"}
    wanted = {f"{value.__module__}.{n}" for n, value in public.items() if callable(value)}
    text = (ROOT / "docs/api.md").read_text()
    entries = re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", text, re.M)
    has = {f"{n}.{m}" if m else n for n, members in entries for m in members.split(", ")}
    assert wanted - has == set()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_document_every_parameter(name):
    function = getattr(moelora, name)
    signature = inspect.signature(function)
    returns = [] if signature.return_annotation in (None, "None") else ["Returns"]
    text = inspect.getdoc(function)  # from Python 3.13 on __doc__ is not indented
    for section in ["Parameters", *returns, "Raises"]:
        assert f"{section}\n{'-' * len(section)}" in text, section
    described = re.split("(?:Returns|Raises)\n", text.split("Parameters\n")[1])[0]
    names = list(signature.parameters)
    for first, last in re.findall(r"\b(\w+), \.\.\., (\w+)", described):
        described += " " + " ".join(names[names.index(first) : names.index(last)])
    for parameter in names:
        assert re.search(rf"\b{parameter}\b", described), f"{name}: {parameter}"


PLACEHOLDER = re.compile(r"^ *\{(\w+)\??\}", re.M)


def test_docstrings_have_what_they_share():
    sources = [*(ROOT / "moelora").rglob("*.py")]
    used = [name for path in sources for name in PLACEHOLDER.findall(path.read_text())]
    used += [one for name in used for one in GROUPS.get(name, ())]
    assert {name for name in ENTRIES if used.count(name) < 2} == set(), "used once"
    for name in OPERATORS:
        assert not PLACEHOLDER.search(getattr(moelora, name).__doc__), name


def test_shared_docstrings_take_more_words_and_any_indentation():
    text = """What it does.

    {topk_ids?} Words that follow,
        and more of them.
    activation : {"silu", "gelu"}
        {not one}
    """
    want = """What it does.

    topk_ids : Tensor, shape (M, top_k), int32 or int64, optional
        Experts of each token. Words that follow, and more of them.
    activation : {"silu", "gelu"}
        {not one}
    """
    assert expand(text) == want
    assert expand(inspect.cleandoc(text)) == inspect.cleandoc(want)  # as from Python 3.13 on
    with pytest.raises(KeyError, match="nobody"):
        expand("    {nobody}")


def test_stubs_name_what_there_is():
    tree = ast.parse((ROOT / "moelora/_C.pyi").read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert named == {name for name in vars(_C) if not name.startswith("_")}


# ---- pages ----


def page_id(path):
    return path.relative_to(ROOT).as_posix()


def anchors(path):
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(page):
    """(Link, file it leads to, anchor) for each link of a page to a file of the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http", "../../actions/")):  # the latter: pages that GitHub makes
            file, _, anchor = target.partition("#")
            yield target, (page.parent / file).resolve() if file else page, anchor


@needs_checkout
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target, path, anchor in links(page):
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@needs_checkout
def test_every_page_is_two_clicks_from_the_readme():
    pages = {README}
    for _ in range(2):
        pages |= {path for page in pages for _, path, _ in links(page) if path in PAGES}
    assert pages == set(PAGES)


def test_a_built_site_is_checked(tmp_path):
    """`make docs` fails for links that lead nowhere, and for files that are no part of a site."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page/index.html").write_text('<h2 id="a">A</h2><a href=../style.css>')
    (tmp_path / "style.css").touch()
    good = '<a href="page/#a"> <a href=page/> <a href="https://example.org/x"> <a href="#">'
    (tmp_path / "index.html").write_text(good)
    assert check_site.problems(tmp_path) == []
    (tmp_path / "index.html").write_text(good + '<img src="b.png"><a class="x" href="page/#b">')
    (tmp_path / "__pycache__").mkdir()
    assert check_site.problems(tmp_path) == [
        "__pycache__ is published",
        "index.html: b.png leads nowhere",
        "index.html: page/#b has no such anchor",
    ]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_examples_are_in_their_language(page):
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "json"):
        json.loads(block)


NOT_RUN = r"<!-- not run: [^\n]+ -->\n"
RUN = re.compile(rf"({NOT_RUN})?^```python\n(.*?)^```", re.M | re.S)


def runnable(page):
    return [code for skipped, code in RUN.findall(page.read_text()) if not skipped]


# Sizes of a page, and those that CI runs it with.
SMALLER = {
    "docs/tenants.md": {"BATCHES, EPOCHS = 4, 256, 16, 2": "BATCHES, EPOCHS = 2, 64, 4, 2"},
    "docs/transformers.md": {
        "generation_config=settings)": "generation_config=settings, "
        "continuous_batching_config=ContinuousBatchingConfig(num_blocks=16))",
        "import GenerationConfig": "import ContinuousBatchingConfig, GenerationConfig",
    },
}


@needs_checkout
@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=page_id)
def test_examples_run_when_pasted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = "\0".join(runnable(page))
    if "transformers" in text:
        pytest.importorskip("peft")
    for given, smaller in extent(nightly={}, ci=SMALLER.get(page_id(page), {})).items():
        assert given in text
        text = text.replace(given, smaller)
    names = {"__name__": page.stem}
    for code in text.split("\0"):
        exec(compile(code, str(page), "exec"), names)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs code in a folder of a checkout that was installed as README says, and returns it."""
    where = tmp_path_factory.mktemp("installed")
    tree, python = where / "moelora", where / "env/bin/python"
    # out: what earlier builds and runs left here
    out = shutil.ignore_patterns(*(".?*", "build", "dist", "out", "_C.abi3.so", "*.egg-info"))
    shutil.copytree(ROOT, tree, ignore=out)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"MOELORA_CUDA": "0"}

    def run(*words, cwd=tree):
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "venv", "--without-pip", where / "env")
    (site,) = (where / "env").glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    (options, _) = re.findall(r"pip install (--no-build-isolation .*?\])", README.read_text())
    run(python, "-m", "pip", "install", "--no-deps", *shlex.split(options.replace('"', "")))
    return lambda code, folder: run(python, "-c", code, cwd=tree / folder)


@needs_checkout
@pytest.mark.timeout(900)  # most of it is pip and the imports of torch
def test_pages_and_notebooks_begin_where_moelora_was_installed(installed):
    """README's block in the checkout, the command and the first cells of each notebook anywhere."""
    installed("\n".join(runnable(README)), ".")
    there = "import os, sys; command = os.path.dirname(sys.executable) + '/moelora'; "
    installed(there + "os.execv(command, [command, 'replay', '-h'])", "/")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        start, first = cells_of(path)[:2]
        assert "import moelora" in first
        installed(f"{start}\nimport moelora", "/")


@needs_checkout
def test_notebooks_are_pages_and_run(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import make_notebook

    for page, path in make_notebook.NOTEBOOKS.items():
        assert path.read_text() == make_notebook.notebook(page), "python examples/make_notebook.py"
        assert cells_of(path)[1:] == [block.strip() for block in runnable(page)]
    monkeypatch.chdir("/")
    names = {"__name__": "notebook"}
    for cell in cells_of(ROOT / "examples/quick_start.ipynb"):  # the other's run as the page
        exec(compile(cell, "quick_start.ipynb", "exec"), names)


def cells_of(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_first_example_is_short():
    (code,) = runnable(ROOT / "README.md")
    assert len(code.splitlines()) == 10  # "Ten lines of Python"


@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_the_line_that_proves_it_is_that_of_the_log(page, monkeypatch, caplog):
    from moelora.integrations import vllm

    monkeypatch.setattr(vllm, "_said", set())
    with caplog.at_level("INFO"):
        vllm.say_served()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said in (ROOT / page).read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page):
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.S))
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z][a-z-]+)", code)):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    command = r"(?:^|`|-m )moelora ([a-z]+(?: plot| compare| engine)?)"
    for words in set(re.findall(command, code, re.M)):
        with pytest.raises(SystemExit) as stopped:
            main([*words.split(), "--help"])
        assert stopped.value.code == 0, words


def test_pages_name_every_variable():
    """And only those that the code reads."""
    sources = [*(ROOT / "moelora").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")]
    text = "\n".join(path.read_text() for path in sources)
    page = (ROOT / "docs/troubleshooting.md").read_text()
    read = set(re.findall(r'"(MOELORA_\w+[A-Z])"', text))
    assert read == set(re.findall(r"`(MOELORA_\w+)=", page))


@needs_checkout
@pytest.mark.parametrize("page", tables.PAGES)
def test_measured_numbers_are_those_of_the_files(page):
    text = (ROOT / page).read_text()
    assert tables.filled(text) == text, "the result files changed: make tables"


@needs_checkout
def test_the_site_inserts_every_table_that_pages_leave_out():
    text = (ROOT / "docs/measurements.md").read_text()
    assert tables.section("layer_all") not in text
    made = tables.for_site(text)
    assert tables.section("layer_all") in made and "<!-- site" not in made


@pytest.mark.parametrize("address", ["https://example.org/a/moelora", ""])
def test_the_site_names_its_repository(monkeypatch, address):
    """Pages have OWNER in its place; without an address links out of docs/ are text."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import mkdocs_hooks

    page = SimpleNamespace(file=SimpleNamespace(src_uri="quick-start.md"))
    text = "[a](../examples/README.md) curl https://github.com/OWNER/moelora/archive/main.tar.gz"
    made = mkdocs_hooks.on_page_markdown(text, page, SimpleNamespace(repo_url=address))
    if address:
        wanted = f"[a]({address}/blob/main/examples/README.md) curl {address}/archive/main.tar.gz"
        assert made == wanted
    else:
        assert made == text.replace("[a](../examples/README.md)", "a")


def test_tables_name_models_as_the_benchmarks_do():
    assert {key: (m.name, m.experts) for key, m in shapes.MODELS.items()} == tables.cases.MODELS


def test_the_message_in_the_page_is_the_librarys():
    """Behind the operator's name, which Python adds."""
    x, w13, w2 = torch.ones(3, 40), torch.ones(2, 64, 40), torch.ones(2, 41, 32)
    routing = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError) as raised:
        moelora.fused_experts_lora(x, w13, w2, *routing)
    message = str(raised.value).removeprefix("fused_experts_lora: ")
    assert f"`{message}`" in (ROOT / "docs/c-api.md").read_text()


def test_the_file_of_tuned_plans_in_the_page_is_one(tmp_path):
    (block,) = blocks(ROOT / "docs/benchmarks.md", "json")
    content = json.loads(block)
    path = tuned.write(tmp_path, content)
    assert path.name == ("E=128,top_k=8,K=2048,I=768,dtype=bf16,device=NVIDIA_H200.json")
    try:
        assert tuned.load(tmp_path) == len(",".join(content["plans"].values()).split(","))
    finally:
        _C.clear_tuned_plans()
