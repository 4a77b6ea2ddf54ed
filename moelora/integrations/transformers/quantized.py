"""Models whose experts stay quantized: `load_quantized`, `load_quantized_experts`."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import tqdm

from moelora.adapters.files import file_in
from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.folder import Folder
from moelora.integrations.transformers.folder_experts import LayerOfFolder, say_dequantized
from moelora.integrations.transformers.hub import local_folder
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.names import OF_ONE, expert_linears
from moelora.integrations.transformers.projection import set_weights
from moelora.integrations.transformers.quantizer import Config, refuse_saving
from moelora.operators.fake import COMPUTE_DTYPES
from moelora.weights.fp8 import Activations
from moelora.weights.rounding import Rounding

GENERATION = "generation_config.json"
# Options with which from_pretrained would load files other than those of the folder.
OF_FILES = ("gguf_file", "revision", "subfolder", "use_safetensors", "variant")


def load_quantized(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activations: Activations | None = None,
    dequantize: bool = False,
    experts: Rounding | None = None,
    model_class: type[PreTrainedModel] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Loads a quantized checkpoint; its experts stay quantized, in four bits or FP8.

    Or quantizes the experts of a 16-bit checkpoint while it loads them, with `experts`.

    transformers loads all but the experts, as it does in `from_pretrained`. No expert is
    dequantized, unless `dequantize` asks for it: beside their tiles there is never more than one
    layer as the folder has it. Other layers that are quantized are dequantized once, to `dtype`;
    the log says how much memory that takes.

    Parameters
    ----------
    folder : str or Path
        A folder with config.json and safetensors files, or its id on the Hub ("org/name"), whose
        `quant_method` is mxfp4, gptq, awq, auto-round, compressed-tensors, fp8, modelopt or
        bitsandbytes; docs/weight-formats.md has the schemes of each.
    dtype : torch.dtype
        bfloat16 or float16, of the model and of its experts' activations.
    activations : {"fp8", "native", "bf16"}, optional
        Format of FP8 experts' activations (`QuantizedWeights.from_fp8_block`), of all layers that
        have such; others may have other schemes. By default FP8 if the folder says that activations
        are quantized, as most do.
    dequantize : bool
        What happens to experts of a scheme that no kernel reads, INT8 or MXFP8 for instance: True
        dequantizes them once, to `dtype`, and the log says how much memory they take; False raises
        NotImplementedError. Experts that kernels read stay quantized.
    experts : {"nf4", "fp4", "mxfp4", "nvfp4", "int4", "fp8"}, optional
        Rounds experts of 16 bits to the nearest values of a format, without calibration
        (`QuantizedWeights.from_dense`), one by one: beside the tiles there is at most one layer's
        stack. The folder then needs no `quantization_config`.
    model_class : type, optional
        By default the first of `architectures` in config.json.
    **options
        For `model_class.from_pretrained`, for instance `device_map="cuda"`. A map that offloads
        layers to "cpu" or "disk" beside a GPU is refused.

    Returns
    -------
    PreTrainedModel
        For inference, with the experts implementation `"moelora"`. Can be passed to
        `load_adapters`.

    Raises
    ------
    ValueError
        As `load_quantized_experts`; or another weight is missing, damaged, or has the wrong shape.
    NotImplementedError
        As of `load_quantized_experts`.
    FileNotFoundError
        `folder` is no folder, and not on the Hub.
    """
    if "torch_dtype" in options:
        raise ValueError(f"torch_dtype is {options['torch_dtype']!r:.80}, wanted none; use dtype")
    if "quantization_config" in options:
        raise ValueError(
            f"quantization_config is a {type(options['quantization_config']).__name__}, wanted "
            'none; experts="nf4" rounds experts of 16 bits, and load_quantized_experts those of a '
            "model that from_pretrained has quantized"
        )
    _check_dtype("dtype", dtype)
    for name in OF_FILES:
        if options.get(name) not in (None, True, ""):
            got = f"{name} is {options[name]!r:.80}"
            raise ValueError(f"{got}, wanted none; give the folder that has these files")
    checkpoint = _checkpoint(folder)
    checkpoint.check(dequantize, activations, experts)
    config = _read(checkpoint.path / "config.json", AutoConfig, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # handled by transformers itself
    if model_class is None:
        model_class = _model_class(config.architectures)
        if model_class is None:
            got = reprlib.repr(config.architectures)
            raise ValueError(f"{folder}: architectures is {got}; pass model_class")
    loaded: Any = model_class.from_pretrained(
        None,
        config=config,
        state_dict=checkpoint.plain(dtype, experts) | _biases(checkpoint, model_class, config),
        dtype=dtype,
        quantization_config=Config(),
        experts_implementation=IMPLEMENTATION,
        output_loading_info=True,
        **{"ignore_mismatched_sizes": True, **options},
    )
    model, info = loaded
    if info["mismatched_keys"] and not options.get("ignore_mismatched_sizes"):
        name, got, wanted = min(info["mismatched_keys"])
        raise ValueError(f"{folder}: {name} has shape {tuple(got)}, wanted {tuple(wanted)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{folder} has no tensor {missing[0]} ({len(missing)} are missing), which "
            f"{model_class.__name__} wants{_of_text_model(checkpoint, missing, config)}"
        )
    _refuse_biases(checkpoint, info["unexpected_keys"])
    if model.can_generate() and (path := file_in(checkpoint.path, GENERATION)).is_file():
        model.generation_config = _read(path, GenerationConfig)
    _load_experts(model, checkpoint, None, activations, dequantize, experts, with_biases=False)
    # from_pretrained got no name; PEFT writes it into the adapters of the model.
    model.name_or_path = model.config.name_or_path = str(folder)
    return model


def load_quantized_experts(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    activations: Activations | None = None,
    dequantize: bool = False,
    experts: Rounding | None = None,
) -> None:
    """Replaces the experts of `model` by those of a quantized checkpoint, layer by layer.

    For models that `load_quantized` did not create. The replaced parameters may be on the meta
    device: only their shapes are read. Biases are kept, unless the folder stores them per expert.
    Tensors may have the names of the model's modules, or names that transformers' conversion maps
    to these.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its experts implementation becomes `"moelora"`.
    folder : str or Path
        As of `load_quantized`.
    dtype : torch.dtype, optional
        bfloat16 or float16, by default that of the experts' parameters.
    activations, dequantize, experts
        As of `load_quantized`.

    Raises
    ------
    ValueError
        A tensor is missing, unknown, or does not match the model or the format in shape, dtype or
        content; the message names it. Earlier layers then have their new weights. Or a file is
        damaged, missing, or a link to outside the folder.
    NotImplementedError
        The quantization method, a setting, or the scheme of experts is not supported (raised before
        any tensor is read); moelora cannot run the experts, or accelerate has offloaded them.
    RuntimeError
        The model has adapters; load these afterwards.
    FileNotFoundError
        `folder` is no folder, and not on the Hub.
    """
    checkpoint = _checkpoint(folder)
    checkpoint.check(dequantize, activations, experts)
    _load_experts(model, checkpoint, dtype, activations, dequantize, experts, with_biases=True)


def _load_experts(
    model: PreTrainedModel,
    checkpoint: Folder,
    dtype: torch.dtype | None,
    activations: Activations | None,
    dequantize: bool,
    rounding: Rounding | None,
    with_biases: bool,
) -> None:
    """As `load_quantized_experts`, of a checkpoint that was checked."""
    if getattr(getattr(model, "_moelora", None), "pool", None) is not None:
        raise RuntimeError("the model has adapters already; load them after its weights")
    layers = moe_layers(model)
    for name, (module, _) in layers.items():
        block = model.get_submodule(name.rpartition(".")[0])
        if any(_is_offloaded(part) for part in (module, *block.modules())):
            raise NotImplementedError(
                f"{name} is offloaded: its device_map keeps weights on the CPU or a disk between "
                "calls; quantized experts stay on one device"
            )
    linears = expert_linears(model, layers, checkpoint.of_names())
    what = None if rounding else True  # reading tiles takes no time; rounding takes some
    for name, (module, _) in tqdm(layers.items(), desc="Quantizing experts", disable=what):
        kind = dtype or module.down_proj.dtype
        _check_dtype("dtype" if dtype else f"dtype of {name}", kind)
        stored = LayerOfFolder(
            checkpoint, name, module, linears[name], activations, dequantize, rounding
        )
        biases = stored.biases() if with_biases else {}
        found = stored.read(kind)
        device = _device(model, name)
        refuse_saving(model)
        set_weights(module, [weights.to(device) for weights in found])
        for own, bias in biases.items():
            old = getattr(module, own)
            bias = bias.to(device, old.dtype)
            module._parameters[own] = nn.Parameter(bias, requires_grad=old.requires_grad)
    model.set_experts_implementation(IMPLEMENTATION)
    say_dequantized(checkpoint, [module for module, _ in layers.values()])


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads the parameters for each call, and offloads them afterwards."""
    hook = getattr(module, "_hf_hook", None)
    hooks = [hook, *getattr(hook, "hooks", ())]  # a SequentialHook contains several
    return any(getattr(one, "offload", False) for one in hooks)


def _of_text_model(checkpoint: Folder, missing: list[str], config: PreTrainedConfig) -> str:
    """What to do if the folder has the missing tensors, under the names of the text model alone."""
    pairs = ((name.replace("language_model.", "", 1), name) for name in missing)
    plain = [name for name, full in pairs if name != full and name in checkpoint]
    text = config.get_text_config()
    if not plain or text is config:
        return ""
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    architecture = "" if cls is None else f' and architectures ["{cls.__name__}"]'
    return (
        f": it has {plain[0]}, as {len(plain)} of them are called in the text model alone; its "
        f"config.json must be that of the text model, text_config with model_type "
        f'"{text.model_type}"{architecture}'
    )


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"{name} is {dtype!r:.80}, wanted torch.bfloat16 or torch.float16")


def _biases(
    checkpoint: Folder, model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> dict[str, Tensor]:
    """Biases stored per expert, as the model's parameters; transformers reports missing ones."""
    names = (name.removesuffix(".bias") for name in checkpoint if name.endswith(".bias"))
    if not any(map(OF_ONE.search, names)):
        return {}
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    layers = moe_layers(model)
    linears = expert_linears(model, layers, checkpoint.of_names())
    return {
        f"{name}.{own}": bias
        for name, (module, _) in layers.items()
        for own, bias in LayerOfFolder(checkpoint, name, module, linears[name]).biases().items()
    }


def _refuse_biases(checkpoint: Folder, unexpected: Collection[str]) -> None:
    """Raises ValueError for a non-zero bias of a quantized layer that has none in the model."""
    for name in sorted(unexpected):
        linear = name.removesuffix(".bias")
        if linear in checkpoint.linears and name in checkpoint and checkpoint[name].float().any():
            raise ValueError(f"{checkpoint.path}: {name} is a bias that the model does not have")


def _read(path: Path, cls: Any, **options: Any) -> Any:
    """A file of a folder as one of transformers' classes of configurations."""
    try:
        return cls.from_pretrained(path.parent, **options)
    except Exception as error:  # whatever transformers raises
        raise ValueError(f"{path} is refused by transformers: {error}") from error


def _model_class(names: Any) -> type[PreTrainedModel] | None:
    """The first of `architectures` in config.json; None if transformers has no such class."""
    first = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, first, None) if isinstance(first, str) else None
    is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
    return found if is_model else None


def _checkpoint(source: str | Path) -> Folder:
    # Subfolders of a repository repeat the weights in other formats, as in gpt-oss.
    return Folder(local_folder(source, ["*.json", "*.safetensors"], ignore_patterns=["*/*"]))


def _device(model: nn.Module, name: str) -> torch.device:
    """Device of the rest of a layer: of its router, or of other parameters around the experts."""
    while name:
        name = name.rpartition(".")[0]
        for parameter in model.get_submodule(name).parameters():
            if parameter.device.type != "meta":
                return parameter.device
    return torch.device("cpu")
