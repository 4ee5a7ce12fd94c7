"""Names with parameters of their own: what a config writes, what its fields and defaults say."""

import types

import pytest

from diffusion_jax.config import named
from diffusion_jax.diffusion import samplers


def scaled(x, *, factor=2.0, shift=0.0):
    return factor * x + shift


TABLE = named.Table(scaled=scaled, plain=lambda x: x, elsewhere="statistics:fmean")


def value(text, group=None, x=10.0):
    return TABLE.bound("group.field", text, group)(x)


def test_a_name_alone_has_the_functions_defaults():
    assert value("scaled") == 20 and value("plain") == 10


def test_brackets_give_parameters_by_place_and_by_name():
    assert value("scaled(3)") == 30
    assert value("scaled(3, shift=-1)") == 29
    assert value(" scaled( shift = 0.5 ) ") == 20.5


def test_a_field_of_the_group_comes_before_the_default_and_after_the_brackets():
    group = types.SimpleNamespace(factor=5.0, other=7)
    assert value("scaled", group) == 50
    assert value("scaled(4)", group) == 40


def test_a_function_may_lie_in_a_module_that_is_imported_when_it_is_used():
    assert TABLE.bound("f", "elsewhere")([3.0, 4.0]) == 3.5


def test_several_are_joined_by_plus_in_their_order():
    parts = named.calls("f", "plain + scaled(factor=3) + plain")
    assert [part.name for part in parts] == ["plain", "scaled", "plain"]
    assert parts[1].by_name == {"factor": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scald", r"group.field is 'scald': did you mean 'scaled'\?"),
        ("zzz", "group.field is 'zzz': choose from scaled, plain, elsewhere"),
        (
            "scaled(std=1)",
            "group.field gives scaled the parameter std, but scaled takes only factor",
        ),
        (
            "scaled(1, 2, 3)",
            "group.field gives scaled 3 values, but scaled takes only factor, shift",
        ),
        ("plain(1)", "group.field gives plain 1 values, but plain takes no parameters"),
        ("scaled(factor=open('x'))", r"group.field is .* write a name, optionally with parameters"),
        ("scaled(", "group.field is 'scaled.': write a name"),
        ("a.b(1)", "group.field is 'a.b.1.': write a name"),
        ("plain + scaled", r"it takes one name, not 2 joined by \+"),
    ],
)
def test_what_cannot_be_is_one_line(text, message):
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
def test_an_unknown_sampler_is_answered_with_the_likeliest_name_and_all_names(name, meant):
    with pytest.raises(ValueError) as error:
        samplers.SAMPLERS.bound("sampler.name", name)
    listed = ", ".join(samplers.SAMPLERS)
    question = f"did you mean {meant!r}? Choose" if meant else "choose"
    assert str(error.value) == f"sampler.name is {name!r}: {question} from {listed}"
