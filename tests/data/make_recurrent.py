"""Writes recurrent.npz, values and gradients of torch's recurrent layers; needs torch and NumPy.

Run it from anywhere: `python tests/data/make_recurrent.py`.
"""

import pathlib

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH, STEPS, FEATURES, HIDDEN = 3, 5, 4, 3
LENGTHS = (5, 2, 3)
# name: layer, both directions, packed by lengths
LAYERS = {
    "lstm": ("LSTM", False, False),
    "lstm_both": ("LSTM", True, False),
    "lstm_lengths": ("LSTM", False, True),
    "lstm_both_lengths": ("LSTM", True, True),
    "gru": ("GRU", False, False),
    "gru_both_lengths": ("GRU", True, True),
    "rnn_tanh": ("RNN", False, False),
    "rnn_relu": ("RNN", False, False),
    "rnn_tanh_both_lengths": ("RNN", True, True),
}


def solve(name, seed):
    """Arrays of one layer: what goes in, what comes out, cotangents and gradients."""
    kind, both, packed = LAYERS[name]
    torch.manual_seed(seed)
    options = {"nonlinearity": name.split("_")[1]} if kind == "RNN" else {}
    layer = getattr(torch.nn, kind)(
        FEATURES, HIDDEN, batch_first=True, bidirectional=both, dtype=torch.float64, **options
    )
    inputs = torch.randn(BATCH, STEPS, FEATURES, dtype=torch.float64, requires_grad=True)
    states = [
        torch.randn(2 if both else 1, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
        for _ in range(2 if kind == "LSTM" else 1)
    ]
    fed = pack_padded_sequence(inputs, LENGTHS, True, enforce_sorted=False) if packed else inputs
    out, last = layer(fed, tuple(states) if kind == "LSTM" else states[0])
    if packed:
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=STEPS)
    results = [out, *(last if kind == "LSTM" else [last])]
    cotangents = [torch.randn_like(x) for x in results]
    weights = {
        n.replace("weight", "w").replace("bias", "b"): w for n, w in layer.named_parameters()
    }
    weights = {n.replace("_l0", ""): w for n, w in weights.items()}
    named = {"inputs": inputs, **dict(zip("hc", states, strict=False)), **weights}
    gradients = torch.autograd.grad(results, list(named.values()), cotangents)
    arrays = {f"in_{n}": x for n, x in named.items()}
    arrays |= {f"out_{n}": x for n, x in zip(("out", "h", "c"), results, strict=False)}
    arrays |= {f"ct_{n}": x for n, x in zip(("out", "h", "c"), cotangents, strict=False)}
    arrays |= {f"grad_{n}": x for n, x in zip(named, gradients, strict=True)}
    return {n: x.detach().numpy() for n, x in arrays.items()}


def everything():
    return {
        f"{name}/{key}": array
        for seed, name in enumerate(LAYERS)
        for key, array in solve(name, seed).items()
    }


if __name__ == "__main__":
    np.savez_compressed(pathlib.Path(__file__).with_name("recurrent.npz"), **everything())
