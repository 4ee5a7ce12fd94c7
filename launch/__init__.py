import diffusion_jax  # noqa: F401  # Makes Ctrl-C end a command during its imports.
