"""Loads what release/hub.py wrote, by Hugging Face's `kernels` beside the installed moelora.

    python tests/project/check_hub.py TREE TREE_OF_ANOTHER_VERSION

Of each tree the variants for this machine, each under a torch that says it is of that variant's
CUDA, or of none. All run the same layers and models, on a CPU.
"""

import importlib
import pathlib
import platform
import re
import sys
from unittest import mock

import kernels
import torch
from kernels._rust import Digest, DigestAlgorithm, Metadata


def torch_of(cuda):
    """torch, as if it were built with this CUDA, or with none."""
    return mock.patch.object(torch.version, "cuda", cuda)


def load(tree):
    """The variants for this machine."""
    folders = sorted(tree.glob(f"build/*-{platform.machine()}-linux"))
    assert folders, f"{tree} has no variant for {platform.machine()}"
    for folder in folders:
        digest = Metadata.read_from_file(folder / "metadata.json").digest
        digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
        cuda = re.search(r"-cu(\d+)(\d)-", folder.name)
        with torch_of(".".join(cuda.groups()) if cuda else None):
            module = kernels.get_local_kernel(tree)
        assert pathlib.Path(module.__file__).parent == folder, module.__file__
        yield module


def layer(module):
    """The same layer through any of them."""
    draw = torch.Generator().manual_seed(0)
    x, w13, w2 = (
        torch.randn(*size, generator=draw, dtype=torch.bfloat16)
        for size in ((8, 64), (4, 64, 64), (4, 64, 32))
    )
    ids = torch.randint(4, (8, 2), generator=draw, dtype=torch.int32)
    return module.fused_experts_lora(x, w13, w2, torch.ones(8, 2), ids)


def model():
    import transformers

    torch.manual_seed(0)
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    sizes |= {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, layer_types=["full_attention"] * 2)
    made = transformers.GptOssForCausalLM(config).bfloat16().eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight.requires_grad_(False), std=0.1)
    return made


def check_models(modules, tree):
    """Each build serves a model of its own; its layer replaces gpt-oss's."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    ids = torch.arange(8)[None]
    logits = []
    for module in modules:
        integration = importlib.import_module(f"{module.__name__}.integrations.transformers")
        one = model()
        integration.enable(one)
        logits.append(one(ids).logits)
    for other in logits[1:]:
        assert torch.equal(other, logits[0])
    assert not torch.equal(model()(ids).logits, logits[0])  # eager rounds elsewhere

    # transformers does both for releases of `kernels` that it knows.
    kernels.use_kernel_forward_from_hub("MegaBlocksMoeMLP")(GptOssMLP)
    repository = kernels.LocalLayerRepository(tree, layer_name="MegaBlocksMoeMLP")
    one = model()
    mapping = kernels.use_kernel_mapping({"MegaBlocksMoeMLP": {"cpu": repository}})
    with mapping, torch_of(None):
        kernels.kernelize(one, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    assert torch.equal(one(ids).logits, logits[0])


def main(trees):
    import moelora

    builds = [module for tree in trees for module in load(tree)]
    modules = [moelora, *builds]
    names = {module._C.NAMESPACE for module in modules}
    assert len(names) == len(modules), names
    for build in builds:
        assert torch.equal(layer(build), layer(moelora))
        assert build.fused_experts_lora is not moelora.fused_experts_lora
    check_models(modules, trees[0])
    print("loaded", *sorted(names))


if __name__ == "__main__":
    main([pathlib.Path(word).resolve() for word in sys.argv[1:]])
