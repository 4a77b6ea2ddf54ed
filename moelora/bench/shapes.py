"""Shapes of the MoE layers of well-known models, from their published configurations."""

from dataclasses import dataclass, replace
from typing import cast

from moelora.bench.formats import FORMATS
from moelora.operators.experts import ACTIVATIONS, Activation
from moelora.weights.readers import GateUp


@dataclass(frozen=True)
class Model:
    """One MoE layer: E experts, top_k of them per token, hidden size K, intermediate size I."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = "silu"
    bias: bool = False  # of both projections
    format: str | None = None  # of FORMATS; None: weights of the activations' dtype

    @property
    def slices(self) -> int:
        """Projections in w13: gate and up, or one without a gate."""
        return 1 if self.activation == "relu2" else 2

    @property
    def gate_up(self) -> GateUp | None:
        """Row order of w13, as the constructors of `QuantizedWeights` name it."""
        if self.slices == 1:
            return None
        return "interleaved" if self.activation == "swigluoai" else "concatenated"

    def quantized(self, format: str | None) -> "Model":
        """The same layer with weights of one of FORMATS; None: of the activations' dtype."""
        if format is None:
            return replace(self, format=None)
        if format not in FORMATS:
            raise ValueError(f"no format is called {format!r}; there are {', '.join(FORMATS)}")
        multiple = FORMATS[format].multiple
        if self.hidden % multiple or self.intermediate % multiple:
            sizes = f"{self.name} has sizes of {self.hidden} and {self.intermediate}"
            raise ValueError(f"{sizes}: {format} takes multiples of {multiple}")
        return replace(self, format=format)

    def cut(self, experts: int) -> "Model":
        """The same layer with fewer experts, for machines that cannot hold them all."""
        if not self.top_k <= experts <= self.experts:
            sizes = f"{self.name} has {self.experts} experts, {self.top_k} per token"
            raise ValueError(f"{sizes}: cannot be cut to {experts}")
        return replace(self, experts=experts)

    def shard(self, tp: int) -> "Model":
        """Shard of one of `tp` tensor-parallel ranks: every expert, 1/tp of its columns."""
        if tp < 1 or self.intermediate % tp:
            size = f"{self.name} has an intermediate size of {self.intermediate}"
            raise ValueError(f"{size}: it does not split into {tp} equal shards")
        return replace(self, intermediate=self.intermediate // tp)


MODELS = {
    "qwen3": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "mixtral": Model("Mixtral-8x7B", 8, 2, 4096, 14336),
    "dsv2lite": Model("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
    "mixtral-8x22b": Model("Mixtral-8x22B", 8, 2, 6144, 16384),
    "qwen3-235b": Model("Qwen3-235B-A22B", 128, 8, 4096, 1536),
    "qwen3-coder-480b": Model("Qwen3-Coder-480B-A35B", 160, 8, 6144, 2560),
    "qwen3-next": Model("Qwen3-Next-80B-A3B", 512, 10, 2048, 512),
    "qwen1.5-moe": Model("Qwen1.5-MoE-A2.7B", 60, 4, 2048, 1408),
    "qwen2-57b": Model("Qwen2-57B-A14B", 64, 8, 3584, 2560),
    "dsv2": Model("DeepSeek-V2", 160, 6, 5120, 1536),
    "dsv3": Model("DeepSeek-V3", 256, 8, 7168, 2048),
    "kimi-k2": Model("Kimi-K2", 384, 8, 7168, 2048),
    "gpt-oss-20b": Model("gpt-oss-20b", 32, 4, 2880, 2880, "swigluoai", bias=True),
    "gpt-oss-120b": Model("gpt-oss-120b", 128, 4, 2880, 2880, "swigluoai", bias=True),
    "olmoe": Model("OLMoE-1B-7B", 64, 8, 2048, 1024),
    "phi3.5": Model("Phi-3.5-MoE", 16, 2, 4096, 6400),
    "glm4.5-air": Model("GLM-4.5-Air", 128, 8, 4096, 1408),
    "glm4.5": Model("GLM-4.5", 160, 8, 5120, 1536),
    "ernie4.5-21b": Model("ERNIE-4.5-21B-A3B", 64, 6, 2560, 1536),
    "minimax-m2": Model("MiniMax-M2", 256, 8, 3072, 1536),
    "llama4-scout": Model("Llama-4-Scout", 16, 1, 5120, 8192),
    "dbrx": Model("DBRX", 16, 4, 6144, 10752),
    "nemotron3-nano": Model("Nemotron-3-Nano-30B-A3B", 128, 6, 2688, 1856, "relu2"),
}


def find(text: str) -> tuple[str, Model]:
    """(key, model) of "qwen3"; of "qwen3:16", the same layer cut to 16 experts; of "qwen3@int4",
    the same layer with quantized weights."""
    text, _, format = text.partition("@")
    key, _, experts = text.partition(":")
    if key not in MODELS:
        raise ValueError(f"no model is called {key!r}; there are {', '.join(MODELS)}")
    model = MODELS[key]
    model = model.cut(_whole(experts, text)) if experts else model
    return key, model.quantized(format or None)


def name_of(key: str, experts: int | None) -> str:
    """A model as `find` takes it, with its number of experts if that was cut (None: all)."""
    known = MODELS.get(key)
    return f"{key}:{experts}" if known and experts and experts < known.experts else key


def custom(text: str) -> tuple[str, Model]:
    """(key, model) of "E,top_k,K,I" or "E,top_k,K,I,activation"."""
    fields = text.split(",")
    if len(fields) not in (4, 5):
        raise ValueError(f"a shape is E,top_k,K,I or E,top_k,K,I,activation, not {text!r}")
    sizes = [_whole(field, text) for field in fields[:4]]
    if sizes[1] > sizes[0]:
        raise ValueError(f"{text!r} chooses {sizes[1]} of {sizes[0]} experts")
    if fields[4:] and fields[4] not in ACTIVATIONS:
        raise ValueError(f"the activation of {text!r} is none of {', '.join(ACTIVATIONS)}")
    experts, top_k, hidden, intermediate = sizes
    activation = cast("Activation", fields[4]) if fields[4:] else "silu"
    model = Model("custom", experts, top_k, hidden, intermediate, activation)
    return "x".join(fields), model


def _whole(field: str, text: str) -> int:
    if not field.strip().isdigit() or int(field) < 1:
        raise ValueError(f"{field!r} in {text!r} is not a positive whole number")
    return int(field)
