"""The backend that this run tests on, known without asking JAX, whose answer takes a device."""

import os

BACKEND = "gpu" if os.environ.get("EJKERNEL_TEST_GPU") else "cpu"
