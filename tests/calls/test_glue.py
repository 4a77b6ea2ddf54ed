"""The boundary between Python, torch and C: errors, ownership, threads, drift of the C ABI."""

import inspect
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import DEVICES
from glue_cases import TOP_K, E, I, K, M, inputs, op_calls, operator, tensors_in, with_another
from torch.utils._python_dispatch import TorchDispatchMode

import moelora
from moelora import _C
from moelora.operators import fake

ROOT = Path(__file__).resolve().parents[2]


LAYOUTS = ("w", "w13", "w2")  # weights whose layout an operator takes, of QuantizedWeights
PARTS = ("format", "order", "rows", "x_format", "x_scale")


def call(**changes):
    return moelora.fused_experts_lora(**{**inputs(), **changes})


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("fused_experts_lora", 16, 99, "activation is 99"),
        ("fused_experts_lora", 2, None, "w2 is None, expected a tensor"),
        ("fused_moe_lora_shrink", 2, [], "lora_a_stacked has 0 slices, expected 1 to 4"),
        ("moe_lora_align_block_size", 5, 0, "mode is 0, must be 1 (uniform) or 2 (segmented)"),
    ],
)
def test_the_operator_itself_raises_runtime_error(name, place, value, message):
    args = next(args for called, args in op_calls() if called == name)
    with pytest.raises(RuntimeError, match=re.escape(f"{name}: {message}")):
        operator(name)(*args[:place], value, *args[place + 1 :])
    status, text = _C.last_error()
    assert status == 1
    assert text.startswith(f"{name}: {message}")


def broken(tensor):
    """What an operator is likely to refuse in place of a tensor."""
    shape = tuple(tensor.shape)
    for dim in range(tensor.dim()):
        yield tensor.new_zeros(*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])
    yield tensor.unsqueeze(0)
    yield tensor.to(torch.int32 if tensor.is_floating_point() else torch.float32)
    yield tensor.to(torch.float64)
    yield tensor.new_zeros(()).expand(shape)
    yield tensor.new_zeros(2 * tensor.numel())[::2].view(shape)


# An argument in a message: before what is said about it, or behind what it is compared with.
TOLD = re.compile(
    r"\w+(?=(?:\[\d\])?(?: has dtype|\.size\(|\.stride\())|(?<=memory with )\w+|(?<= as )\w+$"
)


@pytest.mark.parametrize("case", op_calls(), ids=lambda case: case[0])
def test_messages_use_the_names_of_the_operator(case):
    """Errors name no argument that the called operator does not have."""
    name, args = case
    known = {argument.name for argument in operator(name)._schema.arguments}
    messages = []
    for place, index, tensor in tensors_in(args):
        for other in broken(tensor):
            try:
                operator(name)(*with_another(args, place, index, other))
            except RuntimeError as error:
                messages.append(str(error))
                assert set(TOLD.findall(messages[-1])) <= known, messages[-1]
    assert any(map(TOLD.search, messages))


class Refuses(TorchDispatchMode):
    """Raises what it is told, instead of calling anything."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError(self.text)


def test_an_error_that_quotes_ours_is_not_ours():
    """What was raised is told by its number, not by its text."""
    with pytest.raises(ValueError, match="hidden_states") as ours:
        call(hidden_states=torch.zeros(M))
    status, text = _C.last_error()
    assert (status, text) == (1, str(ours.value))
    number, given = _C.error_number(), inputs()
    with Refuses(f"again: {text}"), pytest.raises(RuntimeError, match="again: fused") as other:
        moelora.fused_experts_lora(**given)
    assert type(other.value) is RuntimeError
    assert _C.error_number() == number


def test_a_stale_error_is_not_blamed():
    with pytest.raises(ValueError, match="hidden_states"):
        call(hidden_states=torch.zeros(M))
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        operator("prepack_weights")("not a tensor")


@pytest.mark.parametrize("device", DEVICES[1:])
def test_tensors_on_two_devices(device):
    with pytest.raises(ValueError, match=r"w2 is on cuda \(index 0\), the first tensor is on cpu"):
        call(w2=inputs(device)["w2"])


def test_tables_of_wider_dtypes():
    given = inputs()
    want = moelora.fused_experts_lora(**given)
    wide = {name: given[name].long() for name in ("topk_ids", "token_lora_mapping", "lora_ranks")}
    wide |= {name: given[name].double() for name in ("topk_weights", "lora_scalings")}
    assert torch.equal(moelora.fused_experts_lora(**{**given, **wide}), want)


def test_a_list_of_one_is_a_tensor():
    given = inputs()
    want = moelora.fused_experts_lora(**given)
    given["w2_lora_a"] = [given["w2_lora_a"]]
    given["w2_lora_b"] = (given["w2_lora_b"],)
    assert torch.equal(moelora.fused_experts_lora(**given), want)


def test_shape_functions_agree_with_the_library():
    """max_blocks in Python is moelora_align_max_blocks in C."""
    for tokens in (0, 1, 3, 40):
        ids = torch.zeros(tokens, TOP_K, dtype=torch.int32)
        mapping = torch.zeros(tokens, dtype=torch.int32)
        weights = torch.zeros(tokens, TOP_K)
        for experts in (1, 5, 64):
            for size in (1, 4, 64):
                got = [
                    moelora.moe_align_block_size(ids, size, experts)[1],
                    moelora.moe_lora_align_block_size(ids, mapping, experts, size, 3)[1],
                    moelora.moe_lora_align_block_size(
                        ids, mapping, experts, size, 3, mode="segmented"
                    )[1],
                    moelora.moe_sorting(ids, weights, experts, size)[2],
                ]
                want = [fake.max_blocks(mode, ids.numel(), experts, 3, size) for mode in range(4)]
                assert [len(blocks) for blocks in got] == want


def tensors_of(given):
    for value in given.values():
        yield from value if isinstance(value, list) else [value]


def test_calls_and_failures_give_every_tensor_back():
    good = inputs()
    good["out"] = torch.empty(M, K)
    bad = {**good, "w2": torch.zeros(E, K, I + 64)}
    many = {**good, "w13_lora_a": [torch.zeros(1, 1, 1, K) for _ in range(9)]}
    watched = [t for given in (good, bad, many) for t in tensors_of(given)]
    before = [t._use_count() for t in watched]
    for _ in range(3):
        moelora.fused_experts_lora(**good)
        with pytest.raises(ValueError, match="w2"):
            moelora.fused_experts_lora(**bad)
        with pytest.raises(ValueError, match="w13_lora_a has 9 slices"):
            moelora.fused_experts_lora(**many)
    assert [t._use_count() for t in watched] == before


def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_failures_give_their_output_back():
    given = {**inputs(tokens=2**15), "w2": torch.zeros(E, K, I + 64)}
    size = given["hidden_states"].nbytes

    def fail():
        with pytest.raises(ValueError, match="w2"):
            moelora.fused_experts_lora(**given)

    fail()
    before = address_space()
    for _ in range(40):
        fail()
    assert address_space() - before < 10 * size


def test_module_functions():
    assert _C.version() == moelora.__version__
    variants, usable = _C.variants(), _C.usable()
    assert variants
    assert set(usable) <= set(variants)
    assert len(set(variants)) == len(variants)
    assert isinstance(_C.cpu_features(), str)
    assert isinstance(_C.has_cuda(), bool)
    call()
    assert any(name in _C.last_plan() for name in usable)


def test_wrappers_take_the_arguments_of_the_operators():
    """A parameter of a schema that no wrapper sets would be unreachable."""
    inside = {f"{w}_{what}" for w in LAYOUTS for what in PARTS} | set(moelora.Saved._fields)
    for name in moelora.__all__:
        if not hasattr(torch.ops.moelora, name):
            continue
        schema = {a.name for a in operator(name)._schema.arguments}
        wrappers = [getattr(moelora, name)]
        if name == "fused_moe_lora_gemm_backward":  # without w
            wrappers.append(moelora.moe_lora_delta_backward)
        settable = {p for wrapper in wrappers for p in inspect.signature(wrapper).parameters}
        assert schema - inside <= settable


def compile_conformance(include):
    torch_include = Path(torch.__file__).parent / "include"
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{torch_include}"]
    source = [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/c/abi_conformance.cpp")]
    return subprocess.run([*command, *source], capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_conformance_unit_notices_drift(tmp_path):
    assert compile_conformance(ROOT / "csrc").returncode == 0
    header = (ROOT / "csrc/glue/abi.h").read_text()
    changed = re.sub(r"aoti_torch_get_dim\(AtenTensorHandle tensor, int64_t", "\\g<0>_t", header)
    changed = changed.replace("int64_t_t", "int32_t")
    assert changed != header
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue/abi.h").write_text(changed)
    failed = compile_conformance(tmp_path)
    assert failed.returncode != 0
    assert "aoti_torch_get_dim" in failed.stderr


def test_conformance_covers_every_function():
    """What the extension takes from torch is what abi.h declares, no more."""
    if not shutil.which("nm") or not shutil.which("cc"):
        pytest.skip("no nm, or no C compiler")

    def names(ending, *command):
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return set(re.findall(rf"\b((?:aoti_)?torch_\w+){ending}", text))

    header = ROOT / "csrc/glue/abi.h"
    used = names("", "nm", "-D", "--undefined-only", _C.__file__)
    assert used == names(r"\(", "cc", "-E", f"-I{ROOT / 'csrc'}", str(header))
