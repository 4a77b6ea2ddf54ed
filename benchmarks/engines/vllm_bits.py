"""Have rows of an engine's MoE layers the same bits in a mixed batch as alone?

Hooks for `vllm_engine --bits`: a row is known by the bits that go into a layer, its
hidden state and router logits, and so found again in another batch, unless what comes before the
layer (attention, say) gave it other bits there. Requests with different adapters may agree in such
a row: then it has several outputs, alone and in the mixed batch.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

LAYERS = ".experts"  # how names of MoE layers end in vLLM's models, with LoRA or without


def digests(t: Tensor) -> list[tuple[int, int]]:
    """128 bits for each row, from all of its bits, whatever the batch."""
    rows = t.detach().reshape(-1, t.shape[-1]).contiguous()
    words = rows.view({2: torch.int16, 4: torch.int32}[t.element_size()]).to(torch.int64)
    draw = torch.Generator().manual_seed(words.shape[1])
    factors = torch.randint(-(2**62), 2**62, (2, words.shape[1]), generator=draw).to(t.device)
    return list(zip(*((words * f).sum(-1).tolist() for f in factors), strict=True))


class Rows:
    """Of each phase, {(layer, what goes in): what came out}."""

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
        """`rows` of `other`; of its different inputs those that `one` has, too, of these the ones
        with an output that `one` has not, and those that `one` has not."""
        a, b = self.seen[one], self.seen[other]
        both = a.keys() & b.keys()
        return {
            "rows": self.count[other],
            "matched": len(both),
            "differing": sum(bool(b[key] - a[key]) for key in both),
            "unmatched": len(b.keys() - a.keys()),
        }
