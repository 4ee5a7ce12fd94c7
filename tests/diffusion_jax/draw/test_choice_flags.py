"""Flags of how models draw, made of their settings: values, stages of a cascade, a sweep's axes."""

import dataclasses
from unittest import mock

import pytest
from absl import flags

from diffusion_jax.draw import choice_flags
from diffusion_jax.evaluate import command, sweep
from imagen_jax.cascade import Choice
from imagen_jax.settings import Sampler
from sd_jax import settings as sd_settings
from sd_jax.weights import trained

CHOICES = {Choice: Sampler, trained.Choice: sd_settings.Sampler}


def holders(**values):
    return {name: mock.Mock(spec=flags.FlagHolder, value=given) for name, given in values.items()}


@pytest.mark.parametrize("kind", CHOICES, ids=["imagen", "sd"])
def test_every_setting_of_the_sampler_can_be_chosen(kind):
    """A field that a config gets is a flag, with its range as its help."""
    fields = {field.metadata.get("field"): field for field in dataclasses.fields(kind)}
    for name in CHOICES[kind]._fields:
        field = fields[f"sampler.{name}"]
        assert field.name == ("sampler" if name == "name" else name)
    text = {field.name: field.metadata["help"] for field in fields.values() if field.metadata}
    assert text["eta"] == "In place of the config's sampler.eta: a number in [0, 1]."
    assert text["grid"].endswith("one of ldm, even, leading, trailing, linspace, karras, "
                                 "exponential.")  # fmt: skip
    assert "one of heun, euler," in text["sampler"] and "apg, cfg_pp" in text["guiding"]


def test_values_of_each_type_are_read():
    found = choice_flags.axes(
        trained.Choice, holders(unit_start=["false"], offset=["0"], guidance_high=["inf"]), 1
    )
    assert [choice.changes() for (choice,) in found] == [
        {"sampler": {"unit_start": False, "offset": 0, "guidance_high": float("inf")}}
    ]


def test_commas_are_points_of_one_model():
    given = holders(
        sampler=["ddim(eta=0.5),heun(churn=3,s_noise=1)"], steps=["4", "8"],
        negative_prompt=["ugly, grey"],
    )  # fmt: skip
    points = choice_flags.axes(Choice, given, 1)
    seen = [(c.sampler, c.steps, c.negative_prompt) for (c,) in points]
    assert seen == [
        ("ddim(eta=0.5)", 4, "ugly, grey"), ("ddim(eta=0.5)", 8, "ugly, grey"),
        ("heun(churn=3,s_noise=1)", 4, "ugly, grey"), ("heun(churn=3,s_noise=1)", 8, "ugly, grey"),
    ]  # fmt: skip
    varied = command._varied(points)
    assert varied[1] == {"sampler.name": "ddim(eta=0.5)", "sampler.steps": "8"}
    row = {"checkpoint": 3, "ema": "ema", **varied[1]}
    assert sweep.point_name(row) == "step_00000003_ema_sampler_ddim_eta_0.5__steps_8"
    assert sweep.label(row) == "step 3, ema, sampler ddim(eta=0.5), steps 8"


def test_commas_are_stages_of_a_cascade_and_repeated_flags_points():
    points = choice_flags.axes(Choice, holders(steps=["30,20", "10"], eta=["1"]), 2)
    assert [[(c.steps, c.eta) for c in row] for row in points] == [
        [(30, 1.0), (20, 1.0)], [(10, 1.0), (10, 1.0)]
    ]  # fmt: skip
    assert command._varied(points) == [{"sampler.steps": "30,20"}, {"sampler.steps": "10"}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guide": ["a", "b"]}, "--guide is given 2 times: it is no axis"),
        ({"steps": ["0"]}, "--steps=0: give numbers from 1 on"),
        ({"eta": ["0,one"]}, "--eta=one is no list of numbers"),
    ],
)
def test_what_is_no_axis_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        choice_flags.axes(Choice, holders(**given), 1)
