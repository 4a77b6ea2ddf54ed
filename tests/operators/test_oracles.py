"""Independent oracles: transformers' MoE blocks and PEFT's adapters, weights mapped to our layout.

Everything runs in float64 where the oracle allows, so that the reference must agree to 1e-10. The
operator is compared with the same oracle, on every device in every dtype that it has there.
"""

import math

import peft
import pytest
import torch
import transformers
from checks import assert_close_to_ref
from conftest import CUDA_DTYPES, on_gpu
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 40, 24, 6, 3, 11

SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
DENSE = {**SIZES, "intermediate_size": INTER, "num_local_experts": EXPERTS}
ROUTED = {**SIZES, "moe_intermediate_size": INTER, "n_routed_experts": EXPERTS, "topk_group": 1}
MODELS = {
    "mixtral": (MixtralSparseMoeBlock, transformers.MixtralConfig(**DENSE)),
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=INTER, num_experts=EXPERTS, norm_topk_prob=True
        ),
    ),
    "gpt_oss": (GptOssMLP, transformers.GptOssConfig(**DENSE)),
    "deepseek_v2": (
        DeepseekV2Moe,
        transformers.DeepseekV2Config(
            **ROUTED,
            num_attention_heads=4,
            topk_method="group_limited_greedy",
            n_group=2,
            routed_scaling_factor=1.5,
        ),
    ),
    "deepseek_v3": (DeepseekV3MoE, transformers.DeepseekV3Config(**ROUTED, n_group=2)),
    "nemotron_h": (
        NemotronHMoE,
        transformers.NemotronHConfig(
            **ROUTED,
            moe_shared_expert_intermediate_size=INTER,
            n_group=1,
            mlp_hidden_act="relu2",
        ),
    ),
}
ACTIVATION = {"gpt_oss": "swigluoai", "nemotron_h": "relu2"}
# Nemotron's router makes float32 weights of any input, and its experts sum in the weights' dtype.
TOLERANCE = {"nemotron_h": 1e-6}


def draw(shape, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random float64 values that every dtype can represent."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return values.bfloat16().double()


def fill(module: nn.Module, seed: int) -> None:
    """Random values of a size that makes every term of the layer count."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.5
            p.copy_(draw(p.shape, 100 * seed + i, scale))


def make_block(name: str) -> nn.Module:
    kind, config = MODELS[name]
    config._experts_implementation = "eager"
    # DeepSeek's and Nemotron's routers hold buffers that only a whole model initializes.
    block = kind(config).double().eval()
    fill(block, 0)
    for buffer in block.buffers():
        buffer.zero_()
    return block


def layer_weights(name: str, experts: nn.Module) -> dict:
    """A transformers experts module as arguments of `fused_experts_lora`."""
    if name == "gpt_oss":  # stored (E, in, out)
        return {
            "w13": experts.gate_up_proj.detach().transpose(1, 2).contiguous(),
            "w2": experts.down_proj.detach().transpose(1, 2).contiguous(),
            "w13_bias": experts.gate_up_proj_bias.detach(),
            "w2_bias": experts.down_proj_bias.detach(),
            "activation": "swigluoai",
        }
    w13 = experts.up_proj if name == "nemotron_h" else experts.gate_up_proj
    return {
        "w13": w13.detach(),
        "w2": experts.down_proj.detach(),
        "activation": ACTIVATION.get(name, "silu"),
    }


def hidden_states() -> torch.Tensor:
    return draw((TOKENS, HIDDEN), 1)


def router(name: str, block: nn.Module, x: torch.Tensor) -> dict:
    gate = block.router if name == "gpt_oss" else block.gate
    _, topk_weights, topk_ids = gate(x)
    return {"topk_weights": topk_weights.detach(), "topk_ids": topk_ids}


def routed(run, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the routed experts of `block` make of `x` when `run` runs the block."""
    y = run(x.unsqueeze(0))
    y = (y[0] if isinstance(y, tuple) else y).squeeze(0)
    return y - block.shared_experts(x) if hasattr(block, "shared_experts") else y


def check_reference(expected: torch.Tensor, arguments: dict, tolerance: float = 1e-10) -> None:
    y = fused_experts_lora_ref(**arguments)
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def cast(value, device, dtype):
    if isinstance(value, list):
        return [cast(v, device, dtype) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.dtype == torch.float64 else value.dtype)


def check_operator(device: str, dtype: torch.dtype):
    def check(expected: torch.Tensor, arguments: dict, tolerance: float = 0.0) -> None:
        arguments = {name: cast(value, device, dtype) for name, value in arguments.items()}
        for name in ("topk_weights", "lora_scalings"):
            if name in arguments:
                arguments[name] = arguments[name].float()
        y = moelora.fused_experts_lora(**arguments)
        if dtype != torch.float32:
            assert_close_to_ref(y, expected, naive_fused_experts_lora(**arguments), dtype)
            return
        # Sums of about HIDDEN terms: errors of some 1e-6 of the largest values are rounding.
        assert y.dtype == dtype
        atol = 5e-6 * expected.abs().max().item() + tolerance
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=atol)

    return check


@pytest.fixture(
    params=[
        pytest.param(check_reference, id="reference"),
        pytest.param(check_operator("cpu", torch.float32), id="cpu-float32"),
        pytest.param(check_operator("cpu", torch.bfloat16), id="cpu-bfloat16"),
        *(on_gpu(check_operator("cuda", d), id=f"cuda-{str(d)[6:]}") for d in CUDA_DTYPES),
    ]
)
def check(request):
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_transformers_block(name, check):
    block = make_block(name)
    x = hidden_states()
    expected = routed(block, block, x)
    routing = router(name, block, x)
    assert routing["topk_ids"].shape == (TOKENS, TOP_K)
    arguments = {"hidden_states": x, **routing, **layer_weights(name, block.experts)}
    check(expected, arguments, **({"tolerance": TOLERANCE[name]} if name in TOLERANCE else {}))


# Scalings are powers of two: folded into B they round nothing.
ADAPTERS = {
    "small": peft.LoraConfig(r=3, lora_alpha=12),
    "large": peft.LoraConfig(r=16, lora_alpha=8, use_rslora=True),
    "uneven": peft.LoraConfig(
        r=4,
        lora_alpha=8,
        rank_pattern={"experts.gate_up_proj": 7},
        alpha_pattern={"experts.gate_up_proj": 14 / 4},
    ),
}


class OneLayer(nn.Module):
    """PEFT wants a model around the block whose parameters it targets."""

    def __init__(self, block: nn.Module, config):
        super().__init__()
        self.mlp = block
        self.config = config

    def forward(self, x):
        return self.mlp(x)


def peft_scaling(config: peft.LoraConfig, parameter: str) -> tuple[int, float]:
    rank = config.rank_pattern.get(f"experts.{parameter}", config.r)
    alpha = config.alpha_pattern.get(f"experts.{parameter}", config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def peft_stacks(model: nn.Module, names: list[str]) -> dict:
    """The adapters of a PEFT model with `target_parameters`, stacked into our layout.

    PEFT keeps A as (r * E, in) with the expert as the slow index and B as (out, r * E) with the
    expert as the fast one; gate and up share an A. The scaling of the two parameters of one adapter
    may differ, ours may not, so it is folded into B.
    """
    down = model.base_model.model.mlp.experts  # gate_up_proj was wrapped first: it is inside
    wrappers = {"w13": (down.base_layer, "gate_up_proj"), "w2": (down, "down_proj")}
    max_rank = 16
    stacks = {}
    for projection, (wrapper, parameter) in wrappers.items():
        assert wrapper.parameter_name == parameter
        factors_a, factors_b = [], []
        for name in names:
            rank, scaling = peft_scaling(ADAPTERS[name], parameter)
            a = wrapper.lora_A[name].weight.detach().view(EXPERTS, rank, -1)
            b = wrapper.lora_B[name].weight.detach()
            b = b.view(b.size(0), rank, EXPERTS).permute(2, 0, 1) * scaling
            factors_a.append(nn.functional.pad(a, (0, 0, 0, max_rank - rank)))
            factors_b.append(nn.functional.pad(b, (0, max_rank - rank)))
        stacks[f"{projection}_lora_a"] = torch.stack(factors_a)
        stacks[f"{projection}_lora_b"] = torch.stack(factors_b)
    return stacks


@torch.no_grad()
# PEFT honors the patterns of target parameters (the shapes prove it) but says that it does not.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "nemotron_h"])
def test_peft_target_parameters(name, check):
    """Three adapters and base tokens in one batch; PEFT runs them one at a time."""
    block = make_block(name)
    weights = layer_weights(name, block.experts)  # before PEFT wraps the module
    x = hidden_states()
    routing = router(name, block, x)
    rows = {"base": [], **{adapter: [] for adapter in ADAPTERS}}
    slots = [-1, 0, 1, 2]
    mapping = [slots[m % 4] for m in range(TOKENS)]
    for m, slot in enumerate(mapping):
        rows[(*ADAPTERS, "base")[slot]].append(m)

    first, *others = ADAPTERS
    model = OneLayer(block, MODELS[name][1])
    for config in ADAPTERS.values():
        config.target_modules = []
        config.target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, ADAPTERS[first], adapter_name=first)
    for other in others:
        model.add_adapter(other, ADAPTERS[other])
    model = model.double().eval()
    lora = [p for n, p in model.named_parameters() if "lora_" in n]
    assert len(lora) == 4 * len(ADAPTERS)
    for i, p in enumerate(lora):
        p.copy_(draw(p.shape, 10 + i, 0.1))

    expected = torch.zeros_like(x)

    with model.disable_adapter():
        base = routed(model, block, x)
    expected[rows["base"]] = base[rows["base"]]
    for adapter in ADAPTERS:
        model.set_adapter(adapter)
        y = routed(model, block, x)
        expected[rows[adapter]] = y[rows[adapter]]
        change = (y - base).abs().max() / base.abs().max()
        assert change > 0.1, f"adapter {adapter} hardly changes the result"

    check(
        expected,
        {
            "hidden_states": x,
            **routing,
            **weights,
            **peft_stacks(model, list(ADAPTERS)),
            "token_lora_mapping": torch.tensor(mapping, dtype=torch.int32),
        },
    )


class LinearExpert(nn.Module):
    """One expert as three linear layers, the form of per-expert checkpoints."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.down_proj = nn.Linear(INTER, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LinearExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(LinearExpert() for _ in range(EXPERTS))

    def forward(self, x, topk_weights, topk_ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(topk_ids == e)
            out.index_add_(0, token, expert(x[token]) * topk_weights[token, choice, None])
        return out


@torch.no_grad()
def test_peft_per_expert_linear_layers(check):
    """Gate and up with an A each (two slices), true ranks and scalings passed beside the stacks."""
    ranks, alphas = {"one": 2, "two": 5}, {"one": 3.0, "two": 2.0}
    model = LinearExperts()
    for name, rank in ranks.items():
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=alphas[name],
            target_modules=["gate_proj", "up_proj", "down_proj"],
            use_rslora=name == "two",
        )
        if name == "one":
            model = peft.get_peft_model(model, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    model = model.double().eval()
    fill(model, 5)
    experts = model.base_model.model.experts

    def base(projection):
        return torch.stack([getattr(e, projection).base_layer.weight.detach() for e in experts])

    def stack(projection, factor):
        """(adapters, E, 5, in) or (adapters, E, out, 5), NaN beyond an adapter's rank."""
        stacked = []
        for name in ranks:
            layers = [getattr(getattr(e, projection), f"lora_{factor}")[name] for e in experts]
            t = torch.stack([layer.weight.detach() for layer in layers])
            missing = 5 - ranks[name]
            padding = (0, 0, 0, missing) if factor == "A" else (0, missing)
            stacked.append(nn.functional.pad(t, padding, value=float("nan")))
        return torch.stack(stacked)

    x = hidden_states()
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    topk_weights, topk_ids = scores.softmax(-1).topk(TOP_K)
    mapping = torch.tensor([m % 3 - 1 for m in range(TOKENS)], dtype=torch.int32)

    expected = torch.zeros_like(x)
    for slot, name in enumerate(("one", "two")):
        model.set_adapter(name)
        y = model(x, topk_weights, topk_ids)
        expected[mapping == slot] = y[mapping == slot]
    with model.disable_adapter():
        expected[mapping < 0] = model(x, topk_weights, topk_ids)[mapping < 0]

    check(
        expected,
        {
            "hidden_states": x,
            "w13": torch.cat((base("gate_proj"), base("up_proj")), dim=1),
            "w2": base("down_proj"),
            "topk_weights": topk_weights,
            "topk_ids": topk_ids,
            "token_lora_mapping": mapping,
            "w13_lora_a": [stack("gate_proj", "A"), stack("up_proj", "A")],
            "w13_lora_b": [stack("gate_proj", "B"), stack("up_proj", "B")],
            "w2_lora_a": stack("down_proj", "A"),
            "w2_lora_b": stack("down_proj", "B"),
            "lora_ranks": torch.tensor([2, 5], dtype=torch.int32),
            "lora_scalings": torch.tensor([3.0 / 2, 2.0 / math.sqrt(5)], dtype=torch.float64),
        },
    )
