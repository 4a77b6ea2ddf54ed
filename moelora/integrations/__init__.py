"""moelora in other people's code, a package for each; none is needed to import what is here.

`import moelora` takes the operators of `vllm` and `sglang`, which have these engines' arguments and
are tensors in, tensors out. Everything else is imported on demand.
"""

from moelora import _C


def reason_against_build() -> str | None:
    """Why an engine's plugin leaves the engine alone whatever GPU is there, or None.

    Engines load plugins before they fork workers, so a plugin must not initialize CUDA.
    `_C.has_cuda()`, which asks the runtime for device 0, does; this does not.
    """
    if _C.WITH_CUDA:
        return None
    return "this build of moelora has no CUDA kernels (it was made without nvcc: docs/install.md)"
