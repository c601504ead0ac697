"""`ejkernel mask` beside every pair of tokens, one at a time."""

import itertools
import json
import struct
import zlib

import numpy as np
import pytest

from ejkernel import cli
from ejkernel.modules import block_mask
from ejkernel.types import MaskInfo, block_picture


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = cli.main(("mask", *argv))
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


def pairs(t, s, causal, window, ids):
    """Which pairs attend, from the specification."""
    seen = np.zeros((t, s), bool)
    for i, j in itertools.product(range(t), range(s)):
        at = s - t + i
        left, right = (window or (-1, -1))[0], (window or (-1, -1))[1]
        hidden = (causal and j > at) or (left >= 0 and j < at - left)
        hidden = hidden or (right >= 0 and j > at + right)
        if ids is not None:
            hidden = hidden or ids[i] < 0 or ids[i] != ids[j]
        seen[i, j] = not hidden
    return seen


def expected(seen, table, size):
    nq, nk = table.shape
    kinds = np.zeros((nq, nk), int)
    for i, j in itertools.product(range(nq), range(nk)):
        block = seen[i * size : (i + 1) * size, j * size : (j + 1) * size]
        if table[i, j] and block.any():
            kinds[i, j] = 2 if block.all() else 1
    return kinds


CASES = [
    (("local(1) | global_(1)", "--causal"), 30, 30, {"causal": True}),
    (("~strided(2) & bigbird(window=1)", "--window", "5,2"), 23, 30, {"window": (5, 2)}),
    (("--window=-1,3", "--keys", "40"), 17, 40, {"window": (-1, 3)}),
    (("--causal", "--documents", "7,0,12"), 25, 25, {"causal": True, "documents": (7, 0, 12)}),
]


@pytest.mark.parametrize(("argv", "t", "s", "options"), CASES, ids=range(len(CASES)))
def test_the_drawing_is_what_pairs_of_tokens_give(run, argv, t, s, options):
    size = 4
    patterns = {
        0: block_mask.local(1) | block_mask.global_(1),
        1: ~block_mask.strided(2) & block_mask.bigbird(window=1),
    }
    number = [case[0] for case in CASES].index(argv)
    ids = None
    if "documents" in options:
        lengths = options["documents"]
        ids = np.full(t, -1)
        ids[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    seen = pairs(t, s, options.get("causal", False), options.get("window"), ids)
    table = np.ones((-(-t // size), -(-s // size)), bool)
    if number in patterns:
        table = patterns[number].build(t, s, size)
    kinds = expected(seen, table, size)
    if "--keys" not in argv:
        argv = (*argv, "--keys", str(s))
    code, out, err = run(*argv, "--length", str(t), "--block-size", str(size))
    assert (code, err) == (0, "")
    _, *drawn, last = out.splitlines()
    assert drawn == ["".join(".+#"[k] for k in row) for row in kinds]
    kept = np.count_nonzero(kinds)
    assert last.startswith(f"{kept} of {kinds.size} blocks are computed ({kept / kinds.size:.1%})")
    code, out, _ = run(*argv, "--length", str(t), "--block-size", str(size), "--json")
    assert json.loads(out)["whole"] == np.count_nonzero(kinds == 2)


def test_groups_of_blocks_are_all_some_or_none():
    kinds = np.array([[2, 2, 0, 0, 1], [2, 2, 0, 0, 0], [2, 1, 0, 2, 2]], np.uint8)
    grouped, height, width = block_picture.pooled(kinds, 2, 3)
    assert (height, width) == (2, 2)
    assert grouped.tolist() == [[2, 0, 1], [1, 1, 2]]


def test_block_kinds_of_one_head():
    mask = np.ones((1, 2, 8, 8), bool)
    mask[0, 1, :4, :4] = False
    mask[0, 1, 5, 5] = False
    info = MaskInfo.from_attention_mask(mask)
    assert info.block_kinds(4, head=1).tolist() == [[0, 2], [2, 1]]
    assert info.block_kinds(4, head=0).tolist() == [[2, 2], [2, 2]]


def read_png(data):
    """Indices of colours, for a PNG with one byte a pixel and no filter."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, found = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (check,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert check == zlib.crc32(name + body)
        found[name] = body
        at += 12 + size
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_a_png_has_a_square_for_each_block(run, tmp_path):
    file = tmp_path / "mask.png"
    code, _, _ = run("local(1, 0)", "--length", "24", "--block-size", "8", "--png", str(file))
    assert code == 0
    pixels = read_png(file.read_bytes())
    side = 1024 // 3
    assert pixels.shape == (3 * side, 3 * side)
    assert pixels[side // 2 :: side, side // 2 :: side].tolist() == [
        [2, 0, 0],
        [2, 2, 0],
        [0, 2, 2],
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["mask.png"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("locl(1)",), "'locl(1)' is no pattern: write local"),
        (("local(1) + causal()",), "is no pattern"),
        (("local(1",), "is no pattern"),
        (("local(x)",), "'local(x)': 'x' is no number"),
        (("local(-1)",), "`local`: `left` must be an int >= 0; got -1."),
        (("__import__('os')",), "is no pattern"),
        (("--block-size", "0"), "--block-size must be at least 1; got 0"),
        (("--length", "9999999", "--block-size", "1"), "too many to draw"),
        (("--window", "a"), "--window 'a' must be whole numbers"),
        (("--window", "1,2,3"), "got (1, 2, 3)"),
        (("--documents", "3000,3000"), "at most 4096 tokens together"),
        (("--png", "/no/such/folder/x.png", "--length", "64"), "is no folder to write to"),
    ],
)
def test_bad_input_gives_one_line(run, argv, text):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1
