"""Precaching: killed, shared, repeated and repaired, a store holds each caption once."""

import functools
import logging
import os
import pathlib
import re
import time
import types
from typing import Any

import jax
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax.config.settings import Data, Text
from diffusion_jax.data import columns, engines, sources
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files.safetensors_files import map_safetensors
from diffusion_jax.precache import fill, lookup, store
from diffusion_jax.text import embed
from imagen_jax import settings as imagen_settings
from imagen_jax import train as imagen_train
from tests.diffusion_jax.text import tiny_weights
from tests.imagen_jax import commands

TEXT = {"encoder": "t5", "width": 64, "max_tokens": 16, "read_tokens": 16, "dtype": "float32"}
WORK = fill.EncodingOptions(shard_captions=8, batch_tokens=128)
SUMMARY = {}
EVERY = {*digits.seen_prompts(), *quickstart.get_config().prompts}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tiny_weights.t5_folder(tmp_path_factory.mktemp("weights") / "t5", width=64)


def config(path, weights, **changes):
    c = quickstart.get_config()
    c.text.update(TEXT | {"weights": str(weights), "store": str(path)})
    for name, value in changes.items():
        group, _, field = name.partition("__")
        c[group].update({field: value}) if field else c.update({group: value})
    return c.to_dict()


def arguments(path, weights):
    fields = TEXT | {"weights": weights, "store": path}
    flags = [f"--config.text.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/quickstart.py", *flags, "--shard_captions=8", "--batch_tokens=128"]


def chunks(path):
    return sorted(set(pathlib.Path(path).glob("*.safetensors")) - {path / columns.INDEX})


def contents(path):
    """Return, for every key, the list of its rows in all shards."""
    rows_of = {}
    for file in chunks(path):
        shard = map_safetensors(file)
        for i, key in enumerate(shard["keys"].tolist()):
            span = slice(*shard["first"][i : i + 2].tolist())
            rows = (shard["values"][span].tobytes(), shard["scales"][span].tobytes())
            rows_of.setdefault(bytes(key), []).append(rows)
    return rows_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory, weights):
    """A store written without interruption."""
    path = tmp_path_factory.mktemp("whole") / "store"
    SUMMARY.update(fill.run(fill.open_job(config(path, weights)), WORK))
    return path


def test_a_store_holds_every_caption_and_prompt_once(whole, weights):
    opened = store.Store(whole)
    assert len(opened) == len(EVERY) == SUMMARY["captions"]
    assert all(len(rows) == 1 for rows in contents(whole).values())
    texts = sorted(EVERY)[::40]
    text = Text(**config(whole, weights)["text"])
    stored, mask = embed(lookup.open_encoder(text), texts)
    expected, expected_mask = embed(lookup.open_online(text), texts)
    np.testing.assert_array_equal(mask, expected_mask)
    stored, expected = np.asarray(stored)[mask], np.asarray(expected)[mask]
    error = np.linalg.norm(stored - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert 0 < error.max() <= SUMMARY["largest_relative_error"] + 1e-5 < 0.01


def hold(path, number, go):
    """Let this process wait at `number` shards until a file `go` exists."""
    write = columns.write_chunk

    def held(*arguments):
        while len(chunks(path)) >= number and not go.exists():
            time.sleep(0.01)
        return write(*arguments)

    columns.write_chunk = held


def wait_for(path, number, process):
    deadline = time.monotonic() + 240
    while len(chunks(path)) < number:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_workers_neither_lose_nor_duplicate_captions(tmp_path, weights, whole):
    """The first worker is killed. Then two start together: one is killed, one finishes."""
    path, line = tmp_path / "store", arguments(tmp_path / "store", weights)
    out = lambda n: (tmp_path / f"out{n}", tmp_path / f"err{n}")

    def start(number, most, *more):
        held = functools.partial(hold, path, most, tmp_path / "go")
        return commands.start("diffusion_jax.precache", *line, *more, devices=1, outputs=out(number), before=held)

    first = start(0, 15)
    wait_for(path, 3, first)
    first.kill()
    first.join()
    done = len(chunks(path))
    assert 3 <= done <= 15 and first.exitcode == -9
    with pytest.raises(ValueError, match="is unfinished: continue with"):
        store.Store(path)
    one, two = (start(1 + n, done + 15, f"--worker={n}", "--workers=2") for n in (0, 1))
    wait_for(path, done + 3, two)
    two.kill()
    two.join()
    assert len(chunks(path)) < len(chunks(whole)) and two.exitcode == -9
    (tmp_path / "go").touch()
    one.join()
    assert one.exitcode == 0, out(1)[1].read_text()
    assert contents(path) == contents(whole)
    # Batches are equal, so rows do not depend on who encoded them.
    assert len(store.Store(path)) == len(EVERY)
    assert not [file for file in os.listdir(path) if file.startswith(".") or "tmp" in file]


def test_a_second_run_encodes_only_what_is_new(tmp_path, weights, whole, caplog):
    path = copy(whole, tmp_path / "store")
    before = {file.name: file.stat().st_mtime_ns for file in chunks(path)}
    changed = config(path, weights, prompts=("a new prompt", *digits.seen_prompts()[:3]))
    with caplog.at_level(logging.INFO, "absl"):
        manifest = fill.run(fill.open_job(changed), WORK)
    assert re.search(r"encoding: 1/1 captions \| .* captions/s \| 0:00:00 left", caplog.text)
    assert manifest["captions"] == len(EVERY) + 1
    after = {file.name: file.stat().st_mtime_ns for file in chunks(path)}
    assert len(after) == len(before) + 1 and before.items() <= after.items()
    assert store.Store(path).read(["a new prompt"])["text_mask"].sum() == 7


def test_damaged_and_missing_shards_are_encoded_again(tmp_path, weights, whole):
    path = copy(whole, tmp_path / "store")
    lost, cut, changed = sorted(chunks(path))[:3]
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-3])
    contents_ = bytearray(changed.read_bytes())
    contents_[-1 - 8 * 16] ^= 1  # The last value, before the keys of 8 captions.
    changed.write_bytes(contents_)
    job = fill.open_job(config(path, weights))
    fill.run(job, WORK)
    assert contents(path).keys() == contents(whole).keys()
    assert changed.read_bytes() == contents_
    fill.run(job, WORK._replace(verify=True))
    assert contents(path).keys() == contents(whole).keys()
    store.Store(path).read(sorted(EVERY))  # Reading checks every checksum.


def test_shards_lost_while_a_store_grows_are_encoded_again(tmp_path, weights, whole, monkeypatch):
    """One lost shard existed before the plan was made, the other was written by it."""
    path, write, written = copy(whole, tmp_path / "store"), columns.write_chunk, []
    old = chunks(path)
    new = [f"new prompt {i}" for i in range(20)]
    job = fill.open_job(config(path, weights, prompts=(*new, *quickstart.get_config().prompts)))

    def killed(*arguments):
        if len(written) == 2:
            raise KeyboardInterrupt
        write(*arguments)
        written[:] = set(chunks(path)) - set(old)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(columns, "write_chunk", killed)
        fill.run(job, WORK)
    written[0].unlink()
    old[3].unlink()
    assert fill.run(job, WORK)["captions"] == len(EVERY) + 20
    store.Store(path).read([*sorted(EVERY), *new])
    assert contents(path).keys() > contents(whole).keys()


def test_a_shard_lost_from_an_unfinished_store_is_encoded_again(tmp_path, weights, whole):
    job = fill.open_job(config(tmp_path / "store", weights))
    lost = []

    class Losing(engines.Worker):
        """Lose a shard after the work is done and before it is listed, then stop."""

        def fill(self, items, path, write, **how):
            super().fill(items, path, write, **how)
            if not lost:
                lost.append(path(items[1]))
                raise KeyboardInterrupt

    work = WORK._replace(engine=Losing())
    with pytest.raises(KeyboardInterrupt):
        fill.run(job, work)
    lost[0].unlink()
    fill.run(job, work)
    assert lost[0].exists()
    assert contents(tmp_path / "store") == contents(whole)


def copy(source, target):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.fixture
def edited(tmp_path):
    """A folder of four pictures with captions, and a config that stores their embeddings."""
    folder = digits.write_examples(tmp_path / "data", 4, size=8)
    c = quickstart.get_config()
    c.unet.image_size = 8
    c.text.store = str(tmp_path / "store")
    c.data.update(source="folder", path=str(folder), threads=0)
    return folder, c.to_dict()


def test_captions_that_are_edited_after_a_kill_are_encoded(edited, monkeypatch):
    folder, c = edited
    # Equal captions are encoded once.
    (folder / "00001.txt").write_text((folder / "00000.txt").read_text())

    def killed(*arguments):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(columns, "write_chunk", killed)
        with pytest.raises(InterruptedError):
            fill.run(fill.open_job(c), WORK)
    (folder / "00001.txt").write_text("a caption that is new")
    fill.run(fill.open_job(c), WORK)
    opened = store.Store(c["text"]["store"])
    texts = [path.read_text().strip() for path in sorted(folder.glob("*.txt"))]
    assert (opened.find(store.keys_of(texts, opened.identity)) >= 0).all()


@pytest.mark.usefixtures("unchecked")
def test_captions_that_change_while_they_are_encoded_are_an_error(edited):
    _, c = edited
    job, read = fill.open_job(c), []

    class Changing:
        def __len__(self):
            return 3

        def texts(self, rows):
            read.append(rows)
            return [f"text {row} of {len(read)}" for row in rows.tolist()]

    job.data = Changing()
    with pytest.raises(ValueError, match=r"^the captions of the data changed while they were encoded: repeat the com"):
        fill.run(job, WORK)


def test_embeddings_that_are_not_finite_are_an_error_with_the_caption(edited):
    folder, c = edited
    job = fill.open_job(c)
    frozen = jax.tree.map(np.array, job.encoder.frozen)
    caption = (folder / "00002.txt").read_text().strip()
    words = job.encoder.tokenize([caption])

    def broken(frozen, batch):
        text, mask = job.encoder.encode(frozen, batch)
        of_caption = (batch["text_ids"] == words["text_ids"][0]).all(1)
        return jax.numpy.where(of_caption[:, None, None], np.nan, text), mask

    encoder = job.encoder._replace(frozen=frozen, encode=broken)
    job.encode = functools.partial(fill.encode.on_own_devices, encoder)
    with pytest.raises(ValueError, match=f"the embeddings of {caption!r} are not finite: check te"):
        fill.run(job, WORK)


def test_training_checks_before_its_first_step_that_captions_are_stored(edited):
    folder, c = edited
    fill.run(fill.open_job(c), WORK)
    s, mesh = imagen_settings.read_settings(c), sharding.make_mesh(1, -1, 1, jax.local_devices())
    open_batches = lambda: imagen_train.open_batches(s, lookup.open_encoder(s.text), mesh).close()
    open_batches()
    (folder / "00003.txt").write_text("a caption that is new")
    (folder / "00002.txt").write_text("")
    with pytest.raises(ValueError, match=r"1 of 3 captions are not in the store .*, such as 'a capt"):
        open_batches()


def test_captions_can_be_read_from_a_file(tmp_path, weights):
    (tmp_path / "captions.txt").write_text("one\n\n two \none\n")
    job = fill.open_job(config(tmp_path / "store", weights, prompts=()), str(tmp_path / "captions.txt"))
    assert fill.run(job, WORK)["captions"] == 2
    store.Store(tmp_path / "store").read(["two", "one"])


def test_a_store_holds_all_captions_of_a_picture(tmp_path, weights):
    pictures = digits.write_examples(tmp_path / "pictures", 3, size=8)
    for number, picture in enumerate(sorted(pictures.glob("*.png"))):
        picture.with_suffix(".txt").write_text(f"{number}\none of all\n{number} again")
    data = {"data__source": "folder", "data__path": str(pictures), "data__text": "txt:lines"}
    job = fill.open_job(config(tmp_path / "store", weights, prompts=("a prompt",), **data))
    assert fill.estimate(job, "int8").startswith("10 captions of")
    assert fill.run(job, WORK)["captions"] == 1 + 3 + 1 + 3  # "one of all" is stored once.
    store.Store(tmp_path / "store").read(["a prompt", "0", "2", "2 again", "one of all"])
    opened = lambda: sources.open_pictures(Data("folder", path=str(pictures), text="txt:lines"), 8)
    encoder = lookup.open_encoder(job.text)
    lookup.check_captions(job.text, encoder, opened())
    (pictures / "00002.txt").write_text("2\nedited")
    with pytest.raises(ValueError, match="'edited'"):
        lookup.check_captions(job.text, encoder, opened())


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"text__store": ""}, ValueError, "text.store is empty: name the folder to write to with --config"),
        ({"text__encoder": "t6"}, ValueError, "text.encoder is 't6': "),
        ({"text__encoder": "precomputed"}, ValueError, "name the encoder that computed the emb"),
        ({"text__width": 32}, ValueError, "text.width is 32, but the T5 in .* has width 64: s"),
        ({"text__weights": "/nothing"}, FileNotFoundError, "no folder /nothing: choose a fold"),
        ({"data__source": "folder", "data__path": "/no"}, FileNotFoundError, "no data at /no: ch"),
    ],
)
def test_invalid_settings_are_errors_before_anything_is_encoded(tmp_path, weights, changes, kind, message):
    with pytest.raises(kind, match=message):
        fill.open_job(config(tmp_path / "store", weights, **changes))
    assert not (tmp_path / "store").exists()


def test_a_store_of_another_encoder_is_an_error(whole, weights, tmp_path):
    other = tiny_weights.t5_folder(tmp_path / "other", width=64, stream=2.0)
    with pytest.raises(ValueError, match=r"made with other settings \(weights: '\w+' stored, '\w+' request"):
        fill.run(fill.open_job(config(whole, other)), WORK)
    longer = config(whole, weights, text__max_tokens=8)
    with pytest.raises(ValueError, match=r"\(max_tokens: 16 stored, 8 requested\): set the text group"):
        fill.run(fill.open_job(longer), WORK)


def test_a_dry_run_prints_the_size_and_writes_nothing(tmp_path, weights):
    ended = commands.run("diffusion_jax.precache", *arguments(tmp_path / "store", weights), "--dry_run")
    assert ended.code == 0, ended.err
    size = r"[\d,]+ captions of \d+\.\d tokens on average \(\d+ at most\) in a sample of [\d,]+: "
    assert re.fullmatch(rf"{size}the store takes at most \S+ GB as int8, and \S+ GB are free\n", ended.out)
    assert not (tmp_path / "store").exists()


def test_stored_embeddings_of_a_bfloat16_t5_are_within_1_percent(tmp_path, weights):
    """Uses the default dtype, and NeMo's default for read_tokens."""
    changes = {"text__dtype": "bfloat16", "text__read_tokens": 512}
    (tmp_path / "captions.txt").write_text("a red seven on gray paper\n")
    changed = config(tmp_path / "store", weights, prompts=(), **changes)
    job = fill.open_job(changed, str(tmp_path / "captions.txt"))
    manifest = fill.run(job, WORK._replace(shard_captions=100))
    assert 0.002 < manifest["largest_relative_error"] < 0.01
    assert manifest["least_cosine"] > 0.9999


@pytest.mark.parametrize(
    ("caption", "keep", "is_error"),
    [("a <cat>, asleep", 0, True), ("asleep, a <CAT>", 1, True), ("a <cat>, asleep", 1, False)],
)
@pytest.mark.usefixtures("unchecked")
def test_the_learned_word_is_never_a_tag_that_is_dropped(tmp_path, caption, keep, is_error):
    folder = digits.write_examples(tmp_path, 2, size=8)
    for picture in folder.glob("*.png"):
        picture.with_suffix(".txt").write_text(caption)
    data = Data("folder", str(folder), tag_drop_prob=0.1, keep_tags=keep)
    text, opened = Text("clip", learned_tokens="<cat>=d"), sources.open_pictures(data, 8)
    encoder: Any = types.SimpleNamespace(tokenize=list, unused=lambda texts: [])
    if not is_error:
        return lookup.check_captions(text, encoder, opened)
    with pytest.raises(ValueError, match=r"tag_drop_prob=0\.1 leaves out <cat>, .*keep_tags=1"):
        lookup.check_captions(text, encoder, opened)
