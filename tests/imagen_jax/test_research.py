"""Changing objective, sampler and guidance through the real commands."""

import csv
import json

import pytest

from diffusion_jax.logs import run_log
from tests.imagen_jax import commands

TINY = (
    *commands.config_flags(
        "steps=4 batch_size=8 log_every=1 save_every=2 sample_every=0 optimizer.warmup=0 data.heldout=0.01 "
        "heldout.every=4 heldout.records=8 heldout.levels=2"
    ),
)
SMALL = ("--config.unet.embed_dim=32", "--config.unet.image_size=8", "--config.unet.cond_dim=32")


def run(name, *arguments, code=0):
    ended = commands.run(name, *map(str, arguments), devices=1)
    assert ended.code == code, ended.err
    return ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: flow (rectified flow with a learned weighting), and other (a smaller guide)."""
    root = tmp_path_factory.mktemp("research")
    config = "--config=configs/quickstart.py"
    objective = (
        "--config.diffusion.noise=logit_normal(mean=0.2, shift=2)",
        *commands.config_flags(
            "diffusion.predicts=flow diffusion.weight=uncertainty(channels=16) diffusion.offset_noise=0.1 "
            "sampler.steps=4 sampler.name=dpmpp_2m_sde(strength=0.5)"
        ),
    )
    run("train", config, *TINY, *SMALL, *objective, f"--workdir={root / 'flow'}")
    smaller = (*SMALL, "--config.unet.head_dim=16", "--config.seed=1")
    run("train", config, *TINY, *smaller, f"--workdir={root / 'other'}")
    return root


@pytest.mark.slow
def test_a_flow_model_is_trained_sampled_with_autoguidance_and_swept(runs, tmp_path):
    flow, other = f"--workdir={runs / 'flow'}", runs / "other"
    rows = run_log.read_metrics(runs / "flow" / "metrics.jsonl")
    assert rows[-1]["heldout/raw/v_loss"] > 0 and len(rows) == 5
    prompt = "--prompt=a red seven on gray paper"
    guided = ("--guiding=apg(eta=0.5, norm=5)+rescale(0.7)", f"--guide={other}@2", "--guidance=3")
    run("sample", flow, prompt, *guided, f"--out={tmp_path / 'a'}")
    (line,) = (tmp_path / "a" / "metadata.jsonl").read_text().splitlines()
    (stage,) = json.loads(line)["stages"]
    assert stage["sampler"] == "dpmpp_2m_sde(strength=0.5)" and stage["guide"] == f"{other}@2"
    assert stage["guiding"] == "apg(eta=0.5,norm=5)+rescale(0.7)"
    run("sample", flow, prompt, "--guidance=3", f"--out={tmp_path / 'b'}")
    image = lambda name: (tmp_path / name / "seed_000000.png").read_bytes()
    assert image("a") != image("b")
    run(
        "evaluate",
        flow,
        "--guiding=cfg_pp",
        "--guidance=0.5,1",
        "--num_seen=4",
        "--num_heldout=4",
        "--sampler=euler",
        "--name=pp",
    )
    with (runs / "flow" / "evaluation" / "pp" / "sweep.csv").open() as file:
        assert [row["guidance"] for row in csv.DictReader(file)] == ["0.5", "1.0"]
    ended = run("sample", flow, prompt, "--guiding=apgg", f"--out={tmp_path}", code=2)
    assert "--guiding is 'apgg': did you mean 'apg'?" in ended.err
