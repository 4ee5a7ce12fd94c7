"""List the commands of this package: python -m sd_jax."""

from diffusion_jax import commands

if __name__ == "__main__":
    commands.main("sd_jax")
