"""Complete workflows of NeMo's users with the real commands: from T5 embeddings to a curve.

The published configs are reduced by flags. A tiny T5's embeddings, in NeMo's pickles, are stored
in separate tars.
"""

import csv
import pickle
import re
import tarfile

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from configs import base64_500m
from diffusion_jax import runs
from diffusion_jax.data import tars as tar_files
from diffusion_jax.devices import sharding
from diffusion_jax.evaluate import evaluate_command, scorers
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.logs import run_log
from diffusion_jax.text import embed, t5
from diffusion_jax.train.train_command import open_evaluation
from imagen_jax import cascade, train
from imagen_jax.settings import read_settings
from imagen_jax.weights import nemo
from tests.diffusion_jax.metrics import standin
from tests.diffusion_jax.text import tiny_weights
from tests.imagen_jax import commands
from tests.imagen_jax.cases import ONE_LEVEL, random_weights

PROMPT = "a red seven on gray paper"
TEXT = {"width": 64, "max_tokens": 16, "read_tokens": 32, "dtype": "float32"}
BOTH = (
    *(f"--config.text.{name}={value}" for name, value in TEXT.items()),
    *commands.config_flags(
        "batch_size=8 steps=3 log_every=1 sample_every=3 optimizer.warmup=0 optimizer.lr=0.01 "
        "optimizer.ema_decays=(0.1,) sampler.steps=2 data.min_size=0 unet.dtype=float32 unet.embed_dim=32 "
        "unet.head_dim=32"
    ),
)
BASE = (
    "--config=configs/base64_500m.py",
    *BOTH,
    *commands.config_flags(
        "unet.image_size=16 unet.channel_mult=(1,) unet.num_res_blocks=1 unet.attention_resolutions=(16,) "
        "unet.cond_dim=32"
    ),
)
SR = (
    "--config=configs/sr256_600m.py",
    *BOTH,
    *commands.config_flags(
        "unet.image_size=64 unet.channel_mult=(1,1) unet.num_res_blocks=(1,1) unet.attention_levels=(1,)"
    ),
)


def run(name, *arguments):
    return commands.succeed(name, *arguments, before=commands.skip_rehearsal).err


def refused(name, *arguments):
    ended = commands.run(name, *map(str, arguments), devices=1)
    assert (ended.code, "Traceback" in ended.err) == (2, False), ended.err
    return ended.err[ended.err.index("error: ") :]


def pixels(folder):
    return [np.asarray(Image.open(path), int) for path in sorted(folder.glob("seed_*.png"))]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder: t5/ (a T5), images/ (tars with captions), joined/ (their table with embeddings)."""
    root = tmp_path_factory.mktemp("journey")
    weights = tiny_weights.t5_folder(root / "t5", width=64)
    (root / "images").mkdir()
    tar = digits.write_examples(root / "images" / "00000.tar", 32, size=64, format="webdataset")
    with tarfile.open(tar) as opened:
        texts = {
            member.name[:-4]: opened.extractfile(member).read().decode()
            for member in opened.getmembers()
            if member.name.endswith(".txt")
        }
    rows, mask = embed(t5.encoder(weights, **TEXT), list(texts.values()))
    arrays = [np.asarray(row)[np.asarray(own)] for row, own in zip(rows, mask, strict=True)]
    pickled = lambda array: pickle.dumps({"embeddings_t5_xxl": {"encodings": array}})
    records = [
        {tar_files.KEY: f"00000.tar/{key}".encode(), "pickle": pickled(array)}
        for key, array in zip(texts, arrays, strict=True)
    ]
    (root / "precached").mkdir()
    tar_files.write(root / "precached" / "t0_r0_0.tar", records)
    (root / "prompts.txt").write_text("\n".join(sorted(set(texts.values()))[:4]) + "\n")
    joined = ("--column=t5", f"--from={root / 'precached'}", f"--out={root / 'joined'}")
    run("diffusion_jax.data", "attach", root / "images", *joined)
    return root


@pytest.fixture(scope="module")
def base(root):
    """A run of base64_500m on stored embeddings, without a text encoder."""
    run("train", *BASE, *data_of(root), f"--workdir={root / 'base'}")
    return root / "base"


@pytest.fixture(scope="module")
def enlarger(root):
    run("train", *SR, *data_of(root), f"--workdir={root / 'sr'}")
    return root / "sr"


def data_of(root):
    """Return the flags of the pictures and embeddings in joined/."""
    return f"--config.data.path={root / 'joined'}", "--config.data.text=t5.npy"


def losses(workdir):
    return np.array([line["loss"] for line in run_log.read_metrics(workdir / run_log.METRICS)])


def test_drawing_and_evaluating_without_the_text_encoder_is_an_error(tmp_path):
    """The error occurs before any checkpoint is read."""
    runs.claim(tmp_path, base64_500m.get_config().to_dict())
    message = r"of training were made by 't5', and new texts need the same encoder.*--text_weights=FOLDER"
    with pytest.raises(ValueError, match=message):
        cascade.load(tmp_path)
    with pytest.raises(ValueError, match=message):
        evaluate_command.open_subject(cascade.KIND, [str(tmp_path)])


def test_scores_during_training_require_the_text_encoder(tmp_path, monkeypatch):
    digits.write_examples(tmp_path, 2, size=16)
    for path in tmp_path.glob("*.txt"):
        np.save(path.with_suffix(".npy"), np.ones((3, 64), np.float32))
    c = base64_500m.get_config()
    c.text.update(TEXT)
    c.data.update(source="folder", path=str(tmp_path))
    c.evaluation.every, c.batch_size = 8, 8
    scorer = scorers.Scorer(["a prompt"], {})  # Without judges, which take seconds to load.
    monkeypatch.setattr(scorers, "open_scorer", lambda *_: scorer)
    s = read_settings(c.to_dict())
    inputs = train.prepare(s, sharding.make_mesh())
    inputs.batches.close()
    with pytest.raises(ValueError, match=r"--config\.text\.weights=FOLDER \(training\)"):
        open_evaluation(s.evaluation, s.data, s.output_size, inputs.open_prompts)


@pytest.mark.gate
@pytest.mark.slow
def test_a_cascade_trained_on_embeddings_is_sampled_and_evaluated(root, base, enlarger):
    both = f"--workdir={base}", f"--workdir={enlarger}", f"--text_weights={root / 't5'}"
    run("sample", *both, f"--prompt={PROMPT}", "--num_images=2", f"--out={root / 'prompted'}")
    encoder = t5.encoder(root / "t5", **TEXT)
    rows, mask = embed(encoder, [PROMPT])
    np.save(root / "seven.npy", np.asarray(rows)[0][np.asarray(mask)[0]])
    run("sample", *both[:2], f"--embeddings={root / 'seven.npy'}", "--num_images=2", f"--out={root / 'embedded'}")
    for one, other in zip(pixels(root / "prompted"), pixels(root / "embedded"), strict=True):
        assert one.shape == (64, 64, 3) and abs(one - other).max() <= 1
    clip = tiny_weights.clip_folder(root / "clip", "open_clip")
    reference, inception = judges(root)
    prompts = ("--guidance=1,3", f"--prompts={root / 'prompts.txt'}", "--num_prompts=4")
    run("evaluate", *both, *prompts, f"--clip={clip}", f"--reference={reference}", f"--inception={inception}")
    (folder,) = (base / runs.EVALUATION).iterdir()
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["guidance"]) for row in rows] == [1, 3]
    for row in rows:
        assert float(row["fd_inception"]) > 0 and -1 < float(row["clip_score"]) < 1
    curve = np.asarray(Image.open(folder / "curve.png").convert("L"))
    assert min(curve.shape) > 300 and curve.std() > 5


@pytest.mark.gate
@pytest.mark.slow
def test_a_nemo_checkpoint_is_converted_sampled_and_fine_tuned(root):
    c = base64_500m.get_config()
    c.unet.update(ONE_LEVEL, image_size=16, attention_resolutions=(16,), dtype="float32")
    c.text.update(TEXT)
    s = read_settings(c.to_dict())
    state = {nemo.PREFIX + n: a for n, a in random_weights(s.unet, s.text.width).items()}
    np.savez(root / "nemo.npz", **state)
    workdir = root / "converted"
    own = (*BASE, *data_of(root))
    err = run("imagen_jax.weights", "convert", f"--from={root / 'nemo.npz'}", *own, f"--to={workdir}")
    assert re.search(r"parameters \(raw, 0\.1\) and verified them bit by bit", err)
    out = f"--out={root / 'none'}"
    for name, more in (("sample", [f"--prompt={PROMPT}", out]), ("evaluate", [])):
        assert "--text_weights=FOLDER" in refused(name, f"--workdir={workdir}", *more)
    weights_flag = f"--text_weights={root / 't5'}"
    run("sample", f"--workdir={workdir}", weights_flag, f"--prompt={PROMPT}", f"--out={root / 'p_nemo'}")
    assert np.std(pixels(root / "p_nemo")) > 1
    run("train", *own, f"--workdir={workdir}")
    assert np.isfinite(losses(workdir)).all()


def judges(root):
    """Write statistics of real pictures, and stand-in weights for Inception."""
    safetensors.numpy.save_file(standin.state(), root / "inception.safetensors")
    digits.write_examples(root / "real", 8, size=64)
    flags = (f"--images={root / 'real'}", f"--out={root / 'real.npz'}", f"--weights={root / 'inception.safetensors'}")
    run("diffusion_jax.metrics", "stats", *flags)
    return root / "real.npz", root / "inception.safetensors"
