"""`EJKERNEL_*` variables: parsing, refusals, overrides that jit sees, and the page about them."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _settings
from ejkernel.errors import SettingsError

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "settings.md"
FIELDS = {field.metadata["variable"]: field for field in dataclasses.fields(_settings.Settings)}
GOOD = {
    "EJKERNEL_AUTOTUNE_POLICY": ("heuristics", "heuristics"),
    "EJKERNEL_AUTOTUNE_BUDGET_S": ("2.5", 2.5),
    "EJKERNEL_LOG_AUTOTUNE": ("1", True),
    "EJKERNEL_OPS_STAMP": ("hash", "hash"),
    "EJKERNEL_OPS_RECORD": ("yes", True),
    "EJKERNEL_TRITON_SMEM_LIMIT": ("65536", 65536),
    "EJKERNEL_CACHE_DIR": ("/some/folder", "/some/folder"),
    "EJKERNEL_TYPECHECK": ("0", False),
    "EJKERNEL_INTERPRET": ("true", True),
    "EJKERNEL_PLATFORM": ("XLA", "xla"),
    "EJKERNEL_DEBUG": ("1", True),
}
BAD = [
    ("EJKERNEL_AUTOTUNE_POLICY", "sometimes"),
    ("EJKERNEL_AUTOTUNE_BUDGET_S", "-1"),
    ("EJKERNEL_AUTOTUNE_BUDGET_S", "nan"),
    ("EJKERNEL_AUTOTUNE_BUDGET_S", "inf"),
    ("EJKERNEL_AUTOTUNE_BUDGET_S", "soon"),
    ("EJKERNEL_LOG_AUTOTUNE", "2"),
    ("EJKERNEL_OPS_STAMP", "yaml"),
    ("EJKERNEL_OPS_RECORD", "maybe"),
    ("EJKERNEL_TRITON_SMEM_LIMIT", "0"),
    ("EJKERNEL_TRITON_SMEM_LIMIT", "1.5"),
    ("EJKERNEL_TYPECHECK", "on off"),
    ("EJKERNEL_INTERPRET", "-1"),
    ("EJKERNEL_PLATFORM", "mlx"),
    ("EJKERNEL_DEBUG", "x"),
]


def table():
    """{variable: (default, allowed, effect)} of the page."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `EJKERNEL_"):
            variable, default, allowed, effect = (
                cell.strip() for cell in line.strip("|").split("|")
            )
            assert variable not in rows, f"{variable} is listed twice"
            rows[variable.strip("`")] = (default, allowed, effect)
    return rows


def written(default):
    if default is None:
        return "unset"
    return f"`{int(default) if isinstance(default, bool) else default}`"


def test_page_lists_exactly_the_variables():
    assert list(table()) == list(FIELDS)
    mentioned = set(re.findall(r"EJKERNEL_[A-Z_]+", PAGE.read_text()))
    assert mentioned == {*FIELDS}


@pytest.mark.parametrize("variable", FIELDS)
def test_page_gives_default_allowed_values_and_effect(variable):
    default, allowed, effect = table()[variable]
    assert default == written(FIELDS[variable].default)
    assert allowed == FIELDS[variable].metadata["allowed"]
    assert effect


def test_nothing_set_gives_defaults():
    assert _settings.read({}) == _settings.Settings()


@pytest.mark.parametrize("variable", FIELDS)
def test_a_value_is_read(variable):
    text, value = GOOD[variable]
    settings = _settings.read({variable: text})
    found = getattr(settings, FIELDS[variable].name)
    assert found == value
    assert type(found) is type(value)
    others = {FIELDS[variable].name: FIELDS[variable].default}
    assert dataclasses.replace(settings, **others) == _settings.Settings()


@pytest.mark.parametrize("variable", FIELDS)
@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_value_counts_as_unset(variable, text):
    assert _settings.read({variable: text}) == _settings.Settings()


@pytest.mark.parametrize(("variable", "text"), BAD)
def test_a_bad_value_names_variable_and_allowed_values(variable, text):
    with pytest.raises(SettingsError) as caught:
        _settings.read({variable: text})
    message = str(caught.value)
    assert variable in message
    assert repr(text) in message
    assert FIELDS[variable].metadata["allowed"] in message


def test_every_variable_that_can_be_wrong_is_tried():
    assert {variable for variable, _ in BAD} == {*FIELDS} - {"EJKERNEL_CACHE_DIR"}


def test_override_is_nested_and_restored():
    before = _settings.current()
    with _settings.override(debug=True, platform="xla") as outer:
        assert _settings.current() == outer
        assert (outer.debug, outer.platform) == (True, "xla")
        with _settings.override(debug=False, ops_stamp="json") as inner:
            assert _settings.current() == inner
            assert (inner.debug, inner.platform, inner.ops_stamp) == (False, "xla", "json")
        assert _settings.current() == outer
    assert _settings.current() == before


def test_override_is_restored_after_an_error():
    before = _settings.current()
    with pytest.raises(ZeroDivisionError), _settings.override(debug=True):
        _ = 1 / 0
    assert _settings.current() == before


def test_override_retraces_a_jitted_function():
    traces = []

    @jax.jit
    def function(x):
        traces.append(_settings.current().debug)
        return x + int(_settings.current().debug)

    x = jnp.zeros(())
    for _ in range(2):
        assert function(x) == 0
        with _settings.override(debug=True):
            assert function(x) == 1
        with _settings.override(debug=False):
            assert function(x) == 0
    assert sorted(set(traces)) == [False, True]
    assert len(traces) <= 3  # one for each context, none for the second round


def test_override_refuses_an_unknown_name():
    with (
        pytest.raises(SettingsError, match=r"'verbose' is not a setting.*debug"),
        _settings.override(verbose=True),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("platform", "mlx"), ("debug", "x"), ("autotune_budget_s", -1), ("triton_smem_limit", 0.5)],
)
def test_override_refuses_a_bad_value(name, value):
    before = _settings.current()
    field = next(f for f in FIELDS.values() if f.name == name)
    with pytest.raises(SettingsError) as caught, _settings.override(**{name: value}):
        pass
    assert name in str(caught.value)
    assert field.metadata["allowed"] in str(caught.value)
    assert _settings.current() == before


def test_override_takes_none_only_where_unset_is_a_value():
    def takes_none(name):
        try:
            with _settings.override(**{name: None}):
                return True
        except SettingsError:
            return False

    taken = {field.name for field in FIELDS.values() if takes_none(field.name)}
    assert taken == {field.name for field in FIELDS.values() if field.default is None}


def test_settings_can_stand_in_a_key():
    assert hash(_settings.Settings()) == hash(_settings.read({}))
