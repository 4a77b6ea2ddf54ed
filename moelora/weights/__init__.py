"""Weights of experts in the tiles that kernels read, and readers of checkpoints."""
