"""Integrations into other libraries, one package each. Importing them does not require the library.

`import moelora` imports the operators of `vllm` and `sglang`, which take these engines' arguments
and only handle tensors. Everything else is imported on demand.
"""

from moelora import _C


def reason_against_build() -> str | None:
    """Why this build cannot serve an engine on any GPU, or None.

    Engines load plugins before they fork workers, so a plugin must not initialize CUDA, as
    `_C.has_cuda()` does.
    """
    if _C.WITH_CUDA:
        return None
    return "this build of moelora has no CUDA kernels (it was made without nvcc: docs/install.md)"
