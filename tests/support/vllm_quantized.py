"""A quantized MoE layer in vLLM, loaded as its model loader does, for the tests of the drop-in."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from cases import Spec
from quantized_cases import Format, Numbers, by_bytes, by_words, fitted, quantize
from torch import Tensor, nn
from vllm_layer import VLLM, Layer, load

from moelora import QuantizedWeights
from moelora.weights.readers import AWQ_ORDER


@dataclass(frozen=True)
class Kind:
    """A checkpoint's format as vLLM has it."""

    methods: tuple[str, ...]  # in the interface tables; the first one that this vLLM has
    format: Format
    symmetric: bool = True


COMPRESSED = "compressed_tensors_marlin", "compressed_tensors"
KINDS = {
    "gpt_oss": Kind(("gpt_oss",), Format("mxfp4", 32)),
    "mxfp4": Kind(("mxfp4",), Format("mxfp4", 32)),
    "mxfp4_compressed": Kind(("mxfp4_compressed_tensors",), Format("mxfp4", 32)),
    "nvfp4_modelopt": Kind(("nvfp4_modelopt",), Format("nvfp4", 16)),
    "nvfp4_compressed": Kind(("nvfp4_compressed_tensors",), Format("nvfp4", 16)),
    "gptq": Kind(("gptq",), Format("int4", 32)),
    "gptq_channel": Kind(("gptq",), Format("int4", None)),
    "awq": Kind(("awq",), Format("int4", 32, zeros=True), symmetric=False),
    "compressed": Kind(COMPRESSED, Format("int4", 32)),
    "compressed_zeros": Kind(COMPRESSED, Format("int4", 32, zeros=True), symmetric=False),
}
QUANT = "vllm.model_executor.layers.quantization"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle"
CHECKPOINT = {
    "quant_type": SimpleNamespace(size_bits=4),
    "weight_bits": 4,
    "num_bits": 4,
    "pack_factor": 8,
    "strategy": "group",
    "actorder": None,
    "desc_act": False,
    "is_sym": True,
    "zero_point": True,
    "is_checkpoint_nvfp4_serialized": True,
    "moe_activation_override": None,
}
BACKENDS = "NvFp4MoeBackend", "Mxfp4MoeBackend", "WNA16MoEBackend", "Fp8MoeBackend"


class Routed(nn.Module):
    """What `RoutedExperts` is to its method."""

    def __init__(self, moe):
        super().__init__()
        self.moe_config = moe
        self.activation = moe.activation
        self.swiglu_limit, self.swiglu_alpha = moe.swiglu_limit, moe.swiglu_alpha
        self.swiglu_beta = moe.swiglu_beta
        self.local_num_experts = moe.num_local_experts
        self._loaded_expert_biases: set[str] = set()

    def _expert_routing_tables(self):
        return None


class QuantizedLayer(Layer):
    """`Layer` whose kernel its quantization method makes, from what a loader filled.

    `p` has the numbers that the quantized weights stand for. Parameters have the sizes that
    `maybe_roundup_sizes` asks for, which may be larger.
    """

    backend: str | None = "MARLIN"  # that vLLM would choose; None leaves its choice as it is
    kinds = KINDS

    def __init__(self, vllm: VLLM, kind: str, spec: Spec, device="cpu", **config):
        self.kind = self.kinds[kind]
        self.changes = config.pop("changes", lambda layer: None)
        p = fitted(spec, spec.dtype).build()
        self.halves = {"w13": 1 + (spec.activation != "relu2"), "w2": 1}  # with a scale each
        weights = enumerate({"w13": p.w13, "w2": p.w2}.items())
        self.numbers = {n: self.quantize(w, n, spec.seed + i) for i, (n, w) in weights}
        dense = {name: n.dequantized(spec.dtype) for name, n in self.numbers.items()}
        self.moe_backend = config.pop("moe_backend", "auto")
        self.backend = config.pop("backend", self.backend)
        self.subclass = config.pop("subclass", False)
        self.use_a16 = config.pop("use_a16", False)
        self.exchange = config.pop("exchange", "allgather_reducescatter")
        super().__init__(vllm, replace(p, **dense), device, **config)

    def quantize(self, weights: Tensor, name: str, seed: int):
        if self.kind.format.name != "nvfp4" or self.halves[name] == 1:
            return quantize(weights, self.kind.format, seed)
        gate, up = (quantize(half, self.kind.format, seed) for half in weights.chunk(2, 1))
        return replace(  # two tensors, each with a scale of its own
            gate,
            q=torch.cat((gate.q, up.q), 1),
            scales=torch.cat((gate.scales, up.scales), 1),
            of_tensor=torch.cat((gate.of_tensor, up.of_tensor), 1),
        )

    def make_kernel(self, quant) -> None:
        p = self.p
        moe = self.moe_config
        moe.moe_backend = self.moe_backend
        moe.moe_parallel_config.all2all_backend = self.exchange
        self.routed = layer = Routed(moe)
        self.method = layer.quant_method = self.make_method()
        parallel = moe.moe_parallel_config
        sizes = moe.hidden_dim, moe.intermediate_size_per_partition
        rounded = self.method.maybe_roundup_sizes(*sizes, moe.in_dtype, parallel)
        layer.hidden_size, layer.intermediate_size_per_partition = rounded
        self.method.create_weights(
            layer,
            moe.num_local_experts,
            *rounded,
            params_dtype=moe.in_dtype,
            intermediate_size_full=rounded[1],
            weight_loader=None,
        )
        for name, numbers in self.numbers.items():
            self.load_numbers(name, numbers)
        for name in ("w13_bias", "w2_bias"):
            if (bias := getattr(p, name)) is not None and hasattr(layer, name):
                getattr(layer, name).data[:, : bias.size(1)] = bias
                layer._loaded_expert_biases.add(name)
        layer.to(self.device)
        self.changes(layer)
        self.loaded_bytes = sum(t.nbytes for t in layer.parameters())
        self.method.process_weights_after_loading(layer)
        self.kernel = self.method.moe_kernel
        self.experts = self.kernel.fused_experts

    def _add_adapters(self, *args, **config) -> None:
        if isinstance(self.experts, self.vllm.TritonExperts):
            super()._add_adapters(*args, **config)

    def make_method(self):
        vllm = self.vllm
        place, cls = next(found for found in map(vllm.method, self.kind.methods) if found[1])
        module = load(place)
        experts = vllm.TritonExperts  # whatever vLLM would choose
        world = "get_tensor_model_parallel_world_size"
        for other in (place, f"{QUANT}.utils.fp8_utils", "vllm.distributed"):
            if hasattr(sys.modules.get(other), world):
                vllm.set(other, world, lambda: 1)
        if self.subclass:
            cls = type("Subclass", (cls,), {})
        chosen_here = [n for n in dir(module) if n.startswith("select_") and self.backend]
        for select in chosen_here:
            backend = next((getattr(module, n) for n in BACKENDS if hasattr(module, n)), None)
            backend = backend or load(f"{ORACLE}.fp8").Fp8MoeBackend
            chosen = getattr(backend, self.backend)
            vllm.set(place, select, lambda *a, b=chosen, **k: (b, experts))
        for asked, value in (
            ("marlin_make_workspace_new", None),
            ("check_moe_marlin_supports_config", True),
            ("get_marlin_input_dtype", None),
        ):
            if hasattr(module, asked):
                vllm.set(place, asked, lambda *a, v=value, **k: v)
        return self.construct(cls)

    def arguments(self) -> dict:
        """What the constructors of methods take, by name."""
        quant = SimpleNamespace(
            quant_method="W4A16_NVFP4" if self.use_a16 else "NVFP4",
            group_size=self.kind.format.group or -1,
            symmetric=self.kind.symmetric,
            **CHECKPOINT,
        )
        return {"quant_config": quant, "weight_quant": quant, "input_quant": None}

    def construct(self, cls: type):
        moe = {"moe": self.moe_config, "moe_config": self.moe_config, "layer": self.routed}
        arguments = self.arguments() | moe | {"use_a16": self.use_a16}
        return cls(**{n: arguments[n] for n in inspect.signature(cls).parameters if n in arguments})

    def load_numbers(self, name: str, numbers: Numbers) -> None:
        """A projection as the loader writes it: into the front of what may be larger."""
        found = getattr(self, f"_{self.kind.methods[-1]}")(numbers)
        for part, tensor in found.items():
            parameter = getattr(self.routed, f"{name}_{part}")
            if getattr(parameter, "is_transposed", False) and part.startswith("weight_"):
                tensor = tensor.transpose(1, 2)
            if parameter.dim() == 1:  # one scale for each expert
                tensor = tensor.squeeze(1)
            write(parameter.data, tensor, halves=name == "w13" and self._halves(part))

    def _halves(self, part: str) -> bool:
        return self.moe_config.is_act_and_mul and self.kind.methods[0] == "mxfp4"

    def _mxfp4(self, n: Numbers) -> dict[str, Tensor]:
        return {"weight": by_bytes(n.q), "weight_scale": n.scales}

    _gpt_oss = _mxfp4

    def _mxfp4_compressed_tensors(self, n: Numbers) -> dict[str, Tensor]:
        return {"weight_packed": by_bytes(n.q), "weight_scale": n.scales}

    def _nvfp4_modelopt(self, n: Numbers) -> dict[str, Tensor]:
        return self._mxfp4(n) | {"weight_scale_2": n.of_tensor}

    def _nvfp4_compressed_tensors(self, n: Numbers) -> dict[str, Tensor]:
        return self._mxfp4_compressed_tensors(n) | {"weight_global_scale": 1 / n.of_tensor}

    def _gptq(self, n: Numbers) -> dict[str, Tensor]:
        return {"qweight": by_words(n.q).transpose(1, 2), "scales": n.scales.transpose(1, 2)}

    def _awq(self, n: Numbers) -> dict[str, Tensor]:
        return {
            "qweight": by_words(n.q.transpose(1, 2), AWQ_ORDER),
            "scales": n.scales.transpose(1, 2),
            "qzeros": by_words(n.zeros.transpose(1, 2), AWQ_ORDER),
        }

    def _compressed_tensors(self, n: Numbers) -> dict[str, Tensor]:
        found = {"weight_packed": by_words(n.q), "weight_scale": n.scales}
        if n.zeros is not None:
            found["weight_zero_point"] = by_words(n.zeros.transpose(1, 2)).transpose(1, 2)
        return found

    def __call__(self, **changes) -> Tensor:
        weights = {"w1": self.routed.w13_weight, "w2": self.routed.w2_weight}
        return super().__call__(**weights | changes)


FP8 = {
    "fp8_block": ("fp8", [128, 128]),
    "fp8_tensor": ("fp8", None),
    "fp8_static": ("fp8", None),
    "fp8_compressed_block": ("fp8_compressed_tensors", [128, 128]),
    "fp8_compressed_channel": ("fp8_compressed_tensors", None),
}
INPUT_SCALES = {"w13": torch.tensor(0.02), "w2": torch.tensor(0.03)}


class Fp8Layer(QuantizedLayer):
    """`numbers` are (e4m3, scales) of w13 and w2."""

    backend = "TRITON"
    kinds = {kind: Kind((method,), None) for kind, (method, _) in FP8.items()}

    def __init__(self, vllm, kind, spec, **config):
        self.scheme, self.block = kind, FP8[kind][1]
        super().__init__(vllm, kind, spec, **config)

    def quantize(self, weights, name, seed):
        n, k = self.block or (weights.size(1) // self.halves[name], weights.size(2))
        n = 1 if self.scheme == "fp8_compressed_channel" else n
        blocks = weights.float().unflatten(2, (-1, k)).unflatten(1, (-1, n))
        scales = blocks.abs().amax((2, 4)).clamp(min=1e-6) / 448
        numbers = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
        q = numbers.flatten(1, 2).flatten(2)
        return SimpleNamespace(q=q, scales=scales, dequantized=weights.to)

    def arguments(self):
        quant = SimpleNamespace(
            weight_block_size=self.block,
            activation_scheme="static" if self.scheme == "fp8_static" else "dynamic",
            is_checkpoint_fp8_serialized=True,
        )
        strategy = "block" if self.block else "channel"
        weights = SimpleNamespace(strategy=strategy, block_structure=self.block, dynamic=False)
        inputs = SimpleNamespace(strategy="group" if self.block else "token", dynamic=True)
        return {"quant_config": quant, "weight_quant": weights, "input_quant": inputs}

    def load_numbers(self, name, numbers):
        get = self.routed.get_parameter
        get(f"{name}_weight").data.copy_(numbers.q)
        scale = "weight_scale_inv" if self.scheme == "fp8_block" else "weight_scale"
        target = get(f"{name}_{scale}").data
        target.copy_(numbers.scales.view(target.shape))
        if self.scheme == "fp8_static":
            get(f"{name}_input_scale").data.fill_(INPUT_SCALES[name])

    def weights(self, name):
        """The same numbers as a user of the operators would bring them."""
        n = self.numbers[name]
        options = {"gate_up": "concatenated" if name == "w13" else None}
        if self.backend == "MARLIN":
            options["activations"] = "native"
        if self.block:
            return QuantizedWeights.from_fp8_block(n.q, n.scales, **options)
        if self.scheme == "fp8_compressed_channel":
            return QuantizedWeights.from_fp8_channel(n.q, n.scales, **options)
        scale = float(INPUT_SCALES[name]) if self.scheme == "fp8_static" else None
        return QuantizedWeights.from_fp8_tensor(n.q, n.scales.squeeze(2), scale, **options)


def quantized_layer(vllm: VLLM, kind: str, *args, **config) -> QuantizedLayer:
    return (Fp8Layer if kind in FP8 else QuantizedLayer)(vllm, kind, *args, **config)


def write(parameter: Tensor, tensor: Tensor, halves: bool) -> None:
    """Into the front; gate and up rows each into the front of their half."""
    parts = [(parameter, tensor)]
    if halves:
        parts = list(zip(parameter.chunk(2, 1), tensor.chunk(2, 1), strict=True))
    for target, source in parts:
        target[tuple(slice(size) for size in source.shape)] = source.to(target.dtype)
