"""The C interface without Python: its test programs and the example, under sanitizers; without them
`make test-c` runs them."""

import platform
import re
import shutil
import subprocess
import sys

import pytest
from c_programs import ROOT, compile_program, library, run
from covering import NIGHTLY, extent

PROGRAMS = sorted((ROOT / "tests/c").glob("test_*.c"))
# Random problems per variant, or rounds, where CI runs fewer than `make sanitize`: each activation
# once, which follows from a problem's number.
CASES = {"test_quantized": 7, "test_changing": 5}
# Fields of a forward that its backward does not read.
NOT_READ = {"experts_backward": {"forward.out"}, "gemm_backward": {"forward.out"}}
EXAMPLES = sorted((ROOT / "examples/c").glob("*.c"))


def passes(source, folder, *args, more=()):
    """What a program says that ends well under sanitizers."""
    done = run(compile_program(source, folder, sanitize=True, more=more), *args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("source", PROGRAMS, ids=lambda p: p.stem)
def test_program(source, tmp_path):
    cases = [] if NIGHTLY or source.stem not in CASES else [str(CASES[source.stem])]
    assert passes(source, tmp_path, *cases).startswith(f"{source.stem}: ")


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="AMX, --wrap")
def test_program_on_emulated_amx(tmp_path):
    """What surrounds the tiles, on machines without them: passes over K and scratch memory."""
    wrapped = [f"-Wl,--wrap=moelora_cpu_{function}" for function in ("isa", "kernels_of")]
    more = (str(ROOT / "tests/c/emulated_amx.c"), *wrapped)
    assert passes(ROOT / "tests/c/test_quantized.c", tmp_path, "7", more=more)


def test_random_arguments(tmp_path):
    """A few of what `make fuzz` tries; the same ones every time."""
    calls = str(extent(nightly=60000, ci=8000))
    said = passes(ROOT / "tests/c/fuzz_api.c", tmp_path, calls, "1")
    assert said.startswith(f"fuzz_api: {calls} calls")


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda p: p.stem)
def test_example(source, tmp_path):
    said = passes(source, tmp_path)
    differences = re.findall(r"max difference (\S+) of (\S+)", said)
    assert len(differences) >= 3
    assert all(float(difference) < 1e-5 * float(scale) for difference, scale in differences)


def test_the_sanitizer_notices_a_short_output(tmp_path):
    """The sanitized run is worth nothing if it cannot fail."""
    source = tmp_path / "overrun.c"
    source.write_text(
        """
#include "harness.h"
int main(void) {
  moelora_tensor w = random_tensor(MOELORA_F32, 1, SIZES(1, 64, 64));
  moelora_tensor out = view(malloc(64), MOELORA_F32, SIZES(1, 1, 1, 64, 64));
  return moelora_pack_weights(&w, &out, &serial);
}
"""
    )
    done = run(compile_program(source, tmp_path, sanitize=True))
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr


@pytest.mark.skipif(not shutil.which("nm"), reason="no binutils")
def test_the_library_allocates_nothing_and_knows_no_runtime():
    symbols = subprocess.run(["nm", "-u", library()], capture_output=True, text=True).stdout.split()
    wanted = {s for s in symbols if s not in ("U", "w") and not s.endswith(":")}
    assert "pthread_once" in wanted  # the list is not empty by mistake
    assert not wanted & {"malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign"}
    assert not [s for s in wanted if s.startswith(("Py", "_Py", "aoti_", "torch_", "cuda", "_Z"))]


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_public_header_stands_alone(language):
    compiler = shutil.which("cc" if language == "c" else "c++")
    if not compiler:
        pytest.skip(f"no {language} compiler")
    source = '#include "moelora.h"\nint main(void) { return moelora_has_device(MOELORA_CPU); }\n'
    command = [compiler, "-x", language, f"-std={language}11", "-pedantic", "-Wall", "-Wextra"]
    command += ["-Werror", f"-I{ROOT / 'csrc'}", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def tensor_fields(structs, name):
    """Paths of the tensors and factors in a struct of moelora.h."""
    for kind, fields in re.findall(r"(\w+)\s+([^;]+);", structs[name]):
        for path in (field.split("[")[0].strip() for field in fields.split(",")):
            if kind in ("moelora_tensor", "moelora_lora"):
                yield path
            elif kind in structs:
                yield from (f"{path}.{inner}" for inner in tensor_fields(structs, kind))


def test_operators_have_a_row_for_each_tensor():
    """Without one in core/operators.inc, nothing would check a field of the arguments."""
    paths = (ROOT / "csrc/moelora.h", ROOT / "csrc/core/backend.h")
    header = re.sub(r"/\*.*?\*/", "", "".join(p.read_text() for p in paths), flags=re.S)
    found = re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", header, re.S)
    structs = {name: body for name, body in found if name != "moelora_tensor"}
    rows = "#define ARG(KIND, ...) ARG_##KIND(__VA_ARGS__)\n" + "".join(
        f"#define {row}(NAME, {more}) {field}\n"
        for row, more, field in (
            *((f"ARG_{row}", "S, D, FIELD", "@FIELD") for row in ("INPUT", "OPTIONAL")),
            *((f"ARG_{row}", "S, D, FIELD", "@FIELD") for row in ("OUTPUT", "OPTIONAL_OUTPUT")),
            *((f"ARG_{row}", "B, FIELD", "@FIELD") for row in ("FACTORS", "FACTOR_GRADIENTS")),
            ("ARG_AT_LEAST", "...", ""),
            *((row, "...", "@@NAME") for row in ("OPERATOR", "CONVERSION")),
        )
    )
    command = ["cc", "-E", "-P", "-x", "c", "-I", str(ROOT / "csrc"), "-"]
    source = rows + '#include "core/operators.inc"\n'
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    blocks = re.sub(r"\s", "", done.stdout).split("@@")[1:]
    assert len(blocks) >= 11
    for block in blocks:
        name, *fields = block.split("@")
        expected = set(tensor_fields(structs, f"moelora_{name}_args"))
        assert set(fields) == expected - NOT_READ.get(name, set()), name
