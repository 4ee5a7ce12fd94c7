"""PNG files hold the text that the web UI of AUTOMATIC1111 reads in its tab PNG Info."""

import io

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.draw import png_text
from diffusion_jax.files import sheets

SD = {
    "file_name": "seed_000003.png",
    "text": "a red fox, (green:1.2)",
    "seed": 3,
    "model": "weights/sd-v1.5/",
    "checkpoint": 0,
    "ema": "ema",
    "height": 8,
    "width": 4,
    "sampler": "dpmpp_2m",
    "steps": 25,
    "eta": 0.0,
    "grid": "karras",
    "guidance": 7.5,
    "negative_prompt": "blurred",
    "strength": 0.5,
    "steps_taken": 12,
    "lora": ["a/b/style.pt:0.7", "c.pt"],
}
STAGE = {"workdir": "runs/a", "checkpoint": 9, "size": 8, "sampler": "heun", "steps": 4}
CASES = [
    (
        SD,
        "a red fox, (green:1.2)\nNegative prompt: blurred\n"
        "Steps: 25, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 3, Size: 4x8, "
        "Model: sd-v1.5, Denoising strength: 0.5, checkpoint: 0, ema: ema, eta: 0.0, "
        'steps_taken: 12, lora: "style.pt:0.7, c.pt"',
    ),
    (
        {
            "text": "two\nlines \u72d0",
            "seed": 2**64 - 1,
            "guidance": 2.0,
            "strength": [0.5, 1.0],
            "stages": [STAGE, {**STAGE, "workdir": "/x/b", "sampler": "dpmpp_2s"}],
        },
        "two\nlines \u72d0\nSteps: 4, Sampler: Heun, CFG scale: 2.0, Seed: 18446744073709551615, "
        "Size: 4x8, Model: a, Denoising strength: 0.5, checkpoint: 9, Stage 2: "
        r'"{\"workdir\": \"b\", \"checkpoint\": 9, \"size\": 8, \"sampler\": \"dpmpp_2s\", '
        r'\"steps\": 4}"',
    ),
    ({"text": "", "seed": 0}, "Seed: 0, Size: 4x8"),
]


@pytest.mark.parametrize(("line", "text"), CASES)
def test_the_text_of_a_png_has_the_form_of_the_web_ui(line, text):
    assert png_text.parameters(line, 8, 4) == text
    image = Image.open(io.BytesIO(sheets.png(np.zeros((8, 4, 3), np.uint8), text)))
    assert image.info == {"parameters": text}
