"""How vLLM 0.33 keeps adapters, as far as `update_adapters` meets it: on each rank.

Names, signatures and order of calls are those of vLLM's sources; four layers of experts (2D) and
one linear layer stand for a model.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from vllm_stand_in import BaseLinearLayerWithLoRA, FusedMoEWithLoRA, LoRAKernelMeta, PEFTHelper

E, K, I, R = 4, 16, 8, 8  # noqa: E741
LAYERS = [f"model.layers.{n}.mlp.experts" for n in range(4)]
LINEAR = "model.layers.0.self_attn.o_proj"
PROJECTIONS = {"gate_proj": (K, I), "down_proj": (I, K), "up_proj": (K, I)}  # w1, w2, w3


@dataclass
class LoRALayerWeights:
    lora_a: object
    lora_b: object
    scaling: object

    def optimize(self):
        lists = isinstance(self.lora_b, list)
        for b in self.lora_b if lists else [self.lora_b]:
            b *= self.scaling
        self.scaling = 1


class PackedLoRALayerWeights(LoRALayerWeights):
    @classmethod
    def pack_moe_stacked(cls, loras, module_name):
        assert len(loras) == 3 and all(lora is not None for lora in loras)
        sides = ([getattr(lora, side) for lora in loras] for side in ("lora_a", "lora_b"))
        return cls(*sides, loras[0].scaling)


def parse_fine_tuned_lora_name(name, weights_mapper=None):
    *module, side, weight = name.removeprefix("base_model.model.").split(".")
    if weight != "weight" or side not in ("lora_A", "lora_B"):
        raise ValueError(f"{name} is unsupported LoRA weight")
    return ".".join(module), side == "lora_A"


def is_pin_memory_available():
    return False


class LoRAModel:
    def __init__(self, lora_model_id, rank, loras):
        self.id, self.rank, self.loras = lora_model_id, rank, loras

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id, tensors, peft_helper, device="cuda", dtype=None, weights_mapper=None
    ):
        loras = {}
        for key, tensor in tensors.items():
            name, is_a = parse_fine_tuned_lora_name(key, weights_mapper)
            scaling = peft_helper.lora_alpha / peft_helper.r
            lora = loras.setdefault(name, LoRALayerWeights(None, None, scaling))
            setattr(lora, "lora_a" if is_a else "lora_b", tensor.to(device=device, dtype=dtype))
        return cls(lora_model_id, peft_helper.r, loras)

    @classmethod
    def from_local_checkpoint(
        cls, lora_dir, expected_lora_modules, peft_helper, *, lora_model_id=None, device="cuda",
        dtype=None, weights_mapper=None, moe_ep_spec=None,
    ):  # fmt: skip
        path = Path(lora_dir, "adapter_model.safetensors")
        if not path.is_file():
            raise FileNotFoundError(f"{lora_dir} doesn't contain tensors")
        tensors = load_file(path)
        for key in tensors:
            name = parse_fine_tuned_lora_name(key)[0].removesuffix(".base_layer").rpartition(".")[2]
            if name not in expected_lora_modules:
                raise ValueError(f"expected target modules but received {name}")
        return cls.from_lora_tensors(lora_model_id, tensors, peft_helper, device, dtype)


LORA_CONFIG = SimpleNamespace(fully_sharded_loras=False, enable_moe_shared_loras=False)
LORA_CONFIG.max_lora_rank, LORA_CONFIG.lora_dtype = R, torch.float32


def linear(slots, device):
    module = BaseLinearLayerWithLoRA()
    module.device, module.input_size, module.output_slices = device, K, (K,)
    module.create_lora_weights(slots, LORA_CONFIG)
    return module


def experts(slots, device):
    module = FusedMoEWithLoRA()
    module.device, module._w13_slices, module.tp_size = device, 2, 1
    module.moe_config = sizes = SimpleNamespace(num_local_experts=E, hidden_dim=K)
    sizes.intermediate_size_per_partition = I
    module.create_lora_weights(slots, LORA_CONFIG)
    return module


def current_stream():
    return None


def get_tp_group():
    return SimpleNamespace(world_size=1)


get_pp_group = get_dp_group = get_tp_group


class LRUCache(OrderedDict):
    def __init__(self):
        super().__init__()
        self.pinned_items = set()

    def touch(self, key):
        if key in self:
            self.move_to_end(key)

    def oldest(self):
        return next(key for key in self if key not in self.pinned_items)


class LoRAModelManager:
    def __init__(self, lora_config):
        self.lora_config = lora_config
        self.capacity, self.lora_slots = lora_config.max_cpu_loras, lora_config.max_loras
        device = getattr(lora_config, "device", "cpu")
        self.modules = {name: experts(self.lora_slots, device) for name in LAYERS}
        self.modules[LINEAR] = linear(self.lora_slots, device)
        every = [f"{e}.{p}" for e in range(E) for p in PROJECTIONS]
        self.packed_modules = {name: [f"{name}.{one}" for one in every] for name in LAYERS}
        self.model = torch.nn.ModuleList(self.modules.values())
        self._registered_adapters, self._active_adapters = LRUCache(), LRUCache()
        self.lora_index_to_id = [None] * self.lora_slots
        self._last_mapping = self._last_slot_layout = None
        self._enable_mixed_moe_lora_format = False
        meta = LoRAKernelMeta.make(self.lora_slots, 16, device)
        self.punica_wrapper_mapping = {"language_model": SimpleNamespace(token_mapping_meta=meta)}

    def __len__(self):
        return len(self._registered_adapters)

    def _create_merged_loras_inplace(self, lora_model):
        for name, names in self.packed_modules.items():
            loras = [self._get_lora_layer_weights(lora_model, one) for one in names]
            if not any(loras):
                continue
            assert all(lora is not None for lora in loras)  # as pack_moe
            stacks = [[torch.stack([getattr(lora, side) for lora in loras[n::3]]) for n in range(3)]
                      for side in ("lora_a", "lora_b")]  # fmt: skip
            lora_model.loras[name] = LoRALayerWeights(*stacks, loras[0].scaling)
            for one in names:
                del lora_model.loras[one]
        for lora in lora_model.loras.values():
            lora.optimize()
        if self._enable_mixed_moe_lora_format and lora_model.is_3d_lora_weight:
            for name in LAYERS:
                self._convert_3d_to_2d_moe_lora(lora_model, name)

    def _convert_3d_to_2d_moe_lora(self, lora_model, name):
        gate_up, down = (lora_model.loras.get(n) for n in (f"{name}.base_layer", name))
        if gate_up is None or down is None:
            return
        (w13_a, w13_b), (w2_a, w2_b) = (
            (
                one.lora_a.reshape(E, -1, one.lora_a.shape[-1]),
                one.lora_b.reshape(one.lora_b.shape[0], -1, E).permute(2, 0, 1),
            )
            for one in (gate_up, down)
        )
        half = w13_b.shape[1] // 2
        down.lora_a, down.lora_b = [w13_a, w2_a, w13_a], [w13_b[:, :half], w2_b, w13_b[:, half:]]
        del lora_model.loras[f"{name}.base_layer"]

    def _validate_moe_lora_format(self, lora_model):
        if self._enable_mixed_moe_lora_format and lora_model.is_3d_lora_weight:
            return
        for name in LAYERS:
            lora = lora_model.loras.get(name)
            if lora is not None and torch.is_tensor(lora.lora_a):
                raise ValueError("contains fused 3D MoE weights")

    def _get_lora_layer_weights(self, lora_model, module_name):
        return lora_model.loras.get(module_name)

    def add_adapter(self, adapter):
        if adapter.id in self._registered_adapters:
            self._registered_adapters.move_to_end(adapter.id)
            return False
        self._validate_moe_lora_format(adapter)
        self._create_merged_loras_inplace(adapter)
        self._registered_adapters[adapter.id] = adapter
        return True

    def activate_adapter(self, lora_id):
        if lora_id in self._active_adapters:
            return False
        index = self.lora_index_to_id.index(None)
        lora_model = self._registered_adapters[lora_id]
        for name, module in self.modules.items():
            lora = self._get_lora_layer_weights(lora_model, name)
            if lora is None:
                module.reset_lora(index)
            else:
                module.set_lora(index, lora.lora_a, lora.lora_b)
        self.lora_index_to_id[index] = lora_id
        self._active_adapters[lora_id] = None
        return True

    def deactivate_adapter(self, adapter_id):
        if self._active_adapters.pop(adapter_id, 0) is None:
            self.lora_index_to_id[self.lora_index_to_id.index(adapter_id)] = None

    def remove_all_adapters(self):
        self._registered_adapters.clear()
        self._active_adapters.clear()
        self.lora_index_to_id = [None] * self.lora_slots
        self._last_mapping = self._last_slot_layout = None

    def set_adapter_mapping(self, mapping):
        slots = tuple(self.lora_index_to_id)
        if self._last_mapping != mapping or self._last_slot_layout != slots:
            of_tokens = [slots.index(n) if n > 0 else -1 for n in mapping.index_mapping]
            meta = self.punica_wrapper_mapping["language_model"].token_mapping_meta
            meta.prepare_tensors(torch.tensor(of_tokens, dtype=torch.long))
            self._last_mapping, self._last_slot_layout = mapping, slots

    def remove_adapter(self, adapter_id):
        self.deactivate_adapter(adapter_id)
        return self._registered_adapters.pop(adapter_id, None) is not None


class LRUCacheLoRAModelManager(LoRAModelManager):
    def activate_adapter(self, lora_id):
        if lora_id not in self._active_adapters and len(self._active_adapters) >= self.lora_slots:
            self.deactivate_adapter(self._active_adapters.oldest())
        result = super().activate_adapter(lora_id)
        self._active_adapters.touch(lora_id)
        return result


class WorkerLoRAManager:
    def __init__(self, lora_config):
        self.lora_config, self.max_position_embeddings = lora_config, 64
        self._lora_model_cls = LoRAModel
        self._adapter_manager = LRUCacheLoRAModelManager(lora_config)

    def add_dummy_lora(self, lora_request, rank):
        if lora_request.lora_int_id in self.list_adapters():
            return False
        return self._adapter_manager.add_adapter(LoRAModel(lora_request.lora_int_id, rank, {}))

    def set_active_adapters(self, requests, mapping):
        self._apply_adapters(requests)
        if mapping is not None:
            self._adapter_manager.set_adapter_mapping(mapping)

    def _load_adapter(self, lora_request):
        helper = PEFTHelper.from_local_dir(lora_request.lora_path, self.max_position_embeddings)
        helper.validate_legal(self.lora_config)
        lora = self._lora_model_cls.from_local_checkpoint(
            lora_request.lora_path,
            {"experts", "o_proj", *PROJECTIONS},
            peft_helper=helper,
            lora_model_id=lora_request.lora_int_id,
            device="cpu",
            dtype=torch.float32,
            weights_mapper=None,
            moe_ep_spec=None,
        )
        lora.is_3d_lora_weight = lora_request.is_3d_lora_weight
        self._adapter_manager._validate_moe_lora_format(lora)
        return lora

    def remove_all_adapters(self):
        self._adapter_manager.remove_all_adapters()

    def list_adapters(self):
        return set(self._adapter_manager._registered_adapters)

    def remove_adapter(self, adapter_id):
        return self._adapter_manager.remove_adapter(adapter_id)


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    def _apply_adapters(self, lora_requests):
        assert len(lora_requests) <= self._adapter_manager.lora_slots
        for lora in lora_requests:
            self.add_adapter(lora)

    def add_adapter(self, lora_request):
        inner = self._adapter_manager
        if lora_request.lora_int_id not in self.list_adapters() or lora_request.load_inplace:
            lora = self._load_adapter(lora_request)
            inner.remove_adapter(lora.id)
            if len(inner) + 1 > inner.capacity:
                inner.remove_adapter(next(iter(inner._registered_adapters)))
            inner.add_adapter(lora)
        else:
            inner._registered_adapters.move_to_end(lora_request.lora_int_id)
        inner.activate_adapter(lora_request.lora_int_id)


PLACES = {
    "vllm.distributed.parallel_state": "get_dp_group get_pp_group get_tp_group",
    "vllm.lora.lora_model": "LoRAModel",
    "vllm.lora.lora_weights": "PackedLoRALayerWeights",
    "vllm.lora.model_manager": "LoRAModelManager",
    "vllm.lora.utils": "parse_fine_tuned_lora_name",
    "vllm.lora.worker_manager": "LRUCacheWorkerLoRAManager WorkerLoRAManager",
    "vllm.utils.cache": "LRUCache",
    "vllm.utils.platform_utils": "is_pin_memory_available",
    "vllm.utils.torch_utils": "current_stream",
}
