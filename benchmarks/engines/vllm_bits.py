"""Check whether rows of an engine's MoE layers have the same bits in a mixed batch as alone.

Hooks for `vllm_engine --bits`: rows of two batches are matched by the bits of a layer's inputs,
hidden state and router logits. A row stays unmatched if earlier layers (attention, say) computed
other bits in the other batch. Requests with different adapters may have the same inputs: such a row
has several outputs, alone and in the mixed batch.
"""

import hashlib
from collections import defaultdict

import torch
from torch import Tensor, nn

LAYERS = ".experts"  # how names of MoE layers end in vLLM's models, with LoRA or without


def digests(t: Tensor) -> list[bytes]:
    """Of each row."""
    rows = t.detach().reshape(-1, t.shape[-1]).cpu().contiguous().view(torch.uint8)
    return [hashlib.sha1(row).digest() for row in rows.numpy()]


class Rows:
    """Digests of the rows of each phase: {(layer, hidden state, router logits): outputs}."""

    def __init__(self):
        self.phase = ""
        self.seen: dict[str, dict[tuple, set]] = defaultdict(lambda: defaultdict(set))
        self.count: dict[str, int] = defaultdict(int)

    def attach(self, model: nn.Module) -> int:
        """The layers that are watched from now on."""
        layers = [(n, m) for n, m in model.named_modules() if n.endswith(LAYERS)]
        for name, module in layers:
            module.register_forward_hook(self.hook(name), with_kwargs=True)
        return len(layers)

    def hook(self, name: str):
        def record(module, args, kwargs, out):
            given = [*args, *kwargs.values()]
            x, logits = (t for t in given[:2])
            out = out[-1] if isinstance(out, tuple) else out
            rows = zip(digests(x), digests(logits), digests(out), strict=True)
            for hidden, routed, result in rows:
                self.seen[self.phase][name, hidden, routed].add(result)
                self.count[self.phase] += 1

        return record

    def compare(self, one: str, other: str) -> dict[str, int]:
        """Counts of `other`: all rows, distinct inputs that `one` also has (matched), those of them
        with an output that `one` lacks (differing), and inputs that `one` lacks (unmatched)."""
        a, b = self.seen[one], self.seen[other]
        both = a.keys() & b.keys()
        return {
            "rows": self.count[other],
            "matched": len(both),
            "differing": sum(bool(b[key] - a[key]) for key in both),
            "unmatched": len(b.keys() - a.keys()),
        }
