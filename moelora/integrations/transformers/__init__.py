"""Hugging Face transformers: the experts implementation `"moelora"`.

    import moelora.integrations.transformers as moelora_hf

    moelora_hf.enable(model)                                          # the base model
    pool = moelora_hf.load_adapters(model, ["adapters/law", "adapters/code"])
    model.generate(**batch_of_three, adapter_names=["law", "__base__", "code"])

Importing this module registers the implementation. Adapters are not merged into the weights: every
row of a batch has its own adapter, or none. Each layer of experts runs as one fused operator; each
other layer with factors needs one more. Threads may call a model concurrently with different
adapters, as may requests of continuous batching.

`enable` is `model.set_experts_implementation("moelora")`, but raises if moelora cannot run a
model's experts; docs/architectures.md lists the supported ones.

Expert weights stored as (E, in, out), as in gpt-oss, are transposed in memory at the first call:
parameters keep identity, shape and values, but are no longer contiguous. `save_pretrained` handles
that; plain `safetensors.torch.save_file(model.state_dict(), ...)` refuses such tensors.

Quantized experts stay quantized (docs/weight-formats.md lists the formats):

    model = moelora_hf.load_quantized("openai/gpt-oss-20b")

`enable` and `load_adapters` pack experts that transformers itself has loaded in FP8; this cannot be
undone. They raise for MXFP4 experts that transformers has swizzled, which no other code can read.

For adapters that PEFT has loaded, see `moelora.integrations.peft`.
"""

from moelora.adapters.names import BASE
from moelora.integrations.transformers import continuous as _continuous  # noqa: F401  takes names
from moelora.integrations.transformers.adapters import (
    enable_checkpointing,
    load_adapters,
    new_pool,
    pool,
    unload_adapters,
    use_adapters,
)
from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.enable import enable
from moelora.integrations.transformers.experts import experts_forward
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.multi import multi_lora
from moelora.integrations.transformers.quantized import load_quantized, load_quantized_experts
from moelora.integrations.transformers.routing import Routing, record_routing, replay_routing
from moelora.integrations.transformers.share import SharedExperts, share_experts

__all__ = [
    "BASE",
    "IMPLEMENTATION",
    "Routing",
    "SharedExperts",
    "enable",
    "enable_checkpointing",
    "experts_forward",
    "load_adapters",
    "load_quantized",
    "load_quantized_experts",
    "moe_layers",
    "multi_lora",
    "new_pool",
    "pool",
    "record_routing",
    "replay_routing",
    "share_experts",
    "unload_adapters",
    "use_adapters",
]
