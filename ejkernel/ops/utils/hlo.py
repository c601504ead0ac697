"""Labels: names written into lowered programs, and read back from them or from HLO text."""

import base64
import binascii
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from ejkernel import _settings
from ejkernel.ops.utils import serialize

_PREFIX = "ejk"
_PATTERN = re.compile(r"ejk\.(label|hash|json)\.([A-Za-z0-9_-]+)")


@dataclasses.dataclass(frozen=True)
class Label:
    """A label found in a program: a name, and for automatic stamps the call and its choice."""

    name: str
    kind: str  # "label", "hash" or "json"
    key: str | None = None
    document: Any = None  # of a json stamp: {"op": …, "call": …, "choice": …}


class label(contextlib.ContextDecorator):
    """Names a part of a program: `with label("block"):` or `@label("block")`."""

    def __init__(self, name: str):
        if not isinstance(name, str) or not name:
            raise ValueError(f"`label`: `name` must be a non-empty string; got {name!r}.")
        self.name = name
        self._scopes: list[Any] = []  # one object may be entered several times

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            with label(self.name):
                return fn(*args, **kwargs)

        return labelled

    def __enter__(self) -> "label":
        self._scopes.append(jax.named_scope(_scope("label", self.name)))
        self._scopes[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scopes.pop().__exit__(*error)


def _scope(kind: str, text: str) -> str:
    """A name scope that survives every printer: letters, digits, - and _."""
    return f"{_PREFIX}.{kind}.{base64.urlsafe_b64encode(text.encode()).decode().rstrip('=')}"


def _name(inv: Any, implementation: Any) -> str:
    return f"ejkernel.{inv.kernel.name}.{implementation.name}"


def named(inv: Any, implementation: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose part of the program has the name of the implementation that it runs."""
    return jax.named_scope(_name(inv, implementation))(fn)


@contextlib.contextmanager
def stamp(inv: Any, choice: Any) -> Iterator[None]:
    """The label of one call: always its op and implementation; more by `EJKERNEL_OPS_STAMP`."""
    name = _name(inv, choice.implementation)
    mode = _settings.current().ops_stamp
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(jax.named_scope(name))
        if mode == "hash":
            scopes.enter_context(jax.named_scope(_scope("hash", f"{inv.kernel.name}:{inv.key}")))
        elif mode == "json":
            document = {
                "op": inv.kernel.name,
                "call": inv.document,
                "choice": {
                    "implementation": choice.implementation.name,
                    "version": choice.implementation.version,
                    "config": serialize.describe(choice.cfg),
                    "source": choice.source,
                },
            }
            scopes.enter_context(jax.named_scope(_scope("json", serialize.stable_json(document))))
        yield


def extract_labels_from_hlo_text(text: str) -> list[Label]:
    """The labels in the text of a program, each once, in the order they appear."""
    found: dict[Label | str, Label] = {}
    for kind, encoded in _PATTERN.findall(text):
        # what looks like a label and is not one is somebody else's name
        with contextlib.suppress(binascii.Error, ValueError, KeyError, TypeError):
            padded = encoded + "=" * (-len(encoded) % 4)
            body = base64.urlsafe_b64decode(padded).decode()
            found.setdefault(f"{kind}:{body}", _parse(kind, body))
    return list(found.values())


def _parse(kind: str, body: str) -> Label:
    if kind == "hash":
        name, _, key = body.partition(":")
        return Label(name, kind, key)
    if kind == "json":
        from ejkernel.ops.utils import fingerprint

        document = json.loads(body)
        call = document["call"]
        return Label(document.get("op", call["op"]), kind, fingerprint.key(call), document)
    return Label(body, kind)


def find_labels_in_lowered(lowered: Any) -> list[Label]:
    """The labels of a `jax.stages.Lowered` or `Compiled` program."""
    try:
        text = lowered.as_text(debug_info=True)
    except TypeError:  # a compiled program prints its names always
        text = lowered.as_text()
    return extract_labels_from_hlo_text(text)


def labels_to_configs(labels: Iterable[Label]) -> dict[str, dict[str, Any]]:
    """Key -> choice (implementation, version, config, source) of the json stamps among labels."""
    return {
        item.key: item.document["choice"]
        for item in labels
        if item.key is not None and item.document is not None
    }
