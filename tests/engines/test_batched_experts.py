"""Tokens that come batched by expert, with and without vLLM."""

from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from checks import assert_close_to_ref
from vllm_layer import Layer, load

from moelora import fused_experts_lora
from moelora.integrations.batched import batched_experts_lora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

pytest_plugins = ["vllm_fixtures"]

ROWS = 11  # of each block, more than any expert gets
# Arguments that only `fused_experts_lora` takes.
ROUTED = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids", "token_lora_mapping")
ROUTED += ("expert_map", "apply_router_weight_on_input")
OF_EXPERTS = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b", "w13_bias", "w2_bias")


def options(p):
    """Arguments that both operators take."""
    return {name: value for name, value in p.kwargs().items() if name not in ROUTED}


def dispatch(p, first=0, experts=None):
    """(hidden states, numbers of tokens, adapters, [(token, choice, expert, row)]) of a rank's
    experts. Rows that no token fills are NaN and have adapter 0."""
    experts = experts or p.spec.experts
    x = p.hidden_states.new_full((experts, ROWS, p.hidden_states.size(1)), float("nan"))
    counts = torch.zeros(experts, dtype=torch.int32)
    mapping = torch.zeros(experts, ROWS, dtype=torch.int32)
    places = []
    for token, choices in enumerate(p.topk_ids.tolist()):
        for choice, expert in enumerate(choices):
            local = expert - first
            if 0 <= local < experts:
                row = int(counts[local])
                x[local, row] = p.hidden_states[token]
                if p.token_lora_mapping is not None:
                    mapping[local, row] = p.token_lora_mapping[token]
                places.append((token, choice, local, row))
                counts[local] += 1
    return x, counts.to(x.device), mapping.to(x.device), places


def local_options(p, here):
    """`options` with the part of a rank's experts, as views."""

    def local(name, value):
        if isinstance(value, list):
            return [local(name, one) for one in value]
        if value is None or (value.dim() == 4 and value.size(1) == 1):  # of all experts
            return value
        return value[here] if name.endswith("bias") else value[:, here]

    return {n: local(n, v) if n in OF_EXPERTS else v for n, v in options(p).items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(mix="absent"),
        Spec(tokens=9, mix="many"),
        Spec(tokens=7, mix="half_base", sharing="outer", slices=1),
        Spec(tokens=6, activation="swigluoai", slices=1, bias=True),
    ],
    ids=str,
)
def test_a_row_is_what_its_choice_contributes(device_and_dtype, spec, ranks):
    """The weighted sums of all ranks' rows are then the layer's result."""
    device, dtype = device_and_dtype
    p = replace(spec, dtype=dtype).build().to(device)
    experts, total = spec.experts // ranks, torch.zeros(p.hidden_states.shape, device=device)
    for first in range(0, spec.experts, experts):
        here = slice(first, first + experts)
        x, counts, mapping, places = dispatch(p, first, experts)
        mapping = None if p.token_lora_mapping is None else mapping
        more = local_options(p, here)
        rows = batched_experts_lora(x, p.w13[here], p.w2[here], counts, mapping, **more)
        assert rows.shape == x.shape
        for token, choice, expert, row in places:
            alone = fused_experts_lora(
                p.hidden_states[token : token + 1],
                p.w13,
                p.w2,
                p.topk_weights.new_ones(1, 1),
                p.topk_ids[token : token + 1, choice : choice + 1].contiguous(),
                token_lora_mapping=mapping if mapping is None else mapping[expert, row : row + 1],
                **options(p),
            )
            assert same_bits(rows[expert, row], alone[0])
            total[token] += p.topk_weights[token, choice].float() * rows[expert, row].float()
    there, here = p.kwargs(), p.to("cpu").kwargs()
    ref, naive = fused_experts_lora_ref(**here), naive_fused_experts_lora(**there)
    assert_close_to_ref(total.to(dtype), ref, naive, dtype)


def test_rows_without_tokens_are_not_read(device_and_dtype):
    """They are NaN here, and 0 in the result; numbers of tokens are on the device."""
    device, dtype = device_and_dtype
    p = Spec(tokens=9, mix="many", dtype=dtype).build().to(device)
    x, counts, mapping, _ = dispatch(p)
    out = torch.full_like(x, float("nan"))
    got = batched_experts_lora(x, p.w13, p.w2, counts, mapping, out=out, **options(p))
    assert got is out and out.isfinite().all()
    for expert, count in enumerate(counts.tolist()):
        assert out[expert, count:].eq(0).all() and out[expert, :count].ne(0).any(-1).all()
    none = batched_experts_lora(x, p.w13, p.w2, counts * 0, mapping, **options(p))
    assert none.eq(0).all()


def test_arguments_are_refused_by_name():
    p = Spec(mix="absent").build()
    x, counts, mapping, _ = dispatch(p)

    def refused(match, **changes):
        given = {"hidden_states": x, "w13": p.w13, "w2": p.w2, "expert_num_tokens": counts}
        with pytest.raises(ValueError, match=match):
            batched_experts_lora(**given | changes)

    refused("hidden_states has 2 dimensions, expected 3", hidden_states=p.hidden_states)
    refused(r"expert_num_tokens has shape \(3,\), expected \(4,\)", expert_num_tokens=counts[:3])
    refused("expert_num_tokens is torch.float32", expert_num_tokens=counts.float())
    refused(r"token_lora_mapping has shape \(4, 3\)", token_lora_mapping=mapping[:, :3])
    refused(r"out has shape \(4, 3, 64\)", out=x[:, :3])
    refused("out is not contiguous", out=x.transpose(1, 2).contiguous().transpose(1, 2))
    refused("expected 4 experts, as many as hidden_states has blocks", w13=p.w13[:2])


# ---- in vLLM ----


def batched_class(vllm):
    oracle = load("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    return oracle.backend_to_kernel_cls(vllm.UnquantizedMoeBackend.BATCHED_TRITON)[0]


class Batched(Layer):
    """A layer whose tokens come batched by expert, called as the modular kernel does."""

    def make_kernel(self, quant):
        cls = batched_class(self.vllm)
        self.experts = cls(self.moe_config, quant, max_num_tokens=ROWS, num_dispatchers=1)
        self.kernel = self

    def apply(self, hidden_states, expert_num_tokens, **call):
        weights_and_ids = call["w1"], call["w2"], call["topk_ids"]
        e, *problem = self.experts.moe_problem_size(hidden_states, *weights_and_ids)
        meta = self.vllm.ExpertTokensMetadata(expert_num_tokens, None)
        call |= {"expert_tokens_meta": meta, "a1q_scale": None, "a2_scale": None}
        self.shapes = self.experts.workspace_shapes(*problem, e, e, meta, call["activation"])
        first, second, output = map(hidden_states.new_empty, self.shapes)
        call |= {"workspace13": first, "workspace2": second, "output": output}
        self.experts.apply(hidden_states=hidden_states, **call)
        return output


def test_vllms_batched_layers_are_served(served, place):
    device, dtype = place
    assert batched_class(served).__name__ == "BatchedTritonExpertsServed"
    p = Spec(tokens=9, mix="absent", bias=True, dtype=dtype).build().to(device)
    layer = Batched(served, p, device)
    x, counts, _, _ = dispatch(p)
    output = layer(hidden_states=x, expert_num_tokens=counts)
    assert layer.shapes[:2] == ((0,), (0,)) and output.shape == x.shape
    wanted = batched_experts_lora(x, p.w13, p.w2, counts, w13_bias=p.w13_bias, w2_bias=p.w2_bias)
    assert same_bits(output, wanted)
    assert output.isfinite().all()


def test_what_is_not_supported_runs_vllms_own_path(served, lines):
    p = Spec(tokens=9, mix="absent").build()
    layer = Batched(served, p)
    layer.activation = layer.moe_config.activation = served.MoEActivation("gelu")
    own = []
    base = type(layer.experts).__mro__[2]
    assert base.__name__ == "BatchedTritonExperts"
    served.monkeypatch.setattr(base, "apply", lambda self, *args: own.append(len(args)))
    x, counts, _, _ = dispatch(p)
    layer(hidden_states=x, expert_num_tokens=counts)
    assert own == [15] and layer.shapes[0] != (0,)
    assert lines[-1] == "moelora: there is no activation 'gelu'; vLLM's own path runs"


def test_a_release_without_batched_experts_is_served_otherwise(vllm, lines):
    place = "vllm.model_executor.layers.fused_moe.experts.fused_batched_moe"
    vllm.monkeypatch.delattr(load(place), "BatchedTritonExperts")
    vllm.register()
    assert vllm.chosen().__name__ == "TritonExpertsWithLoRA"
    assert any("BatchedTritonExperts" in line and "batched by expert" in line for line in lines)
