"""The problems of benchmarks/problems.py, by the name under which tests import them."""

from benchmarks.problems import (  # noqa: F401
    ACTIVATIONS,
    ALPHAS,
    DTYPES,
    EDGE_CASES,
    INT32_MAX,
    INT32_MIN,
    LIMITS,
    MIXES,
    OAI,
    POISON,
    ROUTINGS,
    SHARING,
    W2_SCALE,
    Problem,
    Spec,
    draw_spec,
    random_specs,
    same_bits,
)
