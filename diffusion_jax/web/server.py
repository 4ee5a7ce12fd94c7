"""Define the routes of the web page's server. access.py decides which requests they answer.

The server sends three kinds of files: the page's own files, the pictures that it drew, and the
results that training and evaluation wrote into workdirs. It chooses all paths itself and never
opens a path that a browser sends.
"""

import asyncio
import hashlib
import io
import json
import pathlib
import re
import shlex
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from diffusion_jax import files, runs
from diffusion_jax.config import field_docs, ranges
from diffusion_jax.draw import options
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Option, Values
from diffusion_jax.draw.seeds import MOST
from diffusion_jax.files import untrusted
from diffusion_jax.web import about, results, uploads
from diffusion_jax.web.access import Answer, guarded, with_headers
from diffusion_jax.web.jobs import ENDED, PICTURES, DrawingJob, Picture, Queue
from diffusion_jax.weights import restore

_SCRIPTS_AND_STYLE = (
    "page.css",
    "draw.js",
    "fields.js",
    "prompts.js",
    "editing.js",
    "history.js",
    "results.js",
    "plots.js",
)
_FILES = {"/": "page.html", **{f"/{name}": name for name in _SCRIPTS_AND_STYLE}}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_MAX_LETTERS = 2_000  # The largest length of a prompt or other text.
_MAX_BODY = 2**20  # The largest size of a request in bytes.
_STREAMS = 4  # The largest number of tabs that watch one job.
_MAX = {"steps": 1_000, "height": 2_048, "width": 2_048}  # Limits on settings that cost time.
_PER_STAGE = ("guidance", "steps")  # The page has a field for each stage of a cascade.
_KINDS = {bool: "switch", int: "whole", float: "number", str: "text"}


class Site:
    """The models that draw pictures, and the runs whose results are shown."""

    def __init__(
        self,
        package: str,
        models: Mapping[str, Model],
        workdirs: Mapping[str, Sequence[str]],
        load: Callable[[str], Model] | None = None,
        root: str = "",
    ) -> None:
        """Start the queue of jobs.

        Args:
            package: The system's package, such as imagen_jax. The page shows commands of the form
                `python -m PACKAGE.sample`, which reproduce its pictures.
            models: The loaded models, keyed by name.
            workdirs: The workdirs of the stages of each model, keyed by the model's name.
            load: Loads a model that is not in `models`, given its name.
            root: The path of the page behind a proxy, such as "/draw", or "" for the top.
        """
        self.package, self.models, self.workdirs = package, dict(models), dict(workdirs)
        self.root = root
        self._load, self._loading = load, threading.Lock()
        self.queue = Queue(self.models)
        self.shown: dict[str, pathlib.Path] = {}
        """Paths of pictures, keyed by the name under which the page may request them."""

    def show(self, picture: pathlib.Path) -> str:
        """Allow the page to request a picture file of a run, and return the picture's URL."""
        name = hashlib.blake2b(str(picture).encode(), digest_size=12).hexdigest()
        self.shown[name] = picture
        return f"{self.root}/api/shown/{name}.png"

    def open_waiting(self) -> list[dict[str, Any]]:
        """Load models that now have checkpoints. Return [{"name", "why"}, ...] for the others."""
        load, still = self._load, []
        if load is None:
            return []
        with self._loading:
            for name in self.workdirs.keys() - self.models.keys():
                why = about.waiting(self.workdirs[name])
                try:
                    if not why:
                        self.models[name] = load(name)
                except (ValueError, OSError) as error:  # Perhaps a checkpoint was just removed.
                    why = str(error)
                if why:
                    still.append({"name": name, "why": why})
        return sorted(still, key=lambda one: one["name"])

    def describe(self, name: str) -> dict[str, Any]:
        """Return the data that the page needs for a model, such as its checkpoints and settings."""
        model = self.models[name]
        last = model.stages[-1]
        folder = files.path(last.workdir) / runs.CHECKPOINTS
        steps = restore.steps(folder)
        stored = model.averages(len(model.stages) - 1, last.step) if last.step else []
        chosen = model.values[-1].get("ema", "ema")
        averages = dict.fromkeys(["ema", *stored, "raw", chosen])
        return {
            "name": name,
            "words": repr(model),
            "stages": [files.path(stage.workdir).name for stage in model.stages],
            "checkpoints": sorted({*steps, last.step}) if last.step else [],
            "checkpoint": last.step or None,
            "in_memory": last.step not in steps,
            "averages": list(averages) if last.step else [],
            "average": chosen,
            **about.describe(model),
            "square": not model.any_shape,
            "enlarger": model.enlarger and model.enlarger._asdict(),
            "needs_prompt": about.needs_prompt(model),
            "fields": [_field(name, option, model) for name, option in options.changeable(model.options).items()],
        }

    def picture(self, request: Any) -> Picture:
        """Return a browser's request for one picture as a Picture.

        Raises ValueError if the request is invalid.
        """
        if not isinstance(request, dict):
            raise ValueError("a picture must be a JSON object with model, prompt, seed and choices")
        name, prompt, seed = (request.get(k) for k in ("model", "prompt", "seed"))
        if name not in self.models:
            raise ValueError(f"there is no model {name!r}: choose from {', '.join(self.models)}")
        if not isinstance(prompt, str) or len(prompt) > _MAX_LETTERS:
            raise ValueError(f"the prompt must be a string of at most {_MAX_LETTERS:,} characters")
        if not prompt.strip() and about.needs_prompt(self.models[name]):
            raise ValueError("enter a prompt, because this model was never trained without one")
        if isinstance(seed, str) and re.fullmatch(r"[0-9]{1,20}", seed):
            seed = int(seed)  # JavaScript's numbers have 53 bits, so the page sends text.
        if type(seed) is not int or not 0 <= seed <= MOST:
            raise ValueError(f"the seed is {seed!r}: it must be a whole number from 0 to 2^64 - 1")
        values = request.get("choices") or {}
        if not isinstance(values, dict):
            raise ValueError("choices must be a JSON object of names and values")
        choices = tuple(sorted(_checked(self.models[name], values)))
        return Picture(name, prompt, seed, choices, self.queue.uploads.edit(request.get("edit", {})))

    def command(self, picture: Picture) -> str:
        """Return the shell command that draws a picture again, even after further training."""
        model = self.models[picture.model]
        enlarger = model.enlarger if picture.edit.enlarge else None
        stages = slice(enlarger.stage if enlarger else 0, None)
        words = ["python", "-m", f"{self.package}.sample"]
        words += [f"--workdir={workdir}" for workdir in self.workdirs[picture.model][stages]]
        words += [f"--prompt={picture.prompt}", f"--seed={picture.seed}"]
        # The option values with which the page was started. They are the same for all stages.
        values = {name: value for name, value in model.values[0].items() if (name, value) != ("ema", "ema")}
        if steps := tuple(stage.step for stage in model.stages if stage.step):
            values["checkpoint"] = steps
        text = lambda value: ",".join(map(str, value[stages] if type(value) is tuple else [value]))
        values |= dict(picture.choices)
        words += [f"--{name}={text(value)}" for name, value in values.items()]
        words += [*uploads.flags(picture.edit), "--out=pictures"]
        return " ".join(map(_quoted, words))

    def report(self, job: DrawingJob) -> dict[str, Any]:
        """Return the progress of a drawing job as JSON values, for the tab that watches it."""
        return {
            "state": job.state,
            "ahead": self.queue.ahead(job) if job.state == "waiting" else 0,
            "drawn": [n for n, p in enumerate(job.pictures) if self.queue.files(p) is not None],
            "looks": dict(job.looks),
            "level": job.level,
            "error": job.error,
        }


def app(site: Site, hosts: Sequence[str], token: str = "") -> Any:
    """Return the web application.

    If `hosts` is not empty, it answers only requests for these host names. If `token` is not empty,
    requests must carry it, as a cookie or in the URL. A browser that opens /?token=... stores the
    token as a cookie. A proxy may pass the path of a request with site.root or without it.
    """
    files = [Route(path, _file(name, site.root)) for path, name in _FILES.items()]
    routes = [
        Route(r.path, guarded(r.endpoint, hosts, token, site.root), methods=list(r.methods or ()))
        for r in [*files, *_drawing(site), *_results(site)]
    ]
    return with_headers(Starlette(routes=routes), site.root)


def _drawing(site: Site) -> list[Route]:
    looking_up = asyncio.Lock()

    async def models(request: Request) -> Response:
        waiting = await asyncio.to_thread(site.open_waiting)
        return JSONResponse(
            {"models": [site.describe(name) for name in site.models], "waiting": waiting, "package": site.package}
        )

    async def words(request: Request) -> Response:
        asked = await _json(request)
        if not isinstance(asked, dict) or not isinstance(asked.get("prompts"), list):
            raise ValueError("a request must be a JSON object with model and prompts")
        prompts = [prompt for prompt in asked["prompts"] if isinstance(prompt, str)]
        if sum(map(len, prompts)) > _MAX_LETTERS * PICTURES:
            raise ValueError(f"the prompts must have at most {_MAX_LETTERS * PICTURES:,} letters")
        model = site.models[str(asked.get("model"))]
        async with looking_up:  # So that other requests find a free thread.
            return JSONResponse(await asyncio.to_thread(about.unknown, model, prompts))

    async def upload(request: Request) -> Response:
        sent = await _json(request, uploads.MAX_BODY)
        return JSONResponse(await asyncio.to_thread(site.queue.uploads.add, sent))

    async def draw(request: Request) -> Response:
        requests = await _json(request)
        if not isinstance(requests, list) or not 0 < len(requests) <= PICTURES:
            raise ValueError(f"a request must be a list of 1 to {PICTURES} pictures")
        pictures = [site.picture(one) for one in requests]
        job = site.queue.add(pictures)
        address = f"{site.root}/api/jobs/{job.name}"
        answers = [
            {"url": f"{address}/{n}.png", "command": site.command(picture)} for n, picture in enumerate(pictures)
        ]
        return JSONResponse({"job": job.name, "pictures": answers})

    async def events(request: Request) -> Response:
        job = _job(site, request)

        async def lines() -> AsyncIterator[str]:
            sent, job.streams = None, job.streams + 1
            number = job.streams
            with job.watched():
                while job.streams - number < _STREAMS:  # Newer streams replace old ones.
                    now = site.report(job)
                    if now != sent:
                        sent = now
                        yield f"data: {json.dumps(now)}\n\n"
                    # The report, not the job: a job may end after its report was made.
                    if now["state"] in ENDED or await request.is_disconnected():
                        return
                    await asyncio.sleep(0.05)

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def cancel(request: Request) -> Response:
        await _json(request)
        site.queue.cancel(_job(site, request))
        return JSONResponse({})

    async def picture(request: Request) -> Response:
        job, number = _job(site, request), _number(request.path_params["number"])
        stage = _number(request.path_params["stage"]) if "stage" in request.path_params else -1
        return _png((site.queue.files(job.pictures[number]) or {})[stage])

    async def zipped(request: Request) -> Response:
        job = _job(site, request)
        content = await asyncio.to_thread(_zip, site, job)
        saved = {"Content-Disposition": f'attachment; filename="pictures_{job.name[:6]}.zip"'}
        return Response(content, media_type="application/zip", headers=saved)

    return [
        Route("/api/models", models),
        Route("/api/words", words, methods=["POST"]),
        Route("/api/pictures", upload, methods=["POST"]),
        Route("/api/draw", draw, methods=["POST"]),
        Route("/api/jobs/{job}.zip", zipped),
        Route("/api/jobs/{job}", events),
        Route("/api/jobs/{job}/cancel", cancel, methods=["POST"]),
        Route("/api/jobs/{job}/{number}.png", picture),
        Route("/api/jobs/{job}/{number}/{stage}.png", picture),
    ]


def _results(site: Site) -> list[Route]:
    async def sweeps(request: Request) -> Response:
        read = lambda: results.sweeps(results.drawn_by(site.workdirs), site.show)
        return JSONResponse(untrusted.printable_json(await asyncio.to_thread(read)))

    async def training(request: Request) -> Response:
        shown = await asyncio.to_thread(results.training, site.workdirs, site.show)
        return JSONResponse(untrusted.printable_json(shown))

    async def shown(request: Request) -> Response:
        path = site.shown[request.path_params["name"]]
        return _png(await asyncio.to_thread(untrusted.read_plain, path))

    return [Route("/api/sweeps", sweeps), Route("/api/training", training), Route("/api/shown/{name}.png", shown)]


def _file(name: str, root: str) -> Answer:
    """Return a handler that sends a file of the page, in which all URLs are below `root`."""

    async def answer(request: Request) -> Response:
        content = (pathlib.Path(__file__).parent / name).read_text()
        if root:
            content = re.sub(r"([\"`])(/api/|/\w+\.(?:js|css)\b)", rf"\1{root}\2", content)
        return Response(content, media_type=_TYPES[name.rpartition(".")[2]])

    return answer


def _png(content: bytes | None) -> Response:
    if content is None:
        raise LookupError
    return Response(content, media_type="image/png")


def _zip(site: Site, job: DrawingJob) -> bytes:
    out, commands = io.BytesIO(), []
    with zipfile.ZipFile(out, "w") as archive:
        for number, picture in enumerate(job.pictures):
            if drawn := site.queue.files(picture):
                words = re.sub(r"\W+", "_", picture.prompt)[:60].strip("_")
                name = f"{number:03}_{words}_{picture.seed}.png"
                archive.writestr(name, drawn[-1])
                commands.append(f"# {name}\n{site.command(picture)}\n")
        archive.writestr("commands.txt", "\n".join(commands))
    return out.getvalue()


async def _json(request: Request, max_body: int = _MAX_BODY) -> Any:
    """Return the JSON of a request. Browsers do not let other sites send JSON to this server."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise ValueError("the content-type of the request must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_body:
            raise ValueError(f"the request is too large: {max_body:,} bytes are allowed")
        parts.append(part)
    return json.loads(b"".join(parts) or b"null")


def _number(text: str) -> int:
    """Return a number in a path. Raises LookupError if it is not one, or has too many digits."""
    if not re.fullmatch("[0-9]{1,6}", text):
        raise LookupError
    return int(text)


def _job(site: Site, request: Request) -> DrawingJob:
    return site.queue.jobs[request.path_params["job"]]


def _quoted(word: str) -> str:
    """Quote a word for the shell. Escape control characters, which could control a terminal."""
    if word.isprintable():
        return shlex.quote(word)
    escape = lambda c: {"\\": "\\\\", "'": "\\'"}.get(c, c if c.isprintable() else _escaped(c))
    return f"$'{''.join(map(escape, word))}'"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 128 else f"\\U{code:08x}"


def _field(name: str, option: Option, model: Model) -> dict[str, Any]:
    group, _, field = option.field.partition(".")
    values = [getattr(getattr(stage.settings, group), field) for stage in model.stages]
    shown = [str(value) if value == float("inf") else value for value in values]
    same = len(shown) == 1 or (len(set(shown)) == 1 and name not in _PER_STAGE)
    return {
        "name": name,
        "kind": _KINDS[ranges.kind_of(option.hint)],
        "options": list(map(str, ranges.names_of(option.hint))),
        "about": field_docs.abouts(option.hint),
        "help": option.help,
        "value": shown[0] if same else ", ".join(map(_short, shown)),
    }


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _checked(model: Model, values: Values) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs of a request, with checked types.

    A list, which holds one value per stage, becomes a tuple. Raises ValueError for a name, type or
    value that is not allowed.
    """
    weights = {name: model.options[name] for name in ("ema", "checkpoint")}
    allowed, checked = {**options.changeable(model.options), **weights}, []
    for name, value in values.items():
        each = value if type(value) is list else [value]
        each = tuple(options.read(allowed, {name: one}).get(name) for one in each)
        for one in each:
            if one is None:
                raise ValueError(f"the setting {name} has no value: enter one")
            if name in _MAX and one > _MAX[name]:
                field = allowed[name].field.partition(".")[2]
                raise ValueError(f"{field} is {one}: it must be at most {_MAX[name]:,} on this page")
            if isinstance(one, str) and len(one) > _MAX_LETTERS:
                raise ValueError(f"{name} has {len(one):,} characters: give {_MAX_LETTERS:,} at most")
        checked.append((name, each if type(value) is list else each[0]))
    return checked
