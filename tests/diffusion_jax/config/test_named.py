"""Functions that a config names, with parameters from the name, the config's fields or defaults."""

import re
import types

import pytest

from diffusion_jax.config import named
from diffusion_jax.config.settings import LOSS_MASKS
from diffusion_jax.diffusion import samplers


def scaled(x, *, factor=2.0, shift=0.0):
    return factor * x + shift


TABLE = named.Table(scaled=scaled, plain=lambda x: x, elsewhere="statistics:fmean")


def value(text, group=None, x=10.0):
    return TABLE.bound("group.field", text, group)(x)


def test_a_name_without_parameters_uses_the_functions_defaults():
    assert value("scaled") == 20 and value("plain") == 10


def test_parentheses_hold_positional_and_keyword_parameters():
    assert value("scaled(3)") == 30
    assert value("scaled(3, shift=-1)") == 29
    assert value(" scaled( shift = 0.5 ) ") == 20.5


def test_a_field_overrides_the_default_and_parentheses_override_the_field():
    group = types.SimpleNamespace(factor=5.0, other=7)
    assert value("scaled", group) == 50
    assert value("scaled(4)", group) == 40


def test_a_parameter_without_a_default_needs_a_value_or_a_field():
    table = named.Table(halved=lambda x, *, by: x / by, none=lambda x: x)
    message = r"f is 'halved', but halved needs a value of by: write halved\(by=VALUE\), or none"
    with pytest.raises(ValueError, match=message):
        table.bound("f", "halved", types.SimpleNamespace())
    assert table.bound("f", "halved(4)", types.SimpleNamespace())(8) == 2
    assert table.bound("f", "halved", types.SimpleNamespace(by=2))(8) == 4


def test_a_table_entry_can_name_a_function_that_is_imported_on_first_use():
    assert TABLE.bound("f", "elsewhere")([3.0, 4.0]) == 3.5


def test_calls_splits_names_joined_by_plus_in_order():
    parts = named.calls("f", "plain + scaled(factor=3) + plain")
    assert [part.name for part in parts] == ["plain", "scaled", "plain"]
    assert parts[1].by_name == {"factor": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scald", r"group.field is 'scald': did you mean 'scaled'\?"),
        ("zzz", "group.field is 'zzz': choose from scaled, plain, elsewhere"),
        ("scaled(std=1)", "group.field gives scaled the parameter std, but scaled takes only factor"),
        ("scaled(1, 2, 3)", "group.field gives scaled 3 values, but scaled takes only factor, shift"),
        ("plain(1)", "group.field gives plain 1 values, but plain takes no parameters"),
        ("scaled(factor=open('x'))", r"group.field is .* write a name, optionally with parameters"),
        ("scaled(factor=big)", "whose values are numbers or texts in quotes"),
        ("scaled(", "group.field is 'scaled.': write a name"),
        ("a.b(1)", "group.field is 'a.b.1.': write a name"),
        ("plain + scaled", r"it takes one name, not 2 joined by \+"),
    ],
)
def test_an_invalid_name_or_parameter_is_a_one_line_error(text, message):
    with pytest.raises(ValueError, match=message):
        value(text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("euler_a", "euler_ancestral"),
        ("dpm++", "dpmpp_2m"),
        ("DPM++ 2M SDE", "dpmpp_2m_sde"),
        ("huen", "heun"),
        ("sampler", ""),
    ],
)
def test_an_unknown_sampler_error_suggests_the_closest_name_and_lists_all(name, meant):
    question = f"did you mean {meant!r}? Choose" if meant else "choose"
    message = f"sampler.name is {name!r}: {question} from {', '.join(samplers.SAMPLERS)}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        samplers.SAMPLERS.bound("sampler.name", name)


def test_the_empty_name_is_listed_in_quotes():
    with pytest.raises(ValueError, match=r"data\.loss_mask is 'x': choose from '', alpha, file"):
        named.one_of("data.loss_mask", "x", LOSS_MASKS)
