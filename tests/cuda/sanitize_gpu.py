"""Every CUDA kernel on small problems, for compute-sanitizer.

    python tests/cuda/sanitize_gpu.py                           # run and check the calls
    python tests/cuda/sanitize_gpu.py --tools memcheck,racecheck,initcheck,synccheck --log FILE

The second form runs the first under each tool, in --jobs processes that share the problems, with
torch's caching allocator off so that every tensor and workspace is an allocation of its own with
bounds that memcheck knows to the byte. It fails if any tool found anything, and writes what ran,
where and with which versions to FILE.

initcheck does not see what a Hopper GEMM stores through the copy engine: what reads it would be
reported. It runs the portable kernels only, which leave the same memory to each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/support", "tests/operators", "tests/engines")
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in FOLDERS)]
FAILED = 9
LIMITS = {"initcheck": {"MOELORA_MAX_CC": "80"}}  # environment of a tool, see above


# Each of these yields (name, call that fails if a result is wrong) on a device: bodies of tests.


def alignments(device):
    """All modes on every path that csrc/cuda/align/align.cu can take."""
    import test_align
    from cases import Spec
    from test_fused_moe_lora import check_align_lists

    sizes = {
        # tokens, top_k, experts, adapters, whether ids are int64
        "small": (40, 3, 9, 4, False),
        "small, several CTAs": (300, 4, 32, 8, True),
        "large": (8300, 2, 11, 3, False),
        "two sorts": (60, 4, 300, 40, True),
        "two sorts, large": (17000, 1, 300, 40, False),
    }
    strange = {"hidden": 1, "inter": 1, "mix": "disabled", "routing": "out_of_range", "remote": 2}
    for name, (tokens, top_k, experts, adapters, wide) in sizes.items():
        spec = Spec(tokens, top_k, experts, ranks=(1,) * adapters, int64_ids=wide, **strange)
        yield f"alignments, {name}", partial(test_align.check_all, spec, 16, device)
        yield f"vLLM's lists, {name}", partial(check_align_lists, spec, 16, device)
    yield "zeros", partial(test_align.test_sorting_zeroes_large_and_empty_outputs, device)


def packing(device):
    import test_prepack
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        tiles = test_prepack.test_tiles_and_back
        yield f"prepack_weights, {dtype}", partial(tiles, (2, 64, 192), (device, dtype))
    yield "prepack_weights, strided", partial(test_prepack.test_strided_weights, device)


def specs(dtype):
    """Problems that reach every epilogue and edge once, small enough for racecheck."""
    from cases import Spec

    sizes = {"tokens": 21, "hidden": 136, "inter": 72, "ranks": (8, 17)}
    yield (plain := Spec(dtype=dtype, **sizes, mix="half_base", bias=True))
    yield replace(plain, activation="swigluoai", tokens=3, mix="all_different")
    yield replace(plain, activation="swigluoai_uninterleave", alpha=1.5, limit=0.5)
    yield replace(plain, limit=0.5, tokens=3)
    yield replace(plain, activation="relu2", slices=1, sharing="outer", scalings=False)
    yield replace(plain, activation="gelu", strided=1, int64_ids=True, mix="out_of_range")
    yield replace(plain, remote=3, routing="out_of_range", mix="disabled", ranks=(64, 3, 256))
    yield replace(plain, hidden=128, inter=64, tokens=150, experts=2, slices=1, bias=False)
    yield replace(plain, mix="absent", top_k=1, weight_on_input=True)


def layers(device):
    """By every kernel of projections and of whole layers, each form of weights for it in turn."""
    from holding import hold_gemm, hold_layer
    from quantized_cases import NATIVE, forms_of, made
    from test_prepack import packing as packed

    import moelora
    from moelora import _C

    def check(name, spec, form):
        _C.force_variant(name)
        p = made(spec, form, spec.dtype)
        hold_layer(p, device)
        if spec.hidden % 64 == 0 and form == NATIVE:
            hold_layer(p, device, packed(moelora.fused_experts_lora, ("w13", "w2")))
        for which in ("w13", "w2"):
            hold_gemm(p, device, which, True)
        _C.force_variant(None)

    for dtype in dtypes(device):
        for name in variants(device, dtype, "gemm", "decode"):
            if "_w8a8_" not in name:  # operators/test_variants.py has its reference
                for spec, form in zip(specs(dtype), cycle(forms_of(name)), strict=False):
                    yield f"{name}, {form}: {spec}", partial(check, name, spec, form)


def dtypes(device):
    import torch
    from conftest import CUDA_DTYPES

    return CUDA_DTYPES if device == "cuda" else (*CUDA_DTYPES, torch.float32)


def variants(device, dtype, *roles):
    """Names of the variants of these roles that can be forced on a device."""
    from moelora import _C
    from moelora.operators.checks import dtype_name

    word = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype_name(dtype)]
    here = [name for name in _C.usable() if ("_sm" in name) == (device == "cuda")]
    words = [name.split("_") for name in here]
    return ["_".join(w) for w in words if w[0] in roles and w[1] in ("i32", word)]


def calls_of_roles(p, few):
    """Calls that run the kernels of a role; `p` has more than 64 routed rows, or no segments are
    listed, `few` fewer for what takes no more."""
    import torch
    from delta_cases import DELTAS, Lists, delta_kwargs

    import moelora

    made = {"dtype": p.spec.dtype, "device": p.topk_ids.device}
    lists = Lists(p, "w13", naive=False)

    def layer(q):
        return lambda: moelora.fused_experts_lora(**q.kwargs())

    def shrink():
        h = torch.zeros(len(lists.a), *p.topk_ids.shape, lists.a[0].size(2), **made)
        lists.shrink(h, lists.a)
        return h

    def expand():
        out = torch.ones(*p.topk_ids.shape, sum(b.size(2) for b in lists.b), **made)
        h = torch.ones(len(lists.a), *p.topk_ids.shape, lists.a[0].size(2), **made)
        lists.expand(out, h, lists.b)
        return out

    def gate_up_b():
        h = torch.ones(*p.topk_ids.shape, p.w13_lora_b.size(3), **made)
        who = (p.topk_ids, p.w13_lora_b, p.token_lora_mapping, p.lora_ranks)
        return moelora.moe_lora_gate_up_b(h, *who, num_experts=p.w13.size(0))

    def delta():
        return DELTAS["w13"](**delta_kwargs(few, "w13"))

    def mlp():
        factors = (p.w13_lora_a, p.w13_lora_b, p.w2_lora_a, p.w2_lora_b)
        who = (p.token_lora_mapping, p.lora_ranks, p.lora_scalings)
        return moelora.moe_lora_fused(
            *(p.hidden_states, p.topk_ids, p.topk_weights, *factors, *who),
            torch.ones_like(p.hidden_states),
            num_experts=p.w13.size(0),
        )

    both = [layer(p), layer(few)]
    calls = {"sort": both, "shrink": [both[0], shrink], "expand": [expand, gate_up_b]}
    return calls | {"delta": [delta], "mlp": [mlp], "sum": both[:1]}


def rows(device):
    """Every other row of the table, beside what the table's own choice makes of the same call."""
    import torch
    from cases import Spec
    from quantized_cases import NATIVE, forms_of, made

    import moelora
    from moelora import _C

    def quantized(spec, form):
        arguments = made(spec, form, spec.dtype).to(device).kwargs()
        return lambda: moelora.fused_experts_lora(**arguments)

    def check(name, calls, dtype):
        tolerance, served = (4e-2 if dtype == torch.bfloat16 else 5e-3), False
        for run in calls:
            want = run()
            _C.force_variant(name)
            got = run()
            if name in _C.last_plan().replace("=", " ").split():
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
                served = True
            _C.force_variant(None)
        assert served, f"no call runs {name}"

    for dtype in dtypes(device):
        spec = Spec(dtype=dtype, tokens=40, hidden=160, inter=96, ranks=(16, 16), slices=1)
        p, few = (replace(spec, tokens=tokens).build().to(device) for tokens in (40, 21))
        roles = calls_of_roles(p, few)
        for name in variants(device, dtype, "gemm", "decode", *roles):
            role = name.split("_")[0]
            if role in roles:
                calls = roles[role]
            elif NATIVE in forms_of(name):  # layers() has it
                continue
            else:
                one = replace(spec, tokens=1) if role == "decode" else spec
                calls = [quantized(one, form) for form in forms_of(name)]
            yield f"{name}: {spec}", partial(check, name, calls, dtype)


def long_segments(device):
    """Shrinks that only many rows take, of the layer and of the delta."""
    import torch
    from cases import Spec
    from checks import assert_gemm_is_the_cpus
    from test_delta import check_delta

    def check(spec):
        assert_gemm_is_the_cpus(spec.build(), device)
        check_delta(spec.build(), "w13", device, False, False)

    plain = Spec(dtype=torch.bfloat16, tokens=17500, hidden=72, inter=8, experts=2)
    for ranks in ((8, 5), (24, 32), (64, 33)):
        yield f"long segments of {ranks}", partial(check, replace(plain, ranks=ranks))


def deltas(device):
    """Both deltas, vLLM's lists and halves, and SGLang's operators."""
    import test_fused_moe_lora
    import test_sglang_ops
    from cases import Spec
    from conftest import CUDA_DTYPES
    from test_delta import check_delta

    for dtype in CUDA_DTYPES:
        adapted = [spec for spec in specs(dtype) if spec.mix != "absent"]
        for spec, which, added in product(adapted, ("w13", "w2"), (False, True)):
            call = partial(check_delta, spec.build(), which, device, added, added)
            yield f"delta {which}: {spec}", call
        plain = Spec(dtype=dtype, tokens=21, hidden=136, inter=72, ranks=(17, 17), pass_ranks=False)
        plain = replace(plain, scalings=False)
        expanded = replace(plain, sharing="expanded", tokens=90, mix="out_of_range")
        for spec, which, naive in product((plain, expanded), ("w13", "w2"), (False, True)):
            check = partial(test_fused_moe_lora.check_fused, spec.build(), which, device, naive)
            yield f"fused_moe_lora {which}: {spec}", partial(check, mul_routed_weight=True)
        halves = test_fused_moe_lora.test_shrink_and_expand_are_the_halves
        yield f"halves of fused_moe_lora, {dtype}", partial(halves, (device, dtype))
        plain = replace(plain, slices=1)
        for spec in (plain, replace(plain, tokens=90, top_k=3)):
            for how in test_sglang_ops.RUN:
                call = partial(test_sglang_ops.check, spec.build(), device, how)
                yield f"run_moe_lora, {how}: {spec}", call


def check_all(share: str, device: str) -> None:
    import torch

    index, of = map(int, share.split("/"))

    sys.path.append(str(ROOT / "tests"))  # conftest
    number = count = 0
    for problems in (alignments, packing, rows, long_segments, deltas, layers):
        for name, check in problems(device):
            if number % of == index:
                print(name, flush=True)
                check()
                count += 1
            number += 1
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{count} problems, all right")


def first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else "?"


def follow(tool: str, jobs: int, log: Path) -> tuple[list[int], str]:
    """Runs the checks under a tool: exit statuses of its processes, and all that they said. Until
    the last has ended it stands in files beside the log, line by line: a time limit costs only what
    it cut off."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FAILED)]
    command += [sys.executable, str(Path(__file__).resolve()), "--share"]
    threads = {"OMP_NUM_THREADS": "1"} if jobs > 1 else {}  # of the references in float64
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **threads}
    environment |= LIMITS.get(tool, {})
    said = [log.with_name(f"{log.name}.{tool}.{job}") for job in range(jobs)]
    running = []
    for job, path in enumerate(said):
        with path.open("w") as out:
            streams = {"stdout": out, "stderr": subprocess.STDOUT}
            words = [*command, f"{job}/{jobs}"]
            running.append(subprocess.Popen(words, cwd=ROOT, env=environment, **streams))
    codes = [process.wait() for process in running]
    text = "".join(path.read_text().replace(f"{ROOT}/", "") for path in said)
    for path in said:
        path.unlink()
    return codes, text


def run_tools(tools: list[str], jobs: int, log: Path) -> int:
    import torch

    from moelora.bench import results

    failed = 0
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", buffering=1) as out:
        for key, value in results.meta().items():
            print(f"{key}: {value}", file=out)
        print(f"compute-sanitizer: {first_line('compute-sanitizer', '--version')}", file=out)
        print(f"capability: {torch.cuda.get_device_capability()}", file=out)
        for tool in tools:
            started = time.monotonic()
            codes, text = follow(tool, jobs, log)
            failed += any(codes)
            statuses = ", ".join(map(str, codes))
            end = f"== {tool}: exit status {statuses}, {time.monotonic() - started:.0f} s"
            print(f"\n{end}\n{text}", file=out)
            print(*text.splitlines()[-5:], end, sep="\n", flush=True)
    print(f"{len(tools) - failed} of {len(tools)} tools found nothing; {log}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", help="comma-separated tools of compute-sanitizer to run under")
    parser.add_argument("--jobs", default=1, type=int, help="processes of a tool")
    parser.add_argument("--log", default="build/sanitize-gpu.log", type=Path)
    parser.add_argument("--share", default="0/1", help="I/N: every N-th problem, from I on")
    parser.add_argument("--device", default="cuda", help="cpu: to try the calls themselves")
    args = parser.parse_args()
    if args.tools:
        return run_tools(args.tools.split(","), args.jobs, args.log)
    check_all(args.share, args.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
