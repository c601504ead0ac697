"""NVIDIA's cuDNN, as JAX reaches it."""
