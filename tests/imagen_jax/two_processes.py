"""A process that reads batches, and writes which pictures they contain."""

import json
import pathlib

BATCH, STEPS, SAVED = 8, 10, 3


def settings(path):
    """Return settings for a folder of pictures without threads, which would change the order."""
    from configs import quickstart
    from imagen_jax.settings import read_settings

    c = quickstart.get_config()
    c.unet.update(image_size=8, patch=2, embed_dim=32, head_dim=32)
    c.unet.attention_resolutions = ()
    c.data.update(source="folder", path=str(path), threads=0)
    c.batch_size = BATCH
    return read_settings(c.to_dict())


def read(path, state=None, steps=STEPS):
    """Return the indices of this process's rows per batch, and the position after step SAVED."""
    from diffusion_jax.devices import sharding
    from diffusion_jax.precache import lookup
    from imagen_jax import train

    s, taken, saved = settings(path), [], b""
    mesh = sharding.make_mesh(1, -1, 1)
    with train.open_batches(s, lookup.open_encoder(s.text), mesh) as batches:
        read_all = batches.pictures.columns

        def noting(indices, places=None):
            taken.append(indices.tolist())
            return read_all(indices, places)

        batches.pictures.columns = noting
        if state is not None:
            batches.set_state(state)
        for step in range(steps):
            next(batches)
            saved = batches.get_state() if step + 1 == SAVED else saved
    return taken, saved


def main(process, path, out):
    """Read batches, and write OUT/PROCESS.json."""
    import jax

    taken, saved = read(path)
    ended = {"devices": jax.device_count(), "taken": taken, "saved": saved.decode()}
    pathlib.Path(out, f"{process}.json").write_text(json.dumps(ended))
