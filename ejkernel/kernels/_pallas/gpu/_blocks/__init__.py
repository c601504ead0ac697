"""Pieces that the Mosaic GPU kernels share."""
