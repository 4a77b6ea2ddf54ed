"""A process for each build of moelora, as one process can load only one extension module.

A build is NAME=MODULE, an extension module under the Python code of this repository, or NAME=DIR, a
checkout with its own code and module, for builds whose operators have other schemas. Behind commas
follow environment variables: `sm80=moelora/_C.abi3.so,MOELORA_MAX_CC=80`.

Scripts run from this repository in every process; only what they import from `moelora` is the
build's.
"""

import contextlib
import importlib
import multiprocessing
import os
import pathlib
import sys
import tempfile

from benchmarks import ROOT

MODULE = "_C.abi3.so"


def prepare(text, folder):
    """(the folder in which Python finds the package of a build, `folder`/NAME, its variables)"""
    name, _, rest = text.partition("=")
    path, *variables = rest.split(",")
    path = pathlib.Path(path).resolve()
    checkout = (path / "moelora" / MODULE).is_file()
    if not rest or not (checkout or path.is_file()):
        raise SystemExit(
            f"{text!r} is not NAME=MODULE[,VARIABLE=VALUE...] of a file, nor NAME=DIR of a "
            f"checkout with a moelora/{MODULE}"
        )
    home = pathlib.Path(folder) / name
    home.mkdir()
    if checkout:
        (home / "moelora").symlink_to(path / "moelora")
    else:
        (home / "moelora").mkdir()
        for part in (ROOT / "moelora").iterdir():
            if not part.name.startswith("_C."):
                (home / "moelora" / part.name).symlink_to(part)
        (home / "moelora" / MODULE).symlink_to(path)
    return str(home), dict(variable.split("=", 1) for variable in variables)


def _serve(pipe, home, variables, worker, arguments):
    """Answer the parent's calls; nothing here has imported moelora or torch before."""
    os.environ |= variables
    sys.path.insert(0, home)
    module, name = worker.split(":")
    worker = getattr(importlib.import_module(module), name)(*arguments)
    while True:
        do, more = pipe.recv()
        pipe.send(getattr(worker, do)(**more))


class Build:
    """The parent's handle of a build's process, which constructs `worker`, "module:Class" in this
    repository, from `arguments`. `folder` is temporary."""

    def __init__(self, text, folder, worker, *arguments):
        self.name, context = text.partition("=")[0], multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        arguments = end, *prepare(text, folder), worker, arguments
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        end.close()

    def ask(self, do, **more):
        try:
            self.pipe.send((do, more))
            return self.pipe.recv()
        except (EOFError, OSError):
            raise SystemExit(f"{self.name} ended at {do}, {more}") from None


@contextlib.contextmanager
def started(texts, worker, *arguments):
    """Builds, whose processes end with the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        builds = []
        for text in texts:
            builds.append(Build(text, folder, worker, *arguments))
            stack.callback(builds[-1].process.kill)
        yield builds
