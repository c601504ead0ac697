"""The table of options and kernels on each op's page, generated from the registry."""

import dataclasses
import pathlib

from ejkernel.kernels import _spec
from ejkernel.kernels._registry import KernelEntry, kernel_registry

_HEADING = "## Options and kernels"


def pages(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """The pages of registered ops, and what they should hold."""
    found = {op: folder / f"{op}.md" for op in kernel_registry.ops()}
    return {
        page: render(page.read_text(), table(op)) for op, page in found.items() if page.exists()
    }


def table(op: str) -> str:
    """What the kernels of an op do with its optional arguments, and what has a gradient."""
    spec, entries = kernel_registry.spec(op), kernel_registry.list(op)
    public = _spec.public_fields(spec.args)
    optional = [field for field in public if field.default is not dataclasses.MISSING]
    gradients = [f"`{field.name}`" for field in public if field.name in spec.differentiable]
    lines = []
    if spec.lowers_to is not None:
        steps = ", then ".join(f"[`{name}`]({name}.md)" for name in spec.lowers_to.ops())
        also = ", or run a kernel of this op itself" if spec.lowers_to.beside else ""
        rows = "kernels" if also else "kernels and tuned rows"
        lines += [f"Calls become calls of {steps}, whose {rows} serve them{also}.", ""]
    if optional:
        names = [f"`{entry.name}`" for entry in entries]
        lines += [_row("optional argument", *names), "|---" * (len(names) + 1) + "|"]
        lines += [_row(f"`{f.name}`", *(_cell(e, f) for e in entries)) for f in optional]
        lines.append("")
    lines.append(f"Differentiable: {', '.join(gradients) or 'nothing'}.")
    return "\n".join(lines)


def render(page: str, made: str, name: str = "options", heading: str = _HEADING) -> str:
    """A page with `made` between the markers of `name`, which are added at its end if missing."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in page:
        page = f"{page.rstrip()}\n\n{heading}\n\n{begin}\n{end}\n"
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{made}\n{end}{tail}"


def _cell(entry: KernelEntry, field: dataclasses.Field) -> str:
    # a computed option is part of every call, so that no kernel can be without it
    computed = field.metadata.get("computed")
    honoured = computed or entry.honours is None or field.name in entry.honours
    if honoured and field in _spec.traceable_fields(kernel_registry.spec(entry.op).args):
        return "honoured" if entry.traces_options else "honoured as a number"
    return "honoured" if honoured else "refused"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
