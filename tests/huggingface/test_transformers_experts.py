"""One experts module of transformers: which activations run, and what is refused."""

import importlib

import pytest
import torch
from hf_models import transformers
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import moelora.integrations.transformers  # noqa: F401, registers the implementation
from moelora.integrations.transformers.experts import activation_of


def experts_class(has_gate=True, **options):
    @use_experts_implementation(has_gate=has_gate, **options)
    class Experts(torch.nn.Module):
        def __init__(self, config, act="silu", dtype=torch.float32):
            super().__init__()
            self.num_experts = 4
            name = "gate_up_proj" if has_gate else "up_proj"
            up = torch.randn(4, 40 if has_gate else 20, 16, dtype=dtype) / 4
            setattr(self, name, torch.nn.Parameter(up))
            self.down_proj = torch.nn.Parameter(torch.randn(4, 16, 20, dtype=dtype) / 4)
            self.act_fn = ACT2FN[act]

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the eager path is not used here")

    return Experts


def call(experts, implementation, ids=None):
    experts.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 16, generator=generator).to(experts.down_proj.dtype)
    if ids is None:
        ids = torch.rand(9, 4, generator=generator).argsort(dim=1)[:, :2]
    # Routers give sentinel ids no weight, and the implementation of older releases counts on it.
    weights = torch.rand(9, 2, generator=generator) * (ids < experts.num_experts)
    with torch.no_grad():
        return experts(hidden, ids, weights)


def assert_is(experts, activation, reference="eager"):
    """moelora computes the layer as another implementation, as this activation."""
    wanted = call(experts, reference)
    assert activation_of(experts) == activation
    atol = 1e-6 * max(10.0, wanted.abs().max().item())
    torch.testing.assert_close(call(experts, "moelora"), wanted, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("act", "silu swish gelu_pytorch_tanh gelu_new gelu_fast relu2".split())
def test_activations(act):
    torch.manual_seed(0)
    experts = experts_class(act != "relu2")(transformers.MixtralConfig(), act)
    wanted = call(experts, "batched_mm")
    torch.testing.assert_close(call(experts, "moelora"), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", ["gelu", "relu", "relu2", "silu"])
def test_other_activations_are_refused(act):
    experts = experts_class(act != "silu")(transformers.MixtralConfig(), act)
    act_class = type(experts.act_fn).__name__
    with pytest.raises(NotImplementedError, match=f"of Experts .*act_fn={act_class}.* is none of"):
        call(experts, "moelora")


def clamped_at(limit):
    return lambda g, u: torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def situ(g, u):
    return 3 * torch.tanh(g / 3) * torch.sigmoid(g) * u


@pytest.mark.parametrize("gate", [*map(clamped_at, (0.5, 10.0, 60.0, 1e7)), situ])
def test_gates_with_numbers_of_their_own_are_refused(gate):
    """Same activation function, but with a limit or a soft cap that no configuration names."""
    experts = experts_class()(transformers.MixtralConfig())
    type(experts)._apply_gate = lambda self, x: gate(*x.chunk(2, dim=-1))
    with pytest.raises(NotImplementedError, match="the activation of its gate of Experts"):
        call(experts, "moelora")
    with pytest.raises(NotImplementedError, match="is none of moelora's: silu, .*, situ"):
        activation_of(experts)


SMALL = {"hidden_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
# Experts that clamp, of transformers releases that have them: the module's name, and its config.
CLAMPED = {
    "DeepseekV4": {"moe_intermediate_size": 20},
    "HYV4": {"moe_intermediate_size": 20},
    "Glm5NextText": {"moe_intermediate_size": 20},
    "MiniMaxM3VL": {"config": "MiniMaxM3VLText", "intermediate_size": 20},
    "OpenAIPrivacyFilter": {"intermediate_size": 20},
    "GptOss": {"intermediate_size": 20},
}
OAI = dict.fromkeys(("MiniMaxM3VL", "OpenAIPrivacyFilter"), "swigluoai_uninterleave")
OAI["GptOss"] = "swigluoai"


def clamped(name, **options):
    options = SMALL | CLAMPED.get(name, {}) | options
    config = getattr(transformers, options.pop("config", name) + "Config", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    module = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    torch.manual_seed(0)
    experts = getattr(module, f"{name}Experts")(config(**options))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("limit", [0.75, 7.0, 10.0, 60.0, 1e4])
def test_clamped_experts_are_those_of_eager(name, limit):
    experts = clamped(name, swiglu_limit=limit)
    experts.gate_up_proj.data *= limit  # of the size where it matters
    assert activation_of(experts)[0] == OAI.get(name, "silu")
    assert_is(experts, activation_of(experts))


@pytest.mark.parametrize("name", OAI)
def test_the_alpha_of_a_config_is_read(name):
    """By experts that read it: those of older releases have numbers of their own."""
    experts = clamped(name, swiglu_alpha=1.2, swiglu_limit=3.0)
    reads = 1.2 in (getattr(experts, own, None) for own in ("alpha", "swiglu_alpha"))
    assert_is(experts, (OAI[name], *((1.2, 3.0) if reads else (None, None))))


def test_a_limit_of_the_config_alone_is_read():
    experts = experts_class()(transformers.MixtralConfig(swiglu_limit=80.0))
    gate = type(experts)._apply_gate

    def clamps(self, x):
        g, u = x.chunk(2, dim=-1)
        limit = self.config.swiglu_limit
        return gate(self, torch.cat([g.clamp(max=limit), u.clamp(-limit, limit)], dim=-1))

    type(experts)._apply_gate = clamps
    assert activation_of(experts) == ("silu", None, 80.0)


@pytest.mark.parametrize(("limit", "found"), [(7.0, None), (0.75, 0.75)])
def test_a_clamp_behind_silu(limit, found):
    """As in Step-3.7: of silu(gate), where others clamp gate."""
    experts = experts_class()(transformers.MixtralConfig(swiglu_limit=limit))

    def clamps(self, x):
        g, u = x.chunk(2, dim=-1)
        return self.act_fn(g).clamp(max=limit) * u.clamp(-limit, limit)

    type(experts)._apply_gate = clamps
    experts.gate_up_proj.data *= 4 * limit
    assert_is(experts, ("swiglustep", None, found), "batched_mm")


@pytest.mark.parametrize(("gate_cap", "up_cap"), [(4.0, 25.0), (0.5, 1.5), (1.0, 3.0)])
def test_soft_caps_are_those_of_eager(gate_cap, up_cap):
    """Inkling-2's SwiGLU, which is the SiTU of Kimi-K3."""
    experts = clamped(
        "Inkling2",
        config="Inkling2Text",
        n_routed_experts=4,
        moe_intermediate_size=20,
        mlp_gate_softcap=gate_cap,
        mlp_up_softcap=up_cap,
    )
    experts.gate_up_proj.data *= up_cap / 4  # both caps show
    assert_is(experts, ("situ", None if gate_cap == 1 else gate_cap, up_cap))


@pytest.mark.parametrize("up_cap", [None, 25.0])
def test_the_betas_of_kimi_k3_are_read(up_cap):
    """From a config that names them as Kimi-K3's does; without a linear beta, up has no cap."""
    names = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": up_cap}
    experts = experts_class()(transformers.MixtralConfig(**names))

    def situ(self, x):
        g, u = x.chunk(2, dim=-1)
        u = u if up_cap is None else up_cap * torch.tanh(u / up_cap)
        return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * u

    type(experts)._apply_gate = situ
    assert activation_of(experts) == ("situ", 4.0, up_cap)


def test_a_clamped_model_is_compiled():
    experts = clamped("DeepseekV4", swiglu_limit=1.5)
    wanted = call(experts, "eager")
    compiled = torch.compile(lambda: call(experts, "moelora"), backend="aot_eager")
    torch.testing.assert_close(compiled(), wanted, rtol=1e-4, atol=1e-4)


def test_other_modules_are_refused():
    config = transformers.MixtralConfig()
    experts = experts_class()(config)
    experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match="Experts normalizes every expert's output"):
        call(experts, "moelora")
    experts = experts_class()(config, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"gate_up_proj is torch.float64"):
        call(experts, "moelora")


def test_sentinel_ids_are_skipped():
    torch.manual_seed(0)
    experts = experts_class()(transformers.MixtralConfig())
    ids = torch.tensor([[0, 4], [4, 4], [1, 2]] * 3)
    got = call(experts, "moelora", ids)
    experts._is_expert_parallel = True
    torch.testing.assert_close(got, call(experts, "batched_mm", ids), rtol=1e-4, atol=1e-5)
    assert not got[1].any()
