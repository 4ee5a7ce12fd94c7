"""Options of sampling are converted and checked for flags, keywords, requests and sweeps."""

import re
from unittest import mock

import pytest
from absl import flags

from diffusion_jax.draw import option_flags, options
from diffusion_jax.evaluate import sweep
from imagen_jax import cascade
from imagen_jax.settings import Sampler
from sd_jax import drawing
from sd_jax import settings as sd_settings


def fields_of(values):
    """The config fields that these values of Imagen's options change."""
    return options.fields(cascade.OPTIONS, options.read(cascade.OPTIONS, values))


def holders(**values):
    return {name: mock.Mock(spec=flags.FlagHolder, value=value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("table", "kind"), [(cascade.OPTIONS, Sampler), (drawing.OPTIONS, sd_settings.Sampler)], ids=["imagen", "sd"]
)
def test_every_field_of_the_sampler_config_is_an_option(table, kind):
    """The help of an option has the meaning and the range of the config field."""
    names = {option.field: name for name, option in table.items()}
    for field in kind._fields:
        assert names[f"sampler.{field}"] == ("sampler" if field == "name" else field)
    assert table["eta"].help.startswith("The share of new noise per step of the sampler")
    assert table["eta"].help.endswith(" It is a number from 0 to 1. Default: sampler.eta of the config.")
    assert "one of ldm, even, leading, trailing, linspace, karras, exp" in table["grid"].help
    assert "one of heun, euler," in table["sampler"].help and "apg, cfg_pp" in table["guiding"].help


def test_values_and_strings_are_converted_to_the_type_of_their_option():
    values = {"unit_start": "false", "offset": "0", "guidance_high": "inf", "rho": 7, "grid": "", "steps": None}
    table = drawing.OPTIONS
    typed = options.read(table, values | {"ema": "raw", "checkpoint": "3", "vae_weights": "a.npz"})
    expected = {"unit_start": False, "offset": 0, "guidance_high": float("inf"), "rho": 7.0, "grid": ""}
    fields = {f"sampler.{name}": value for name, value in expected.items()}
    assert options.fields(table, typed) == {**fields, "vae.weights": "a.npz"}
    assert (typed["ema"], typed["checkpoint"], "steps" in typed) == ("raw", 3, False)
    assert type(typed["rho"]) is float
    # The VAE is read when the model opens.
    assert options.fields(options.changeable(table), typed) == fields


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, "there is no option 'stepz': did you mean steps"),
        ({"steps": 0}, "steps is 0: it must be above 0"),
        ({"steps": "2.5"}, "steps is '2.5': it must be a whole number"),
        ({"steps": True}, "steps is True: it must be a whole number"),
        ({"eta": "one"}, "eta is 'one': it must be a number"),
        ({"eta": 2}, "eta is 2.0: it must be from 0 to 1"),
        ({"sampler": "huen"}, "sampler is 'huen': did you mean 'heun'"),
        ({"negative_prompt": 3}, "negative_prompt is 3: it must be a string"),
        ({"aug_sigma": "0"}, "aug_sigma is 0.0: it must be above 0"),
        ({"checkpoint": 1.5}, "checkpoint is 1.5: it must be a whole number"),
    ],
)
def test_invalid_values_of_options_are_errors(values, message):
    with pytest.raises(ValueError, match=message):
        options.read(cascade.OPTIONS, values)


def test_for_one_model_commas_separate_points_of_a_sweep():
    table = cascade.OPTIONS
    axes = holders(sampler=["ddim(eta=0.5),heun(churn=3,s_noise=1)"], steps=["4", "8"], negative_prompt=["ugly, grey"])
    points = option_flags.points(table, axes, 1)
    rows = [tuple(stage.values()) for (stage,) in points]
    samplers = ("ddim(eta=0.5)", "heun(churn=3,s_noise=1)")
    assert rows == [(sampler, steps, "ugly, grey") for sampler in samplers for steps in "48"]
    varied = options.varied([[fields_of(stage) for stage in point] for point in points])
    assert varied[1] == {"sampler.name": "ddim(eta=0.5)", "sampler.steps": "8"}
    row = {"checkpoint": 3, "ema": "ema", **varied[1]}
    assert sweep.point_name(row) == "step_00000003_ema_sampler_ddim_eta_0.5__steps_8"
    assert sweep.label(row) == "step 3, ema, sampler ddim(eta=0.5), steps 8"


def test_for_a_cascade_commas_separate_stages_and_a_repeated_flag_adds_a_point():
    points = option_flags.points(cascade.OPTIONS, holders(steps=["30,20", "10"], eta=["1"]), 2)
    fields = [[fields_of(stage) for stage in point] for point in points]
    with_steps = lambda *each: [{"sampler.steps": steps, "sampler.eta": 1.0} for steps in each]
    assert fields == [with_steps(30, 20), with_steps(10, 10)]
    assert options.varied(fields) == [{"sampler.steps": "30,20"}, {"sampler.steps": "10"}]


def test_flags_have_one_value_for_all_stages_or_one_for_each():
    flags_given = holders(steps=["30", "20"], eta=["1"], negative_prompt=["a, b"], guide=[])
    same = {"eta": "1", "negative_prompt": "a, b", "guide": None}
    assert option_flags.by_stage(cascade.OPTIONS, flags_given, 2) == [{"steps": n, **same} for n in ("30", "20")]
    assert option_flags.each("batch_size", ["3"], int, 2) == [3, 3]
    assert option_flags.each("batch_size", [], int, 2) == [None, None]
    with pytest.raises(ValueError, match="has 2 values for 3 stages: give one value for all "):
        option_flags.each("batch_size", ["3", "4"], int, 3)


@pytest.mark.parametrize("given", [["a.pt", "b,c.pt"], ["a.pt,b,c.pt"], ["a.pt"], []])
def test_a_repeated_flag_of_files_joins_them_with_commas(given):
    joined = ",".join(given) or None
    one = holders(embedding=given or None)
    assert option_flags.values(drawing.OPTIONS, one) == {"embedding": joined}
    points = option_flags.points(drawing.OPTIONS, holders(embedding=given, eta=["0", "1"]), 1)
    assert points == [[{"embedding": joined, "eta": eta}] for eta in "01"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": ["0"]}, "--steps is 0: it must be above 0"),
        ({"guidance": ["two"]}, "--guidance is 'two': it must be a number"),
        ({"sampler": ["heun(churn=-1)"]}, "--sampler: churn is -1: it must be from 0 to 1000"),
    ],
)
def test_an_error_in_a_flag_names_the_flag(given, message):
    message = f"^{re.escape(message)}"
    for read in (option_flags.by_stage, option_flags.points):
        with pytest.raises(ValueError, match=message):
            read(cascade.OPTIONS, holders(**given), 1)
    ((name, (value,)),) = given.items()
    with pytest.raises(ValueError, match=message):
        option_flags.values(cascade.OPTIONS, holders(**{name: value}))


def test_options_that_are_read_when_a_model_opens_cannot_vary_in_a_sweep():
    with pytest.raises(ValueError, match="--guide is given 2 times, but it cannot vary"):
        option_flags.points(cascade.OPTIONS, holders(guide=["a", "b"]), 1)
