"""From your own pictures to a config that trains on them here, in the time that there is.

    python -m imagen_jax.start --data=PHOTOS [--hours=2] [--out=configs/mine.py]

PHOTOS is a folder of pictures with their captions beside them (.txt, .json) or in a table (.jsonl,
.parquet), or without any; tars; a parquet file with pictures in it; a folder of Hugging Face's; or
SOURCE:PATH::TEXT, as a config's data group has them. It looks at the set and at the machine, takes
a few steps of the models that it chooses among, writes a short config (of a cascade one for each
stage) and a sheet of what training will see, and says the commands that follow. Nothing that is
there is written over.
"""

from diffusion_jax.start.command import command
from diffusion_jax.start.stages import Rung, Stage
from imagen_jax.train import prepare

_TRAIN = "imagen_jax.train"


def rungs() -> list[Rung]:
    """A base model by itself or with one that enlarges, from the smallest on."""
    alone = lambda base: Stage(base, "", _TRAIN, prepare)
    cascade = lambda base, larger: (
        alone(base)._replace(share=0.75),
        Stage(larger, "_sr", _TRAIN, prepare, 0.25),
    )
    return [
        Rung(32, 0, [alone("base32_8m")]),
        Rung(32, 4_000_000, [alone("base32_19m")]),
        Rung(64, 200_000, cascade("base32_8m", "sr64_3m")),
        Rung(64, 4_000_000, [alone("base64_47m")]),
        Rung(256, 8_000_000, cascade("base64_47m", "sr256_18m")),
    ]


if __name__ == "__main__":
    command("imagen_jax", rungs)
