"""Stand-ins of vLLM's methods of quantized layers: what they are made from, and which parameters
their `create_weights` registers, in 0.26 and 0.33.

Mirrors vllm/model_executor/layers/quantization/{mxfp4,modelopt,auto_gptq,auto_awq,fp8}.py and,
in quantization/compressed_tensors/compressed_tensors_moe, compressed_tensors_moe_{wna16,
wna16_marlin,w8a8_fp8,w4a4_nvfp4,w4a4_mxfp4}.py.
The tests run on the real ones, too, where they can be imported.
"""

from __future__ import annotations

import sys
from enum import Enum

import torch
from stand_in import takes
from torch import nn
from vllm_stand_in import OtherExperts

QUANT = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{QUANT}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def zeros(*shape, dtype=torch.uint8):
    return torch.zeros(shape, dtype=dtype)


class _Method:
    place: str  # its module
    backends: dict[str, Enum] = {}  # chosen by functions of these names there
    attributes: dict[str, object] = {}  # of its parameters, beside those of the call

    def __init__(self, moe):
        self.moe, self.moe_quant_config, self.moe_kernel = moe, None, None
        self.experts_cls = OtherExperts

    def maybe_roundup_sizes(self, hidden_size, intermediate_size, act_dtype, parallel_config):
        return hidden_size, intermediate_size

    process_weights_after_loading = takes("self layer")

    def chosen(self, **options):
        """(backend, class of experts) that the first function of `backends` selects."""
        return getattr(sys.modules[self.place], next(iter(self.backends)))(**options)

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        gate_and_up = 2 if self.moe.is_act_and_mul else 1
        w13 = (gate_and_up,), gate_and_up * inter, hidden_size
        for name, sizes in (("w13", w13), ("w2", ((), hidden_size, inter))):
            for part, of_expert in self.parts(*sizes, params_dtype).items():
                tensor = torch.stack([of_expert] * num_experts)
                parameter = nn.Parameter(tensor, requires_grad=False)
                vars(parameter).update(attributes | self.attributes)
                layer.register_parameter(f"{name}_{part}", parameter)

    def parts(self, shards, rows, columns, dtype):
        """{suffix of a parameter's name: tensor of one expert}; `shards` is the shape of what each
        of gate and up has one of."""
        raise NotImplementedError


def selected(backend):
    """vLLM's `select_*_moe_backend`, which chooses this one."""

    def select(config=None, **options):
        return backend, OtherExperts

    return select


class Mxfp4MoeBackend(Enum):
    MARLIN = "MARLIN"
    EMULATION = "EMULATION"


class GptOssMxfp4MoEMethod(_Method):
    place = f"{QUANT}.mxfp4"
    backends = {"select_mxfp4_moe_backend": Mxfp4MoeBackend.MARLIN}

    def __init__(self, moe):
        super().__init__(moe)
        self.mxfp4_backend, self.experts_cls = self.chosen(config=moe)

    def maybe_roundup_sizes(self, hidden_size, intermediate_size, act_dtype, parallel_config):
        if self.mxfp4_backend is Mxfp4MoeBackend.EMULATION:
            return round_up(hidden_size, 32), round_up(intermediate_size, 32)
        return round_up(hidden_size, 256), round_up(intermediate_size, 128)

    def parts(self, shards, rows, columns, dtype):
        weights = {"weight": zeros(rows, columns // 2), "weight_scale": zeros(rows, columns // 32)}
        biases = {"bias": zeros(rows, dtype=torch.bfloat16)} if self.moe.has_bias else {}
        return weights | biases


class Mxfp4MoEMethod(GptOssMxfp4MoEMethod):
    backends = {"select_deepseek_v4_mxfp4_moe_backend": Mxfp4MoeBackend.MARLIN}


class CompressedTensorsW4A4Mxfp4MoEMethod(_Method):
    place = f"{COMPRESSED}_w4a4_mxfp4"
    use_cutlass_mxfp4 = False

    def parts(self, shards, rows, columns, dtype):
        packed, scale = zeros(rows, columns // 2), zeros(rows, columns // 32)
        return {"weight_packed": packed, "weight_scale": scale}


class NvFp4MoeBackend(Enum):
    MARLIN = "MARLIN"
    FLASHINFER_CUTLASS = "FLASHINFER_CUTLASS"


class _NvFp4Method(_Method):
    backends = {"select_nvfp4_moe_backend": NvFp4MoeBackend.MARLIN}
    packed, of_tensor, of_input = "weight", "weight_scale_2", "input_scale"

    def select(self, use_a16):
        self.use_a16 = use_a16
        self.nvfp4_backend, self.experts_cls = self.chosen(config=self.moe)

    def parts(self, shards, rows, columns, dtype):
        return {
            self.packed: zeros(rows, columns // 2),
            "weight_scale": zeros(rows, columns // 16).to(torch.float8_e4m3fn),
            self.of_tensor: torch.ones(shards),
            self.of_input: torch.full(shards, float("nan")),  # unused
        }


class ModelOptNvFp4FusedMoE(_NvFp4Method):
    place = f"{QUANT}.modelopt"

    def __init__(self, quant_config, moe_config):
        super().__init__(moe_config)
        self.quant_config = quant_config
        self.select(quant_config.quant_method == "W4A16_NVFP4")


class CompressedTensorsW4A4Nvfp4MoEMethod(_NvFp4Method):
    place = f"{COMPRESSED}_w4a4_nvfp4"
    packed, of_tensor = "weight_packed", "weight_global_scale"
    of_input = "input_global_scale"

    def __init__(self, moe, layer_name=None, use_a16=False):
        super().__init__(moe)
        self.select(use_a16)


class AutoGPTQMoEMethod(_Method):
    place = f"{QUANT}.auto_gptq"
    attributes = {"is_transposed": True}
    indices = True  # 0.26

    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config

    def parts(self, shards, rows, columns, dtype):
        group = self.quant_config.group_size
        groups = 1 if group == -1 else columns // group
        found = {
            "qweight": zeros(columns // 8, rows, dtype=torch.int32),
            "scales": zeros(groups, rows, dtype=dtype),
            "qzeros": zeros(groups, rows // 8, dtype=dtype if self.indices else torch.int32),
        }
        if not self.indices:
            return found | {"bias": zeros(rows, dtype=dtype)}
        indices = zeros(columns, dtype=dtype)
        return found | {"g_idx": indices, "g_idx_sort_indices": indices}


class AutoAWQMoEMethod(AutoGPTQMoEMethod):
    place = f"{QUANT}.auto_awq"

    def parts(self, shards, rows, columns, dtype):
        groups = columns // self.quant_config.group_size
        return {
            "qweight": zeros(columns, rows // 8, dtype=torch.int32),
            "scales": zeros(groups, rows, dtype=dtype),
            "qzeros": zeros(groups, rows // 8, dtype=torch.int32),
        }


class CompressedTensorsWNA16MarlinMoEMethod(_Method):
    place = f"{COMPRESSED}_wna16_marlin"
    attributes = {"is_transposed": True}

    def __init__(self, weight_quant, input_quant, moe, layer_name=None):
        super().__init__(moe)
        self.weight_quant, self.symmetric = weight_quant, weight_quant.symmetric
        self.num_bits, self.group_size = weight_quant.num_bits, weight_quant.group_size

    def parts(self, shards, rows, columns, dtype):
        groups = columns // self.group_size
        found = {
            "weight_packed": zeros(rows, columns // 8, dtype=torch.int32),
            "weight_scale": zeros(rows, groups, dtype=dtype),
        }
        if not self.symmetric:
            found["weight_zero_point"] = zeros(rows // 8, groups, dtype=torch.int32)
        if not self.attributes["is_transposed"]:
            return found
        found = {name: tensor.t().contiguous() for name, tensor in found.items()}
        return found | {"weight_g_idx": zeros(columns, dtype=torch.int32)}


class CompressedTensorsWNA16MoEMethod(CompressedTensorsWNA16MarlinMoEMethod):
    place = f"{COMPRESSED}_wna16"
    attributes = {"is_transposed": False}


class Fp8MoeBackend(Enum):
    TRITON = "TRITON"
    MARLIN = "MARLIN"


class _Fp8Method(_Method):
    backends = {"select_fp8_moe_backend": Fp8MoeBackend.TRITON}
    scale, static = "weight_scale", False

    def select(self, weight_block_size):
        self.weight_block_size = weight_block_size
        self.block_quant = weight_block_size is not None
        self.fp8_backend, self.experts_cls = self.chosen()

    def parts(self, shards, rows, columns, dtype):
        scales = self.by_tensor_or_channel(shards, rows)
        if self.block_quant:
            (n, k), parts = self.weight_block_size, sum(shards) or 1
            scales = parts * round_up(rows // parts, n) // n, round_up(columns, k) // k
        weight = zeros(rows, columns, dtype=torch.float8_e4m3fn)
        found = {"weight": weight, self.scale: torch.ones(scales)}
        return found | ({"input_scale": torch.ones(())} if self.static else {})

    def create_weights(self, layer, *sizes, **attributes):
        super().create_weights(layer, *sizes, **attributes)
        if not self.static:
            layer.w13_input_scale = layer.w2_input_scale = None


class Fp8MoEMethod(_Fp8Method):
    place = f"{QUANT}.fp8"

    def __init__(self, quant_config, layer):
        super().__init__(layer.moe_config)
        self.quant_config = quant_config
        self.select(quant_config.weight_block_size)
        self.scale = "weight_scale_inv" if self.block_quant else "weight_scale"
        self.static = quant_config.activation_scheme == "static"

    def by_tensor_or_channel(self, shards, rows):
        return shards


class CompressedTensorsW8A8Fp8MoEMethod(_Fp8Method):
    place = f"{COMPRESSED}_w8a8_fp8"

    def __init__(self, weight_quant, input_quant, moe, layer_name=None):
        super().__init__(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.select(weight_quant.block_structure if weight_quant.strategy == "block" else None)

    def by_tensor_or_channel(self, shards, rows):
        return rows, 1


METHODS = (
    *(GptOssMxfp4MoEMethod, Mxfp4MoEMethod, CompressedTensorsW4A4Mxfp4MoEMethod),
    *(ModelOptNvFp4FusedMoE, CompressedTensorsW4A4Nvfp4MoEMethod, AutoAWQMoEMethod),
    *(Fp8MoEMethod, CompressedTensorsW8A8Fp8MoEMethod),
)


def places(version: str) -> dict[str, dict[str, object]]:
    """Module: what is in it, of a release."""
    old = version.startswith("0.26")
    gptq = type("AutoGPTQMoEMethod", (AutoGPTQMoEMethod,), {"indices": old})
    wna16 = CompressedTensorsWNA16MarlinMoEMethod if old else CompressedTensorsWNA16MoEMethod
    found: dict[str, dict[str, object]] = {}
    for cls in (*METHODS, gptq, wna16):
        module = found.setdefault(cls.place, {})
        module[cls.__name__] = cls
        for name, backend in cls.backends.items():
            module |= {name: selected(backend), type(backend).__name__: type(backend)}
    return found
