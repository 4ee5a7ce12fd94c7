"""Passwords and signatures in URLs are sent to the server, but neither shown nor written."""

import base64
import logging

import numpy as np
import pytest
from PIL import Image

from diffusion_jax import cli, files, runs
from diffusion_jax.config.settings import Data
from diffusion_jax.data import engines, sources, storage, tars
from diffusion_jax.files import url_secrets
from launch import job
from tests import web_server
from tests.imagen_jax import commands

PLAIN, SECRET = "https://host/a/b.tar", "https://me:pass@host/a/b.tar?sig=x%2B/y&v=1"
SHARDS = "https://host/shard-{{0..9}}.tar{}"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(url_secrets, "_secrets", {})


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (SECRET, PLAIN),
        ("HTTPS://me@Host/x?a", "HTTPS://Host/x"),
        ("http://me:a@[::1]:80/x?b", "http://[::1]:80/x"),
        (f"--config.data.path={SECRET}", f"--config.data.path={PLAIN}"),
        (f"--embedding={SECRET},{SECRET}", f"--embedding={PLAIN},{PLAIN}"),
        (f"webdataset:{SECRET}::txt", f"webdataset:{PLAIN}::txt"),
        (f"((1, 'webdataset', '{SECRET}', 'txt'),)", f"((1, 'webdataset', '{PLAIN}', 'txt'),)"),
        (SHARDS.format("?sig=1"), SHARDS.format("")),
        ("s3://key:pass@bucket/x-?.tar", "s3://bucket/x-?.tar"),
    ],
)
def test_a_secret_in_a_flag_is_hidden_and_revealed(text, hidden):
    assert url_secrets.hide(text) == url_secrets.without(text) == hidden
    assert url_secrets.reveal(hidden) == (text if "http" in text.lower() else hidden)


@pytest.mark.parametrize(
    "text", ["", "a?b", "x@train", "gs://bucket/NAME@train", PLAIN, f"--prompt=see {SECRET}", "::"]
)
def test_a_text_without_a_secret_does_not_change(text):
    assert url_secrets.hide(text) == text
    assert not url_secrets._secrets


def test_secrets_in_a_config_are_hidden_and_the_secret_of_the_nearest_address_is_sent():
    data = Data("mixture", "https://a:b@host/", mixture=((1, "webdataset", SECRET, "txt"),))
    hidden = url_secrets.hide({"data": data, "steps": 3, "list": [SECRET, None]})
    assert hidden["data"] == data._replace(path="https://host/", mixture=((1, "webdataset", PLAIN, "txt"),))
    assert (hidden["steps"], hidden["list"]) == (3, [PLAIN, None])
    assert url_secrets.reveal("https://host/other.tar") == "https://a:b@host/other.tar"
    assert url_secrets.reveal(PLAIN) == SECRET
    assert url_secrets.reveal("https://other/a/b.tar") == "https://other/a/b.tar"


def test_messages_and_logs_hide_secrets(capsys):
    with pytest.raises(SystemExit), cli.bad_input():
        raise ValueError(f"cannot read {SECRET}: check it")
    assert capsys.readouterr().err == f"error: cannot read {PLAIN}: check it\n"
    record = logging.LogRecord("", 20, "", 0, "lost %s", (SECRET,), None)
    assert cli._Printable().format(record).endswith(f"lost {PLAIN}")


def test_a_launched_job_gets_the_secrets_of_its_command():
    argv = ("imagen_jax.train", url_secrets.hide(f"--config.data.path={SECRET}"))
    run = job.JobRun("a", argv, "w", ())
    assert job.command(run, "w")[1] == f"--config.data.path={SECRET}"


class Guarded(web_server.Files):
    """Sends files only to requests with the password and the signature."""

    def send_head(self):
        password = base64.b64encode(b"me:pa55word").decode()
        if self.headers.get("Authorization") == f"Basic {password}" and "?sig=5ign" in self.path:
            return super().send_head()
        self.send_error(403)


@pytest.fixture
def tar(tmp_path, monkeypatch):
    """Return the URL, with its secrets, of a tar of pictures on a guarded server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "site").mkdir()
    rows = []
    for i in range(16):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(picture := tmp_path / "picture.png")
        rows.append({tars.KEY: b"%03d" % i, "png": picture.read_bytes(), "txt": b"red %d" % i})
    tars.write(folder / "a.tar", rows)
    with web_server.serving(folder, Guarded) as host:
        yield f"http://me:pa55word@{host}/a.tar?sig=5ign"


def test_data_behind_a_password_and_a_signature_are_read(tar):
    plain = url_secrets.without(tar)
    with pytest.raises(OSError):
        storage.stamp(plain)
    pictures = sources.open_pictures(Data("webdataset", tar), 16)
    images, texts = pictures.read(np.array([3]))
    assert (images[0, 0, 0].tolist(), *texts) == ([3, 0, 0], "red 3")
    assert pictures.data is not None and pictures.data.path == plain
    assert files.path(tar).read_bytes()[:3] == b"000" and str(files.path(tar)) == plain
    url_secrets._secrets.clear()  # As in another process.
    again = engines.unpickled(engines.pickled(pictures))
    np.testing.assert_array_equal(again.read(np.array([3]))[0], images)


@pytest.mark.slow
def test_no_file_or_message_of_a_run_holds_the_secrets_of_its_data(tar, tmp_path):
    run, packed = tmp_path / "run", tmp_path / "packed"
    tiny = commands.config_flags(
        "unet.image_size=16 unet.embed_dim=32 unet.channel_mult=(1,) unet.num_res_blocks=1 batch_size=8 steps=2 "
        "unet.attention_resolutions=() sample_every=0 save_every=2 log_every=1 optimizer.warmup=1 data.text=txt "
        f"data.source=webdataset data.path={tar}"
    )
    validate = ("validate", "--source=webdataset", f"--path={tar}", "--text=txt", f"--out={tmp_path / 'report'}")
    ends = [
        commands.run("train", "--config=configs/quickstart.py", f"--workdir={run}", *tiny),
        commands.run("diffusion_jax.pack", f"--workdir={run}", f"--out={packed}"),
        commands.run("diffusion_jax.report", str(run)),
        commands.run("diffusion_jax.data.prepare", *validate),
        commands.run("sample", f"--workdir={packed}", "--prompt=red", "--steps=1", f"--out={tmp_path / 'drawn'}"),
    ]
    assert [end.code for end in ends] == [0] * 5, ends[0].err[-300:]
    texts = [text.encode() for end in ends for text in (end.out, end.err)]
    for folder in (run, packed, tmp_path / "report", tmp_path / "drawn", tmp_path / "cache"):
        texts += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if b"pa55word" in text or b"5ign" in text]
    assert runs.load(run)["data"]["path"] == url_secrets.without(tar)
    assert runs.load(packed)["data"]["path"] == ""
