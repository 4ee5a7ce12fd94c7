"""Our samplers match diffusers' schedulers: their images, and the times passed to the network.

`diffusers_schedulers.npz` was written by diffusers 0.42, and `diffusers_lcm.npz` and
`diffusers_solvers.npz` by 0.34, with a closed-form network instead of a UNet. They hold configs as
in scheduler_config.json, steps, times and final latents.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.config.ranges import check
from diffusion_jax.diffusion import precond, samplers
from diffusion_jax.diffusion.noise import NOISES
from sd_jax.settings import Sampler
from sd_jax.weights import schedulers

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
SAVED, CASES = {}, []
for file in ("diffusers_schedulers.npz", "diffusers_lcm.npz", "diffusers_solvers.npz"):
    saved = np.load(FIXTURES / file)
    for n, saved_case in enumerate(json.loads(saved["info"].item())):
        SAVED |= {f"{len(CASES)}{end}": saved[f"{n}{end}"] for end in ("", "_times")}
        CASES.append(saved_case)
    SAVED |= {key: saved[key] for key in ("xT", "draws") if key in saved}
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def images(z):
    """Transpose [..., C, H, W] to [..., H, W, C]."""
    return jnp.moveaxis(jnp.asarray(z), -3, -1)


def toy(x, t):
    return 0.8 * jnp.sin(x) + 0.3 * x * jnp.cos(3 * t / 1000)[:, None, None, None]


def name(case):
    steps, config = CASES[case]
    extra = [f"{k}={v}" for k, v in config.items() if k not in (*SD, "num_train_timesteps")]
    return f"{steps} {', '.join(extra)}"


def cases():
    """Yield all cases. Those that repeat a config with other steps or another target are slow."""
    seen = set()
    for case, (steps, config) in enumerate(CASES):
        same = json.dumps({k: v for k, v in config.items() if k != "prediction_type"}, sort_keys=True)
        yield pytest.param(case, marks=[pytest.mark.slow] if same in seen and steps > 3 else [], id=name(case))
        seen.add(same)


@pytest.mark.parametrize("case", [*cases()])
def test_times_and_samples_match_those_of_diffusers(case):
    steps, config = CASES[case]
    s = schedulers.read_sampler(config, Sampler(steps=steps))
    check(Sampler, s._asdict(), "sampler")
    predicts, noise = schedulers.read_diffusion(config)
    table = NOISES.function(noise)()
    grid = samplers.sampling_grid(table, s)
    times = np.asarray(grid.time(grid.sigmas[:-1]))
    # Heun and PNDM repeat times.
    expected_times = np.array(list(dict.fromkeys(SAVED[f"{case}_times"])))
    np.testing.assert_allclose(times[: len(expected_times)], expected_times, atol=2e-2)

    scalings = precond.PRECONDS[predicts](grid.time)
    start = jnp.sqrt(1 + grid.sigmas[0] ** 2) if s.unit_start else grid.sigmas[0]
    draws = images(SAVED["draws"])
    sampler = s.method.sampler
    run = jax.jit(lambda x: sampler(precond.denoiser(toy, scalings), x, grid.sigmas, draws.__getitem__))
    actual = samplers.to_variance_preserving(run(images(SAVED["xT"]) * start), grid.sigmas[-1])
    expected = images(SAVED[str(case)])
    error = float(jnp.abs(actual - expected).max() / jnp.abs(expected).max())
    print(f"{error:.1e}")
    assert error < 3e-5  # Steps from high levels lose digits in float32: up to 1.5e-5.
