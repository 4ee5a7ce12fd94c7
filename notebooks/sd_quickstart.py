# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Stable Diffusion's quick start
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/YOUR-NAME/imagen-sd-jax/blob/main/notebooks/sd_quickstart.ipynb)
#
# Trains a small autoencoder on handwritten digits in named colours, then a latent diffusion model
# on what it encodes, and draws from it. Some minutes on a GPU or on two CPU cores.
#
# The first cell installs one exact set of packages, from a copy of `REPOSITORY` (where the project
# is installed already it does not), and draws with a trained model that comes with the project.

# %%
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile

from IPython.display import Image, display

REPOSITORY = "https://github.com/YOUR-NAME/imagen-sd-jax"

if os.path.isdir("../imagen_jax"):  # Opened from the project's own folder.
    os.chdir("..")
if importlib.util.find_spec("imagen_jax") is None:
    if not os.path.isdir("imagen-sd-jax"):
        subprocess.run(["git", "clone", "--depth=1", REPOSITORY, "imagen-sd-jax"], check=True)
    os.chdir("imagen-sd-jax")
    packages = ["-r", "requirements.txt", "-c", "constraints.txt"]
    packages += ["jax[cuda13]"] if shutil.which("nvidia-smi") else []
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)

# Any run, trained here or exported; in a process of its own, so that the device is free afterwards.
SHIPPED = os.environ.get("SHIPPED", "models/emoji32")
if os.path.isdir(SHIPPED):
    with open(f"{SHIPPED}/config.json") as file:
        config = json.load(file)
    program, out = f"{config['system'].partition('.')[0]}.sample", tempfile.mkdtemp()
    command = [sys.executable, "-m", program, f"--workdir={SHIPPED}", f"--out={out}"]
    command += [f"--prompt={prompt}" for prompt in config["prompts"]]
    subprocess.run(command, check=True)
    display(Image(f"{out}/sheet.png"))

# %% [markdown]
# ## Train the autoencoder
# Pictures of 16x16 become latents of 4x4, among which the diffusion model works.

# %%
WORKDIR = os.environ.get("WORKDIR", "runs/sd_quickstart")
VAE_WORKDIR = f"{WORKDIR}_vae"
VAE_CONFIG = os.environ.get("VAE_CONFIG", "--config=configs/sd_quickstart_vae.py")

# !{sys.executable} -m sd_jax.train_vae {VAE_CONFIG} --workdir={VAE_WORKDIR}

# %% [markdown]
# ## Train the diffusion model
# The same command in a terminal does the same. Any value of `configs/sd_quickstart.py` can be
# changed by a flag; killed at any moment, the command goes on where it was.

# %%
CONFIG = os.environ.get("CONFIG", "--config=configs/sd_quickstart.py")

# !{sys.executable} -m sd_jax.train {CONFIG} --config.vae.weights={VAE_WORKDIR} --workdir={WORKDIR}

# %%
from matplotlib import pyplot as plt

with open(f"{WORKDIR}/metrics.jsonl") as file:
    lines = [json.loads(line) for line in file]
plt.plot([line["step"] for line in lines], [line["loss"] for line in lines])
plt.xlabel("step")
plt.ylabel("loss")
plt.show()

# %% [markdown]
# TensorBoard shows all that was written: losses, also by noise level, pictures over time, the
# config.

# %%
os.environ.setdefault("TENSORBOARD_BINARY", f"{os.path.dirname(sys.executable)}/tensorboard")
# %load_ext tensorboard
# %tensorboard --logdir {WORKDIR}

# %% [markdown]
# ## Draw
# An image depends on its prompt and its seed alone. Change either and run the cell again. From here
# on this notebook holds the device, so that commands as above would find no memory on a GPU.

# %%
import sd_jax

model = sd_jax.load(WORKDIR)
prompts = ["a red seven on gray paper", "a white two on cyan paper", "a blue three on black paper"]
model.draw(prompts, seeds=[0, 1, 2])

# %% [markdown]
# Everything about the sampler can be chosen, without loading again; and `model.denoiser` is
# D(x, sigma) of some prompts, for a sampler of your own. This one is Euler's method.

# %%
import itertools

D = model.denoiser(prompts, guidance=3)
x = D.start(seeds=[0, 1, 2])
for sigma, lower in itertools.pairwise(D.sigmas):
    x = x + (lower - sigma) * (x - D(x, sigma)) / sigma
own = D.pictures(x)
