"""precache and prepare write the same bytes into a bucket as into a folder.

Each job is killed after every few objects that it writes, and resumed.
"""

import io
import threading
import uuid

import numpy as np
import pytest

from diffusion_jax import files
from diffusion_jax.config.settings import Data, Text
from diffusion_jax.data import __main__ as data_command
from diffusion_jax.data import home, sources, tars
from diffusion_jax.data.prepare import fetch, index, reshard, validate
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files import remote
from diffusion_jax.precache import fill, lookup, store
from diffusion_jax.text import embed
from tests import emulators
from tests.diffusion_jax.precache import test_moments, test_precache
from tests.diffusion_jax.text import tiny_weights

pytestmark = [pytest.mark.xdist_group("stores"), pytest.mark.slow, pytest.mark.gate]


@pytest.fixture(params=["s3", "gs"])
def bucket(request, stores):
    return files.path(f"{request.param}://{emulators.BUCKET}/{uuid.uuid4().hex}")


class Killed(BaseException):
    """Raised in place of a kill."""


def finish(work, writes):
    """Call `work` until it returns. Each call is killed after this many writes."""
    for kills in range(100):
        left = writes

        def limited(write):
            def call(self, *args, **options):
                nonlocal left
                # The lock's heartbeat can come at any time.
                if threading.current_thread().name == "writer":
                    return write(self, *args, **options)
                if not left:
                    raise Killed
                left -= 1
                return write(self, *args, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("write_bytes", "send"):
                patch.setattr(remote.Remote, name, limited(getattr(remote.Remote, name)))
            try:
                return work(), kills
            except Killed:
                pass
    raise AssertionError("it makes no progress")


def contents(folder):
    store = files.store_path(folder)
    paths = filter(lambda path: path.is_file(), folder.rglob("*"))
    names = store.objects() if store else [str(path.relative_to(folder)) for path in paths]
    return {name: (folder / name).read_bytes() for name in names}


def test_a_store_of_texts_in_a_bucket_matches_one_in_a_folder(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tiny_weights.t5_folder(tmp_path / "t5", width=64)
    texts = digits.seen_prompts()[:30]
    (tmp_path / "texts").write_text("\n".join(texts))
    changes = {"prompts": ("one more",)}
    jobs = [
        fill.open_job(test_precache.config(path, weights, **changes), str(tmp_path / "texts"))
        for path in (tmp_path / "store", bucket)
    ]
    sizes = [fill.estimate(job, "int8") for job in jobs]
    assert sizes[0].endswith(" are free") and " free" not in sizes[1]
    summary = fill.run(jobs[0], test_precache.WORK)
    again, kills = finish(lambda: fill.run(jobs[1], test_precache.WORK), writes=2)
    assert kills >= 4 and again == summary and summary["captions"] == 31
    assert contents(bucket) == contents(tmp_path / "store")
    name = test_precache.chunks(tmp_path / "store")[1].name
    for job, place in zip(jobs, (tmp_path / "store", bucket), strict=True):
        damaged = bytearray((place / name).read_bytes())
        damaged[-200] ^= 1
        files.write_whole(place / name, bytes(damaged))
        fill.run(job, test_precache.WORK._replace(verify=True))
    assert contents(bucket) == contents(tmp_path / "store")
    fields = test_precache.config(bucket, weights)["text"]
    for opened in (lookup.open_encoder(Text(**fields)), lookup.open_online(Text(**fields))):
        rows, mask = embed(opened, texts[3:5])
        assert mask.any(axis=1).all() and np.isfinite(rows).all()
    with pytest.raises(ValueError, match="captions are not in the store"):
        store.Store(files.local(bucket)).read(["never seen"])


@pytest.mark.parametrize("format", reshard.FORMATS)
def test_reshard_index_and_validate_in_a_bucket_match_a_folder(bucket, tmp_path, format):
    pictures = digits.write_examples(tmp_path / "pictures", 10, size=8)
    (pictures / "00003.png").write_bytes(b"GIF89a")
    records = open_folder(pictures, uncaptioned="drop")
    how = {"num": 2, "format": format, "identity": {"path": "pictures"}}
    reshard.reshard(records, tmp_path / "out", **how)
    assert finish(lambda: reshard.reshard(records, bucket, **how), 3)[1] >= 1
    assert contents(bucket) == contents(tmp_path / "out")
    if format == "webdataset":
        counted = [index.index(str(place), "txt") for place in (bucket, tmp_path / "out")]
        assert counted[0] == counted[1] and counted[0]["records"] == 9
        in_bucket, in_folder = open_tars(str(bucket)), open_tars(tmp_path / "out")
        assert [r.image for r in in_bucket.read(range(9))] == [r.image for r in in_folder.read(range(9))]
        parts = bucket / "parts"
        assert validate.validate(in_bucket, folder=parts) == validate.validate(in_folder)
        assert len(parts.objects()) > 1


def test_fetch_into_a_bucket_downloads_and_verifies_files(bucket, tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"45")
    urls = [f"file://{tmp_path}/{name}" for name in "ab"]
    finish(lambda: fetch.fetch(urls, bucket, {}), writes=1)
    assert contents(bucket) == {"a": b"123", "b": b"45"}
    with pytest.raises(ValueError, match="should have"):
        fetch.fetch(urls, bucket, {"a": "0" * 32}, verify=True)


def test_a_table_in_a_bucket_joins_pictures_and_embeddings_in_the_bucket(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for shard in range(2):
        array = io.BytesIO()
        np.save(array, np.full((2, 4), shard, np.float32))
        for folder, of in (("images", {"jpg": b"%d" % shard, "txt": b"t"}), ("stored", {"npy": array.getvalue()})):
            tars.write(tmp_path / "a.tar", [{tars.KEY: b"0", **of}])
            files.write_whole(bucket / folder / f"{shard}.tar", (tmp_path / "a.tar").read_bytes())
    flags = ("--column=t5", f"--from={bucket}/stored", f"--out={bucket}/table")
    data_command.main(["attach", f"webdataset:{bucket}/images", *flags])
    records = sources.open_records(Data("webdataset", f"{bucket}/table", "t5.npy"))
    assert [(record.image, record.text[0, 0]) for record in records.read(range(2))] == [(b"0", 0), (b"1", 1)]


def test_a_run_goes_on_with_its_own_moments_in_a_bucket(bucket, tmp_path):
    def of_run(begun):
        with home.tables_of(tmp_path / "run", begun) as tables:
            values, _ = (pictures := test_moments.opened(bucket)).read(np.arange(len(pictures)))
        tables.write()
        return values[:, 0, 0, 0].tolist()

    (tmp_path / "a").mkdir()
    (tmp_path / "run").mkdir()
    for number in range(3):
        test_moments.write_picture(tmp_path / "a", number, 10 * number)
    test_moments.run(tmp_path / "a", bucket)
    assert of_run(begun=False) == [0, 10, 20]
    test_moments.write_picture(tmp_path / "a", 11, 90)  # In the middle of the order of names.
    test_moments.run(tmp_path / "a", bucket)
    assert of_run(begun=True) == [0, 10, 20] and of_run(begun=False) == [0, 10, 90, 20]
