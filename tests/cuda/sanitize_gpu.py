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
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
FAILED = 9
LIMITS = {"initcheck": {"MOELORA_MAX_CC": "80"}}  # environment of a tool, see above


@dataclass
class Share:
    """Of the problems, every `of`-th from number `index` on."""

    index: int = 0
    of: int = 1
    number: int = -1  # of the last problem that any share was asked about

    def take(self, problems):
        """Those of the problems to come that belong to it."""
        for problem in problems:
            self.number += 1
            if self.number % self.of == self.index:
                yield problem


def alignments():
    """(name, call on a device): all modes on every path that csrc/cuda/align/align.cu can take."""
    import torch

    import moelora

    sizes = {
        # tokens, top_k, experts, adapters, dtype of ids
        "small": (40, 3, 9, 4, torch.int32),
        "small, several CTAs": (300, 4, 32, 8, torch.int64),
        "large": (8300, 2, 11, 3, torch.int32),
        "two sorts": (60, 4, 300, 40, torch.int64),
        "two sorts, large": (17000, 1, 300, 40, torch.int32),
    }
    for name, (tokens, top_k, experts, adapters, dtype) in sizes.items():
        make = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=make).to(dtype)
        mapping = torch.randint(-1, adapters + 1, (tokens,), generator=make).to(dtype)
        weights = torch.rand(tokens, top_k, generator=make)
        enabled = torch.rand(adapters, generator=make) < 0.8
        local = torch.rand(experts, generator=make) < 0.7
        expert_map = torch.where(local, local.cumsum(0) - 1, -1).int()
        zero = torch.ones(tokens, 37)

        def base(device, t=(ids, expert_map), experts=experts):
            a, m = (x.to(device) for x in t)
            return moelora.moe_align_block_size(a, 16, experts, expert_map=m)

        def sorting(device, t=(ids, weights, zero, expert_map), experts=experts):
            a, w, z, m = (x.to(device, copy=True) for x in t)
            found = moelora.moe_sorting(a, w, experts, 16, out_to_zero=z, expert_map=m)
            return (*found, z)

        def lora(device, mode, t=(ids, mapping, enabled), e=experts, slots=adapters):
            a, c, on = (x.to(device) for x in t)
            return moelora.moe_lora_align_block_size(
                a, c, e, 16, slots, mode=mode, adapter_enabled=on
            )

        yield f"moe_align_block_size, {name}", base
        yield f"moe_sorting, {name}", sorting
        yield (
            f"moe_lora_align_block_size of vLLM, {name}",
            lambda device, t=(ids, mapping, enabled, experts, adapters): align_lists(device, *t),
        )
        for mode in ("uniform", "segmented"):
            yield (
                f"moe_lora_align_block_size {mode}, {name}",
                lambda device, mode=mode, lora=lora: lora(device, mode),
            )


def layers(dtype):
    """Problems that reach every epilogue and edge once, small enough for racecheck."""
    from cases import Spec

    plain = Spec(
        dtype=dtype, tokens=21, hidden=136, inter=72, ranks=(8, 17), mix="half_base", bias=True
    )
    yield plain
    yield replace(plain, activation="swigluoai", tokens=3, mix="all_different")
    yield replace(plain, activation="swigluoai_uninterleave", alpha=1.5, limit=0.5)
    yield replace(plain, limit=0.5, tokens=3)
    yield replace(plain, activation="relu2", slices=1, sharing="outer", scalings=False)
    yield replace(plain, activation="gelu", strided=1, int64_ids=True, mix="out_of_range")
    yield replace(plain, remote=3, routing="out_of_range", mix="disabled", ranks=(64, 3, 256))
    yield replace(plain, hidden=128, inter=64, tokens=150, experts=2, slices=1, bias=False)
    yield replace(plain, mix="absent", top_k=1, weight_on_input=True)


def check_layers(share: Share) -> int:
    from checks import assert_close_to_ref
    from quantized_cases import NATIVE, dense, forms_of, made

    import moelora
    from benchmarks import grid
    from moelora import _C
    from moelora.reference import (
        fused_experts_lora_ref,
        fused_moe_lora_gemm_ref,
        naive_fused_experts_lora,
        naive_fused_moe_lora_gemm,
    )

    count = 0
    names = {n: d for d in grid.DTYPES["cuda"].values() for n in grid.rows("cuda", d, *grid.BASE)}
    for name, dtype in names.items():
        if "_w8a8_" in name:  # operators/test_variants.py has its reference
            continue
        _C.force_variant(name)
        # Each form of weights for it in turn.
        for spec, form in share.take(zip(layers(dtype), cycle(forms_of(name)), strict=False)):
            problem = made(spec, form, dtype)
            there, p = problem.to("cuda"), dense(problem)
            print(f"{name}: {spec}", flush=True)
            arguments = there.kwargs()
            y = moelora.fused_experts_lora(**arguments)
            ref, naive = (
                fused_experts_lora_ref(**p.kwargs()),
                naive_fused_experts_lora(**p.kwargs()),
            )
            assert_close_to_ref(y, ref, naive, dtype)
            if spec.hidden % 64 == 0 and form == NATIVE:
                for w in ("w13", "w2"):
                    arguments[w] = moelora.prepack_weights(arguments[w])
                y = moelora.fused_experts_lora(**arguments)
                assert_close_to_ref(y, ref, naive, dtype)
            for which in ("w13", "w2"):
                y = moelora.fused_moe_lora_gemm(**there.gemm_kwargs(which, True))
                arguments_here = p.gemm_kwargs(which, True)
                ref = fused_moe_lora_gemm_ref(**arguments_here)
                assert_close_to_ref(y, ref, naive_fused_moe_lora_gemm(**arguments_here), dtype)
            count += 1
    _C.force_variant(None)
    return count


def assert_close(there, here, dtype):
    import torch

    tolerance = 4e-2 if dtype == torch.bfloat16 else 5e-3
    torch.testing.assert_close(there.cpu(), here, rtol=tolerance, atol=tolerance)


def quantized_layers(role, formats, spec):
    """Calls for the rows of a role and a format, by both words of a row's name."""
    from benchmarks.grid import quantized

    calls = {}
    for name in formats:
        run = dict(quantized.calls("cuda", name, spec))["layer"]
        calls.setdefault(f"{role}_{quantized.kernels_of(name)}", []).append(run)
    return calls


def check_rows(share: Share) -> int:
    """Every other row of the table, beside what the table's own choice makes of the same call."""
    from cases import Spec

    from benchmarks import grid
    from moelora import _C

    unmet, count = [], 0
    for dtype in grid.DTYPES["cuda"].values():
        # More than 64 routed rows, or no segments are listed; fewer for what takes no more.
        spec = Spec(dtype=dtype, tokens=40, hidden=160, inter=96, ranks=(16, 16), slices=1)
        p, few = (replace(spec, tokens=tokens).build().to("cuda") for tokens in (40, 21))
        layer, few_rows = (grid.layers.layer(q)["layer"] for q in (p, few))
        vllm, sglang = grid.adapters.vllm(p, "w13", 16), grid.adapters.sglang(p)
        four_bits, fp8 = grid.quantized.FORMATS, grid.quantized.FP8
        runs = {
            **quantized_layers("gemm", (*four_bits, *fp8), spec),
            **quantized_layers("decode", four_bits, replace(spec, tokens=1)),
            "sort": [layer, few_rows],
            "shrink": [layer, vllm["shrink"]],
            "expand": [vllm["expand"], sglang["gate_up_b"]],
            "delta": [grid.layers.delta(few)["delta w13"]],
            "mlp": [sglang["at once"]],
            "sum": [layer],
        }
        usual = {kind: [run() for run in of_kind] for kind, of_kind in runs.items()}
        formats = grid.quantized.KERNELS
        names = [n for n in grid.rows("cuda", dtype, *grid.BASE) if formats & set(n.split("_"))]
        names += grid.rows("cuda", dtype, *grid.AROUND, *grid.DELTA)
        for name in share.take(dict.fromkeys(names)):
            words, served = name.split("_"), False
            kind = "_".join([words[0], *(formats & set(words))])
            _C.force_variant(name)
            for run, want in zip(runs[kind], usual[kind], strict=True):
                got = run()
                if name in _C.last_plan().replace("=", " ").split():
                    print(f"{name}: {spec}", flush=True)
                    assert_close(got, want.cpu(), dtype)
                    served, count = True, count + 1
            _C.force_variant(None)
            if not served:
                unmet.append(name)
    assert not unmet, f"no call runs {', '.join(unmet)}"
    return count


def check_long_segments(share: Share) -> int:
    """Shrinks that only many rows take, of the layer and of the delta."""
    import torch
    from cases import Spec
    from checks import assert_gemm_is_the_cpus
    from delta_cases import delta_kwargs, delta_operator

    plain = Spec(dtype=torch.bfloat16, tokens=17500, hidden=72, inter=8, experts=2)
    count = 0
    for ranks in share.take(((8, 5), (24, 32), (64, 33))):
        spec = replace(plain, ranks=ranks)
        p = spec.build()
        print(f"long segments: {spec}", flush=True)
        assert_gemm_is_the_cpus(p, "cuda")
        run = delta_operator("w13")
        there, here = (run(**delta_kwargs(q, "w13")) for q in (p.to("cuda"), p))
        assert_close(there, here, spec.dtype)
        count += 1
    return count


def check_deltas(share: Share) -> int:
    """Both deltas, vLLM's lists and halves, and SGLang's operators, beside the CPU's results."""
    import torch
    from cases import Spec
    from delta_cases import Lists, delta_kwargs, delta_operator

    import moelora

    def routed(p, which, summed):
        rows = (p.spec.tokens, p.spec.top_k)
        columns = p.spec.hidden if which == "w2" else p.w13.size(1)
        out = torch.ones(*rows, columns, dtype=p.spec.dtype, device=p.topk_ids.device)
        return delta_operator(which)(
            **delta_kwargs(p, which, mul_routed_weight=summed), add_inputs=summed, out=out
        )

    def vllm(p, which, naive):
        lists = Lists(p, which, naive)
        made = {"dtype": p.spec.dtype, "device": p.topk_ids.device}
        h = torch.zeros(len(lists.a), p.spec.tokens, p.spec.top_k, lists.a[0].size(2), **made)
        columns = sum(b.size(2) for b in lists.b)
        whole, halves = (torch.ones(p.spec.tokens, p.spec.top_k, columns, **made) for _ in "ab")
        lists.fused(whole, mul_routed_weight=True)
        lists.shrink(h, lists.a)
        lists.expand(halves, h, lists.b, mul_routed_weight=True)
        return torch.stack((whole, halves))

    def sglang(p):
        batch = moelora.MoELoRABatchInfo(
            p.token_lora_mapping, p.lora_ranks, p.lora_scalings, p.adapter_enabled
        )
        return moelora.run_moe_lora(
            *(p.hidden_states, p.topk_ids, p.topk_weights, batch, p.w13_lora_a, p.w13_lora_b),
            *(p.w2_lora_a, p.w2_lora_b, torch.ones_like(p.hidden_states).contiguous()),
        )

    count = 0
    for dtype in (torch.bfloat16, torch.float16):
        adapted = (spec for spec in layers(dtype) if spec.mix != "absent")
        for spec in share.take(adapted):
            p = spec.build()
            there = p.to("cuda")
            print(f"delta: {spec}", flush=True)
            for which in ("w13", "w2"):
                for summed in (False, True):
                    assert_close(routed(there, which, summed), routed(p, which, summed), dtype)
            count += 1
        plain = Spec(dtype=dtype, tokens=21, hidden=136, inter=72, ranks=(17, 17), pass_ranks=False)
        expanded = replace(plain, sharing="expanded", tokens=90, mix="out_of_range")
        for spec in share.take((plain, expanded)):
            p = spec.build()
            there = p.to("cuda")
            for naive in (False, True):
                print(f"fused_moe_lora, naive {naive}: {spec}", flush=True)
                for which in ("w13", "w2"):
                    assert_close(vllm(there, which, naive), vllm(p, which, naive), dtype)
                count += 1
        plain = replace(plain, slices=1)
        for spec in share.take((plain, replace(plain, tokens=90, top_k=3))):
            p = spec.build()
            there = p.to("cuda")
            print(f"run_moe_lora: {spec}", flush=True)
            assert_close(sglang(there), sglang(p), dtype)
            count += 1
    return count


def align_lists(device, ids, mapping, enabled, experts, slots):
    """vLLM's form of the alignment, every other list asked for."""
    import torch

    import moelora

    rows = ids.numel() + min(ids.numel(), experts) * 15
    made = [
        torch.full(shape, 77, dtype=torch.int32, device=device)
        for shape in ((slots, rows), (slots, -(-rows // 16)), (slots,))
    ]
    lora_ids = torch.arange(-1, slots + 2, 2, dtype=torch.int32, device=device)
    moelora.moe_lora_align_block_size(
        *(ids.to(device), mapping.to(device), experts, 16, slots, rows, -(-rows // 16), *made),
        *(enabled.to(device), lora_ids),
    )
    return made


def check_packing(share: Share) -> int:
    import torch

    import moelora

    count = 0
    wide = torch.randn(3, 128, 64 + 5)
    for dtype in (torch.bfloat16, torch.float32):
        weights = (torch.randn(2, 64, 192).to(dtype), wide.to(dtype)[:, :, 3:67])
        for w in share.take(weights):
            there = w.to("cuda") if w.is_contiguous() else wide.to(dtype).to("cuda")[:, :, 3:67]
            print(f"prepack_weights: {tuple(w.shape)} {dtype}", flush=True)
            assert torch.equal(moelora.prepack_weights(there).unpack().cpu(), w)
            count += 1
    return count


def check_all(share: Share) -> None:
    import torch

    count = 0
    for name, call in share.take(alignments()):
        print(name, flush=True)
        for i, (got, expected) in enumerate(zip(call("cuda"), call("cpu"), strict=True)):
            assert torch.equal(got.cpu(), expected), f"{name}: output {i}"
        count += 1
    for check in (check_packing, check_rows, check_long_segments, check_deltas, check_layers):
        count += check(share)
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
            words = [*command, f"{job}/{jobs}"]
            running.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
                )
            )
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


def share_of(text: str) -> Share:
    index, of = map(int, text.split("/"))
    if not 0 <= index < of:
        raise argparse.ArgumentTypeError(f"wanted I/N with I from 0 to N - 1, got {text}")
    return Share(index, of)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", help="comma-separated tools of compute-sanitizer to run under")
    parser.add_argument("--jobs", default=1, type=int, help="processes of a tool")
    parser.add_argument("--log", default="build/sanitize-gpu.log", type=Path)
    parser.add_argument(
        "--share", default=Share(), type=share_of, help="I/N: every N-th, from I on"
    )
    args = parser.parse_args()
    if args.tools:
        return run_tools(args.tools.split(","), args.jobs, args.log)
    check_all(args.share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
