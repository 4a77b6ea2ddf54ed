"""Writes what Hugging Face's `kernels` loads, a variant for each wheel:

    python release/hub.py OUT moelora-*.whl --cuda 13.0
    python release/hub.py OUT moelora          # the package of this checkout, as it was built

    OUT/README.md
    OUT/build/torch-stable-abi211-cpu-x86_64-linux/{__init__.py, _C.abi3.so, ..., metadata.json}
    OUT/build/torch-stable-abi211-cu130-x86_64-linux/...

`kernels` takes cu130 under a torch with CUDA 13, cpu under one without CUDA or by `backend="cpu"`.
docs/releasing.md says how OUT is uploaded.

The copy's imports are relative, since `kernels` imports it by a name that no other build has, its
"id"; that is also the namespace of its operators in torch, so that builds run beside each other.
metadata.json has the SHA-256 digests of all files (`kernels` 0.17). Variants by:
https://huggingface.co/docs/kernels/builder/variants
"""

import argparse
import ast
import base64
import hashlib
import json
import platform
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

TORCH = "torch-stable-abi211"  # LOWEST_TORCH of moelora/operators/startup.py
MACHINE = platform.machine()
ARCHS = ["8.0+PTX", "9.0a", "10.0", "12.0"]  # of the wheels
LAYERS = Path(__file__).with_name("hub_layers.py")
LEFT_OUT = ("bench", "commands", "__main__.py", "__pycache__", "_C.pyi", "py.typed")
CARD = """---
license: apache-2.0
tags: [kernels]
---
MoE layers with LoRA adapters fused into their grouped GEMMs.

    import kernels
    moelora = kernels.get_kernel("OWNER/moelora", version={version}, trust_remote_code=True)
"""


def relative(source, folders):
    """`source` of a module that is `folders` below the package, with relative imports."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(
            name.name.split(".")[0] == "moelora" for name in node.names
        ):
            raise ValueError(f"line {node.lineno}: write `from moelora import ...`")
        if isinstance(node, ast.ImportFrom) and not node.level:
            line = node.lineno - 1
            lines[line] = re.sub(
                r"from moelora\b\.?", "from " + "." * (folders + 1), lines[line], count=1
            )
    return "".join(lines)


def copy(package, out):
    """Copy what serves operators and integrations."""
    for path in sorted(package.rglob("*")):
        place = path.relative_to(package)
        if path.is_dir() or set(place.parts) & set(LEFT_OUT):
            continue
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            try:
                text = relative(path.read_text(), len(place.parts) - 1)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            (out / place).write_text(text)
        else:
            shutil.copyfile(path, out / place)


def digests(folder):
    """Base64 of the SHA-256 of each file but metadata.json."""
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "metadata.json"
    }


def write(package, out, version=1, cuda=None, machine=MACHINE):
    """One variant under OUT/build; its folder."""
    backend, content = "cpu", {"type": "cpu"}
    if b".nv_fatbin" in (package / "_C.abi3.so").read_bytes():
        if cuda is None:
            raise ValueError("has CUDA kernels: --cuda names the toolkit, such as 13.0")
        backend = "cu" + "".join(cuda.split(".")[:2])
        content = {"type": "cuda", "archs": ARCHS}
    folder = out / "build" / f"{TORCH}-{backend}-{machine}-linux"
    if folder.exists():
        raise ValueError(f"would be a second {folder}: name one package of each, and a new folder")
    copy(package, folder)
    shutil.copyfile(LAYERS, folder / "layers.py")
    with (folder / "__init__.py").open("a") as file:
        file.write("\nfrom . import layers  # noqa: E402\n")
    files = digests(folder)
    identity = hashlib.sha256(json.dumps([version, files]).encode()).hexdigest()[:12]
    metadata = {
        "id": f"moelora_{backend}_{identity}",
        "name": "moelora",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": content,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return folder


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("package", type=Path, nargs="+", help="a wheel, or a folder moelora")
    parser.add_argument("--version", type=int, default=1, help="branch v1, v2, ... of the Hub")
    parser.add_argument("--cuda", help="version of the toolkit of wheels with CUDA kernels")
    args = parser.parse_args(argv)
    for source in args.package:
        with tempfile.TemporaryDirectory() as unpacked:
            package, machine = source, MACHINE
            if source.suffix == ".whl":
                machine = re.search(r"(x86_64|aarch64)\.whl$", source.name)[1]
                with zipfile.ZipFile(source) as archive:
                    archive.extractall(unpacked)
                package = Path(unpacked, "moelora")
            if not (package / "_C.abi3.so").is_file():
                parser.error(f"{source} has no _C.abi3.so: make build, or name a wheel")
            try:
                print(write(package, args.out, args.version, args.cuda, machine))
            except ValueError as error:
                parser.error(f"{source}: {error}")
    (args.out / "README.md").write_text(CARD.format(version=args.version))


if __name__ == "__main__":
    main()
