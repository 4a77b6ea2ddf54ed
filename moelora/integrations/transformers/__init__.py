"""moelora inside Hugging Face transformers: `"moelora"` as an experts implementation.

    import moelora.integrations.transformers as moelora_hf

    moelora_hf.enable(model)                                          # the base model
    pool = moelora_hf.load_adapters(model, ["adapters/law", "adapters/code"])
    model.generate(**batch_of_three, adapter_names=["law", "__base__", "code"])

Importing this module registers the implementation. Nothing is merged into the weights: every row of
a batch carries its own adapter, or none, through one fused operator per layer of experts, and one
more for each other layer that adapters have factors of. Threads may call one model at the same
time, each with adapters of its own; requests of continuous batching have theirs.

`enable` is `model.set_experts_implementation("moelora")` that raises where a model's experts would
not come here; docs/architectures.md has which those are.

Expert weights that a model stores as (E, in, out), gpt-oss's, are laid out anew in place at the
first call: parameters keep identity, shape and values, but are no longer contiguous, which bare
`safetensors.torch.save_file(model.state_dict(), ...)` refuses; `save_pretrained` takes care of it.

Quantized experts stay so (docs/weight-formats.md has what is covered):

    model = moelora_hf.load_quantized("openai/gpt-oss-20b")

Those that transformers itself has loaded in FP8 `enable` and `load_adapters` put into tiles, for
good. Those that it has swizzled, of MXFP4, nobody else can read: both raise.

Adapters that PEFT has loaded are for `moelora.integrations.peft`.
"""

from moelora.adapters.pool import BASE
from moelora.integrations.transformers import continuous as _continuous  # noqa: F401  takes names
from moelora.integrations.transformers.adapters import (
    enable_checkpointing,
    load_adapters,
    new_pool,
    unload_adapters,
    use_adapters,
)
from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.enable import enable
from moelora.integrations.transformers.experts import experts_forward
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.quantized import load_quantized, load_quantized_experts

__all__ = [
    "BASE",
    "IMPLEMENTATION",
    "enable",
    "enable_checkpointing",
    "experts_forward",
    "load_adapters",
    "load_quantized",
    "load_quantized_experts",
    "moe_layers",
    "new_pool",
    "unload_adapters",
    "use_adapters",
]
