"""Shows the formulas of docstrings as code on the API pages.

A formula is a paragraph whose first line starts with a lower-case name and has a " = ", such as
`out[t] = h[t].T @ q[t]`, or a list of them such as `linear: -(8 / heads)`. Markdown would join its
lines.
"""

import re

import griffe

FORMULA = re.compile(r"^[a-z]\w*(\[[^\]]*\])?(, \w+)* = |^[a-z]+: +-")


class Formulas(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = with_code(obj.docstring.value)


def with_code(text: str) -> str:
    """The text with each formula indented by four spaces, which makes it a block of code."""
    paragraphs = text.split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        if FORMULA.match(paragraph):
            paragraphs[i] = re.sub("^", "    ", paragraph, flags=re.MULTILINE)
    return "\n\n".join(paragraphs)
