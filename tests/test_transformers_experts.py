"""One experts module of transformers: which activations run, and what is refused."""

import pytest
import torch
from hf_models import transformers
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import moelora.integrations.transformers  # noqa: F401, registers the implementation


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


@pytest.mark.parametrize(
    ("act", "has_gate"),
    [
        ("silu", True),
        ("swish", True),
        ("gelu_pytorch_tanh", True),
        ("gelu_new", True),
        ("gelu_fast", True),
        ("relu2", False),
    ],
)
def test_activations(act, has_gate):
    torch.manual_seed(0)
    experts = experts_class(has_gate)(transformers.MixtralConfig(), act)
    wanted = call(experts, "batched_mm")
    torch.testing.assert_close(call(experts, "moelora"), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("act", "has_gate"), [("gelu", True), ("relu", True), ("relu2", True), ("silu", False)]
)
def test_other_activations_are_refused(act, has_gate):
    experts = experts_class(has_gate)(transformers.MixtralConfig(), act)
    act_class = type(experts.act_fn).__name__
    with pytest.raises(NotImplementedError, match=f"of Experts .*act_fn={act_class}.* is none of"):
        call(experts, "moelora")


def test_other_gates_are_refused():
    """Same activation function, but the gate clamps, as DeepSeek-V4's does."""
    experts = experts_class()(transformers.MixtralConfig())
    gate = type(experts)._apply_gate
    type(experts)._apply_gate = lambda self, x: gate(self, x.clamp(max=10.0))
    with pytest.raises(NotImplementedError, match="the activation of its gate of Experts"):
        call(experts, "moelora")


def test_other_modules_are_refused():
    config = transformers.MixtralConfig()
    experts = experts_class()(config)
    experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match="Experts normalises after every expert"):
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
