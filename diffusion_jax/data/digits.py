"""Write a tiny data set of coloured digits, for trying out a data source.

    python -m diffusion_jax.data.digits --out=examples --num=100
    python -m diffusion_jax.data.digits --out=examples.tar --num=100 --format=webdataset

The first command writes images and captions as files, the second as one tar.
"""

from diffusion_jax import cli
from diffusion_jax.examples.digits import rendering

if __name__ == "__main__":
    with cli.interruptible():
        rendering.main()
