"""Kernels for TPUs, in Pallas."""
