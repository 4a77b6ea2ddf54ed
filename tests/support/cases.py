"""Problems that tests run and builds are compared by: named edge cases, and a seeded generator.

A `Spec` says in a few words what a problem looks like; `Spec.build()` draws its tensors. A spec
prints as one line, so that a failing test can be repeated with `Spec(...).build()`.

Values that must never influence a result are NaN: LoRA factors beyond an adapter's true rank, all
factors of disabled adapters and of adapters with rank 0, and the gaps between the rows of strided
tensors.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moelora.operators.experts import ACTIVATIONS as ACTIVATION_NUMBERS

POISON = float("nan")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = tuple(ACTIVATION_NUMBERS)
OAI = ("swigluoai", "swigluoai_uninterleave")
ALPHAS = (*OAI, "situ")  # those that take an alpha
LIMITS = ("silu", *OAI, "situ", "swiglustep")  # and those that take a limit
MIXES = ("absent", "none", "one", "many", "all_different", "half_base", "disabled", "out_of_range")
# Keeps the layer's outputs, which square or multiply O(1) values, well inside O(1).
W2_SCALE = dict.fromkeys(ACTIVATIONS, 0.25) | dict.fromkeys(("relu2", *OAI), 0.15)
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Spec:
    """What a problem looks like.

    mix: which adapters the tokens carry. `absent` passes no LoRA argument at all, `none` gives
        every token -1, `disabled` draws from all slots, some of which are disabled, `out_of_range`
        adds ids such as max_loras and INT32_MIN.
    routing: `few` uses a quarter of the experts, `one_expert` a single one (top_k times when top_k
        > 1), `out_of_range` replaces some ids by -1, E, INT32_MAX and so on, `all_skipped` all.
    sharing: expert dimension of the factors that shared-outer adapters share (A of w13, B of w2):
        all experts, 1, or E by stride 0.
    slices: 1 (one A for gate and up) or 2 pairs for w13.
    remote: how many experts live on other ranks; > 0 gives the problem an expert_map.
    strided: gaps of `strided` elements after each row and unused experts and adapters in between.
    """

    tokens: int = 5
    top_k: int = 2
    experts: int = 4
    hidden: int = 64
    inter: int = 32
    dtype: torch.dtype = torch.float32
    activation: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = (8, 16)
    spare_rank: int = 0
    mix: str = "many"
    routing: str = "random"
    sharing: str = "per_expert"
    slices: int = 2
    scalings: bool = True
    pass_ranks: bool = True
    bias: bool = False
    remote: int = 0
    int64_ids: bool = False
    strided: int = 0
    weight_on_input: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """The fields that differ from the defaults."""
        different = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return "Spec(" + ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in different) + ")"

    def build(self) -> Problem:
        return _Builder(self).build()


PER_TOKEN = ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping")


@dataclass
class Problem:
    """The tensors of one layer; `rows` is an input (M * top_k, I) for the w2 projection alone."""

    spec: Spec
    hidden_states: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    rows: Tensor
    token_lora_mapping: Tensor | None = None
    w13_lora_a: Tensor | list[Tensor] | None = None
    w13_lora_b: Tensor | list[Tensor] | None = None
    w2_lora_a: Tensor | None = None
    w2_lora_b: Tensor | None = None
    lora_ranks: Tensor | None = None
    lora_scalings: Tensor | None = None
    adapter_enabled: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    expert_map: Tensor | None = None

    def to(self, device) -> Problem:
        """The same problem on another device, strides included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Problem(**{name: _move(value, device) for name, value in values.items()})

    def kwargs(self) -> dict:
        """Arguments of `fused_experts_lora`."""
        skip = ("spec", "rows")
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip},
            "activation": self.spec.activation,
            "activation_alpha": self.spec.alpha,
            "activation_limit": self.spec.limit,
            "apply_router_weight_on_input": self.spec.weight_on_input,
        }

    def gemm_kwargs(self, projection: str = "w13", mul_routed_weight: bool = False) -> dict:
        """Arguments of `fused_moe_lora_gemm` for the `w13` or the `w2` projection."""
        shared = ("topk_weights", "topk_ids", "token_lora_mapping", "lora_ranks", "lora_scalings")
        return {
            **{name: getattr(self, name) for name in shared},
            "adapter_enabled": self.adapter_enabled,
            "expert_map": self.expert_map,
            "x": self.hidden_states if projection == "w13" else self.rows,
            "w": getattr(self, projection),
            "lora_a": getattr(self, f"{projection}_lora_a"),
            "lora_b": getattr(self, f"{projection}_lora_b"),
            "bias": getattr(self, f"{projection}_bias"),
            "mul_routed_weight": mul_routed_weight,
        }

    def align_kwargs(self, block_size: int) -> dict:
        """Arguments of `moe_lora_align_block_size`; the mapping is required there."""
        num_experts = self.w13.size(0) if self.expert_map is None else self.expert_map.size(0)
        mapping = self.token_lora_mapping
        if mapping is None:
            mapping = torch.full_like(self.topk_ids[:, 0], -1, dtype=torch.int32)
        return {
            "topk_ids": self.topk_ids,
            "token_lora_mapping": mapping,
            "num_experts": num_experts,
            "block_size": block_size,
            "max_loras": len(self.spec.ranks),
            "adapter_enabled": self.adapter_enabled,
            "expert_map": self.expert_map,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its argument name, one entry per LoRA slice."""
        found = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = value
            elif isinstance(value, list):
                found.update({f"{f.name}[{i}]": t for i, t in enumerate(value)})
        return found

    def prefix(self, tokens: int) -> Problem:
        """The problem of the first tokens: their results are those of the whole."""
        values = {name: getattr(self, name) for name in PER_TOKEN}
        values = {name: t if t is None else t[:tokens] for name, t in values.items()}
        rows = self.rows[: tokens * self.spec.top_k]
        return replace(self, **values, spec=replace(self.spec, tokens=tokens), rows=rows)

    def base(self) -> Problem:
        """The same layer without adapters."""
        lora = ("token_lora_mapping", "lora_ranks", "lora_scalings", "adapter_enabled")
        factors = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
        return replace(self, **dict.fromkeys(lora + factors))


def among(p: Problem, experts: int, used: list[int], slots: int, used_slots: list[int]) -> Problem:
    """The problem with its experts and adapters at places `used` and `used_slots` of larger stacks.
    Other places are NaN on a GPU; on a CPU they are not written, and take no memory."""

    def stack(t, *places):
        if not isinstance(t, Tensor):
            return t and [stack(one, *places) for one in t]
        shape = (*(slots, experts)[-len(places) :], *t.shape[len(places) :])
        large = torch.empty(shape, dtype=t.dtype, device=t.device)
        if t.is_cuda:
            large.fill_(POISON)
        for index in itertools.product(*(range(len(place)) for place in places)):
            large[tuple(place[i] for place, i in zip(places, index, strict=True))] = t[index]
        return large

    weights = {name: stack(getattr(p, name), used) for name in ("w13", "w2")}
    names = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
    factors = {name: stack(getattr(p, name), used_slots, used) for name in names}
    expert_of = torch.tensor(used, dtype=torch.int32, device=p.w13.device)
    changes = weights | factors | {"topk_ids": expert_of[p.topk_ids.long()]}
    if p.token_lora_mapping is not None:
        slot_of = torch.tensor([*used_slots, -1], dtype=torch.int32, device=p.w13.device)
        ranks = torch.full((slots,), max(p.spec.ranks), dtype=torch.int32, device=p.w13.device)
        scalings = torch.full((slots,), POISON, device=p.w13.device)
        ranks[used_slots], scalings[used_slots] = p.lora_ranks, p.lora_scalings
        changes |= {"lora_ranks": ranks, "lora_scalings": scalings}
        changes["token_lora_mapping"] = slot_of[p.token_lora_mapping.long()]
    return replace(p, **changes)


def _move(value, device):
    if isinstance(value, list):
        return [_move(v, device) for v in value]
    if not isinstance(value, Tensor):
        return value
    # Tensor.to() packs a strided tensor; move its whole storage instead.
    elements = value.untyped_storage().nbytes() // value.element_size()
    flat = torch.as_strided(value, (elements,), (1,), 0).to(device)
    return torch.as_strided(flat, value.size(), value.stride(), value.storage_offset())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors hold the same bytes: unlike `torch.equal`, +0 differs from -0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    both = (t.contiguous().view(integer) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(*both)


class _Builder:
    """Draws the tensors of a spec; each method depends only on the spec and the generators."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.rng = random.Random(spec.seed)
        self.generator = torch.Generator().manual_seed(spec.seed)
        self.global_experts = spec.experts + spec.remote

    def build(self) -> Problem:
        s = self.spec
        columns = s.inter if s.activation == "relu2" else 2 * s.inter
        w2_scale = W2_SCALE[s.activation]
        topk_ids = self._topk_ids()
        problem = Problem(
            spec=s,
            hidden_states=self._floats(s.tokens, s.hidden),
            w13=self._floats(s.experts, columns, s.hidden, scale=s.hidden**-0.5),
            w2=self._floats(s.experts, s.hidden, s.inter, scale=w2_scale * s.inter**-0.5),
            topk_weights=self._spread(self._topk_weights()),
            topk_ids=self._spread(topk_ids.long() if s.int64_ids else topk_ids),
            rows=self._floats(s.tokens * s.top_k, s.inter),
        )
        if s.bias:
            problem.w13_bias = self._floats(s.experts, columns, scale=0.5)
            problem.w2_bias = self._floats(s.experts, s.hidden, scale=0.2)
        if s.remote:
            problem.expert_map = self._expert_map()
        if s.mix != "absent":
            self._add_adapters(problem, columns)
        return problem

    def _floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator) * scale
        return self._spread(values.to(self.spec.dtype))

    def _spread(self, t: Tensor) -> Tensor:
        """A view of the same values with gaps after rows and, in 3D and 4D, between matrices."""
        gap = self.spec.strided
        if not gap:
            return t
        filler = POISON if t.is_floating_point() else 2**30
        rows = torch.full((*t.shape[:-1], t.size(-1) + gap), filler, dtype=t.dtype)
        rows[..., gap // 2 : gap // 2 + t.size(-1)] = t
        if t.dim() >= 3:
            rows = torch.stack((rows, torch.full_like(rows, filler)), dim=1).flatten(0, 1)[::2]
        return rows[..., gap // 2 : gap // 2 + t.size(-1)]

    def _expert_map(self) -> Tensor:
        local = list(range(self.spec.experts)) + [-1] * self.spec.remote
        self.rng.shuffle(local)
        return torch.tensor(local, dtype=torch.int32)

    def _topk_ids(self) -> Tensor:
        s, rng, total = self.spec, self.rng, self.global_experts
        candidates = range(total)
        if s.routing == "few":
            candidates = rng.sample(range(total), max(1, total // 4))
        elif s.routing == "one_expert":
            candidates = [rng.randrange(total)]
        ids = []
        for _ in range(s.tokens):
            if s.top_k <= len(candidates):
                ids.append(rng.sample(candidates, s.top_k))
            else:
                ids.append(rng.choices(candidates, k=s.top_k))
        strange = (-1, -2, total, total + 7, INT32_MAX, INT32_MIN)
        if s.int64_ids:
            strange += (2**32, -(2**63), 2**63 - 1)  # the low 32 bits alone would be in range
        share = {"out_of_range": 0.3, "all_skipped": 1.0}.get(s.routing, 0.0)
        ids = [[rng.choice(strange) if rng.random() < share else e for e in row] for row in ids]
        dtype = torch.int64 if s.int64_ids else torch.int32
        return torch.tensor(ids, dtype=dtype).reshape(s.tokens, s.top_k)

    def _topk_weights(self) -> Tensor:
        logits = torch.randn(self.spec.tokens, self.spec.top_k, generator=self.generator)
        if self.spec.top_k == 1:
            return torch.sigmoid(logits)
        return torch.softmax(logits, dim=-1)

    def _mapping(self) -> list[int]:
        s, rng, slots = self.spec, self.rng, len(self.spec.ranks)
        one = rng.randrange(slots)
        draw = {
            "none": lambda m: -1,
            "one": lambda m: one,
            "many": lambda m: rng.randrange(-1, slots),
            "all_different": lambda m: m % slots,
            "half_base": lambda m: -1 if m % 2 else rng.randrange(slots),
            "disabled": lambda m: rng.randrange(-1, slots),
            "out_of_range": lambda m: rng.choice(
                (rng.randrange(slots), -1, -2, slots, slots + 5, INT32_MAX, INT32_MIN)
            ),
        }[s.mix]
        return [draw(m) for m in range(s.tokens)]

    def _add_adapters(self, problem: Problem, columns: int) -> None:
        s, slots = self.spec, len(self.spec.ranks)
        disabled = []
        if s.mix == "disabled":
            disabled = [slot for slot in range(slots) if slot == 0 or self.rng.random() < 0.3]
            # Both accepted lengths: (max_loras,) and vLLM's (max_loras + 1,).
            enabled = [slot not in disabled for slot in range(slots + s.seed % 2)]
            dtype = torch.bool if s.seed % 4 < 2 else torch.int32
            problem.adapter_enabled = torch.tensor(enabled, dtype=dtype)
        problem.token_lora_mapping = torch.tensor(self._mapping(), dtype=torch.int32)
        if s.pass_ranks:
            problem.lora_ranks = torch.tensor(s.ranks, dtype=torch.int32)
        if s.scalings:
            scalings = [self.rng.choice((0.25, 0.5, 1.0, 1.5, 2.0)) for _ in s.ranks]
            problem.lora_scalings = torch.tensor(scalings, dtype=torch.float32)

        outer = s.sharing != "per_expert"
        per_slice = columns // s.slices
        a13 = [self._stack("a", s.hidden, disabled, outer) for _ in range(s.slices)]
        b13 = [self._stack("b", per_slice, disabled, False) for _ in range(s.slices)]
        problem.w13_lora_a = a13 if s.slices > 1 else a13[0]
        problem.w13_lora_b = b13 if s.slices > 1 else b13[0]
        problem.w2_lora_a = self._stack("a", s.inter, disabled, False)
        scale = W2_SCALE[s.activation]
        problem.w2_lora_b = self._stack("b", s.hidden, disabled, outer, scale)

    def _stack(
        self, kind: str, size: int, disabled: list[int], shared: bool, scale: float = 1.0
    ) -> Tensor:
        """(slots, E or 1, R, size) for A, (slots, E or 1, size, R) for B."""
        s = self.spec
        experts = 1 if shared else s.experts
        max_rank = max(1, *s.ranks) + s.spare_rank
        shape = (len(s.ranks), experts, max_rank, size)
        # A row of A gives an O(1) value; B sums rank of them, and the delta stays below the base.
        stack = torch.randn(shape, generator=self.generator)
        for slot, rank in enumerate(s.ranks):
            stack[slot] *= size**-0.5 if kind == "a" else 0.5 * scale / math.sqrt(max(rank, 1))
            if s.pass_ranks:
                stack[slot, :, rank:] = POISON
            if slot in disabled:
                stack[slot] = POISON
        if kind == "b":
            stack = stack.transpose(2, 3).contiguous()
        stack = self._spread(stack.to(s.dtype))
        return stack.expand(-1, s.experts, -1, -1) if shared and s.sharing == "expanded" else stack


def draw_spec(seed: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Spec:
    """A random small problem; the same seed gives the same one everywhere."""
    rng = random.Random(seed)
    experts = rng.choice((1, 2, 3, 4, 8, 13))
    top_k = rng.choice((1, 1, 2, 2, 3, experts))
    activation = rng.choice(ACTIVATIONS)
    inter = rng.choice((1, 7, 16, 32, 33, 64, 100))
    mix = rng.choice(MIXES)
    num_adapters = rng.choice((1, 2, 3, 8))
    every = (1, 2, 3, 4, 8, 8, 16, 16, 17, 32, 33, 64, 128, 256)
    ranks = tuple(rng.choice(every) for _ in range(num_adapters))
    pass_ranks = rng.random() < 0.8
    if not pass_ranks:
        ranks = (ranks[0],) * num_adapters
    elif rng.random() < 0.1:
        ranks = (0, *ranks[1:])
    slices = 2 if activation != "relu2" and rng.random() < 0.6 else 1
    numbers = random.Random(-1 - seed)
    has_alpha, has_limit = activation in ALPHAS, activation in LIMITS
    return Spec(
        alpha=numbers.choice((None, None, 0.5, 1.0, 3.0)) if has_alpha else None,
        limit=numbers.choice((None, None, 0.25, 1.0, 10.0, 1e30)) if has_limit else None,
        tokens=rng.choice((1, 1, 2, 3, 5, 8, 17, 33)),
        top_k=min(top_k, experts),
        experts=experts,
        hidden=rng.choice((1, 7, 16, 33, 64, 72, 100, 128)),
        inter=inter,
        dtype=rng.choice(dtypes),
        activation=activation,
        ranks=ranks,
        spare_rank=rng.choice((0, 0, 1, 8)) if pass_ranks else 0,
        mix=mix,
        routing=rng.choice(("random", "random", "random", "few", "one_expert", "out_of_range")),
        sharing=rng.choice(("per_expert", "per_expert", "outer", "expanded")),
        slices=slices,
        scalings=rng.random() < 0.5,
        pass_ranks=pass_ranks,
        bias=rng.random() < 0.3,
        remote=rng.choice((0, 0, 0, 1, 5)),
        int64_ids=rng.random() < 0.3,
        strided=rng.choice((0, 0, 0, 1, 8)),
        weight_on_input=top_k == 1 and rng.random() < 0.3,
        seed=seed,
    )


def random_specs(count: int, first_seed: int = 0, dtypes=DTYPES) -> list[Spec]:
    return [draw_spec(seed, dtypes) for seed in range(first_seed, first_seed + count)]


# One line per situation that the contract names. Shapes are those of the tests unless they matter.
EDGE_CASES: dict[str, Spec] = {
    "plain": Spec(),
    "empty_batch": Spec(tokens=0),
    "one_token": Spec(tokens=1),
    "one_row": Spec(tokens=1, top_k=1),
    "one_expert_model": Spec(experts=1, top_k=1),
    "top_k_is_experts": Spec(experts=6, top_k=6),
    "empty_experts": Spec(experts=16, routing="few", tokens=9),
    "all_tokens_on_one_expert": Spec(tokens=20, top_k=1, experts=8, routing="one_expert"),
    "same_expert_chosen_twice": Spec(tokens=4, top_k=3, routing="one_expert"),
    "unit_sizes": Spec(hidden=1, inter=1, ranks=(1,), experts=1, top_k=1),
    "odd_sizes": Spec(tokens=7, hidden=33, inter=7, ranks=(3, 5), experts=3, top_k=3),
    "hundreds": Spec(tokens=13, hidden=100, inter=100),
    "no_lora_arguments": Spec(mix="absent"),
    "no_token_has_an_adapter": Spec(mix="none"),
    "one_adapter": Spec(mix="one", tokens=8),
    "all_adapters_different": Spec(mix="all_different", tokens=8, ranks=(4,) * 8),
    "half_base": Spec(mix="half_base", tokens=9),
    "disabled_adapters": Spec(mix="disabled", tokens=12, ranks=(8, 4, 16)),
    "disabled_adapters_vllm_length": Spec(mix="disabled", tokens=12, ranks=(8, 4, 16), seed=1),
    "mixed_ranks": Spec(mix="all_different", tokens=10, ranks=(1, 256, 3, 64, 17), hidden=72),
    "ranks_of_nearly_whole_stages": Spec(
        mix="all_different", tokens=30, experts=2, ranks=(50, 64, 49, 24), hidden=72
    ),
    "rank_zero": Spec(mix="all_different", tokens=6, ranks=(0, 8)),
    "spare_rank": Spec(ranks=(8, 5), spare_rank=11, tokens=8),
    "ranks_absent": Spec(ranks=(8, 8), pass_ranks=False),
    "scalings_absent": Spec(scalings=False),
    "one_slice": Spec(slices=1),
    "shared_outer": Spec(sharing="outer", tokens=8),
    "shared_outer_one_slice": Spec(sharing="outer", slices=1, tokens=8),
    "stride_zero_experts": Spec(sharing="expanded", tokens=8),
    "biases": Spec(bias=True),
    "gelu": Spec(activation="gelu"),
    "swigluoai": Spec(activation="swigluoai", bias=True, slices=1),
    "swigluoai_other_numbers": Spec(activation="swigluoai", alpha=1.1, limit=0.5, slices=1),
    "swigluoai_uninterleave": Spec(activation="swigluoai_uninterleave", bias=True),
    "swigluoai_uninterleave_one_slice": Spec(
        activation="swigluoai_uninterleave", alpha=0.9, limit=1.25, slices=1
    ),
    "silu_with_a_limit": Spec(limit=0.5, bias=True, tokens=9),
    "situ": Spec(activation="situ", bias=True, tokens=9),
    "situ_of_kimi_k3": Spec(activation="situ", alpha=4, limit=25, tokens=9),
    "situ_with_small_caps": Spec(activation="situ", alpha=0.5, limit=0.75, bias=True, slices=1),
    "swiglustep": Spec(activation="swiglustep", limit=0.5, bias=True, tokens=9),
    "swigluoai_two_slices": Spec(activation="swigluoai", bias=True, slices=2),
    "relu2": Spec(activation="relu2", slices=1),
    "expert_map": Spec(remote=4, tokens=10, top_k=3),
    "expert_map_all_remote": Spec(experts=1, remote=15, tokens=3, top_k=1, seed=1),
    "weight_on_input": Spec(top_k=1, weight_on_input=True),
    "int64_ids": Spec(int64_ids=True),
    "strided": Spec(strided=8, bias=True, tokens=7),
    "strided_unaligned": Spec(strided=1, bias=True, tokens=7),
    "expert_ids_out_of_range": Spec(routing="out_of_range", tokens=12),
    "int64_expert_ids_out_of_range": Spec(routing="out_of_range", tokens=12, int64_ids=True),
    "expert_ids_out_of_range_with_map": Spec(routing="out_of_range", tokens=12, remote=3),
    "every_expert_id_out_of_range": Spec(routing="all_skipped"),
    "adapter_ids_out_of_range": Spec(mix="out_of_range", tokens=16),
    "many_rows": Spec(tokens=150, top_k=2, experts=4),
    "many_experts": Spec(tokens=3, experts=300, top_k=8, hidden=16, inter=16, ranks=(2,)),
    "many_adapters": Spec(
        tokens=40, ranks=(1, 2, 3, 4) * 10, mix="all_different", hidden=16, inter=16
    ),
    "more_pairs_than_a_sort_of_a_gpu_has_keys": Spec(
        tokens=20, top_k=3, experts=125, ranks=(1, 2, 1) * 21, hidden=16, inter=16
    ),
}
