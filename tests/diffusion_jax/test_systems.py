"""Configs name their system, whose defaults complete them."""

import sys

import pytest
from absl import flags

from configs import quickstart, sd_quickstart
from diffusion_jax import cli, runs, systems
from imagen_jax import settings as imagen_settings
from imagen_jax import unet
from sd_jax import train_vae

SMALLEST = """
from ml_collections import ConfigDict

def get_config(steps="10"):
    c = ConfigDict(dict(system="imagen_jax", steps=int(steps), batch_size=4))
    c.unet = dict(image_size=16, attention_resolutions=(8, 16))
    c.text = dict(encoder="hashed", width=32)
    c.optimizer = dict(lr=1.0, warmup=0)
    c.data = dict(source="diffusion_jax.examples.digits", max_aspect=2)
    return c
"""


def parse(monkeypatch, *arguments):
    """Parse a command line like the commands, and return its config."""
    values = flags.FlagValues()
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    holder = cli.define_config(flag_values=values)
    values(sys.argv)
    return holder.value


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "smallest.py"
    path.write_text(SMALLEST)
    return path


def test_a_short_config_file_is_completed_and_changed_by_the_command_line(monkeypatch, file):
    fields = ("data.max_aspect=1.5", "unet.channel_mult=(1, 2)", "sample_every=0", "sampler.eta=1")
    c = parse(monkeypatch, f"--config={file}:20", *(f"--config.{field}" for field in fields))
    assert (c.steps, c.data.max_aspect, c.sampler.eta, c.unet.kind) == (20, 1.5, 1.0, "unet")
    s = imagen_settings.read_settings(c.to_dict())
    assert (s.unet.channel_mult, s.unet.embed_dim, s.run.step_timeout) == ((1, 2), 256, 1800)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c.unet.embd_dim = 8", "unknown config field unet.embd_dim: did you mean unet.embed_dim?"),
        ("del c.unet.image_size", "the config lacks unet.image_size"),
        ("del c.steps", "the config lacks steps"),
        ("del c.system", "the config has no field `system`: choose from imagen_jax, sd_jax, sd_jax.vae"),
        ("c.system = 'imagen'", "system is 'imagen': did you mean 'imagen_jax'?"),
        ("c.system = 'sd_jax.vea'", "system is 'sd_jax.vea': did you mean 'sd_jax.vae'?"),
        ("c.unet.kind = 'effcient'", "unet.kind is 'effcient': did you mean 'efficient'?"),
        ("c.vae = dict(width=8)", "unknown config field vae: choose from unet, text, diffusion"),
    ],
)
def test_a_mistake_in_a_config_file_is_an_error_that_names_it(monkeypatch, file, line, message):
    file.write_text(SMALLEST.replace("    return c", f"    {line}\n    return c"))
    with pytest.raises(flags.IllegalFlagValueError) as error:
        parse(monkeypatch, f"--config={file}")
    assert f"flag --config={file}: {message}" in str(error.value)


def test_reading_a_config_of_another_system_is_a_one_line_error():
    with pytest.raises(ValueError, match=r"imagen_jax, not sd_jax: it is for python -m imagen_"):
        systems.read(quickstart.get_config().to_dict(), "sd_jax")
    with pytest.raises(ValueError, match=r"sd_jax, not sd_jax\.vae: it is for python -m sd_ja"):
        train_vae.read_settings(sd_quickstart.get_config().to_dict())


class Sharper(unet.UNet):
    """A UNet with one more option."""

    sharpness: float = 0.5


def test_an_added_unet_option_works_in_files_flags_and_workdirs(monkeypatch, tmp_path, file):
    before = parse(monkeypatch, f"--config={file}", "--config.sample_every=0").to_dict()
    runs.claim(tmp_path, before)
    monkeypatch.setitem(imagen_settings.UNETS, "unet", Sharper)
    loaded = imagen_settings.read_settings(runs.load(tmp_path)).unet
    # A run without the option gets its default.
    assert (type(loaded), loaded.sharpness) == (Sharper, 0.5)
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    flag = ("--config.sample_every=0", "--config.unet.sharpness=2")
    with pytest.raises(ValueError, match=r"unet\.sharpness: 0\.5 stored, 2\.0 requested"):
        runs.claim(tmp_path, parse(monkeypatch, f"--config={file}", *flag).to_dict())
    runs.claim(tmp_path / "new", parse(monkeypatch, f"--config={file}", *flag).to_dict())
    loaded = imagen_settings.read_settings(runs.load(tmp_path / "new")).unet
    assert (type(loaded), loaded.sharpness, loaded.image_size) == (Sharper, 2.0, 16)
    file.write_text(SMALLEST.replace("image_size=16,", "image_size=16, sharpness=3.0,"))
    assert parse(monkeypatch, f"--config={file}").unet.sharpness == 3.0
