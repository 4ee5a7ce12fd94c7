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
a cascade, one per stage) and a sheet of the first training pictures, and prints the commands to run
next. It never overwrites a file. Measuring takes at most half of --hours, but no more than ten
minutes and no less than one. If that is too short, the config states which speed it assumes.
"""

from diffusion_jax.start.finetuned import Shipped
from diffusion_jax.start.stages import Candidate, TrainingStage
from diffusion_jax.start.start_command import command
from imagen_jax.train import prepare

_TRAIN = "imagen_jax.train"
SHIPPED = Shipped("models/emoji32", "emoji32")


def candidates() -> list[Candidate]:
    """Return the base models and two-stage cascades to choose from, the smallest first."""
    alone = lambda base: TrainingStage(base, "", _TRAIN, prepare)
    cascade = lambda base, larger: (
        alone(base)._replace(share=0.75),
        TrainingStage(larger, "_sr", _TRAIN, prepare, 0.25),
    )
    return [
        Candidate(32, 0, [alone("base32_8m")]),
        Candidate(32, 4_000_000, [alone("base32_19m")]),
        Candidate(64, 200_000, cascade("base32_8m", "sr64_3m")),
        Candidate(64, 4_000_000, [alone("base64_47m")]),
        Candidate(256, 8_000_000, cascade("base64_47m", "sr256_18m")),
    ]


if __name__ == "__main__":
    command("imagen_jax", candidates, SHIPPED)
