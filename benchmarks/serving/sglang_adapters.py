"""A plugin of SGLang that loads adapters from their files, whatever loads the base model.

SGLang 0.5.23 loads adapters by the load format of the base model, and refuses them under `dummy`.
Servers of this benchmark find the plugin by an entry point beside moelora's; with moelora and
without, nothing else in SGLang is changed.
"""

import dataclasses

ENTRY_POINT = {"sglang.srt.plugins": {"benchmark_adapters": f"{__name__}:register"}}
HOOKED = "sglang.srt.lora.lora.LoRAAdapter.initialize_weights"


def from_files(initialize_weights, adapter):
    adapter.load_config = dataclasses.replace(adapter.load_config, load_format="auto")
    return initialize_weights(adapter)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, from_files, HookType.AROUND)
