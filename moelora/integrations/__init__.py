"""moelora in other people's code, a package for each; none is needed to import what is here.

`import moelora` takes the operators of `vllm` and `sglang`, which have these engines' arguments and
are tensors in, tensors out. Everything else is imported on demand.
"""
