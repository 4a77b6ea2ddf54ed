"""Docstring entries that several operators share: arguments, results and errors.

A line of a numpy docstring that is a name in braces stands for its entry here; the rest of that
line and the indented lines below it are appended to the entry's description:

    {topk_ids} A row whose id is out of range becomes 0.

A question mark, as in `{token_lora_mapping?}`, means that the argument is optional. `typed`
(call.py) expands the docstrings of operators, and docs/griffe_shared.py those that the API
reference reads from the sources. This module must not import moelora.
"""

import re
import textwrap

WIDTH = 100

# Heading and description.
ENTRIES = {
    "topk_weights": (
        "topk_weights : Tensor, shape (M, top_k)",
        "Routing weights; cast to float32 if they are not.",
    ),
    "topk_ids": ("topk_ids : Tensor, shape (M, top_k), int32 or int64", "Experts of each token."),
    "token_lora_mapping": (
        "token_lora_mapping : Tensor, shape (M,), int32 or int64",
        "Adapter slot of each token, -1 for none.",
    ),
    "lora_ranks": (
        "lora_ranks : Tensor, shape (max_loras,), int32",
        "True rank of each adapter, `<= R`; the rest of its factors is not read. Absent: `R`.",
    ),
    "lora_scalings": (
        "lora_scalings : Tensor, shape (max_loras,), float32",
        "`alpha / r` of each adapter, `alpha / sqrt(r)` for rsLoRA. Absent: 1, that is folded into "
        "the expand factors.",
    ),
    "adapter_enabled": (
        "adapter_enabled : Tensor, shape (max_loras,) or (max_loras + 1,), bool or int",
        "Zero turns an adapter off. Absent: all are on.",
    ),
    "expert_map": (
        "expert_map : Tensor, shape (E_global,), int32",
        "Local expert of each global expert, -1 for experts of other ranks.",
    ),
    "num_experts": (
        "num_experts : int",
        "Experts on this rank, where factors do not say it because all are shared. None is "
        "unknown: every id from 0 up has the shared factors.",
    ),
    "mul_routed_weight": (
        "mul_routed_weight : bool",
        "Multiply row (m, j) by `topk_weights[m, j]`.",
    ),
    "sorted_rows": (
        "sorted_token_ids : Tensor, shape (blocks * block_size,), int32",
        "Flat row indices; padding is `M * top_k`.",
    ),
    "num_tokens_post_padded": (
        "num_tokens_post_padded : Tensor, shape (1,), int32",
        "Rows in use, padding included.",
    ),
    "wanted": (
        "wanted : collection of str, optional",
        "Fields of the result to compute. Absent: all whose argument is given.",
    ),
    "float32": (
        "float32 : bool",
        "Gradients of factors and biases in float32 instead of in their own dtype.",
    ),
    "projection_grads": (
        "grads : ProjectionGradients, optional",
        "Where to write instead of returning new tensors: what is given says what is wanted. Those "
        "of factors are in the dtype of `x` or in float32, of any strides whose last is 1; that of "
        "`topk_weights` is float32; that of `x` has its shape.",
    ),
    "accumulate": ("accumulate : bool", "Add to the gradients of factors and biases in `grads`."),
    "projection_pairs": (
        "pairs : Tensor, shape (max_loras, E), int32, optional",
        "Gradients of factors in `grads` are sparse, as those of `fused_experts_lora_backward`.",
    ),
    "options": (
        "**options",
        "The forward's other arguments, token_lora_mapping, ..., mul_routed_weight.",
    ),
    "ValueError": (
        "ValueError",
        "A shape, dtype, stride or value is not as above, or the tensors are on different devices.",
    ),
    "TypeError": (
        "TypeError",
        "An argument is of another type than in the signature, or a table of ids, ranks or "
        "switches is not of integers.",
    ),
    "RuntimeError": (
        "RuntimeError",
        "An argument requires a gradient, and grad mode is on: there is no backward.",
    ),
    "value": ("ValueError", "A shape, a dtype or a value is not as above."),
    "scale": (
        "ValueError",
        "A shape, a dtype or a value is not as above, or a scale is not finite or exceeds 65504 in "
        "magnitude.",
    ),
    "other_type": ("TypeError", "An argument is of another type than in the signature."),
    "no_kernel": ("NotImplementedError", "There is no kernel for this device."),
    "recorded": (
        "RuntimeError",
        "Grad mode is on, and an argument requires a gradient that has none: weights, scalings, an "
        "output that is a leaf; on CUDA any.",
    ),
    "shared_memory": (
        "ValueError",
        "A shape, dtype, stride or value is not as above, `wanted` names something else, or "
        "tensors share memory.",
    ),
    "no_double": (
        "RuntimeError",
        "An argument requires a gradient, and grad mode is on: there is no double backward.",
    ),
    "NotImplementedError": (
        "NotImplementedError",
        "This build or this device has no kernel for it.",
    ),
}
# In the order of the docstrings: of a projection and the deltas; of explicit backwards; of packing.
GROUPS = {
    "errors": ("ValueError", "TypeError", "recorded", "NotImplementedError"),
    "packing_errors": ("value", "other_type", "no_kernel"),
    "int4_errors": ("scale", "other_type", "no_kernel"),
    "backward_errors": ("shared_memory", "TypeError", "no_double", "NotImplementedError"),
}

_SHARED = re.compile(r"^( *)\{(\w+)(\??)\}(.*)((?:\n\1 +\S.*)*)$", re.M)


def expand(docstring: str) -> str:
    """Replace every shared entry of the docstring. Names without one raise KeyError."""
    return _SHARED.sub(_entries, docstring)


def _entries(found: re.Match[str]) -> str:
    indent, name, optional, *more = found.groups()
    lines = []
    for one in GROUPS.get(name, (name,)):
        heading, description = ENTRIES[one]
        lines.append(indent + heading + (", optional" if optional else ""))
        words = " ".join([description, *" ".join(more).split()])
        inside = indent + 4 * " "
        lines.append(
            textwrap.fill(
                words,
                WIDTH,
                initial_indent=inside,
                subsequent_indent=inside,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)
