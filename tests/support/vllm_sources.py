"""What vLLM's sources say, without importing them: parameters of functions, and small functions.

`VLLM_SOURCES` names a folder with one unpacked source distribution for each release in it:

    pip download --no-deps --no-binary :all: --no-build-isolation vllm==0.26.0    # or by hand
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("VLLM_SOURCES", Path(__file__).parents[2] / ".peers/vllm_sources"))
RELEASES = sorted(p.parent.parent for p in FOLDER.glob("*/vllm/__init__.py"))
needs_sources = pytest.mark.skipif(not RELEASES, reason=f"no sources of vLLM in {FOLDER}")


class Sources:
    """A folder with a `vllm` package in it, for instance an unpacked source distribution."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module:
        path = self.folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        raise ModuleNotFoundError(module)

    def parameters(self, module: str, name: str) -> dict[str, bool]:
        """As `inspect.signature` would have them, and which have no default; of a class without
        `__init__`, its fields."""
        owner, _, attribute = name.rpartition(".")
        found = self.find(module, owner or attribute)
        if found is None:
            raise AttributeError(f"{module}.{name}")
        module, node = found
        if owner:
            node = self.method(module, node, attribute)
        if node is None:
            raise AttributeError(f"{module}.{name}")
        if isinstance(node, ast.ClassDef):
            if (init := self.method(module, node, "__init__")) is not None:
                _, *parameters = self.parameters_of(init).items()
                return dict(parameters)
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            return {n.target.id: n.value is None for n in fields}
        return self.parameters_of(node)

    def parameters_of(self, node: ast.FunctionDef) -> dict[str, bool]:
        a = node.args
        placed = [p.arg for p in (*a.posonlyargs, *a.args)]
        optional = set(placed[len(placed) - len(a.defaults) :])
        if any(getattr(d, "id", None) == "classmethod" for d in node.decorator_list):
            optional.add(placed[0])  # bound
        required = {name: name not in optional for name in placed}
        keywords = zip(a.kwonlyargs, a.kw_defaults, strict=True)
        variadic = {p.arg: False for p in (a.vararg, a.kwarg) if p is not None}
        return required | {p.arg: default is None for p, default in keywords} | variadic

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a class or function is defined that `module` has under a name."""
        for node in self.tree(module).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return module, node
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name or alias.name == "*":
                        wanted = name if alias.name == "*" else alias.name
                        if found := self.find(self.absolute(module, node), wanted):
                            return found
        return None

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        package = self.folder.joinpath(*module.split(".")).is_dir()
        parts = module.split(".")[: None if package and node.level == 1 else -node.level + package]
        return ".".join([*parts, node.module])

    def method(self, module: str, node: ast.ClassDef, name: str) -> ast.AST | None:
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == name:
                return member
        for parent in node.bases:
            where = module
            if isinstance(parent, ast.Attribute):  # mk.FusedMoEExpertsModular
                where, parent = self.alias(module, parent.value.id), ast.Name(parent.attr)
            found = self.find(where, parent.id) if where else None
            if found and (member := self.method(*found, name)) is not None:
                return member
        return None

    def alias(self, module: str, name: str) -> str | None:
        """The module that another one calls so."""
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == name:
                        return alias.name
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{self.absolute(module, node)}.{alias.name}"
        return None

    def text(self, module: str) -> str:
        return ast.unparse(self.tree(module))

    def functions(self, module: str, *names: str, **needed) -> list[Callable]:
        """Functions of a module that call each other and `needed`, and nothing else of it."""
        nodes = [node for node in self.tree(module).body if getattr(node, "name", None) in names]
        made = dict(needed)
        # annotations stay text, as in this file: they may name what is not there
        exec(compile(ast.Module(nodes, []), module, "exec"), made)
        return [made[name] for name in names]
