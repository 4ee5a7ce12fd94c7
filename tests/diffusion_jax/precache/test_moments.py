"""Moments are written shard by shard, and nothing of a killed worker stays."""

import numpy as np

from diffusion_jax.data.captions import Captions
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources.webdataset import WebDataset
from diffusion_jax.precache import moments
from diffusion_jax.precache.moments import Work

NAMES = ["000000.tar", "000001.tar", "checksums", "moments.json"]


class Four(Pictures):
    """Four pictures of their own number."""

    def __len__(self):
        return 4

    def usable(self, indices):
        images = np.zeros((len(indices), 2, 2, 3), np.uint8) + indices[:, None, None, None]
        return indices, images.astype(np.uint8), [str(index) for index in indices]

    def read(self, *_):
        raise NotImplementedError

    def texts(self, indices):
        raise NotImplementedError


def encode(images):
    return images[:, :1, :1, :2].astype(np.float32)


def test_temporary_files_of_killed_workers_are_removed_at_the_end(tmp_path):
    stale = tmp_path / ".000001.tar.0123abcd.tmp"
    other = tmp_path / ".notes.tar.0123abcd.tmp"
    stale.touch(), other.touch()
    assert moments.run(Four(), encode, tmp_path, {}, Work(2, 2)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, *NAMES]


def test_a_damaged_shard_is_encoded_again_but_not_in_a_dry_run(tmp_path, capsys):
    assert moments.run(Four(), encode, tmp_path, {}, Work(2, 2)) == 2
    whole = (tmp_path / NAMES[1]).read_bytes()
    (tmp_path / NAMES[1]).write_bytes(whole[:-1] + b"x")
    dry = Work(2, 2, verify=True, dry_run=True)
    assert moments.run(Four(), encode, tmp_path, {}, dry) == 1
    assert "would encode 1 of 2 shards" in capsys.readouterr().out
    assert (tmp_path / NAMES[1]).read_bytes() == whole[:-1] + b"x"
    assert moments.run(Four(), encode, tmp_path, {}, Work(2, 2, verify=True)) == 2
    assert (tmp_path / NAMES[1]).read_bytes() == whole
    (tmp_path / NAMES[1]).unlink()  # A missing one counts once.
    assert moments.run(Four(), encode, tmp_path, {}, dry) == 1


def test_a_shard_that_another_worker_wrote_meanwhile_is_left_to_it(tmp_path):
    def overtaken(images):
        if not (tmp_path / NAMES[0]).exists():
            assert moments.run(Four(), encode, tmp_path, {}, Work(2, 2)) == 2
        return encode(images)

    assert moments.run(Four(), overtaken, tmp_path, {}, Work(2, 2)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


def test_all_captions_and_their_weights_are_stored(tmp_path):
    class Several(Four):
        def usable(self, indices):
            texts = [Captions((f"{i} a", f"{i} b"), (0.75, 0.25)) if i else "0" for i in indices]
            return *super().usable(indices)[:2], texts

    moments.run(Several(), encode, tmp_path, {}, Work(2, 2))
    texts = WebDataset(tmp_path, "txt,json:captions", images=("npy",)).texts(range(4))
    assert texts[::3] == ["0", Captions(("3 a", "3 b"), (0.75, 0.25))]
