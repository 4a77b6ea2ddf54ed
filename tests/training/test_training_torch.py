"""A layer in what torch trains with: compiled graphs, checkpoints, wrappers, mixed precision."""

import copy

import pytest
import torch
from cases import same_bits
from glue_cases import TOP_K, E, K, M, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

import moelora

BACKEND = "aot_eager"  # Inductor needs a C++ compiler on the CPU, which is not ours to demand


class Adapted(nn.Module):
    """A router and a layer of frozen experts with one adapter for all tokens."""

    def __init__(self, dtype=torch.float32, factors=None):
        super().__init__()
        given, factors = inputs(dtype=dtype), factors or dtype
        self.w13 = nn.Parameter(given["w13"], requires_grad=False)
        self.w2 = nn.Parameter(given["w2"], requires_grad=False)
        self.gate = nn.Parameter(given["w2"][0, :E].contiguous(), requires_grad=False)
        self.a13 = nn.Parameter(given["w13_lora_a"][0][:1].to(factors))
        self.b13 = nn.Parameter(torch.cat(given["w13_lora_b"], 2)[:1].to(factors))
        self.a2 = nn.Parameter(given["w2_lora_a"][:1].to(factors))
        self.b2 = nn.Parameter(given["w2_lora_b"][:1].to(factors))

    def forward(self, x):
        scores = (x @ self.gate.t()).float().softmax(-1)
        weights, ids = scores.topk(TOP_K, -1)
        out = moelora.fused_experts_lora(
            *(x, self.w13, self.w2, weights, ids),
            token_lora_mapping=torch.zeros(x.shape[0], dtype=torch.int32, device=x.device),
            w13_lora_a=self.a13,
            w13_lora_b=self.b13,
            w2_lora_a=self.a2,
            w2_lora_b=self.b2,
        )
        return x + out


def gradients(model, x, call=None):
    """Of the mean square, in order: of x and of all that is trained."""
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    (model if call is None else call)(x).float().square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def all_same(found, wanted):
    return len(found) == len(wanted) and all(map(same_bits, found, wanted))


@pytest.mark.parametrize(
    "dynamic, dtypes", [(False, (torch.float32, None)), (True, (torch.bfloat16, torch.float32))]
)
def test_compiled(dynamic, dtypes):
    """One graph forward and one backward, with the bits of eager calls."""
    torch._dynamo.reset()
    model = Adapted(*dtypes)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=dynamic)
    for tokens in (M, 9) if dynamic else (M,):
        x = inputs(dtype=dtypes[0], tokens=tokens)["hidden_states"]
        assert all_same(gradients(model, x, compiled), gradients(model, x))
    with torch.no_grad():
        assert same_bits(compiled(x), model(x))


def test_compiled_with_frozen_weights_that_require_a_gradient():
    torch._dynamo.reset()
    model = Adapted()
    model.w2.requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    with pytest.raises(RuntimeError, match="w2 requires a gradient.*frozen"):
        compiled(inputs()["hidden_states"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, compiled):
    if reentrant and compiled:
        pytest.skip("torch compiles no reentrant checkpoints")
    torch._dynamo.reset()
    model = Adapted()
    x = inputs()["hidden_states"]

    def call(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    run = torch.compile(call, fullgraph=True, backend=BACKEND) if compiled else call
    assert all_same(gradients(model, x, run), gradients(model, x))


def test_autocast():
    """The layer keeps its dtype under autocast; a linear layer behind it does not mind."""
    model = Adapted(torch.bfloat16, torch.float32)
    head = nn.Linear(K, 3)
    x = inputs(dtype=torch.bfloat16)["hidden_states"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(model(x)).float().square().mean()
    loss.backward()
    assert model.a2.grad.dtype == torch.float32 and model.a2.grad.any()
    grads = gradients(model, x, lambda x: head.bfloat16()(model(x)))
    assert same_bits(model.a2.grad, grads[3])


def test_loss_scaling():
    """What overflows is seen by the scaler, which skips the step."""
    model = Adapted(torch.float16, torch.float32)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = model.a2.detach().clone()
    x = inputs(dtype=torch.float16)["hidden_states"]
    for _ in range(60):
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if not torch.equal(model.a2, before):
            break
    assert 0 < scaler.get_scale() < 2.0**60
    assert not torch.equal(model.a2, before) and model.a2.isfinite().all()


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_fully_sharded(reshard, checkpointed):
    """Weights and factors are gathered for the forward, freed, and gathered again."""
    from torch.distributed.fsdp import fully_shard

    model, x = Adapted(), inputs()["hidden_states"]
    wanted = gradients(model, x)
    sharded = nn.Sequential(copy.deepcopy(model))
    fully_shard(sharded[0], reshard_after_forward=reshard)
    fully_shard(sharded)

    def call(x):
        return checkpoint(sharded, x, use_reentrant=False) if checkpointed else sharded(x)

    found = gradients(sharded, x, call)
    found = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    assert all_same(found, wanted)
