"""Kernels in Pallas."""
