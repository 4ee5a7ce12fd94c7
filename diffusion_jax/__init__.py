"""What Imagen and Stable Diffusion share: diffusion, training, drawing, data, text and metrics."""

__version__ = "0.2.0"
