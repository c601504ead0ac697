"""Kernels for GPUs, in Pallas Mosaic GPU."""
