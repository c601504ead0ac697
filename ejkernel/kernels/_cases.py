"""Small sets of calls that still meet every pair of options."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(options: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every two values of every two options meet at least once.

    Greedy: each new row is the best of fifty random ones, by pairs not met yet.
    """
    rng = random.Random(seed)
    names = list(options)
    todo = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(options[names[a]]))
        for j in range(len(options[names[b]]))
    }

    def met(row: list[int]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}

    rows = []
    while todo:
        a, i, b, j = min(todo)
        best, gain = [], -1
        for _ in range(50):
            row = [rng.randrange(len(options[name])) for name in names]
            row[a], row[b] = i, j
            found = len(met(row) & todo)
            if found > gain:
                best, gain = row, found
        todo -= met(best)
        rows.append({name: options[name][k] for name, k in zip(names, best, strict=True)})
    return rows
