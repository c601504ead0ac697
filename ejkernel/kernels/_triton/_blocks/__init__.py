"""Pieces that the Triton kernels share."""
