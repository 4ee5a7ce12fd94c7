"""Training on moments written by precache: resuming, meshes, replaying, and errors."""

import io
import json

import jax
import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.config.settings import Data
from diffusion_jax.data import tars
from diffusion_jax.data.engines import Worker
from diffusion_jax.data.sources import moments, open_pictures
from diffusion_jax.data.table import Table
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files import sheets
from diffusion_jax.precache import moments as encode_moments
from diffusion_jax.precache.moments import MomentOptions
from diffusion_jax.task import to_range
from diffusion_jax.train import loop, replay
from sd_jax import drawing, precache, sampling, train
from sd_jax.weights import opened
from tests.sd_jax import tiny

pytestmark = [pytest.mark.slow, pytest.mark.gate]

NUM, SHARD = 10, 4


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return tiny.write_vae(tmp_path_factory.mktemp("vae") / "vae.safetensors")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write ten digits with captions, and one file that is not an image."""
    path = tmp_path_factory.mktemp("images")
    digits.write_examples(path, NUM, size=tiny.SIZE)
    (path / "00003x.png").write_bytes(b"no image")
    (path / "00003x.txt").write_text("lost")
    return path


def source(images):
    return {"data__source": "folder", "data__path": str(images)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory, vae, images):
    """Return their moments in three files, for which the weights were read once."""
    out, read = tmp_path_factory.mktemp("moments"), []
    with pytest.MonkeyPatch.context() as patched:
        noting = lambda *args: read.append(args) or opened.read_vae(*args)
        patched.setattr(precache, "read_vae", noting)
        assert precache.encode(tiny.settings(vae, **source(images)), out, MomentOptions(SHARD, 1)) == NUM
    assert len(read) == 1
    return out


def records(path):
    """Return {name: (moments, caption)} of all pictures that have moments."""
    found = Table(path, str(path)).read(range(NUM))
    return {record.name: (np.load(io.BytesIO(record.image)), record.text) for record in found}


def test_moments_of_each_picture_equal_the_encoders_output(stored, vae, images):
    s, params = tiny.settings(vae), tiny.vae_params()
    opened = open_pictures(Data("folder", path=str(images)), tiny.SIZE)
    rows, read, captions = opened.usable(np.arange(len(opened)))
    assert len(rows) == NUM and len(opened) == NUM + 1
    program = jax.jit(lambda p, x: s.vae.apply(p, x, method="encode"))
    expected = np.asarray(program(params, to_range(read)))
    moments_of_key = records(stored)
    assert list(moments_of_key) == opened.names(rows)
    for (array, text), mean, caption in zip(moments_of_key.values(), expected, captions, strict=True):
        assert array.dtype == np.float32 and text == caption
        # Batches of another size have another order of sums.
        np.testing.assert_allclose(array.transpose(1, 2, 0), mean, atol=1e-5)


def test_an_interrupted_precache_continues_with_equal_files(tmp_path, stored, vae, images, capsys):
    s = tiny.settings(vae, **source(images))
    opened = open_pictures(Data("folder", path=str(images)), tiny.SIZE)
    encode, calls = precache.MomentEncoder(s), []

    def killed(batch):
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(batch)

    work = MomentOptions(SHARD, 8, Worker(1, 2))  # Starts in the middle.
    with pytest.raises(KeyboardInterrupt):
        encode_moments.run(opened, killed, tmp_path, encode.identity, work)
    chunks = lambda path: {file.name: file.read_bytes() for file in path.glob("*[0-9a-f].safetensors")}
    whole, done = chunks(stored), chunks(tmp_path)
    assert len(done) == 1 and len(whole) == 3 and done.items() <= whole.items()
    assert precache.encode(s, tmp_path / "new", MomentOptions(SHARD, 1, dry_run=True)) == 0
    assert "would encode at most 11 images into" in capsys.readouterr().out and not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"is unfinished: continue with"):
        moments.find_identity(tmp_path)
    assert precache.encode(s, tmp_path, MomentOptions(SHARD, 1)) == NUM
    assert chunks(tmp_path) == whole
    damaged = tmp_path / min(done)
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    assert precache.encode(s, tmp_path, MomentOptions(SHARD, 1, verify=True)) == NUM
    assert chunks(tmp_path) == whole


def on_moments(stored, vae, **changes):
    return tiny.config(vae, data__source="moments", data__path=str(stored), **changes)


def run(workdir, config, sizes=(1, 1, 1)):
    """Trains on a mesh, and returns the last state and each step's loss and gradient norm."""
    workdir.mkdir(exist_ok=True)
    s = tiny.read_settings(config.to_dict())
    mesh = sharding.make_mesh(*sizes)
    runs.claim(workdir, config.to_dict())
    inputs = train.prepare(s, mesh)
    with inputs.batches:
        state = loop.train(inputs, s.run, s.optimizer, mesh, workdir, {})
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return jax.device_get(state), [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, stored, vae):
    """Return (workdir, state, losses) of four steps on one device."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, *run(workdir, on_moments(stored, vae, steps=4))


def test_four_steps_equal_two_and_two_more_after_resuming_bit_for_bit(tmp_path, whole, stored, vae):
    run(tmp_path, on_moments(stored, vae, steps=2))
    state, losses = run(tmp_path, on_moments(stored, vae, steps=4))
    jax.tree.map(np.testing.assert_array_equal, state, whole[1])
    assert losses == whole[2] and len(set(losses)) == 4


@pytest.mark.parametrize("lora", [False, True])
def test_replaying_a_step_on_moments_repeats_it_and_decodes_its_pictures(whole, stored, vae, tmp_path, lora):
    workdir, _, logged = whole
    if lora:
        changes = {"unet__weights": str(workdir), "lora": {"rank": 2, "targets": "_res"}}
        workdir, logged = tmp_path, run(tmp_path, on_moments(stored, vae, steps=4, **changes))[1]
    s, mesh = tiny.read_settings(runs.load(workdir)), sharding.make_mesh(1, 1, 1)
    inputs = train.prepare(s, mesh)
    with inputs.batches:
        result = replay.replay(inputs, s.run, s.optimizer, mesh, workdir, 4)
    assert result.checkpoint == 2 and [line.differ for line in result.compared] == [{}, {}]
    assert (result.metrics["loss"], result.metrics["grad_norm"]) == logged[3]
    by_text = {text: array.transpose(1, 2, 0) for array, text in records(stored).values()}
    means = np.stack([by_text[example["text"]] for example in result.examples])[..., :4]
    decoded = jax.jit(lambda p, z: s.vae.apply(p, z, method="decode"))(tiny.vae_params(), means)
    # Two programs may round a pixel differently, by 1 of 255.
    expected = np.int32(sheets.to_uint8(jax.device_get(decoded)))
    assert np.abs(expected - result.pictures).max() <= 1


def test_losses_on_eight_devices_match_one_device(tmp_path, whole, stored, vae):
    _, losses = run(tmp_path, on_moments(stored, vae, steps=2), (2, 4, 1))
    # Sums have another order, and Adam's first steps divide small gradients by themselves.
    np.testing.assert_allclose(losses, whole[2][:2], rtol=2e-4)


def test_unet_weights_start_a_run_from_the_average_of_another_run(whole, stored, vae):
    s = tiny.read_settings(on_moments(stored, vae, unet__weights=str(whole[0])).to_dict())
    inputs = train.prepare(s, sharding.make_mesh(1, 1, 1))
    inputs.batches.close()
    assert inputs.start is not None
    jax.tree.map(np.testing.assert_array_equal, inputs.start(), whole[1].ema["0.9999"])


def test_a_trained_model_is_sampled_with_the_chosen_settings(whole, vae):
    values = {"sampler": "euler", "steps": 1, "height": 16, "negative_prompt": "ugly"}
    (model,) = drawing.load(whole[0], **values).stages
    assert (model.step, model.settings.output_shape) == (4, (16, 8))
    batch = sampling.prompts(model.encoder, ["a red seven"] * 2, "ugly")
    drawn = model.draw(model.params, batch, [3, 4], np.float32([2, 2]))
    assert drawn.shape == (2, 16, 8, 3)
    alone = model.draw(model.params, {k: v[:1] for k, v in batch.items()}, [4], np.float32([2]))
    np.testing.assert_allclose(alone[0], drawn[1], atol=1e-5)


def rewritten(path, change):
    """Write a tar of one record, with moments changed by the function `change`."""
    array = change(np.zeros((8, 4, 4), np.float32))
    file = io.BytesIO()
    np.save(file, array)
    record = {tars.KEY: b"a", "npy": file.getvalue(), "txt": b"a red seven"}
    tars.write(path / "a.tar", [record])
    return path


def test_mlperfs_moments_are_read_and_other_shapes_are_errors(tmp_path, vae):
    path = rewritten(tmp_path, lambda m: m[None] + np.arange(8).reshape(8, 1, 1))
    opened = open_pictures(Data("moments", path=str(path)), 8, moments=(4, 4, 8))
    images, texts = opened.read(np.arange(1))
    assert texts == ("a red seven",) and images.dtype == np.float32
    np.testing.assert_array_equal(images, np.broadcast_to(np.arange(8), (1, 4, 4, 8)))
    rewritten(tmp_path, lambda m: m[:, :, :3])
    s = tiny.read_settings(on_moments(path, vae).to_dict())
    with pytest.raises(ValueError, match=r"shape \[8, 4, 3\], but the config expects \[8, 4, 4\]"):
        train.prepare(s, sharding.make_mesh(1, 1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents__scale": 1.0}, r"other settings \(scale: 0\.5 stored, 1\.0 requested\)"),
        ({"latents__pixels": "unit"}, r"other settings \(pixels: 'symmetric' stored, 'unit' requested\)"),
        ({"latents__image_size": 16}, r"other settings \(image_size: 8 stored, 16 requested\)"),
    ],
)
def test_moments_stored_with_other_settings_are_errors(stored, vae, changes, message):
    s = tiny.read_settings(on_moments(stored, vae, **changes).to_dict())
    with pytest.raises(ValueError, match=message):
        train.prepare(s, sharding.make_mesh(1, 1, 1))


def test_moments_of_another_vae_are_errors(stored, vae, monkeypatch):
    other = jax.tree.map(lambda leaf: leaf * 1.01, opened.read_vae(vae, tiny.settings(vae).vae))
    monkeypatch.setattr(train, "read_vae", lambda path, network: other)
    s = tiny.read_settings(on_moments(stored, vae).to_dict())
    with pytest.raises(ValueError, match=r"made with other settings \(vae: '\w+' stored, '\w+' req"):
        train.prepare(s, sharding.make_mesh(1, 1, 1))


def test_weights_of_another_network_are_errors_that_name_the_difference(vae):
    deeper = tiny.settings(vae, vae__num_res_blocks=2).vae
    with pytest.raises(ValueError, match="num_res_blocks is 1 in the file, but 2 in the con"):
        opened.read_vae(vae, deeper)
    with pytest.raises(ValueError, match="holds no UNet"):
        opened.read_unet(vae, tiny.settings(vae).unet, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "moments", "data__path": "x"}, "data.source is 'moments', but moments"),
        ({"data__flip": True}, "data.flip is True and data.crop is .center., but moments"),
    ],
)
def test_precache_settings_that_cannot_be_encoded_are_errors(tmp_path, vae, changes, message):
    s = tiny.settings(vae)
    fields = {name.removeprefix("data__"): value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        precache.encode(s._replace(data=s.data._replace(**fields)), tmp_path, MomentOptions(SHARD, 1))
