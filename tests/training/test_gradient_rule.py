"""The rule that gradients are held to refuses what it should: errors twice as large, derivatives
that miss a clamp; and knows which side of a clamp a result took."""

from dataclasses import replace

import pytest
import torch
from cases import Spec
from gradient_cases import (
    assert_accurate_on_average,
    by_autograd,
    hold_gradients,
    naive_gradients,
    reference_gradients,
)

SPECS = [
    Spec(tokens=16, bias=True),
    Spec(tokens=16, activation="gelu", ranks=(16, 3), mix="all_different"),
    Spec(tokens=16, activation="relu2", slices=1, sharing="outer"),
    Spec(tokens=1, hidden=100, inter=33, ranks=(32, 32), mix="one"),
    Spec(tokens=2, top_k=1, hidden=33, inter=7, ranks=(4,), mix="one"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_twice_the_error_is_refused(dtype):
    """Gradients that are off by as much as the naive layer's pass, by twice as much not."""

    def off_by(factor):
        def compute(arguments, grad_out):
            exact = reference_gradients(arguments, grad_out, None)
            grads, _ = naive_gradients(arguments, grad_out)
            return {n: (exact[n] + factor * (g - exact[n])).to(g.dtype) for n, g in grads.items()}

        return [hold_gradients(replace(spec, dtype=dtype), compute) for spec in SPECS]

    means = assert_accurate_on_average(off_by(1), dtype)
    assert all(mean == pytest.approx(1) for mean in means.values())
    with pytest.raises(AssertionError, match="naive"):
        assert_accurate_on_average(off_by(2), dtype)


LIMITED = [
    Spec(tokens=12, limit=0.5, bias=True, dtype=torch.bfloat16),
    Spec(tokens=12, activation="swigluoai", slices=1, limit=0.25, dtype=torch.bfloat16),
    Spec(tokens=12, activation="swiglustep", limit=0.25, bias=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("spec", LIMITED, ids=lambda s: s.activation)
def test_a_clamp_that_is_missed_is_refused(spec):
    """Values right at the limit are forgiven, those beyond are not."""
    hold_gradients(spec)

    def without(arguments, grad_out):
        return by_autograd(arguments | {"activation_limit": 1e30}, grad_out)

    with pytest.raises(AssertionError):
        hold_gradients(spec, without)
