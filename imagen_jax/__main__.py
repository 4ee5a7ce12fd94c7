"""List the commands of this package: python -m imagen_jax."""

from diffusion_jax import commands

if __name__ == "__main__":
    commands.main("imagen_jax")
