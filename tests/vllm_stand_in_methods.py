"""Stand-ins of vLLM's methods of 4-bit layers: what they are made from, and which parameters their
`create_weights` registers, in 0.26 and 0.33.

Mirrors vllm/model_executor/layers/quantization/{mxfp4,auto_gptq,auto_awq}.py and
quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16{,_marlin}.py.
The tests run on the real ones, too, where they can be imported.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn
from vllm_stand_in import OtherExperts


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
    def __init__(self, moe):
        super().__init__(moe)
        self.mxfp4_backend, self.experts_cls = select_mxfp4_moe_backend(moe)

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
    pass


def select_mxfp4_moe_backend(moe):
    return Mxfp4MoeBackend.MARLIN, OtherExperts


select_deepseek_v4_mxfp4_moe_backend = select_mxfp4_moe_backend


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


def places(version: str) -> dict[str, dict[str, object]]:
    """Module: what is in it, of a release."""
    old = version.startswith("0.26")
    quant = "vllm.model_executor.layers.quantization"
    compressed = f"{quant}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16"
    gptq = type("AutoGPTQMoEMethod", (AutoGPTQMoEMethod,), {"indices": old})
    marlin = CompressedTensorsWNA16MarlinMoEMethod
    wna16 = CompressedTensorsWNA16MoEMethod
    found = {
        f"{quant}.mxfp4": {
            name: globals()[name]
            for name in (
                "GptOssMxfp4MoEMethod",
                "Mxfp4MoEMethod",
                "Mxfp4MoeBackend",
                "select_mxfp4_moe_backend",
                "select_deepseek_v4_mxfp4_moe_backend",
            )
        },
        f"{quant}.auto_gptq": {"AutoGPTQMoEMethod": gptq},
        f"{quant}.auto_awq": {"AutoAWQMoEMethod": AutoAWQMoEMethod},
    }
    if old:
        found[f"{compressed}_marlin"] = {"CompressedTensorsWNA16MarlinMoEMethod": marlin}
    else:
        found[compressed] = {"CompressedTensorsWNA16MoEMethod": wna16}
    return found
