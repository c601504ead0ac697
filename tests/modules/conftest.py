"""Programs of these tests are compiled without expensive passes, in half the time.

`make test-all` compiles them as a user would, and so do tests that look at memory.
"""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation(request):
    asked = request.config.getoption("--optimised") or "memory" in request.node.nodeid
    jax.config.update("jax_disable_most_optimizations", not asked)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
