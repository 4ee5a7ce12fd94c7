"""PNG files hold the text that the web UI of AUTOMATIC1111 reads in its tab PNG Info."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.draw import png_text
from diffusion_jax.files import sheets

PROMPT = {"text": "a red fox, (green:1.2)", "negative_prompt": "blurred", "seed": 3, "file_name": "seed_000003.png"}
WEIGHTS = {"model": "weights/sd-v1.5/", "checkpoint": 0, "ema": "ema", "lora": ["a/b/style.pt:0.7", "c.pt"]}
SAMPLER = {"sampler": "dpmpp_2m", "steps": 25, "grid": "karras", "guidance": 7.5, "height": 8, "width": 4, "eta": 0.0}
SD = PROMPT | WEIGHTS | SAMPLER | {"strength": 0.5, "steps_taken": 12}
SD_TEXT = """a red fox, (green:1.2)
Negative prompt: blurred
Steps: 25, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 3, Size: 4x8, Model: sd-v1.5, \
Denoising strength: 0.5, checkpoint: 0, ema: ema, lora: "style.pt:0.7, c.pt", eta: 0.0, steps_taken: 12"""

STAGE = {"workdir": "runs/a", "checkpoint": 9, "size": 8, "sampler": "heun", "steps": 4}
STAGES = [STAGE, {**STAGE, "workdir": "/x/b", "sampler": "dpmpp_2s"}]
CASCADE = {"text": "two\nlines \u72d0", "seed": 2**64 - 1, "guidance": 2.0, "strength": [0.5, 1.0], "stages": STAGES}
SECOND = json.dumps(json.dumps({**STAGES[1], "workdir": "b"}))
CASCADE_TEXT = f"""two\nlines \u72d0
Steps: 4, Sampler: Heun, CFG scale: 2.0, Seed: 18446744073709551615, Size: 4x8, Model: a, \
Denoising strength: 0.5, checkpoint: 9, Stage 2: {SECOND}"""


@pytest.mark.parametrize(
    ("line", "text"), [(SD, SD_TEXT), (CASCADE, CASCADE_TEXT), ({"text": "", "seed": 0}, "Seed: 0, Size: 4x8")]
)
def test_the_text_of_a_png_has_the_form_of_the_web_ui(line, text):
    assert png_text.parameters(line, 8, 4) == text
    image = Image.open(io.BytesIO(sheets.png(np.zeros((8, 4, 3), np.uint8), text)))
    assert image.info == {"parameters": text}
