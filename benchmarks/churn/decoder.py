"""A decoder of random weights that serves requests of one pool: prefill one, decode all.

Layers have attention over a static cache, and experts with the adapters of the pool. Decode steps
of all rows are one CUDA graph, captured once; rows without a request compute, too.
"""

import torch
import torch.nn.functional as F

import moelora
from benchmarks.gpu import capture
from benchmarks.models import dtype_on, fan_in, layer_name, moe_layers

VOCAB = 4096


def new_pool(shape, layers, slots, rank, device, **options):
    options |= {"dtype": dtype_on(device), "device": device, "w13_slices": 1}
    return moelora.AdapterPool(moe_layers(shape, layers), slots, rank, **options)


class Layer:
    """Weights of one layer, and keys and values of all rows."""

    def __init__(self, shape, draw, rows, length):
        h, hd = shape.hidden, shape.head
        self.heads, self.kv_heads, self.head = shape.heads, shape.kv_heads, hd
        self.qkv = draw((shape.heads + 2 * shape.kv_heads) * hd, h)
        self.o = draw(h, shape.heads * hd)
        self.router = draw(shape.experts, h)
        self.w13 = draw(shape.experts, 2 * shape.inter, h)
        self.w2 = draw(shape.experts, h, shape.inter)
        self.keys = draw(rows, length, shape.kv_heads, hd).zero_()
        self.values = torch.zeros_like(self.keys)

    def split(self, x):
        """Queries (*, heads, head), keys and values (*, kv_heads, head) of x."""
        sizes = [n * self.head for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = (x @ self.qkv.T).split(sizes, dim=-1)
        return [part.unflatten(-1, (-1, self.head)) for part in parts]

    def attend(self, q, k, v, **mask):
        """(rows, length, heads * head) of q (rows, length, heads, head)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask)
        return out.transpose(1, 2).flatten(2) @ self.o.T


class Decoder:
    """A model with `rows` sequences of at most `length` tokens; `shared`: one layer, so many times,
    for pools of deep models, whose weights need not fit beside them."""

    def __init__(self, shape, layers, rows, length, device, shared=False):
        self.shape, self.rows, self.length, self.device = shape, rows, length, device
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size):
            return fan_in(generator, *size, dtype=dtype_on(device))

        made = [Layer(shape, draw, rows, length) for _ in range(1 if shared else layers)]
        self.layers = made * layers if shared else made
        self.embedding, self.head = draw(VOCAB, shape.hidden), draw(VOCAB, shape.hidden)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.mapping = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.every = torch.arange(rows, device=device)
        self.graph = None

    def use(self, pool):
        """Serve the adapters of a pool; on a GPU capture the decode step with its tensors."""
        self.pool, self.graph = pool, None
        self.factors = [pool.layer(layer_name(n)) for n in range(len(self.layers))]
        self.mapping.fill_(-1)
        self.positions.zero_()
        if self.device == "cuda":
            self.graph = capture(self._decode)

    def prefill(self, row, prompt, slot, wait):
        """Put a request into a row; its first token. `wait(layer)` precedes each layer's experts.

        `prompt` is a list of tokens.
        """
        ids = torch.tensor(prompt, device=self.device)
        n = ids.numel()
        mapping = torch.full((n,), slot, dtype=torch.int32, device=self.device)
        x = self.embedding[ids]
        for number, layer in enumerate(self.layers):
            q, k, v = layer.split(_normed(x))
            layer.keys[row, :n], layer.values[row, :n] = k, v
            x = x + layer.attend(q[None], k[None], v[None], is_causal=True)[0]
            wait(layer_name(number))
            x = x + self._experts(number, _normed(x), mapping)
        token = (_normed(x[-1:]) @ self.head.T).argmax(-1)
        self.tokens[row : row + 1] = token
        self.positions[row], self.mapping[row] = n, slot
        return int(token)

    def decode(self):
        """The next token of all rows."""
        if self.graph is None:
            self._decode()
        else:
            self.graph.replay()
        return self.tokens.tolist()

    def leave(self, row):
        self.mapping[row], self.positions[row] = -1, 0

    def _decode(self):
        x = self.embedding[self.tokens]
        seen = torch.arange(self.length, device=self.device) <= self.positions[:, None]
        mask = seen[:, None, None, :]
        for number, layer in enumerate(self.layers):
            q, k, v = layer.split(_normed(x))
            layer.keys[self.every, self.positions] = k
            layer.values[self.every, self.positions] = v
            x = x + layer.attend(q[:, None], layer.keys, layer.values, attn_mask=mask)[:, 0]
            x = x + self._experts(number, _normed(x), self.mapping)
        self.tokens.copy_((_normed(x) @ self.head.T).argmax(-1))
        self.positions.add_(1).clamp_(max=self.length - 1)

    def _experts(self, number, x, mapping):
        layer = self.layers[number]
        scores = torch.softmax((x @ layer.router.T).float(), dim=-1)
        weights, ids = scores.topk(self.shape.top_k, dim=-1)
        routing = weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)
        adapters = {"token_lora_mapping": mapping, **self.factors[number]}
        return moelora.fused_experts_lora(x, layer.w13, layer.w2, *routing, **adapters)


def _normed(x):
    return F.rms_norm(x, x.shape[-1:])
