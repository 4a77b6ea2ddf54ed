"""A process for each build of moelora, as one process can load only one extension module.

A build is NAME=MODULE, an extension module under the Python code of this repository, or NAME=DIR, a
checkout with its own code and module, for builds whose operators have other schemas. Behind commas
follow environment variables: `sm80=moelora/_C.abi3.so,MOELORA_MAX_CC=80`.

Scripts run from this repository in every process; only what they import from `moelora` is the
build's.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import ROOT

MODULE = "_C.abi3.so"
ANSWER = "@"  # prefix of answers in the output of a build's process


def serve(worker):
    """Run the methods of `worker` that the parent requests; in the process of a build."""
    for line in sys.stdin:
        asked = json.loads(line)
        print(ANSWER + json.dumps(getattr(worker, asked.pop("do"))(**asked)), flush=True)


def prepare(text, folder):
    """The environment in which Python finds the package of a build, linked in `folder`/NAME."""
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
    places = os.pathsep.join([str(home), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return dict(v.split("=", 1) for v in variables) | {"PYTHONPATH": places}


class Build:
    """The parent's handle of a build's process, which constructs `worker`, "module:Class" in this
    repository, from `arguments`. `folder` is temporary."""

    def __init__(self, text, folder, worker, *arguments):
        self.name = text.partition("=")[0]
        module, name = worker.split(":")
        code = f"from benchmarks.compare.builds import serve; from {module} import {name}; "
        code += f"serve({name}{arguments!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | prepare(text, folder),
        )

    def ask(self, do, **more):
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line[len(ANSWER) :])
        raise SystemExit(f"{self.name} ended with status {self.process.wait()} at {do}, {more}")


@contextlib.contextmanager
def started(texts, worker, *arguments):
    """Builds, whose processes end with the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        builds = []
        for text in texts:
            builds.append(Build(text, folder, worker, *arguments))
            stack.enter_context(builds[-1].process)
            stack.callback(builds[-1].process.kill)
        yield builds
