"""Names of layers in vLLM, where they differ from those of transformers.

vLLM maps the names of an adapter as those of a checkpoint (`hf_to_vllm_mapper` of the model's
class), and then looks for its modules: an expert's projections are called as `get_expert_mapping`
says, and factors of other names are loaded and never used. SGLang finds experts by the numbers of
layer and expert, and reads all of these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moelora.adapters.layers import Projection

NAMES: Mapping[Projection, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL: Mapping[Projection, str] = {"gate": "w1", "up": "w3", "down": "w2"}


class EngineNames(NamedTuple):
    """What a model's layers are called: projections of an expert, and replaced parts of names.

    `second` is one more part and its replacement, for names that differ between releases of vLLM.
    """

    projections: Mapping[Projection, str] = NAMES
    parts: Mapping[str, str] = {}
    second: tuple[str, str] | None = None

    def of(self, name: str) -> list[str]:
        """The names of a layer, with which all releases of vLLM find it."""
        for part, replacement in self.parts.items():
            name = name.replace(part, replacement)
        names = [name] if self.second is None else [name, name.replace(*self.second)]
        return list(dict.fromkeys(names))


OF_TRANSFORMERS = EngineNames()
_BLOCK_SPARSE = EngineNames(MIXTRAL, {".mlp.": ".block_sparse_moe."})
_GRANITE = EngineNames(parts={".block_sparse_moe.router": ".block_sparse_moe.gate"})
# vLLM 0.33 has the first, 0.28 the second.
_GEMMA = EngineNames(second=(".experts.", ".moe.experts."))

_BY_MODEL_TYPE = {
    "afmoe": EngineNames(parts={".mlp.router.gate": ".mlp.gate"}),
    "gemma4": _GEMMA,
    "gemma4_text": _GEMMA,
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hy_v3": EngineNames(parts={".mlp.shared_experts.": ".mlp.shared_mlp."}),
    "laguna": EngineNames(parts={".mlp.shared_experts.": ".mlp.shared_expert."}),
    "lfm2_moe": EngineNames(MIXTRAL),
    "minimax_m2": _BLOCK_SPARSE,
    "mixtral": _BLOCK_SPARSE,
    "phimoe": EngineNames(
        MIXTRAL, {".mlp.router": ".block_sparse_moe.gate", ".mlp.": ".block_sparse_moe."}
    ),
}

# Models whose experts vLLM reads as stacks only, as PEFT writes them (`is_3d_moe_weight`).
STACKED = frozenset(
    "gpt_oss interns1_pro qwen3_5_moe qwen3_5_moe_text qwen3_omni_moe qwen3_omni_moe_thinker "
    "qwen3_vl_moe qwen3_vl_moe_text".split()
)


def names_of(model_type: str) -> EngineNames:
    """The names of a model, by `model_type` of its configuration."""
    return _BY_MODEL_TYPE.get(model_type, OF_TRANSFORMERS)
