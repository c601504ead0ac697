"""`recurrent`: every error names the argument, the value and the way out."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import recurrent
from tests import host
from tests.modules.test_recurrent import call, on_host

X, STATE, WEIGHTS = on_host()
_, BOTH_STATES, BOTH = on_host(both=True)
TORCHS = {n.replace("w_", "weight_").replace("b_", "bias_") + "_l0": x for n, x in WEIGHTS.items()}
FLAT = {name: host.ones(12) for name in WEIGHTS}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cell_type": "lsmt"}, ValueError, "`cell_type` must be one of .*'gru'.*got 'lsmt'"),
        ({"weights": [1, 2]}, TypeError, "`weights` must be a dict with `w_ih`.*got list"),
        ({"weights": {"w_ih": WEIGHTS["w_ih"]}}, ValueError, r"\['w_hh'\] missing"),
        ({"weights": WEIGHTS | {"w_hi": X}}, ValueError, r"alone; got also \['w_hi'\]"),
        ({"weights": BOTH}, ValueError, "got also .*w_ih_reverse.*`bidirectional=True`"),
        ({"bidirectional": True}, ValueError, "'w_ih_reverse'.*missing.*end in `_reverse`"),
        (
            {"bidirectional": True, "weights": {n: BOTH[n] for n in BOTH if n != "b_hh"}},
            ValueError,
            r"\['b_hh'\] missing",
        ),
        ({"cell_type": "gru", "hidden": STATE[0]}, ValueError,
         r"`weights\['w_ih'\]` of a gru must be \[3 \* d, i\] with d=3.*got \(12, 4\)"),
        ({"weights": FLAT}, ValueError, r"`weights\['w_ih'\]`.*\[4 \* d, i\]; got \(12,\)"),
        ({"weights": WEIGHTS | {"w_hh": host.ones((8, 3))}}, ValueError,
         r"`weights\['w_hh'\]`.*\[4 \* d, d\] with d=3.*got \(8, 3\)"),
        ({"weights": WEIGHTS | {"b_hh": host.ones(3)}}, ValueError, r"\[4 \* d\].*got \(3,\)"),
        ({"weights": WEIGHTS | {"b_ih": 0.0}}, TypeError, r"`weights\['b_ih'\]` must be an array"),
        ({"weights": WEIGHTS | {"w_ih": host.ones((12, 5))}}, ValueError, "4 features of `inputs`"),
        ({"weights": WEIGHTS | {"b_ih": host.ones(12, jnp.bfloat16)}}, TypeError,
         "`b_ih` must have the dtype of `inputs`, float32; got bfloat16"),
        ({"weights": TORCHS | {"weight_ih_l1": X}}, ValueError, "_ih_l1.*One call is one layer"),
        ({"weights": TORCHS | {"w_ih": X}}, ValueError, r"'weight_ih_l0'.*got also \['w_ih'\]"),
        ({"weights": TORCHS | {"bias_hh_l0": host.ones(3)}}, ValueError,
         r"`weights\['bias_hh_l0'\]` of a lstm.*from `weight_hh_l0`"),
        ({"hidden": STATE[0]}, ValueError, r"of an lstm must be the pair \(h, c\).*got one array"),
        ({"hidden": (STATE[0],)}, ValueError, r"the pair \(h, c\).*got 1 values"),
        ({"hidden": (STATE[0], None)}, ValueError, r"the pair \(h, c\)"),
        ({"hidden": BOTH_STATES}, ValueError, r"`hidden` must be \[b, d\], \(3, 3\); got \(2, 3,"),
        ({"hidden": (STATE[0], X[:, 0])}, ValueError, r"cell state of `hidden` must be \[b, d\]"),
        ({"bidirectional": True, "weights": BOTH}, ValueError, r"must be \[2, b, d\], \(2, 3, 3\)"),
        ({"bidirectional": True, "reverse": True, "weights": BOTH}, ValueError,
         "`reverse` must be False with `bidirectional`"),
        ({"lengths": host.ones(2, jnp.int32)}, ValueError, r"`lengths` must.*b=3.*got \(2,\)"),
        ({"lengths": host.ones(3)}, TypeError, "`lengths` must have a dtype of kind Int"),
        ({"lengths": [1, 2, 3]}, TypeError, "`lengths` must be an array"),
        ({"inputs": X[0]}, ValueError, "`inputs` must have 3 axes"),
        ({"inputs": 1.0}, TypeError, "`inputs` must be an array"),
        ({"hidden": (1.0, STATE[1])}, TypeError, "`hidden` must be an array"),
        ({"activation": "tahn"}, ValueError, "`activation` must be one of .*got 'tahn'"),
        ({"gate_activation": 3}, ValueError, "`gate_activation` must be one of .*got 3"),
        ({"activation": jnp.sum}, ValueError, "`activation` must act on each element"),
        ({"platform": "gpu"}, ValueError, "`platform` must be"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    arguments = {"inputs": X, "hidden": STATE, "weights": WEIGHTS} | change
    arguments = host.to_jax(arguments)
    with pytest.raises(error, match=message):
        recurrent(**arguments)


def test_errors_of_cells_with_one_state():
    x, state, weights = call("gru")
    with pytest.raises(ValueError, match=r"`hidden` of a gru must be one array.*has \(h, c\)"):
        recurrent(x, (state, state), weights, "gru")
    x, state, weights = call("rnn")
    with pytest.raises(ValueError, match="`gate_activation` must be left out for an rnn"):
        recurrent(x, state, weights, "rnn", gate_activation="tanh")


def test_options_are_no_arrays():
    run = jax.jit(lambda both: recurrent(X, STATE, WEIGHTS, bidirectional=both))
    with pytest.raises(TypeError, match="`bidirectional` is part of the compiled program"):
        run(True)
