"""Write a config that trains on your own pictures, on this machine, in a given time.

    python -m imagen_jax.start --data=PHOTOS [--hours=2] [--out=configs/mine.py]

PHOTOS is a folder of pictures, with captions beside them (.txt, .json), in a table (.jsonl,
.parquet), or without captions. It may also be a folder of tars, a parquet file that holds pictures,
a Hugging Face data set on disk, or SOURCE:PATH::TEXT, the values of data.source, data.path and
data.text in a config.

The command reads a random sample of the pictures. In three cases it asks in the terminal what to
do, unless a flag gives the answer: if there are fewer than 1,000 pictures and they have captions
(--finetune), if at least a twentieth of the pictures are far from square (--tall), or if reading
the pictures is slow and they are larger than necessary (--shrink). Without a terminal, it takes the
default answers.

It then measures a few training steps of suitable models on this machine, writes a short config (for
a cascade, one per stage) and a sheet of random training pictures, and prints the commands to run
next. It never overwrites a file. The limit for measuring is half of --hours, but at least one and
at most ten minutes. If that is too short, the config states which speed it assumes.
"""

from collections.abc import Mapping
from typing import Any

import jax

from diffusion_jax import runs
from diffusion_jax.start.changes import Changes, full_config
from diffusion_jax.start.stages import Candidate, TrainingStage
from diffusion_jax.start.start_command import command

TRAINED = "models/emoji32"
"""The workdir of the model that can be fine-tuned."""
_GROUPS = ("unet", "text", "diffusion", "sampler")  # Config groups that must match the weights.
# The settings of docs/finetuning.md, which trains on ten pictures in batches of 20: a LoRA for 150
# steps (300 epochs), and all weights for 100 steps (200 epochs).
_BATCH_SIZE, _LORA_EPOCHS, _FULL_EPOCHS = 20, 300.0, 200.0
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"lora": {"rank": 8, "targets": "_attn/|text_embed/|text_to_cond"}, "optimizer.lr": 2e-3},
    "full": {"optimizer.lr": 3e-4},
}


def candidates() -> list[Candidate]:
    """Return the base models and two-stage cascades to choose from, the smallest first."""
    small, large = TrainingStage("base32_8m", 1.7), TrainingStage("base64_47m", 39.0)
    cascade = lambda base, *larger: (base._replace(share=0.75), TrainingStage(*larger, suffix="_sr", share=0.25))
    return [
        Candidate(32, 0, [small]),
        Candidate(32, 4_000_000, [TrainingStage("base32_19m", 3.8)]),
        Candidate(64, 200_000, cascade(small, "sr64_3m", 1.5)),
        Candidate(64, 4_000_000, [large]),
        Candidate(256, 8_000_000, cascade(large, "sr256_18m", 59.0)),
    ]


def fine_tuned(method: str) -> Candidate:
    """Return the candidate that fine-tunes TRAINED: "lora" adds a LoRA, "full" trains all weights.

    Its config is base32_8m, with the values of the model's own config.json for the network.
    """
    own, base = runs.load(TRAINED), full_config("base32_8m", {})
    values = {
        f"{group}.{field}": value
        for group in _GROUPS
        for field, value in own[group].items()
        if field not in ("weights", "dtype") and _plain(value) != _plain(base[group].get(field))
    }
    devices = jax.device_count()
    values |= {"batch_size": -(-_BATCH_SIZE // devices) * devices}
    values |= {"optimizer.warmup": 10, "optimizer.schedule": "cosine"}
    values |= {"unet.weights": TRAINED, "text.max_tokens": own["text"]["max_tokens"]}
    values |= _SETTINGS[method]
    changes: Changes = {name: (_plain(value), "") for name, value in values.items()}
    epochs = _LORA_EPOCHS if method == "lora" else _FULL_EPOCHS
    stage = TrainingStage("base32_8m", 1.7, changes=lambda workdir: changes, max_epochs=epochs)
    return Candidate(own["unet"]["image_size"], 0, [stage])


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    command("imagen_jax", candidates, TRAINED, fine_tuned)
