"""The page's server without a browser: its queue, errors, access, and results of runs."""

import asyncio
import base64
import gc
import io
import json
import math
import re
import threading
import time
import tracemalloc
import types

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.draw import model as draw_model
from diffusion_jax.draw.model import Cancelled
from diffusion_jax.evaluate import sweep
from diffusion_jax.logs import run_log
from diffusion_jax.metrics.cards import Scored
from diffusion_jax.web import jobs, results, server, web_command
from imagen_jax import cascade
from imagen_jax.settings import Sampler
from sd_jax import drawing
from tests import written_sweeps

HOSTS = ("127.0.0.1",)
JSON = ("content-type", "application/json")


class Slow(draw_model.Model):
    """A model whose pixels equal the seed. A test releases each of its steps."""

    enlarger = None

    def __init__(self):
        low_res = types.SimpleNamespace(aug_sigma=0.1)
        text = types.SimpleNamespace(drop_prob=0.0)
        s = types.SimpleNamespace(sampler=Sampler(), super_resolution=low_res, text=text)
        self.stages = (types.SimpleNamespace(workdir="runs/none", step=0, settings=s),)
        self.options, self.values = cascade.OPTIONS, ({},)
        self.go, self.drawn = threading.Semaphore(0), []

    def __repr__(self):
        return "slow"

    def draw(self, prompts, *, seeds, progress, **choices):
        images = np.array(seeds, np.uint8)[:, None, None, None] * np.ones((4, 4, 3), np.uint8)
        for level in (2.0, 1.0):
            assert self.go.acquire(timeout=120)
            progress(images, level)
        self.drawn.append((prompts, seeds, choices))
        return types.SimpleNamespace(smaller=(), png=lambda n: draw_model.png(images[n]))


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition was never true"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Prevent jobs from being cancelled while a busy machine does not watch them."""
    monkeypatch.setattr(jobs, "_UNWATCHED", 1e6)


@pytest.fixture
def slow():
    model = Slow()
    yield model
    model.go.release(1000)  # Otherwise an unfinished job fails, and logs this, during a later test.


@pytest.fixture
def site(slow):
    return server.Site("imagen_jax", {"slow": slow}, {"slow": ["runs/no run"]})


def ask(app, path, body=None, headers=(), host="127.0.0.1:8765", cookie=""):
    """Send a request to the application, and return (status, headers, content)."""
    path, _, query = path.partition("?")
    all_headers = [("host", host), *([("cookie", cookie)] if cookie else []), *headers]
    scope = {"type": "http", "method": "GET" if body is None else "POST", "scheme": "http", "http_version": "1.1"}
    scope |= {"path": path, "raw_path": b"", "root_path": "", "query_string": query.encode()}
    scope |= {"server": ("x", 1), "client": ("x", 2), "asgi": {"spec_version": "2.4"}}
    scope["headers"] = [(k.encode(), v.encode()) for k, v in all_headers]
    sent = []

    async def receive():
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, content


def a_picture(**changes):
    return {"model": "slow", "prompt": "a <b>", "seed": 3, "choices": {"steps": "4"}, **changes}


def post(app, pictures, path="/api/draw", headers=(JSON,)):
    status, _, content = ask(app, path, json.dumps(pictures).encode(), headers)
    return status, json.loads(content)


def test_a_picture_is_sampled_with_previews_and_stored(site, slow):
    app = server.app(site, HOSTS)
    status, content = post(app, [a_picture(), a_picture(seed=5)])
    assert status == 200
    job = site.queue.jobs[content["job"]]
    assert ask(app, content["pictures"][0]["url"])[0] == 404
    slow.go.release()
    wait_for(lambda: job.level == 2.0)
    assert set(job.looks) == {0, 1}
    slow.go.release()
    wait_for(lambda: job.state == "done")
    status, headers, png = ask(app, content["pictures"][1]["url"])
    assert (status, headers["content-type"], png[:4]) == (200, "image/png", b"\x89PNG")
    assert slow.drawn == [(["a <b>"] * 2, [3, 5], {"steps": 4})]
    command = "python -m imagen_jax.sample '--workdir=runs/no run' '--prompt=a <b>' --seed=3 --steps=4 --out=pictures"
    assert content["pictures"][0]["command"] == command
    _, again = post(app, [a_picture(seed=5)])  # It is already stored.
    wait_for(lambda: site.queue.jobs[again["job"]].state == "done")
    assert len(slow.drawn) == 1


def test_jobs_wait_for_each_other_and_can_be_cancelled(site, slow):
    app = server.app(site, HOSTS)
    names = [post(app, [a_picture(seed=seed)])[1]["job"] for seed in (1, 2, 3)]
    first, second, third = (site.queue.jobs[name] for name in names)
    wait_for(lambda: first.state == "drawing")
    assert [site.queue.ahead(job) for job in (second, third)] == [1, 2]
    assert post(app, None, f"/api/jobs/{names[1]}/cancel")[0] == 200
    assert (second.state, site.queue.ahead(third)) == ("cancelled", 1)
    post(app, None, f"/api/jobs/{names[0]}/cancel")
    slow.go.release(4)
    wait_for(lambda: third.ended)
    assert [job.state for job in (first, second, third)] == ["cancelled", "cancelled", "done"]
    assert [seeds for _, seeds, _ in slow.drawn] == [[3]]
    report = site.report(first)
    assert (report["state"], report["drawn"], report["looks"]) == ("cancelled", [], {})


def test_a_tab_learns_that_a_job_ended_even_if_it_ends_during_a_progress_report(site, slow, monkeypatch):
    app, report = server.app(site, HOSTS), site.report
    name = post(app, [a_picture()])[1]["job"]
    job = site.queue.jobs[name]
    wait_for(lambda: job.state == "drawing")

    def then_end(job):
        made = report(job)
        slow.go.release(2)
        wait_for(lambda: job.ended)
        return made

    monkeypatch.setattr(site, "report", then_end)
    sent = [json.loads(line[6:]) for line in ask(app, f"/api/jobs/{name}")[2].split(b"\n") if line]
    assert [(one["state"], one["drawn"]) for one in sent] == [("drawing", []), ("done", [0])]


def test_the_number_of_waiting_jobs_is_limited(site, slow):
    app = server.app(site, HOSTS)
    many = [post(app, [a_picture(seed=n)])[0] for n in range(jobs.WAITING + 2)]
    assert many[-1] == 429 and many[: jobs.WAITING] == [200] * jobs.WAITING
    for job in list(site.queue.jobs.values())[1:]:
        site.queue.cancel(job)
    assert post(app, [a_picture(seed=99)])[0] == 200  # Cancelled jobs do not count.
    for job in site.queue.jobs.values():
        site.queue.cancel(job)
    slow.go.release(2)


def test_a_thousand_jobs_leave_a_short_queue(site, slow):
    """At most 16 jobs wait and 200 are listed, however many are requested."""
    picture = lambda n: server.Picture("slow", "a", n, ())
    first = site.queue.add([picture(0)])
    wait_for(lambda: first.state == "drawing")
    waiting = [site.queue.add([picture(n)]) for n in range(jobs.WAITING)]
    for n in range(1_000):
        with pytest.raises(jobs.Full):
            site.queue.add([picture(n)])
    assert site.queue.ahead(waiting[-1]) == jobs.WAITING
    for n in range(1_000):
        site.queue.cancel(waiting.pop())
        waiting.append(site.queue.add([picture(n)]))
        assert len(site.queue.jobs) <= jobs._MAX_JOBS
    assert site.queue.ahead(waiting[-1]) == jobs.WAITING
    for job in (first, *waiting):
        site.queue.cancel(job)
    slow.go.release(4)


def test_polling_takes_no_memory(tmp_path, slow):
    """A leaked copy of this run's curve would take 30 kB."""
    lines = [run_log.metrics_line(step, {"loss": 1 / step}) for step in range(1, 401)]
    (tmp_path / run_log.METRICS).write_text("".join(lines))
    app = server.app(server.Site("imagen_jax", {"slow": slow}, {"slow": [str(tmp_path)]}), HOSTS)

    def poll(count):
        for _ in range(count):
            status, _, content = ask(app, "/api/training")
            assert status == 200 and len(json.loads(content)["runs"][0]["curves"]["loss"]) == 400
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = poll(5)
        assert poll(20) - before < 20 * 5000
    finally:
        tracemalloc.stop()


def test_a_job_that_no_page_watches_is_cancelled(site, slow):
    first, second, third = (site.queue.add([site.picture(a_picture(seed=n))]) for n in (1, 2, 3))
    wait_for(lambda: first.state == "drawing")
    with second.watched():
        for job in (first, second, third):
            job.left -= jobs._UNWATCHED
        assert site.queue.ahead(third) == 2 and third.state == "cancelled"
        slow.go.release(3)
        wait_for(lambda: second.ended)
    assert (first.state, second.state, second.watchers) == ("cancelled", "done", 0)
    assert ask(server.app(site, HOSTS), f"/api/jobs/{second.name}")[0] == 200
    assert second.watchers == 0


def test_the_most_recently_requested_pictures_are_stored(site, monkeypatch):
    pictures = [site.picture(a_picture(seed=n)) for n in range(3)]
    monkeypatch.setattr(jobs, "_MAX_BYTES", 20)
    for picture in pictures[:2]:
        site.queue._keep(picture, (b"12345", b"12345"))
    assert site.queue.files(pictures[0])
    site.queue._keep(pictures[2], (b"1234567890",))
    assert [site.queue.files(p) is not None for p in pictures] == [True, False, True]


def test_the_command_of_a_picture_has_the_flags_of_the_page(slow):
    slow.values = ({"ema": "raw", "guide": "runs/bad one", "lora_scale": 0.5, "steps": 9, "eta": 0.25},)
    slow.stages = tuple(types.SimpleNamespace(**{**vars(slow.stages[0]), "step": n}) for n in (7, 5))
    site = server.Site("imagen_jax", {"slow": slow}, {"slow": ["a", "b"]})
    options = "--ema=raw '--guide=runs/bad one' --lora_scale=0.5 --steps=4 --eta=0.25 --checkpoint=7,5 --out=pictures"
    command = site.command(site.picture(a_picture()))
    assert command.endswith(f".sample --workdir=a --workdir=b '--prompt=a <b>' --seed=3 {options}")


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (a_picture(model="other"), "there is no model 'other': choose from slow"),
        (a_picture(prompt=" "), "enter a prompt, because this model was never trained without one"),
        (a_picture(prompt="a" * 2001), "the prompt must be a string of at most 2,000 characters"),
        (a_picture(seed=2**64), "the seed is 18446744073709551616"),
        (a_picture(seed=-1), "the seed is -1"),
        (a_picture(seed="1.5"), "the seed is '1.5'"),
        (a_picture(choices={"steps": 1001}), "steps is 1001: it must be at most 1,000 on this page"),
        (a_picture(choices={"steps": "many"}), "steps is 'many': it must be a whole number"),
        (a_picture(choices={"guide": "/etc/passwd"}), "there is no option 'guide'"),
        (a_picture(choices={"text_weights": "/etc"}), "there is no option 'text_weights'"),
        (a_picture(choices={"checkpoint": float("inf")}), "checkpoint is inf: it must be"),
        ("a", "a picture must be a JSON object"),
    ],
)
def test_invalid_requests_for_pictures_are_errors_of_one_line(site, picture, message):
    status, content = post(server.app(site, HOSTS), [picture])
    assert status == 400 and message in content["error"]


def test_a_request_has_at_least_one_picture_and_limited_sizes(site):
    app = server.app(site, HOSTS)
    assert post(app, [])[0] == 400
    assert post(app, [a_picture()] * (jobs.PICTURES + 1))[0] == 400
    assert post(app, "x" * 2**20)[1]["error"].endswith("1,048,576 bytes are allowed")


@pytest.mark.parametrize("folder", ["", "/api/jobs", "/api/shown"])
@pytest.mark.parametrize("path", ["server.py", "page.html", "none.png", "../../etc/passwd", "%2Fetc%2Fpasswd.png"])
def test_paths_of_files_on_the_machine_are_not_found(site, folder, path):
    assert ask(server.app(site, HOSTS), f"{folder}/{path}")[0] == 404


def test_a_form_sent_by_a_browser_on_another_site_is_an_error(site):
    app = server.app(site, HOSTS)
    assert post(app, [a_picture()], headers=(("content-type", "text/plain"),))[0] == 400
    assert "access-control-allow-origin" not in ask(app, "/")[1]


def test_a_page_for_other_machines_requires_the_token(site):
    app = server.app(site, (), token="secret")
    anywhere = {"host": "box.example:8765"}
    assert ask(app, "/", **anywhere)[0] == ask(app, "/api/models", **anywhere)[0] == 403
    assert ask(app, "/?token=wrong", **anywhere)[0] == 403
    status, headers, _ = ask(app, "/?token=secret", **anywhere)
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower()
    # The cookie's name has the port, because pages of other ports have other tokens.
    assert cookie.startswith("token_1=secret;")
    assert ask(app, "/", cookie=cookie.partition(";")[0], **anywhere)[0] == 200
    assert ask(app, "/", cookie="token_1=é", **anywhere)[0] == 403
    local = [web_command.is_local(h) for h in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "box")]
    assert local == [True, True, True, False, False]
    assert [web_command.in_address(h) for h in ("::1", "127.0.0.2")] == ["[::1]", "127.0.0.2"]


def test_the_list_of_models_has_their_options(site):
    (one,) = json.loads(ask(server.app(site, HOSTS), "/api/models")[2])["models"]
    fields = {field["name"]: field for field in one["fields"]}
    assert fields["steps"]["value"] == 30 and fields["guidance_high"]["value"] == "inf"
    assert {"sampler", "eta", "aug_sigma"} <= set(fields)
    assert not {"guide", "ema", "text_weights"} & set(fields)
    assert "dpmpp_2m" in fields["sampler"]["options"]


def test_a_removed_checkpoint_in_memory_is_listed(site, slow):
    slow.stages[0].step, slow.values = 7, ({"ema": "0.05"},)
    slow.averages = lambda n, step: ["0.99", "0.999"]
    one = site.describe("slow")
    assert (one["checkpoints"], one["checkpoint"], one["in_memory"]) == ([7], 7, True)
    assert (one["averages"], one["average"]) == (["ema", "0.99", "0.999", "raw", "0.05"], "0.05")


def test_all_errors_are_responses_in_json(site, monkeypatch):
    app = server.app(site, HOSTS)
    nested = ask(app, "/api/draw", b"[" * 200_000, (JSON,))
    assert nested[0] == 400 and "recursion" in json.loads(nested[2])["error"]
    monkeypatch.setattr(site, "describe", lambda name: 1 / 0)
    status, _, content = ask(app, "/api/models")
    assert (status, json.loads(content)) == (500, {"error": "ZeroDivisionError: division by zero"})


@pytest.fixture
def swept(tmp_path):
    """Write a base with its own sweep, one of a cascade with this base, and one of two models."""
    row = {"guidance": 2.0, "checkpoint": 3, "ema": "ema", "fid": 9.0, "clip_score": math.nan}
    of = lambda *names: [{"workdir": str(tmp_path / name)} for name in names]
    sweeps = ("own", {}, of("base")), ("row", {}, of("base", "sr")), ("both", {"model": "sr"}, of("base"))
    for name, more, models in sweeps:
        folder = tmp_path / "base" / "evaluation" / name
        folder.mkdir(parents=True)
        sweep.write_table(folder / sweep.TABLE, [{**more, **row}])
        scored = Scored({"fid": 9.0}, {"extractor": "inception", "models": models})
        sweep.write_scored(folder / sweep.SCORED, "point", {"inception": scored})
    return tmp_path


def test_a_sweep_belongs_to_the_model_with_the_same_stages(swept):
    base, sr = str(swept / "base"), str(swept / "sr")
    sweeps = results.drawn_by({"base": [base], "sr": [base, sr], "other": [base, "other"]})
    sweeps = results.sweeps(sweeps, str)["sweeps"]
    assert [(one["run"], one["name"]) for one in sweeps] == [("base", "both"), ("base", "own"), ("sr", "row")]
    points = {one["name"]: one["points"][0] for one in sweeps}
    assert points["own"]["scores"] == {"guidance": 2.0, "fid": 9.0}  # Scores that are not finite are omitted.
    assert points["own"]["choices"] == {"guidance": "2.0", "ema": "ema", "checkpoint": "3"}
    assert points["both"]["choices"] is points["row"]["choices"] is None


def test_pictures_of_runs_have_urls_without_their_paths(tmp_path, slow):
    run = written_sweeps.write_run(tmp_path / "run")
    app = server.app(server.Site("imagen_jax", {"slow": slow}, {"slow": [str(run)]}), HOSTS)
    name = results.sweep.REAL
    assert ask(app, f"/api/shown/{name}")[0] == 404
    (one,) = json.loads(ask(app, "/api/sweeps")[2])["sweeps"]
    assert str(tmp_path) not in json.dumps(one)
    status, headers, png = ask(app, one["real"])
    assert (status, headers["content-type"]) == (200, "image/png")
    assert png == (run / "evaluation" / "step_00000002" / name).read_bytes()


def test_training_curves_of_stages_are_read_again_when_they_change(tmp_path, monkeypatch):
    base, sr = tmp_path / "base", tmp_path / "sr"
    for folder in (base, sr):
        folder.mkdir()
        (folder / run_log.METRICS).write_text(run_log.metrics_line(1, {"loss": 2.0}))
    read, lines_known = run_log.read_more_metrics, []
    more = lambda path, tail, rows: lines_known.append(len(rows)) or read(path, tail, rows)
    monkeypatch.setattr(run_log, "read_more_metrics", more)
    workdirs = {"sr": [str(base), str(sr)], "base": [str(base)]}
    training = [results.training(workdirs, str) for _ in range(2)][1]
    assert [run["name"] for run in training["runs"]] == training["names"] == ["base", "sr"]
    with (sr / run_log.METRICS).open("a") as file:
        file.write(run_log.metrics_line(2, {"loss": 1.0}))
    assert results.training(workdirs, str)["runs"][1]["curves"]["loss"] == [(1, 2.0), (2, 1.0)]
    # Numbers of lines that are not parsed again, for each run in turn.
    assert lines_known == [0, 0, 1, 1, 1, 1]


def test_the_name_of_a_folder_may_contain_commas(tmp_path):
    (tmp_path / "a,b").mkdir()
    assert web_command.stages_of(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")]
    assert web_command.stages_of("a,b") == ["a", "b"]
    with pytest.raises(ValueError, match="--workdir=a,b does not exist"):
        drawing.open_alone(["a", "b"], [{}, {}])


def test_runs_with_equal_names_get_numbers():
    workdirs = [["a/run"], ["b/run"], ["c/base", "c/sr"]]
    assert results.named(workdirs) == dict(zip(("run", "run_2", "base + sr"), workdirs, strict=True))


def test_the_queue_continues_after_a_model_fails(site, slow, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory\nmore")

    queue = site.queue
    with monkeypatch.context() as patched:
        patched.setattr(slow, "draw", fail)
        job = queue.add([site.picture(a_picture())])
        wait_for(lambda: job.ended)
    assert (job.state, job.error) == ("failed", "RuntimeError: out of memory")
    slow.go.release(2)
    after = queue.add([site.picture(a_picture())])
    wait_for(lambda: after.state == "done")


def test_previews_of_a_second_batch_belong_to_its_pictures():
    job = jobs.DrawingJob([])
    look = jobs._Looks(job, [4, 5, 6])
    two, seen = np.zeros((2, 2, 2, 3), np.uint8), []
    for level in (9.0, 1.0, 9.0):  # The last batch is padded, and the padding is removed.
        look._last = 0.0
        look(two, level)
        seen.append(sorted(job.looks))
    assert seen == [[4, 5], [4, 5], [6]]
    job.cancelled = True
    with pytest.raises(Cancelled):
        look(two, 1.0)


def test_previews_of_both_stages_of_a_cascade_belong_to_their_pictures():
    """The first stage has batches of four, the second of two. Levels may rise within a batch."""
    job = jobs.DrawingJob([])
    look, seen = jobs._Looks(job, [4, 5, 6, 7, 8]), []
    small, large = np.zeros((4, 2, 2, 3), np.uint8), np.zeros((2, 600, 600, 3), np.uint8)
    for images in (small, large, large, small, large):
        for level in (9.0, 4.0, 5.0):
            look._last = 0.0
            look(images, level)
            seen.append(sorted(job.looks))
    assert seen[::3] == seen[1::3] == seen[2::3] == [[4, 5, 6, 7], [4, 5], [6, 7], [8], [8]]
    shown = Image.open(io.BytesIO(base64.b64decode(job.looks[8])))
    assert shown.size == (200, 200)


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1" * 7, "\u0663", "x"])
def test_an_invalid_number_in_a_path_gives_status_404(site, number):
    app = server.app(site, HOSTS)
    _, content = post(app, [a_picture()])
    for path in (f"{number}.png", f"0/{number}.png"):
        assert ask(app, f"/api/jobs/{content['job']}/{path}")[0] == 404


def test_checking_the_words_of_very_long_prompts_is_an_error(site):
    status, content = post(server.app(site, HOSTS), {"model": "slow", "prompts": ["a" * 200_001]}, "/api/words")
    assert status == 400 and content["error"] == "the prompts must have at most 200,000 letters"


def test_opening_a_fifth_stream_of_a_job_closes_the_first(site):
    job = site.queue.add([site.picture(a_picture())])
    app = server.app(site, HOSTS)
    ended = threading.Thread(target=ask, args=(app, f"/api/jobs/{job.name}"), daemon=True)
    ended.start()
    wait_for(lambda: job.streams == 1)
    job.streams += 4  # As four more tabs would.
    wait_for(lambda: not ended.is_alive())


def test_curves_are_thinned_while_lines_arrive_and_keep_their_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_MAX_POINTS", 10)
    path, values = tmp_path / run_log.METRICS, np.random.default_rng(0).normal(size=57)
    lines = [run_log.metrics_line(i, {"loss": values[i], "late": np.nan}) for i in range(57)]
    for count in (3, 57):
        path.write_text("".join(lines[:count]))
        _, curves = results._metrics(path)
        points = curves["loss"].points()
        groups = np.array_split(np.arange(count), range(8, 57, 8)) if count > 10 else range(count)
        expected = [(np.mean(rows), values[rows].mean()) for rows in groups]
        np.testing.assert_allclose(points, expected, rtol=1e-12)
        assert curves["late"].points() == []
    path.write_text(lines[0])  # Continued from an earlier step.
    assert results._metrics(path)[1]["loss"].points() == [(0.0, values[0])]


def test_behind_a_proxy_every_url_of_the_page_is_below_the_root_path(slow, tmp_path):
    site = server.Site("imagen_jax", {"slow": slow}, {"slow": ["runs/no run"]}, root="/draw")
    app = server.app(site, HOSTS, "t")
    status, headers, _ = ask(app, "/draw/?token=t")
    assert (status, headers["location"]) == (303, "/draw/")
    cookie = headers["set-cookie"].partition(";")[0]
    for name in ("", "draw.js", "results.js", "prompts.js", "editing.js", "history.js"):
        for prefix in ("/draw/", "/"):  # A proxy may remove the root path.
            status, _, content = ask(app, prefix + name, cookie=cookie)
            urls = re.findall(r'["`](/[\w/.]*)', content.decode())
            assert status == 200 and all(url.startswith("/draw/") for url in urls if len(url) > 1)
    assert b'src="/draw/draw.js"' in ask(app, "/draw/", cookie=cookie)[2]
    said = json.loads(ask(app, "/draw/api/draw", json.dumps([a_picture()]).encode(), (JSON,), cookie=cookie)[2])
    assert said["pictures"][0]["url"].startswith("/draw/api/jobs/")
    assert site.show(tmp_path / "a.png").startswith("/draw/api/shown/")


@pytest.mark.parametrize(("path", "root"), [("", ""), ("/", ""), ("/a/b-c/", "/a/b-c")])
def test_a_root_path_ends_without_a_slash(path, root):
    assert web_command.root_of(path) == root


@pytest.mark.parametrize("path", ["draw", "//evil", "/a b", '/"'])
def test_an_invalid_root_path_is_an_error(path):
    with pytest.raises(ValueError, match="write a path such as /draw"):
        web_command.root_of(path)
