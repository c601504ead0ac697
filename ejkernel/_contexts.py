"""Every value that a `with` block of ours changes, all made when ejkernel is first imported.

They are part of jit's key, and so is their number: one made later, by an import inside a traced
function, has every program of the process traced and compiled again.
"""

import jax

settings = jax.make_user_context(default_value=None)
policy = jax.make_user_context(default_value=())  # overridden fields, as sorted pairs
overlay = jax.make_user_context(default_value=None)
compile_for_tpu = jax.make_user_context(default_value=False)
detect_races = jax.make_user_context(default_value=False)
