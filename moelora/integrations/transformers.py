"""moelora inside Hugging Face transformers: `"moelora"` as an experts implementation.

    import moelora.integrations.transformers as moelora_hf

    model.set_experts_implementation("moelora")                       # the base model
    pool = moelora_hf.load_adapters(model, ["adapters/law", "adapters/code"])
    model.generate(**batch_of_three, adapter_names=["law", "__base__", "code"])

Importing this module registers the implementation. Nothing is merged into the weights: every row of
a batch carries its own adapter, or none, through one fused operator per layer. Inference only.
Adapters that PEFT has loaded, with factors of other layers beside those of the experts, are for
`moelora.integrations.peft`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moelora
from moelora.adapters import AdapterPool, MoELayer, peek

IMPLEMENTATION = "moelora"
BASE = "__base__"  # PEFT's name for rows without an adapter


# ---- the base model ----


def experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """`fused_experts_lora` behind the signature of transformers' experts functions.

    `self` is the experts module. Ids that are no expert's, the sentinels of expert parallelism,
    are skipped. Raises NotImplementedError for a module that computes something else.
    """
    activation = _activation(self)
    up, down = _parameters(self)
    has_bias = getattr(self, "has_bias", False)
    up_bias = getattr(self, f"{_up_name(self)}_bias") if has_bias else None
    down_bias = self.down_proj_bias if has_bias else None
    if torch.is_grad_enabled():
        _refuse_gradients(hidden_states, top_k_weights, up, down, up_bias, down_bias)
    w13, w2 = _transposed(self) if self.is_transposed else (up, down)

    serving = getattr(self, "_moelora", None)
    adapters = {} if serving is None else serving.adapters(self._moelora_layer, hidden_states)
    out = moelora.fused_experts_lora(
        hidden_states.to(w13.dtype),
        w13,
        w2,
        top_k_weights.to(torch.float32),
        top_k_index,
        w13_bias=up_bias,
        w2_bias=down_bias,
        activation=activation,
        **adapters,
    )
    return out.to(hidden_states.dtype)


def _up_name(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _parameters(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return getattr(experts, _up_name(experts)), experts.down_proj


def _refuse_gradients(*tensors: torch.Tensor | None) -> None:
    if any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            'experts_implementation="moelora" has no backward pass: call the model under '
            "torch.no_grad() or torch.inference_mode()"
        )


_activations: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _activation(experts: nn.Module) -> str:
    """The activation of `experts` in moelora's words, found by trying it on a few numbers.

    Class and config names do not decide what `_apply_gate` computes (clamps, offsets, layout), so
    the function itself is asked; once per module.
    """
    known = _activations.get(experts)
    if known is None:
        known = _activations[experts] = _identify(experts)
    return known


@torch.no_grad()
def _identify(experts: nn.Module) -> str:
    name = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(f"{name} normalises after every expert, which moelora has not")
    up, down = _parameters(experts)
    for parameter, weight in ((_up_name(experts), up), ("down_proj", down)):
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"{name}.{parameter} is {weight.dtype}, which moelora has not"
            )

    # Past every clamp in use (7 to 10), and finer where the variants of gelu differ.
    x = [n / 4 for n in range(-24, 25)] + [-50.0, -20.0, 20.0, 50.0]
    x = torch.tensor(x, dtype=torch.float32)
    gate, up = (t.flatten().to(down.device) for t in torch.meshgrid(x, x, indexing="ij"))
    if not experts.has_gate:
        got = experts.act_fn(gate)
        wanted = {"relu2": F.relu(gate).square()}
    elif getattr(experts, "is_concatenated", True):
        got = experts._apply_gate(torch.cat([gate, up])[None])[0]
        wanted = {"silu": F.silu(gate) * up, "gelu": F.gelu(gate, approximate="tanh") * up}
    else:
        got = experts._apply_gate(torch.stack([gate, up], dim=-1).flatten()[None])[0]
        clamped = gate.clamp(max=7.0)
        glu = clamped * torch.sigmoid(clamped * 1.702)
        wanted = {"swigluoai": (up.clamp(-7.0, 7.0) + 1) * glu}
    for activation, values in wanted.items():
        if got.shape == values.shape and torch.allclose(got.float(), values, rtol=1e-4, atol=1e-4):
            return activation
    layout = "" if not experts.has_gate else " of its gate"
    act = getattr(experts, "act_fn", None)
    raise NotImplementedError(
        f"the activation{layout} of {name} ({type(experts)._apply_gate.__qualname__}, "
        f"act_fn={type(act).__name__}) is none of moelora's: {', '.join(wanted)}"
    )


_copies: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, torch.Tensor, torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)


@torch.compiler.disable
def _transposed(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 (E, 2I, K) and w2 (E, K, I) of a module that stores them as (E, in, out).

    The copy, a second set of expert weights in memory, is made once per module and again when a
    weight moves or is written to. Writes through `.data` are not seen by autograd's version
    counter, and so not here either.
    """
    up, down = _parameters(experts)
    # Anything but the module's own parameters (PEFT's parametrisations) lives for one call only.
    own = up is experts._parameters.get(_up_name(experts)) and down is experts._parameters.get(
        "down_proj"
    )
    key = (_identity(up), _identity(down))
    cached = _copies.get(experts) if own else None
    if cached is None or cached[0] != key:
        with torch.no_grad():
            w13, w2 = (w.detach().transpose(1, 2).contiguous() for w in (up, down))
        cached = (key, w13, w2)
        if own:
            _copies[experts] = cached
    return cached[1], cached[2]


def _identity(weight: torch.Tensor) -> tuple:
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.device, weight.shape


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


# ---- adapters ----


class _Serving:
    """What a model with adapters carries: its pool, and which adapter each row of a batch has.

    The model and its experts modules refer to it by plain attributes, which torch.compile can
    read. A copy of the model, or one that was pickled, has no adapters: copies are empty.
    """

    def __init__(self) -> None:
        self.pool: AdapterPool | None = None
        self.layers: dict[str, dict[str, Any]] = {}  # arguments of the operator
        self.configs: dict[str, Any] = {}  # of the experts modules
        self.hooks: list[Any] = []
        self.call: ExitStack | None = None  # a forward pass that was given adapter_names
        self.lock = threading.Lock()
        self.thread: int | None = None  # that has entered use_adapters
        self.slots: torch.Tensor | None = None  # (rows,) int32
        self.token_lora_mapping: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict) -> _Serving:
        copied = memo[id(self)] = _Serving()
        return copied

    def __reduce__(self) -> tuple:
        return _Serving, ()

    def before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: takes `adapter_names` and spreads the rows over the pass's tokens."""
        names = kwargs.pop("adapter_names", None)
        if names is not None:
            with ExitStack() as stack:
                stack.enter_context(use_adapters(model, names))
                self._spread(args, kwargs)
                self.call = stack.pop_all()
        elif self.slots is not None:
            self._spread(args, kwargs)
        return args, kwargs

    def after_forward(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook, called after a failure too: `adapter_names` are for one pass."""
        if self.call is not None:
            call, self.call = self.call, None
            call.close()

    def _spread(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        slots = self.slots
        if not torch.compiler.is_compiling() and self.thread != threading.get_ident():
            raise RuntimeError(
                "use_adapters was entered in another thread; enter it in the thread that calls "
                "the model, one thread at a time"
            )
        inputs = (kwargs.get("input_ids"), *args[:1], kwargs.get("inputs_embeds"))
        shapes = [x.shape for x in inputs if x is not None]
        if not shapes:
            raise ValueError("use_adapters: the model was called without input_ids, inputs_embeds")
        rows, length = shapes[0][:2]
        if rows != slots.shape[0]:
            raise ValueError(
                f"use_adapters names {slots.shape[0]} rows, the model was called with {rows}; "
                "if generate made copies of each row (num_beams, num_return_sequences) pass their "
                "number as expand="
            )
        self.token_lora_mapping = slots[:, None].expand(rows, length).reshape(-1)

    def adapters(self, layer: str, hidden_states: torch.Tensor) -> dict[str, Any]:
        """The adapter arguments of `fused_experts_lora` for one layer."""
        if self.slots is None:
            return {}
        mapping = self.token_lora_mapping
        if mapping is None or mapping.shape[0] != hidden_states.shape[0]:
            tokens = None if mapping is None else mapping.shape[0]
            raise RuntimeError(
                f"use_adapters: {hidden_states.shape[0]} tokens reached the experts, but the call "
                f"of the model had {tokens}; call the model that was given to use_adapters"
            )
        return {"token_lora_mapping": mapping, **self.layers[layer]}


def moe_layers(model: nn.Module) -> dict[str, tuple[nn.Module, MoELayer]]:
    """The experts modules of a model that go through transformers' experts interface, by name.

    Modules that PEFT has wrapped have the name that they had before.
    """
    layers = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "is_transposed") and hasattr(module, "has_gate")):
            continue
        name = name.replace(".base_layer", "")
        if getattr(module, "_is_expert_parallel", False):
            raise NotImplementedError(
                f"{name} is expert parallel; its adapters are not sharded yet"
            )
        up, down = _parameters(module)
        hidden, intermediate = down.shape[1:] if not module.is_transposed else down.shape[:0:-1]
        layer = MoELayer(
            name,
            down.shape[0],
            hidden,
            intermediate,
            gated=module.has_gate,
            interleaved=module.has_gate and not getattr(module, "is_concatenated", True),
        )
        layers[name] = (module, layer)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts behind transformers' interface")
    return layers


def new_pool(
    layers: Mapping[str, tuple[nn.Module, MoELayer]],
    max_loras: int,
    max_rank: int,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> AdapterPool:
    """An empty pool for the result of `moe_layers`, on the device of the experts.

    Raises NotImplementedError for experts that moelora cannot run or that are on several devices.
    """
    for module, _ in layers.values():
        _activation(module)
    weights = [module.down_proj for module, _ in layers.values()]
    devices = {w.device for w in weights}
    if len(devices) > 1:
        raise NotImplementedError(
            f"the experts are on {sorted(map(str, devices))}; a pool lives on one device"
        )
    specs = [layer for _, layer in layers.values()]
    dtype = dtype or weights[0].dtype
    return AdapterPool(specs, max_loras, max_rank, dtype=dtype, device=devices.pop(), **options)


def load_adapters(
    model: nn.Module,
    adapters: Mapping[str, str | Path] | Iterable[str | Path],
    *,
    max_loras: int | None = None,
    max_rank: int | None = None,
    dtype: torch.dtype | None = None,
    w13_slices: int | None = None,
    shared_outer: bool | None = None,
) -> AdapterPool:
    """Loads PEFT adapter folders into a pool and attaches it to `model`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its experts implementation becomes `"moelora"`, and calls of it and of its `generate` take
        `adapter_names`: one name per row of the batch, "__base__" or None for the base model.
    adapters : mapping or iterable
        Name -> folder with `adapter_config.json` and `adapter_model.safetensors`, or the folders,
        whose own names become those of the adapters.
    max_loras, max_rank : int, optional
        Size of the pool; by default just enough for `adapters`. Give more to add others later
        with `pool.add(name, folder)`.
    dtype : torch.dtype, optional
        Of the factors, by default that of the experts.
    w13_slices, shared_outer : optional
        See `AdapterPool`; by default what suits all of `adapters`.

    Returns
    -------
    AdapterPool
        The pool; a model has one, `unload_adapters` detaches it.
    """
    if hasattr(model, "_moelora") and model._moelora.pool is not None:
        raise RuntimeError(
            "the model has a pool already; add to that one, or unload_adapters first"
        )
    adapters = _named(adapters)
    if max_loras is not None and len(adapters) > max_loras:
        raise ValueError(f"{len(adapters)} adapters do not fit into max_loras={max_loras}")
    found = moe_layers(model)
    for name, (module, _) in found.items():
        if model.get_submodule(name) is not module:
            raise ValueError(
                f"{name} is wrapped by PEFT; load adapters into the plain model, or attach "
                "moelora.integrations.peft to what PEFT has loaded"
            )
    specs = [layer for _, layer in found.values()]

    infos = [peek(folder, specs) for folder in adapters.values()]
    if w13_slices is None:
        w13_slices = 1 if infos and all(i.fused for i in infos) else 2
    if shared_outer is None:
        shared_outer = bool(infos) and all(i.shared_outer for i in infos)
    if max_rank is None:
        # Gate and up of a checkpoint that keeps them apart share one slice where rows interleave.
        joined = any(layer.interleaved for layer in specs)
        max_rank = max(
            (i.max_rank * (2 if joined and not i.fused else 1) for i in infos), default=16
        )
    pool = new_pool(
        found,
        max(len(adapters), 1) if max_loras is None else max_loras,
        max_rank,
        dtype=dtype,
        w13_slices=w13_slices,
        shared_outer=shared_outer,
    )
    for name, folder in adapters.items():
        pool.add(name, folder)

    model.set_experts_implementation(IMPLEMENTATION)
    serving = _Serving()
    serving.pool = pool
    serving.layers = {name: pool.layer(name) for name in found}
    serving.configs = {name: module.config for name, (module, _) in found.items()}
    serving.hooks = [
        model.register_forward_pre_hook(serving.before_forward, with_kwargs=True),
        model.register_forward_hook(serving.after_forward, always_call=True),
    ]
    for name, (module, _) in found.items():
        module._moelora, module._moelora_layer = serving, name
    model._moelora = serving
    if hasattr(type(model), "generate"):
        model.generate = MethodType(_taking_adapter_names(type(model).generate), model)
    return pool


def _named(adapters: Mapping[str, str | Path] | Iterable[str | Path]) -> dict[str, str | Path]:
    if isinstance(adapters, Mapping):
        return dict(adapters)
    if isinstance(adapters, (str, Path)):
        raise ValueError(f"adapters is {str(adapters)!r}, wanted a mapping or a list of folders")
    folders = list(adapters)
    names = [Path(folder).name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"the folders are called {names}, two the same; pass a mapping")
    return dict(zip(names, folders, strict=True))


def _taking_adapter_names(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` with the argument `adapter_names`, one per row that its caller passes."""

    @functools.wraps(generate)
    def call(model: nn.Module, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
        if adapter_names is None:
            return generate(model, *args, **kwargs)
        config = kwargs.get("generation_config") or model.generation_config
        copies = (
            kwargs.get(name) or getattr(config, name) or 1
            for name in ("num_beams", "num_return_sequences")
        )
        with use_adapters(model, adapter_names, expand=max(copies)):
            return generate(model, *args, **kwargs)

    return call


def unload_adapters(model: nn.Module) -> None:
    """Detaches the pool from the model, which goes on as base model."""
    serving = _serving(model)
    for hook in serving.hooks:
        hook.remove()
    model.__dict__.pop("generate", None)
    for module in model.modules():
        if module.__dict__.get("_moelora") is serving:
            del module._moelora


@contextmanager
def use_adapters(
    model: nn.Module, names: Sequence[str | None], *, expand: int = 1
) -> Iterator[None]:
    """Within the context, row i of every batch given to `model` carries adapter `names[i]`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that went through `load_adapters`.
    names : sequence of str or None
        One adapter per row, None or "__base__" for the base model.
    expand : int
        Consecutive rows per name: the num_beams or num_return_sequences (whichever is larger) with
        which `generate` copies each row.

    Notes
    -----
    The adapters stay in their slots until the context ends. The context belongs to the thread that
    enters it: while it lasts, no other thread can call the model.
    """
    serving = _serving(model)
    if isinstance(names, str):
        raise ValueError(f"names is the string {names!r}, wanted one name per row of the batch")
    if expand < 1:
        raise ValueError(f"expand is {expand}, wanted >= 1")
    for name, config in serving.configs.items():
        implementation = config._experts_implementation
        if implementation != IMPLEMENTATION:
            raise RuntimeError(
                f"{name} runs experts_implementation={implementation!r}, which knows no adapters; "
                f"call model.set_experts_implementation({IMPLEMENTATION!r})"
            )
    names = [None if name == BASE else name for name in names for _ in range(expand)]
    thread = threading.get_ident()
    with serving.pool.hold(names):
        slots = serving.pool.mapping(names)
        with serving.lock:
            if serving.thread not in (None, thread):
                raise RuntimeError("another thread is using adapters with this model")
            outer = serving.thread, serving.slots
            serving.thread, serving.slots, serving.token_lora_mapping = thread, slots, None
        try:
            yield
        finally:
            with serving.lock:
                serving.thread, serving.slots = outer
                serving.token_lora_mapping = None


def _serving(model: nn.Module) -> _Serving:
    serving = model.__dict__.get("_moelora")
    if serving is None or serving.pool is None:
        raise RuntimeError(f"this {type(model).__name__} has no adapters; call load_adapters first")
    return serving
