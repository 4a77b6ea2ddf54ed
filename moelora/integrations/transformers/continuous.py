"""Continuous batching: refused where it would leave adapters behind.

`generate_batch`, `generate(cache_implementation="paged")` and the managers of transformers generate
in a thread of their own. The adapters of a call belong to the thread that makes it, so its requests
would run on the base model without a word. All of them go through the three methods wrapped here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin

from moelora.integrations.transformers.calls import Serving


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of a model or of its manager, which raises for a request with adapters."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model if isinstance(self, ContinuousBatchingManager) else self
        serving: Serving | None = getattr(model, "_moelora", None)
        if kwargs.get("adapter_names") is not None:
            given = "adapter_names"
        elif serving is not None and serving.carries():
            given = "use_adapters"
        else:
            return method(self, *args, **kwargs)
        raise NotImplementedError(
            f"{method.__name__} with {given}: continuous batching generates in a thread of its own "
            "and would serve the base model; pass adapter_names to generate, without "
            'cache_implementation="paged"'
        )

    return wrapped


for owner, name in (
    (ContinuousMixin, "generate_batch"),  # swallows keywords that it does not know
    (ContinuousMixin, "init_continuous_batching"),
    (ContinuousBatchingManager, "add_request"),
):
    setattr(owner, name, _refusing(getattr(owner, name)))
