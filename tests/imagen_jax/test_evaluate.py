"""The evaluation command: its table, its pictures and its scores."""

import base64
import csv
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

import imagen_jax
from diffusion_jax.logs import events
from tests.diffusion_jax.event_files import points
from tests.imagen_jax import commands

pytestmark = [pytest.mark.slow, pytest.mark.gate]


@pytest.fixture(scope="module")
def evaluated(trained):
    arguments = (f"--workdir={trained}", "--guidance=1,3", "--num_heldout=1", "--batch_size=64")
    ended = commands.succeed("evaluate", *arguments, devices=8)
    (folder,) = (trained / "evaluation").iterdir()
    with (folder / "sweep.csv").open() as file:
        return folder, list(csv.DictReader(file)), ended.err


def test_evaluate_writes_a_row_and_a_card_per_guidance_scale(evaluated, trained):
    folder, rows, _ = evaluated
    step = imagen_jax.load(trained).stages[0].step
    assert folder.name == f"step_{step:08}"
    assert [float(row["guidance"]) for row in rows] == [1, 3]
    for row in rows:
        ends = [float(row[f"seen_prompt_accuracy{end}"]) for end in ("_low", "", "_high")]
        assert ends == sorted(ends)
        assert (int(row["checkpoint"]), row["ema"]) == (step, "ema")
        low, distance, high = (float(row[f"fd_digits{end}"]) for end in ("_low", "", "_high"))
        assert 0 < low < distance < high
    name = f"scores/step_{step:08}_ema_guidance_3_digits.json"
    scores, card = json.loads((folder / name).read_text()).values()
    assert scores["fd_digits"] == float(rows[1]["fd_digits"])
    assert (card["images_seen"], card["images_heldout"], card["n"]) == (272, 18, 290)
    assert card["judge_accuracy_on_real"] > 0.98
    sampled = {"sampler": "ddim", "steps": "2", "guidance": 3.0, "seed": 0, "image_size": "16x16", "ema": "ema"}
    assert card.items() >= {"extractor": "digits", "checkpoint": step, "precision": "float32", **sampled}.items()
    assert len(card["weights"]) == 64 and len(card["prompts"]) == len(card["model"]) == 16


def test_the_scores_are_in_metrics_jsonl_tensorboard_and_the_log(evaluated):
    folder, rows, err = evaluated
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["guidance"] for line in lines] == [1, 3]
    heldout = [float(row["heldout_prompt_accuracy"]) for row in rows]
    assert [line["evaluation/heldout_prompt_accuracy"] for line in lines] == heldout
    (run,) = (folder / events.FOLDER).glob("step_*_ema")
    curve = points(run, "guidance_x100/heldout_prompt_accuracy")
    assert curve == [(100, np.float32(heldout[0])), (300, np.float32(heldout[1]))]
    sheets_of = points(run, "guidance_x100/pictures")
    assert [step for step, _ in sheets_of] == [100, 300]
    drawn = [np.asarray(Image.open(io.BytesIO(png))) for _, (*_, png) in sheets_of]
    for scale, picture in zip((1, 3), drawn, strict=True):
        np.testing.assert_array_equal(picture, Image.open(folder / f"guidance_{scale}.png"))
    ((_, (*_, png)),) = points(folder / events.FOLDER, "curve")
    curve = Image.open(folder / "curve.png").convert("RGB")
    np.testing.assert_array_equal(Image.open(io.BytesIO(png)), curve)
    assert f"all right, prompts seen {100 * float(rows[1]['seen_prompt_accuracy']):.4g} % (" in err
    assert "290/290 images | " in err


def test_report_html_shows_the_sweep_and_the_training(evaluated, trained):
    text = (trained / "report.html").read_text()
    page = json.loads(re.findall('id="kept">(.*)</script>', text)[0])
    (one,), (run,) = page["/api/sweeps"]["sweeps"], page["/api/training"]["runs"]
    scores = {"guidance", "fd_digits", "seen_prompt_accuracy", "heldout_prompt_accuracy"}
    assert [point["guidance"] for point in one["points"]] == [1, 3]
    assert all(point["scores"].keys() >= scores for point in one["points"])
    assert {"loss", "images_per_second"} <= run["curves"].keys()
    pictures = [point["sheet"] for point in one["points"]]
    folder, _, _ = evaluated
    for picture, name in zip((*pictures, one["real"]), ("guidance_1", "guidance_3", "real"), strict=True):
        kind, _, content = picture.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content) == (folder / f"{name}.png").read_bytes()
