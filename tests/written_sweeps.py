"""Write evaluated runs without a model."""

import json

import numpy as np

from diffusion_jax.evaluate import sweep
from diffusion_jax.files import sheets
from diffusion_jax.metrics.cards import Scored

POINTS = ((4.0, 15.5, 0.31), (1.0, 20.0, 0.25), (2.0, 12.0, 0.29))
"""Guidance, FID, CLIP score."""


def write_run(path, checkpoints=(2,)):
    """Write a run of two steps with a sweep of three points, and with drawn and real pictures."""
    lines = [{"step": s, "loss": 1.0 / s, "images_per_second": 100.0} for s in (1, 2)]
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = path / "evaluation" / "step_00000002"
    folder.mkdir(parents=True)
    rows = [
        {
            "guidance": g,
            "checkpoint": step,
            "ema": "ema",
            "fid": fid,
            "fid_low": fid - 1,
            "fid_high": fid + 1,
            "clip_score": clip,
        }
        for step in checkpoints
        for g, fid, clip in POINTS
    ]
    sweep.write_table(folder / sweep.TABLE, rows)
    for row in rows:
        card = {"extractor": "a <stand-in>", "n": 30, "guidance": row["guidance"]}
        point = f"{sweep.point_name(row)}_guidance_{row['guidance']:g}_fid"
        sweep.write_scored(folder / sweep.SCORED, point, {"fid": Scored({"fid": row["fid"]}, card)})
    of_colour = lambda *colour: np.zeros((64, 64, 3), np.uint8) + np.array(colour, np.uint8)
    sheets.write_png(folder / sweep.sheet_name({"guidance": 2.0}), of_colour(0, 200, 0))
    sheets.write_png(folder / sweep.REAL, of_colour(200, 0, 200))
    return path


def write_digits(path, **card):
    """Write a run whose evaluation, at two guidance values, looks like the quick start's."""
    folder = path / "evaluation" / "step_2"
    folder.mkdir(parents=True)
    row = {"checkpoint": "2", "ema": "ema", "features_share_of_time": "0.02"}
    scores = {"fd_digits": "2", "seen_prompt_accuracy": "0.9", "heldout_prompt_accuracy": "0.8"}
    rows = [{"guidance": guidance, **row, **scores} for guidance in ("1", "3")]
    sweep.write_table(folder / sweep.TABLE, rows)
    scored = Scored({}, {"extractor": "digits", "n": 40, **card})
    sweep.write_scored(folder / sweep.SCORED, "step_00000002_ema_guidance_1", {"digits": scored})
    return path
