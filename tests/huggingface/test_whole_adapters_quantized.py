"""Adapters of all layers over weights of GPTQ, of compressed-tensors and of quantized experts."""

import copy

import pytest
import quantized_folders
import torch
from conftest import on_gpu
from hf_models import TARGETS, oracle, save_adapter
from torch import nn
from whole_models import ROWS, relative, served, wanted_logits

import moelora.integrations.transformers as moelora_hf

pytestmark = pytest.mark.usefixtures("no_grad")


class GPTQLinear(nn.Module):
    """As the linear layers of GPTQ: no `weight`, sizes under names of their own."""

    def __init__(self, linear):
        super().__init__()
        self.infeatures, self.outfeatures = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 7
        self.register_buffer("scales", scale.detach())
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8).detach())

    @property
    def meant(self):
        return self.qweight * self.scales

    def forward(self, x):
        return x @ self.meant.T.to(x.dtype)


def test_linear_layers_of_gptq(tmp_path):
    model, ids, folders = served(tmp_path)
    exact = copy.deepcopy(model)
    for name, module in exact.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            quantized = GPTQLinear(module)
            module.weight.copy_(quantized.meant)
            model.set_submodule(name, quantized)
    moelora_hf.load_adapters(model, folders)
    wanted = wanted_logits(exact, folders, ROWS, ids)
    assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4


def test_linear_layers_of_compressed_tensors(tmp_path):
    """The library runs quantized layers in a `forward` of its own."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model, ids, folders = served(tmp_path)
    exact = copy.deepcopy(model)
    weights = quantization.QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            scale = module.weight.abs().amax(1, keepdim=True) / 127
            module.weight_scale.copy_(scale)
            module.quantization_status = quantization.QuantizationStatus.FROZEN
            meant = (module.weight / scale).round().clamp(-128, 127) * scale
            exact.get_submodule(name).weight.copy_(meant)
    assert relative(model(ids).logits, exact(ids).logits) < 1e-5
    wanted = wanted_logits(exact, folders, ROWS, ids)
    moelora_hf.load_adapters(model, folders)
    assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4


@pytest.mark.parametrize("device", ["cpu", on_gpu("cuda")])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "gptq"])
def test_quantized_experts(kind, device, tmp_path):
    """Adapters of attention, routers and experts over a quantized base, against dequantized."""
    exact = quantized_folders.make_folder(
        tmp_path / kind, kind, 128 if kind == "fp8" else 32
    ).float()
    router = "router.weight" if kind == "mxfp4" else "gate.weight"
    ids = torch.randint(2, 128, (3, 7), generator=torch.Generator().manual_seed(2))
    folders = {
        name: save_adapter(
            exact,
            tmp_path / name,
            seed,
            target_modules=modules,
            target_parameters=[*TARGETS, f"mlp.{router}"],
        )
        for seed, (name, modules) in enumerate({"a": ["q_proj", "o_proj"], "b": []}.items())
    }
    rows = ["a", None, "b"]
    wanted, base = oracle(exact, folders, rows, ids), exact(ids).logits
    options = {"activations": "native"} if kind == "fp8" else {}
    model = moelora_hf.load_quantized(
        tmp_path / kind, attn_implementation="eager", device_map=device, **options
    )
    pool = moelora_hf.load_adapters(model, folders)
    assert {place.device.type for place in pool.places.values()} == {device}
    got = model(ids.to(device), adapter_names=rows).logits.cpu()
    alone = model(ids.to(device)).logits.cpu()
    assert torch.equal(got[1], alone[1])
    off, naive = (  # of each token: some take other experts in bfloat16
        (x.float() - y).norm(dim=-1) / y.norm(dim=-1) for x, y in ((got, wanted), (alone, base))
    )
    assert (off.quantile(0.3, -1) <= max(2 * float(naive.quantile(0.3)), 0.03)).all(), (off, naive)
    assert relative(base[::2], wanted[::2]) > 0.3, "adapters must be seen"
