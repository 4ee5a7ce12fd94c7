"""A guide must denoise the same pictures or latents as the model that it guides."""

from types import SimpleNamespace

import pytest

from diffusion_jax.config.settings import Text
from diffusion_jax.devices import sharding
from diffusion_jax.draw import stage


def settings(**changes):
    """Return settings with the fields that the two models of autoguidance share."""
    values = {"text": Text("hashed"), "output_size": 64, "data": SimpleNamespace(fields=()), "latents": latents(0.5)}
    return SimpleNamespace(**values | {"super_resolution": SimpleNamespace(factor=1)} | changes)


def latents(scale):
    return SimpleNamespace(scale=scale, pixels="symmetric")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": latents(0.18215)}, "has latents.scale 0.18215, but the guided model has latents.scale 0.5:"),
        ({"super_resolution": SimpleNamespace(factor=4)}, "has super_resolution.factor 4, but the"),
        ({"output_size": 32, "text": Text("hashed", width=8)}, "text.width 8, output_size 32, .* has text.width 1024"),
    ],
)
def test_a_guide_with_other_inputs_or_latents_is_an_error(changes, message):
    read = lambda workdir: settings(**changes)
    with pytest.raises(ValueError, match=message):
        stage.load_guide("runs/a", settings(), read, lambda s: None, sharding.make_mesh(), [])
