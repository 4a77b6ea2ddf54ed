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
from torch import nn
from vllm_stand_in import OtherExperts

QUANT = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{QUANT}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"


class Mxfp4MoeBackend(Enum):
    MARLIN = "MARLIN"
    EMULATION = "EMULATION"


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _Method:
    def __init__(self, moe):
        self.moe, self.moe_quant_config, self.moe_kernel = moe, None, None
        self.experts_cls = OtherExperts

    def maybe_roundup_sizes(self, hidden_size, intermediate_size, act_dtype, parallel_config):
        return hidden_size, intermediate_size

    def process_weights_after_loading(self, layer):
        raise AssertionError("the tests put their own here")

    def _register(self, layer, attributes, **tensors):
        for name, tensor in tensors.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            for attribute, value in attributes.items():
                setattr(parameter, attribute, value)
            layer.register_parameter(name, parameter)


class GptOssMxfp4MoEMethod(_Method):
    select = "select_mxfp4_moe_backend"

    def __init__(self, moe):
        super().__init__(moe)
        select = getattr(sys.modules[f"{QUANT}.mxfp4"], self.select)  # a name of that module
        self.mxfp4_backend, self.experts_cls = select(moe)

    def maybe_roundup_sizes(self, hidden_size, intermediate_size, act_dtype, parallel_config):
        if self.mxfp4_backend is Mxfp4MoeBackend.EMULATION:
            return round_up(hidden_size, 32), round_up(intermediate_size, 32)
        return round_up(hidden_size, 256), round_up(intermediate_size, 128)

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        def zeros(*shape, dtype=torch.uint8):
            return torch.zeros(num_experts, *shape, dtype=dtype)

        self._register(
            layer,
            attributes,
            w13_weight=zeros(2 * inter, hidden_size // 2),
            w13_weight_scale=zeros(2 * inter, hidden_size // 32),
            w2_weight=zeros(hidden_size, inter // 2),
            w2_weight_scale=zeros(hidden_size, inter // 32),
        )
        if self.moe.has_bias:
            biases = {"w13_bias": zeros(2 * inter, dtype=torch.bfloat16)}
            biases["w2_bias"] = zeros(hidden_size, dtype=torch.bfloat16)
            self._register(layer, attributes, **biases)


class Mxfp4MoEMethod(GptOssMxfp4MoEMethod):
    select = "select_deepseek_v4_mxfp4_moe_backend"


def select_mxfp4_moe_backend(config):
    return Mxfp4MoeBackend.MARLIN, OtherExperts


def select_deepseek_v4_mxfp4_moe_backend(config):
    return Mxfp4MoeBackend.MARLIN, OtherExperts


class CompressedTensorsW4A4Mxfp4MoEMethod(_Method):
    use_cutlass_mxfp4 = False

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        for name, (rows, columns) in _sizes(self, hidden_size, inter).items():
            packed = torch.zeros(num_experts, rows, columns // 2, dtype=torch.uint8)
            scale = torch.zeros(num_experts, rows, columns // 32, dtype=torch.uint8)
            parts = {f"{name}_weight_packed": packed, f"{name}_weight_scale": scale}
            self._register(layer, attributes, **parts)


def _sizes(method, hidden_size, inter):
    shards = 2 if method.moe.is_act_and_mul else 1
    return {"w13": (shards * inter, hidden_size), "w2": (hidden_size, inter)}


class NvFp4MoeBackend(Enum):
    MARLIN = "MARLIN"
    FLASHINFER_CUTLASS = "FLASHINFER_CUTLASS"


def select_nvfp4_moe_backend(config, weight_key=None, activation_key=None):
    return NvFp4MoeBackend.MARLIN, OtherExperts


class _NvFp4Method(_Method):
    packed, of_tensor, of_input = "weight", "weight_scale_2", "input_scale"

    def select(self, use_a16):
        self.use_a16 = use_a16
        select = sys.modules[self.place].select_nvfp4_moe_backend  # a name of that module
        self.nvfp4_backend, self.experts_cls = select(config=self.moe)

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        for name, (rows, columns) in _sizes(self, hidden_size, inter).items():
            shards = (rows // inter,) if name == "w13" else ()
            packed = torch.zeros(num_experts, rows, columns // 2, dtype=torch.uint8)
            scale = torch.zeros(num_experts, rows, columns // 16).to(torch.float8_e4m3fn)
            parts = {self.packed: packed, "weight_scale": scale}
            parts[self.of_tensor] = torch.ones(num_experts, *shards)
            parts[self.of_input] = torch.full((num_experts, *shards), float("nan"))  # unused
            self._register(layer, attributes, **{f"{name}_{part}": t for part, t in parts.items()})


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
    indices = True  # 0.26

    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        group = self.quant_config.group_size
        groups = [1, 1] if group == -1 else [hidden_size // group, inter // group]
        sizes = {"w13": (hidden_size, 2 * inter), "w2": (inter, hidden_size)}
        for (name, (columns, rows)), count in zip(sizes.items(), groups, strict=True):
            shapes = {"qweight": (columns // 8, rows), "scales": (count, rows)}
            shapes["qzeros"] = (count, rows // 8)
            if self.indices:
                shapes["g_idx"] = shapes["g_idx_sort_indices"] = (columns,)
            integers = ("qweight",) if self.indices else ("qweight", "qzeros")
            for part, shape in shapes.items():
                dtype = torch.int32 if part in integers else params_dtype
                tensor = torch.zeros(num_experts, *shape, dtype=dtype)
                self._register(
                    layer, attributes | {"is_transposed": True}, **{f"{name}_{part}": tensor}
                )
            if not self.indices:
                bias = torch.zeros(num_experts, rows, dtype=params_dtype)
                self._register(layer, attributes, **{f"{name}_bias": bias})


class AutoAWQMoEMethod(_Method):
    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        group = self.quant_config.group_size
        for name, columns, rows in (("w13", hidden_size, 2 * inter), ("w2", inter, hidden_size)):
            for part, shape, dtype in (
                ("qweight", (columns, rows // 8), torch.int32),
                ("scales", (columns // group, rows), params_dtype),
                ("qzeros", (columns // group, rows // 8), torch.int32),
            ):
                tensor = torch.zeros(num_experts, *shape, dtype=dtype)
                self._register(
                    layer, attributes | {"is_transposed": True}, **{f"{name}_{part}": tensor}
                )


class CompressedTensorsWNA16MarlinMoEMethod(_Method):
    is_transposed = True

    def __init__(self, weight_quant, input_quant, moe, layer_name=None):
        super().__init__(moe)
        self.weight_quant, self.symmetric = weight_quant, weight_quant.symmetric
        self.num_bits, self.group_size = weight_quant.num_bits, weight_quant.group_size

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        attributes["is_transposed"] = self.is_transposed
        for name, columns, rows in (("w13", hidden_size, 2 * inter), ("w2", inter, hidden_size)):
            groups = columns // self.group_size
            parts = {
                "packed": ((rows, columns // 8), torch.int32),
                "scale": ((rows, groups), params_dtype),
            }
            if not self.symmetric:
                parts["zero_point"] = ((rows // 8, groups), torch.int32)
            for part, (shape, dtype) in parts.items():
                shape = shape[::-1] if self.is_transposed else shape
                tensor = torch.zeros(num_experts, *shape, dtype=dtype)
                self._register(layer, attributes, **{f"{name}_weight_{part}": tensor})
            if self.is_transposed:
                indices = torch.zeros(num_experts, columns, dtype=torch.int32)
                self._register(layer, attributes, **{f"{name}_weight_g_idx": indices})


class CompressedTensorsWNA16MoEMethod(CompressedTensorsWNA16MarlinMoEMethod):
    is_transposed = False


class Fp8MoeBackend(Enum):
    TRITON = "TRITON"
    MARLIN = "MARLIN"


def select_fp8_moe_backend(**options):
    return Fp8MoeBackend.TRITON, OtherExperts


class _Fp8Method(_Method):
    def select(self):
        select = sys.modules[self.place].select_fp8_moe_backend  # a name of that module
        self.fp8_backend, self.experts_cls = select()

    def fill(self, layer, num_experts, hidden_size, inter, attributes, scale_name, scales, static):
        sizes = {"w13": (2 * inter, hidden_size), "w2": (hidden_size, inter)}
        for name, (rows, columns) in sizes.items():
            weight = torch.zeros(num_experts, rows, columns, dtype=torch.float8_e4m3fn)
            shape = scales(name, rows, columns)
            scale = torch.ones(num_experts, *shape)
            self._register(layer, attributes, **{f"{name}_weight": weight})
            self._register(layer, attributes, **{f"{name}_{scale_name}": scale})
            setattr(layer, f"{name}_input_scale", None)
            if static:
                delattr(layer, f"{name}_input_scale")
                self._register(
                    layer, attributes, **{f"{name}_input_scale": torch.ones(num_experts)}
                )

    def by_blocks(self, name, rows, columns):
        (n, k), parts = self.weight_block_size, 2 if name == "w13" else 1
        return parts * -(-rows // parts // n), -(-columns // k)


class Fp8MoEMethod(_Fp8Method):
    place = f"{QUANT}.fp8"

    def __init__(self, quant_config, layer):
        super().__init__(layer.moe_config)
        self.quant_config = quant_config
        self.weight_block_size = quant_config.weight_block_size
        self.block_quant = self.weight_block_size is not None
        self.select()

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        def by_tensor(name, rows, columns):
            return (2,) if name == "w13" else ()

        scales = self.by_blocks if self.block_quant else by_tensor
        scale_name = "weight_scale_inv" if self.block_quant else "weight_scale"
        static = self.quant_config.activation_scheme == "static"
        sizes = num_experts, hidden_size, inter
        self.fill(layer, *sizes, attributes, scale_name, scales, static)


class CompressedTensorsW8A8Fp8MoEMethod(_Fp8Method):
    place = f"{COMPRESSED}_w8a8_fp8"

    def __init__(self, weight_quant, input_quant, moe, layer_name=None):
        super().__init__(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        blocks = weight_quant.strategy == "block"
        self.weight_block_size = weight_quant.block_structure if blocks else None
        self.block_quant = blocks
        self.select()

    def create_weights(self, layer, num_experts, hidden_size, inter, params_dtype, **attributes):
        def by_channel(name, rows, columns):
            return rows, 1

        scales = self.by_blocks if self.block_quant else by_channel
        sizes = num_experts, hidden_size, inter
        self.fill(layer, *sizes, attributes, "weight_scale", scales, False)


def places(version: str) -> dict[str, dict[str, object]]:
    """Module: what is in it, of a release."""
    old = version.startswith("0.26")
    gptq = type("AutoGPTQMoEMethod", (AutoGPTQMoEMethod,), {"indices": old})
    marlin = CompressedTensorsWNA16MarlinMoEMethod
    wna16 = CompressedTensorsWNA16MoEMethod
    nvfp4 = {
        "NvFp4MoeBackend": NvFp4MoeBackend,
        "select_nvfp4_moe_backend": select_nvfp4_moe_backend,
    }
    found = {
        f"{QUANT}.mxfp4": {
            name: globals()[name]
            for name in (
                "GptOssMxfp4MoEMethod",
                "Mxfp4MoEMethod",
                "Mxfp4MoeBackend",
                "select_mxfp4_moe_backend",
                "select_deepseek_v4_mxfp4_moe_backend",
            )
        },
        f"{QUANT}.modelopt": {"ModelOptNvFp4FusedMoE": ModelOptNvFp4FusedMoE, **nvfp4},
        f"{COMPRESSED}_w4a4_nvfp4": {
            "CompressedTensorsW4A4Nvfp4MoEMethod": CompressedTensorsW4A4Nvfp4MoEMethod,
            **nvfp4,
        },
        f"{COMPRESSED}_w4a4_mxfp4": {
            "CompressedTensorsW4A4Mxfp4MoEMethod": CompressedTensorsW4A4Mxfp4MoEMethod,
        },
        f"{QUANT}.auto_gptq": {"AutoGPTQMoEMethod": gptq},
        f"{QUANT}.auto_awq": {"AutoAWQMoEMethod": AutoAWQMoEMethod},
        f"{QUANT}.fp8": {
            "Fp8MoEMethod": Fp8MoEMethod,
            "Fp8MoeBackend": Fp8MoeBackend,
            "select_fp8_moe_backend": select_fp8_moe_backend,
        },
        f"{COMPRESSED}_w8a8_fp8": {
            "CompressedTensorsW8A8Fp8MoEMethod": CompressedTensorsW8A8Fp8MoEMethod,
            "Fp8MoeBackend": Fp8MoeBackend,
            "select_fp8_moe_backend": select_fp8_moe_backend,
        },
    }
    if old:
        found[f"{COMPRESSED}_wna16_marlin"] = {"CompressedTensorsWNA16MarlinMoEMethod": marlin}
    else:
        found[f"{COMPRESSED}_wna16"] = {"CompressedTensorsWNA16MoEMethod": wna16}
    return found
