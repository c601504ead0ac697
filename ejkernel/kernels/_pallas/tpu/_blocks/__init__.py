"""What TPU kernels share: tables of blocks, logits, softmax, random numbers and tiles."""
