"""Stable Diffusion in buckets: the real commands write the same bytes as in a folder.

The commands that write moments and train are killed and continued.
"""

import signal
import time

import pytest

from diffusion_jax import files, runs
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.weights import restore
from tests import emulators, test_buckets
from tests.sd_jax import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("stores"),
    pytest.mark.filterwarnings("ignore:Sending a large body"),  # gcsfs sends some.
]
CONFIG = """from tests.sd_jax import tiny


def get_config():
    return tiny.config(steps=4, batch_size=8, data__source="moments", optimizer__ema_decays=(0.9,))
"""
IMAGES, CHUNKS = 40, "*[0-9a-f].safetensors"


@pytest.fixture(scope="module", params=["s3", "gs"])
def homes(request, stores, tmp_path_factory):
    """Return a folder, and a bucket with a copy of its pictures, VAE and prompts."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "config.py").write_text(CONFIG)
    tiny.write_vae(folder / "vae.safetensors")
    (folder / "prompts.txt").write_text("a red 3\na blue 7\n")
    digits.write_examples(folder / "pictures", IMAGES, size=tiny.SIZE, format="webdataset")
    bucket = files.path(f"{request.param}://{emulators.BUCKET}/sd")
    for name in ("vae.safetensors", "prompts.txt", "pictures/00000.tar"):
        (bucket / name).send(folder / name)
    return folder, bucket


def kill_when(process, is_reached):
    deadline = time.monotonic() + test_buckets.PATIENCE
    while process.poll() is None and time.monotonic() < deadline and not is_reached():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def commands_of(home, config):
    """Return the commands that compute moments of a home's pictures, and train on them."""
    flags = (f"--config={config}", f"--config.vae.weights={home}/vae.safetensors")
    source = ("--config.data.source=webdataset", f"--config.data.path={home}/pictures")
    moments = ("sd_jax.precache", *flags, *source, f"--out={home}/moments", "--shard_images=4", "--batch=1")
    data = f"--config.data.path={home}/moments"
    return moments, ("sd_jax.train", *flags, data, f"--workdir={home}/run")


@pytest.fixture(scope="module")
def trained(homes):
    """Both homes, with moments and a training run. In the bucket, the commands were killed once."""
    folder, bucket = homes
    moments, train = commands_of(bucket, folder / "config.py")
    chunks = lambda: len(list((bucket / "moments").glob(CHUNKS)))
    kill_when(test_buckets.start(*moments), lambda: chunks() >= 3)
    assert 3 <= chunks() < IMAGES / 4
    test_buckets.run(*moments)
    kill_when(test_buckets.start(*train), (bucket / "run" / runs.CHECKPOINTS / "2").objects)
    test_buckets.run(*train)
    for command in commands_of(folder, folder / "config.py"):
        test_buckets.run(*command)
    return homes


def test_moments_and_training_in_a_bucket_match_a_folder(trained):
    folder, bucket = (home / "moments" for home in trained)
    names = sorted(path.name for path in bucket.glob(CHUNKS))
    assert names == sorted(path.name for path in folder.glob(CHUNKS)) and len(names) == IMAGES // 4
    assert all((folder / name).read_bytes() == (bucket / name).read_bytes() for name in names)
    folder, bucket = (home / "run" for home in trained)
    assert restore.steps(bucket / runs.CHECKPOINTS) == [2, 4]
    test_buckets.assert_alike(bucket, folder, {runs.CHECKPOINTS: ("params", "ema_0.9", "optimizer")})


def test_pictures_sampled_in_a_bucket_match_a_folder(trained):
    pictures = []
    for home in trained:
        test_buckets.run(
            "sd_jax.sample",
            f"--workdir={home}/run",
            f"--out={home}/drawn",
            "--steps=2",
            f"--prompts={home}/prompts.txt",
        )
        pictures.append({path.name: path.read_bytes() for path in (home / "drawn").glob("*.png")})
    assert pictures[0] == pictures[1] and len(pictures[0]) == 3
