"""Every config field is described in docs/settings.md and in --help."""

import pathlib
import re

import pytest

from diffusion_jax import reference, systems
from diffusion_jax.config import settings
from diffusion_jax.config.field_docs import fields, sentences
from diffusion_jax.data.sources import SOURCES
from diffusion_jax.text.registry import ENCODERS
from diffusion_jax.train.optimizer import SCHEDULES
from imagen_jax.magnitude_unet import MagnitudeUNet
from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parents[2]


def kinds():
    """Return the classes of all config groups."""
    networks = [reference._networks(systems.find(name)) for name in systems.KNOWN]
    groups = [network for of in networks for group in of.values() for network in group.values()]
    return list(dict.fromkeys([settings.Run, *groups]))


def test_settings_md_matches_the_generated_page():
    """After a change, run: python -m diffusion_jax.reference > docs/settings.md"""
    assert (ROOT / "docs/settings.md").read_text() == reference.page()


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_config_field_is_described_in_whole_sentences_and_its_group_names_its_readers(kind):
    for field in fields(kind):
        assert re.fullmatch(r"[A-Z0-9].*\.", field.meaning), f"{kind.__name__}.{field.name}"
    if hasattr(kind, "_fields"):  # A network reads its own fields.
        files = re.findall(r"\w+/[\w/]+\.py", kind.__doc__.partition("Read by ")[2])
        assert files and all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(
    ("group", "field", "names"),
    [
        (settings.Text, "encoder", ENCODERS),
        (settings.Optimizer, "schedule", SCHEDULES),
        (settings.Data, "source", SOURCES),
        (settings.Run, "system", systems.KNOWN),
    ],
)
def test_the_description_of_a_choice_lists_all_names_of_its_table(group, field, names):
    for name in names:
        assert re.search(rf"\b{name}\b", sentences(group)[field]), name


def test_a_network_inherits_the_field_descriptions_of_its_base_class():
    (image_size,) = (field for field in fields(MagnitudeUNet) if field.name == "image_size")
    assert image_size.values == "a whole number from 1 to 16384"
    assert image_size.meaning.startswith("Side of the square training images, in pixels.")


def test_help_lists_the_fields_of_the_commands_system_or_config():
    lr = "--config.optimizer.lr: The learning rate at the end of the warm-up. (a number above 0)"
    magnitude = reference.in_help("imagen_jax", {"unet": "magnitude"}).splitlines()
    assert lr in magnitude and not any(".null_token:" in line for line in magnitude)
    assert any(".null_token:" in line for line in reference.in_help("imagen_jax", {}).splitlines())
    shown = commands.run("sd_jax.train_vae", "--help").out
    assert "--config.reconstruction.kl: The weight of the KL" in shown
    shown = commands.run("launch.plan", "--config=configs/quickstart_mp.py", "--help").out
    assert "--config.unet.cond_dim:" in shown and "--config.unet.null_token:" not in shown
