"""Rules about the source that no linter of the test environment checks."""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import pathlib
import subprocess
import sys

import pytest

import ejkernel.modules
from ejkernel.kernels import _spec, _support, _support_docs, kernel_registry

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "ejkernel").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BACKENDS = ("_triton", "_pallas", "_xla", "_cuda", "_cudnn")
# The first may not import any of the others, nor what lies under them.
FORBIDDEN = {
    "ejkernel.errors": ("ejkernel",),
    "ejkernel._settings": tuple(f"ejkernel.{n}" for n in ("_device", "ops", "kernels", "modules")),
    "ejkernel._device": ("ejkernel.ops", "ejkernel.kernels", "ejkernel.modules"),
    "ejkernel.ops": ("ejkernel.kernels", "ejkernel.modules"),
    "ejkernel.kernels": ("ejkernel.modules",),
    "ejkernel.xla_utils": ("ejkernel.ops", "ejkernel.kernels", "ejkernel.modules"),
    "ejkernel.types": ("ejkernel.ops", "ejkernel.kernels", "ejkernel.modules"),
    "ejkernel.callib": ("ejkernel.ops", "ejkernel.kernels", "ejkernel.modules"),
} | {
    f"ejkernel.kernels.{one}": tuple(f"ejkernel.kernels.{b}" for b in BACKENDS if b != one)
    for one in BACKENDS
}


@functools.cache
def parse(path):
    return ast.parse(path.read_text(), str(path))


def where(path, node=None):
    return f"{path.relative_to(ROOT)}" + (f":{node.lineno}" if node is not None else "")


def walk(paths, *kinds):
    for path in paths:
        for node in ast.walk(parse(path)):
            if isinstance(node, kinds):
                yield path, node


def dotted(node):
    """`a.b.c` of an attribute chain, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def test_contexts_are_made_in_one_module_that_every_import_loads():
    """One made while a function is traced would have every program traced again."""
    calls = [(p, n) for p, n in walk(PACKAGE, ast.Call) if "make_user_context" in dotted(n.func)]
    assert {path.name for path, _ in calls} == {"_contexts.py"}


# Exceptions


def blind(node):
    """Whether an exception type catches everything."""
    types_ = node.elts if isinstance(node, ast.Tuple) else [node]
    return node is None or any(dotted(t) in ("Exception", "BaseException") for t in types_)


def is_silent(handler):
    """A handler of everything that neither raises nor looks at what it caught."""
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    raises = any(isinstance(node, ast.Raise) for node in inside)
    looks = handler.name and any(
        isinstance(node, ast.Name) and node.id == handler.name for node in inside
    )
    return blind(handler.type) and not raises and not looks


def silences(call):
    return dotted(call.func).endswith("suppress") and any(map(blind, call.args))


def test_no_exception_is_swallowed():
    handlers = walk(PACKAGE + TESTS, ast.ExceptHandler)
    calls = walk(PACKAGE + TESTS, ast.Call)
    found = [where(path, node) for path, node in handlers if is_silent(node)]
    found += [where(path, node) for path, node in calls if silences(node)]
    assert not found


@pytest.mark.parametrize(
    ("source", "silent"),
    [
        ("try: f()\nexcept: pass", True),
        ("try: f()\nexcept Exception: x = 1", True),
        ("try: f()\nexcept (ValueError, BaseException): x = 1", True),
        ("try: f()\nexcept Exception as error: x = 1", True),
        ("try: f()\nexcept Exception as error: log(error)", False),
        ("try: f()\nexcept Exception: raise", False),
        ("try: f()\nexcept ValueError: pass", False),
    ],
)
def test_the_rule_about_exceptions_finds_them(source, silent):
    (handler,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ExceptHandler))
    assert is_silent(handler) == silent


# Tests


ROLES = {
    name: role
    for role, names in {
        "q": ("q", "query", "queries"),
        "k": ("k", "key", "keys"),
        "v": ("v", "value", "values"),
    }.items()
    for name in names
}


def roles(node):
    """Which inputs of attention are named in an expression."""
    names = (n.id.lower() for n in ast.walk(node) if isinstance(n, ast.Name))
    return [ROLES[name] for name in names if name in ROLES]


def shares_inputs(assign):
    """`q = k = v`, `k = q`, `q, k, v = (x,) * 3` or `q, k, v = x, x, x`."""
    inputs = {role for target in assign.targets for role in roles(target)}
    value = assign.value
    if len(assign.targets) > 1 and len(inputs) > 1:
        return True
    if isinstance(value, ast.Name):
        return bool(inputs and {*roles(value)} - inputs)
    if len(inputs) < 2:
        return False
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return any(isinstance(side, ast.Tuple | ast.List) for side in (value.left, value.right))
    if isinstance(value, ast.Tuple | ast.List):
        sources = [e.id for e in value.elts if isinstance(e, ast.Name)]
        return len(set(sources)) < len(sources)
    return False


def test_inputs_of_attention_are_independent():
    paths = [path for path in TESTS if path.name != "test_seed_examples.py"]
    found = [where(p, n) for p, n in walk(paths, ast.Assign) if shares_inputs(n)]
    assert not found


@pytest.mark.parametrize(
    ("source", "shared"),
    [
        ("q = k = v = x", True),
        ("query = key = x", True),
        ("k = q", True),
        ("q, k, v = (x,) * 3", True),
        ("q, k, v = [x] * 3", True),
        ("q, k, v = x, x, x", True),
        ("q, k, v = x, x, y", True),
        ("q, k, v = (f(key) for key in keys)", False),
        ("q, k, v = x, y, z", False),
        ("q, k, v = draw(), draw(), draw()", False),
        ("q, k, v = arrays", False),
        ("key = k", False),
        ("a = b = x", False),
        ("k = k[:, None]", False),
        ("key = jax.random.key(0)", False),
        ("q = 2 * x", False),
    ],
)
def test_the_rule_about_inputs_finds_them(source, shared):
    assert shares_inputs(ast.parse(source).body[0]) == shared


def own_checks(tree):
    """Names of the functions of a file that assert something, directly or by another of them."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    checks: set[str] = set()
    while more := {n for n, f in functions.items() if n not in checks and asserts(f, checks)}:
        checks |= more
    return checks


def asserts(function, checks):
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            last = dotted(node.func).rpartition(".")[2].lstrip("_")
            if last in ("raises", "warns", "fail") or last.startswith(("assert", "check")):
                return True
            if dotted(node.func) in checks:
                return True
    return False


def test_every_test_asserts():
    found = []
    for path in TESTS:
        checks = own_checks(parse(path))
        for node in ast.walk(parse(path)):
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and node.name not in checks:
                found.append(where(path, node))
    assert not found


def test_the_rule_about_asserting_finds_them():
    tree = ast.parse(
        "def helper(): assert x\n"
        "def test_a(): run()\n"
        "def test_b(): helper()\n"
        "def test_c(): np.testing.assert_allclose(x, y)\n"
        "def test_d():\n  with pytest.raises(ValueError): run()\n"
    )
    assert own_checks(tree) == {"helper", "test_b", "test_c", "test_d"}


# The package


def test_the_environment_is_read_in_one_place():
    found = [
        where(path, node)
        for path, node in walk(PACKAGE, ast.Attribute, ast.ImportFrom)
        # `_no_tpu` sets a variable of JAX's, before JAX is imported
        if path.name not in ("_settings.py", "_no_tpu.py")
        and (
            dotted(node) in ("os.environ", "os.getenv", "os.environb")
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and {a.name for a in node.names} & {"environ", "getenv", "environb"}
            )
        )
    ]
    assert not found


def test_nothing_prints():
    calls = walk(PACKAGE, ast.Call)
    assert not [where(p, n) for p, n in calls if dotted(n.func) in ("print", "pprint.pprint")]


def test_imports_are_absolute_and_annotations_are_values():
    found = [
        where(path, node)
        for path, node in walk(PACKAGE, ast.ImportFrom)
        if node.level
        or (node.module == "__future__" and "annotations" in {a.name for a in node.names})
    ]
    assert not found


def test_files_are_short():
    lengths = {where(path): len(path.read_text().splitlines()) for path in PACKAGE}
    assert not {path: length for path, length in lengths.items() if length > 500}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node):
    """The modules that an import names; a name imported from a module may be one too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


def under(module, package):
    return module == package or module.startswith(f"{package}.")


def test_imports_go_one_way():
    found = []
    for path, node in walk(PACKAGE, ast.Import, ast.ImportFrom):
        for room, others in FORBIDDEN.items():
            if not under(module_of(path), room):
                continue
            found += [
                f"{where(path, node)} imports {name}"
                for name in imported(node)
                if any(under(name, other) for other in others)
            ]
    assert not found


def test_public_things_have_docstrings():
    missing = []
    for name in ejkernel.modules.__all__:
        thing = getattr(ejkernel.modules, name)
        # a dataclass without one gets its signature as docstring
        made_up = isinstance(thing, type) and (thing.__doc__ or "").startswith(f"{name}(")
        if not (thing.__doc__ or "").strip() or made_up:
            missing.append(name)
    assert not missing


def test_public_functions_explain_every_argument_once():
    function = ejkernel.modules.flash_attention
    explained = [line.partition(":")[0].strip() for line in function.__doc__.splitlines()]
    assert not [n for n in inspect.signature(function).parameters if explained.count(n) != 1]


def test_generated_files_are_up_to_date():
    # in a process of its own: other tests register kernels
    program = (
        "import json; from ejkernel.kernels import _support, kernel_registry; "
        "files = {str(p): t for p, t in _support.files().items()}; "
        "print(json.dumps([files, kernel_registry.ops()]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files, ops = json.loads(done.stdout)
    pages = {p.name for p in (ROOT / "docs" / "ops").glob("*.md") if p.stem in ops}
    names = {pathlib.Path(path).name for path in files}
    assert "flash_attention.md" in pages
    assert names == {"README.md", "checks.md", "support_matrix.json", *pages}
    for path, text in files.items():
        current = pathlib.Path(path).read_text()
        difference = difflib.unified_diff(current.splitlines(), text.splitlines(), lineterm="")
        assert current == text, "run `make matrix`:\n" + "\n".join(difference)


def test_the_support_table_has_a_mark_for_each_kind_of_kernel():
    def cells(table, op):
        (row,) = (line for line in table.splitlines() if line.startswith(f"| `{op}` |"))
        return dict(zip(_support._COLUMNS, row.split(" | ")[1:], strict=True))

    marks = {op: cells(_support.table(), op) for op in ("flash_attention", "page_attention")}
    assert marks["flash_attention"]["Triton"] == "✓"
    assert marks["page_attention"]["XLA"].startswith("→")
    assert marks["page_attention"]["cuDNN"] == "·"
    words = cells(_support.checks(), "flash_attention")
    assert words["TPU"].startswith("own backward, ")
    page = f"before\n{_support._BEGIN}\nold\n{_support._END}\nafter\n"
    assert _support.render(page, "new") == page.replace("old", "new")


def test_a_page_without_a_table_gets_one_and_keeps_its_text():
    page = "# An op\n\nWhat it does.\n"
    first = _support_docs.render(page, "| a |")
    assert (
        first == page + "\n## Options and kernels\n\n<!-- options -->\n| a |\n<!-- /options -->\n"
    )
    moved = first + "\n## More\n"
    second = _support_docs.render(moved, "| b |")
    assert second == moved.replace("| a |", "| b |")
    assert _support_docs.render(second, "| b |") == second


def test_the_table_tells_honoured_from_refused():
    made = dataclasses.replace(kernel_registry.list("gla")[-1], honours=frozenset({"g"}))
    cells = {
        f.name: _support_docs._cell(made, f)
        for f in _spec.public_fields(kernel_registry.spec("gla").args)
    }
    assert cells["g"] == cells["softmax_scale"] == "honoured"
    assert cells["reverse"] == cells["initial_state"] == "refused"
    rows = _support_docs.table("gla").splitlines()
    assert any(row.startswith("| `reverse` | ") for row in rows)
    assert not any(row.startswith("| `query` | ") for row in rows)
    assert "`query`" in rows[-1]
    assert "cu_seqlens" not in rows[-1]
