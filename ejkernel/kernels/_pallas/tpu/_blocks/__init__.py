"""What TPU kernels share: tables of blocks, pairs, softmax, random numbers and tiles."""
