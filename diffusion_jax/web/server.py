"""The page's server: what it answers, and whom.

It gives out its own files, pictures that it drew, and what training and evaluation wrote into the
runs that it was started with, by names of its own: no path that a browser sends is ever opened.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import json
import pathlib
import shlex
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from absl import logging
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from diffusion_jax import runs
from diffusion_jax.config import ranges
from diffusion_jax.draw.loaded import Loaded
from diffusion_jax.machine import files
from diffusion_jax.web import results
from diffusion_jax.web.jobs import PICTURES, Full, Job, Picture, Queue
from diffusion_jax.weights import restore

_FILES = {
    "/": "page.html",
    **{f"/{name}": name for name in ("page.css", "draw.js", "results.js", "plots.js")},
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_LETTERS = 2_000  # Of a prompt.
_BODY = 2**20  # Bytes of a request.
_MOST = {"steps": 1_000, "height": 2_048, "width": 2_048}  # Of the settings that cost time.
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TOKEN = "token"
Answer = Callable[[Request], Awaitable[Response]]


class Site:
    """Models that draw, and runs whose results are shown."""

    def __init__(
        self, package: str, models: Mapping[str, Loaded], workdirs: Mapping[str, Sequence[str]]
    ) -> None:
        """`workdirs` are those of each model's stages, `package` whose commands draw the same."""
        self.package, self.models, self.workdirs = package, dict(models), dict(workdirs)
        self.queue = Queue(self.models)
        self.shown: dict[str, pathlib.Path] = {}
        """Pictures of runs that the page was told of, by a name that it may ask for."""

    def show(self, picture: pathlib.Path) -> str:
        """The address of a picture of a run."""
        name = hashlib.blake2b(str(picture).encode(), digest_size=12).hexdigest()
        self.shown[name] = picture
        return f"/api/shown/{name}.png"

    def describe(self, name: str) -> dict[str, Any]:
        """What the page says of a model and offers to choose."""
        model = self.models[name]
        last = model.stages[-1]
        folder = files.path(last.workdir) / runs.CHECKPOINTS
        steps = restore.steps(folder)
        stored = model.averages(len(model.stages) - 1, last.step) if last.step else []
        averages = dict.fromkeys(["ema", *stored, "raw", model.choice.ema])
        return {
            "name": name,
            "words": repr(model),
            "stages": len(model.stages),
            "checkpoints": sorted({*steps, last.step}) if last.step else [],
            "checkpoint": last.step or None,
            "in_memory": last.step not in steps,
            "averages": list(averages) if last.step else [],
            "average": model.choice.ema,
            "fields": [_field(field, model) for field in fields(model)],
        }

    def picture(self, asked: Any) -> Picture:
        """A picture that a browser asks for; ValueError for what is none."""
        if not isinstance(asked, dict):
            raise ValueError("a picture is an object with model, prompt, seed and choices")
        name, prompt, seed = (asked.get(k) for k in ("model", "prompt", "seed"))
        if name not in self.models:
            raise ValueError(f"there is no model {name!r}: choose from {', '.join(self.models)}")
        if not isinstance(prompt, str) or not prompt.strip() or len(prompt) > _LETTERS:
            raise ValueError(f"a prompt is a text of 1 to {_LETTERS:,} letters")
        if type(seed) is not int or not 0 <= seed < 2**31:
            raise ValueError(f"the seed is {seed!r}: it must be a whole number from 0 to 2^31 - 1")
        choices = asked.get("choices") or {}
        if not isinstance(choices, dict):
            raise ValueError("choices are an object of names and values")
        return Picture(name, prompt, seed, tuple(sorted(self._checked(name, choices).items())))

    def _checked(self, name: str, choices: Mapping[str, Any]) -> dict[str, Any]:
        """The choices with values of their types; ValueError for what cannot be."""
        model, checked = self.models[name], {}
        known = {field.name: field for field in fields(model)}
        for key, value in choices.items():
            if key in ("ema", "checkpoint"):
                checked[key] = str(value) if key == "ema" else int(value)
                continue
            if key not in known:
                raise ValueError(f"there is no choice {key!r}: choose from {', '.join(known)}")
            field = known[key].metadata["field"].partition(".")[2]
            each = [_read(known[key], one) for one in (value if type(value) is list else [value])]
            checked[key] = tuple(each) if type(value) is list else each[0]
            if key in _MOST and max(each) > _MOST[key]:
                raise ValueError(f"{field} is {max(each)}: here it is {_MOST[key]:,} at most")
        return checked

    def command(self, picture: Picture) -> str:
        """The command that draws the same picture, whatever is trained meanwhile."""
        words = ["python", "-m", f"{self.package}.sample"]
        words += [f"--workdir={workdir}" for workdir in self.workdirs[picture.model]]
        words += [f"--prompt={picture.prompt}", f"--seed={picture.seed}"]
        model, values = self.models[picture.model], {}
        for field in dataclasses.fields(model.choice):
            value = getattr(model.choice, field.name)
            if "help" in field.metadata and value != field.default:
                values[field.name] = value
        if steps := tuple(stage.step for stage in model.stages if stage.step):
            values["checkpoint"] = steps
        text = lambda value: ",".join(map(str, value if type(value) is tuple else [value]))
        values |= dict(picture.choices)
        words += [f"--{name}={text(value)}" for name, value in values.items()]
        return shlex.join([*words, "--out=pictures"])

    def report(self, job: Job) -> dict[str, Any]:
        """How far a job is, for its tab."""
        return {
            "state": job.state,
            "ahead": self.queue.ahead(job) if job.state == "waiting" else 0,
            "drawn": [n for n, p in enumerate(job.pictures) if self.queue.files(p) is not None],
            "looks": dict(job.looks),
            "level": job.level,
            "error": job.error,
        }


def fields(model: Loaded) -> list[dataclasses.Field]:
    """The settings that can be chosen of a model that is loaded."""
    every = dataclasses.fields(model.choice)
    return [f for f in every if f.metadata.get("field") and not f.metadata["loads"]]


def app(site: Site, hosts: Sequence[str], token: str = "") -> Starlette:
    """The application; requests for other names than `hosts` are refused, and those without the
    token where there is one: /?token=... gives it to a browser, which keeps it as a cookie."""
    files = [Route(path, _file(name)) for path, name in _FILES.items()]
    guarded = [Route(r.path, _guarded(r.endpoint, hosts, token), methods=list(r.methods or ()))
               for r in [*files, *_drawing(site), *_results(site)]]  # fmt: skip
    return Starlette(routes=guarded)


def _drawing(site: Site) -> list[Route]:
    """What can be drawn, and jobs that draw: asked for, followed, cancelled, and their pictures."""

    async def models(request: Request) -> Response:
        return JSONResponse({"models": [site.describe(name) for name in site.models],
                             "package": site.package})  # fmt: skip

    async def draw(request: Request) -> Response:
        asked = await _json(request)
        if not isinstance(asked, list) or not 0 < len(asked) <= PICTURES:
            raise ValueError(f"a drawing has 1 to {PICTURES} pictures")
        pictures = [site.picture(one) for one in asked]
        job = site.queue.add(pictures)
        made = [{"url": f"/api/jobs/{job.name}/{n}.png", "command": site.command(picture)}
                for n, picture in enumerate(pictures)]  # fmt: skip
        return JSONResponse({"job": job.name, "pictures": made})

    async def events(request: Request) -> Response:
        job = _job(site, request)

        async def lines() -> AsyncIterator[str]:
            seen = None
            with job.watched():
                while True:
                    now = job.version, site.queue.ahead(job) if job.state == "waiting" else 0
                    if now != seen:
                        seen = now
                        yield f"data: {json.dumps(site.report(job))}\n\n"
                    if job.ended or await request.is_disconnected():
                        return
                    await asyncio.sleep(0.05)

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def cancel(request: Request) -> Response:
        await _json(request)
        site.queue.cancel(_job(site, request))
        return JSONResponse({})

    async def picture(request: Request) -> Response:
        job, number = _job(site, request), int(request.path_params["number"])
        stage = int(request.path_params.get("stage", -1))
        return _png((site.queue.files(job.pictures[number]) or {})[stage])

    return [
        Route("/api/models", models),
        Route("/api/draw", draw, methods=["POST"]),
        Route("/api/jobs/{job}", events),
        Route("/api/jobs/{job}/cancel", cancel, methods=["POST"]),
        Route("/api/jobs/{job}/{number:int}.png", picture),
        Route("/api/jobs/{job}/{number:int}/{stage:int}.png", picture),
    ]


def _results(site: Site) -> list[Route]:
    """Sweeps and trainings of the models' runs, with their pictures."""

    async def sweeps(request: Request) -> Response:
        read = lambda: results.sweeps(results.drawn_by(site.workdirs), site.show)
        return JSONResponse(await asyncio.to_thread(read))

    async def training(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(results.training, site.workdirs, site.show))

    async def shown(request: Request) -> Response:
        path = site.shown[request.path_params["name"]]
        return _png(await asyncio.to_thread(path.read_bytes) if path.exists() else None)

    return [
        Route("/api/sweeps", sweeps),
        Route("/api/training", training),
        Route("/api/shown/{name}.png", shown),
    ]


def _guarded(answer: Answer, hosts: Sequence[str], token: str) -> Answer:
    """The same answer for those who may have it; mistakes are one line of JSON."""

    async def checked(request: Request) -> Response:
        host = request.headers.get("host", "").rpartition("]")  # [::1]:8765, or a name and a port.
        name = host[0] + host[1] or host[2].partition(":")[0]
        if hosts and name not in hosts:
            return JSONResponse({"error": f"this is not {name}"}, 421)
        cookie = f"{_TOKEN}_{request.scope['server'][1]}"  # Other ports get it too.
        given = request.query_params.get(_TOKEN, "")
        if token and given and hmac.compare_digest(given.encode(), token.encode()):
            welcome = RedirectResponse(request.url.path, 303, _SAFE)
            # Not "strict": a link that somebody follows from elsewhere is to open.
            welcome.set_cookie(cookie, token, httponly=True, samesite="lax")
            return welcome
        kept = request.cookies.get(cookie, "")
        if token and not hmac.compare_digest(kept.encode(), token.encode()):
            return JSONResponse({"error": "open the address with the token that was printed"}, 403)
        try:
            response = await answer(request)
        except LookupError:
            response = JSONResponse({"error": "there is no such thing"}, 404)
        except Full as error:
            response = JSONResponse({"error": str(error)}, 429)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            response = JSONResponse({"error": str(error)}, 400)
        except Exception as error:  # A mistake of ours: the page shows JSON alone.
            logging.exception("a request failed")
            response = JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        response.headers.update(_SAFE)
        return response

    return checked


def _file(name: str) -> Answer:
    """The answer with one of the page's own files."""

    async def answer(request: Request) -> Response:
        content = (pathlib.Path(__file__).parent / name).read_text()
        return Response(content, media_type=_TYPES[name.rpartition(".")[2]])

    return answer


def _png(content: bytes | None) -> Response:
    if content is None:
        raise LookupError
    return Response(content, media_type="image/png")


async def _json(request: Request) -> Any:
    """What a page of ours sent; those of other sites may not send JSON."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise ValueError("send JSON, with its content-type")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _BODY:
            raise ValueError(f"a request has {_BODY:,} bytes at most")
        parts.append(part)
    return json.loads(b"".join(parts) or b"null")


def _job(site: Site, request: Request) -> Job:
    return site.queue.jobs[request.path_params["job"]]


def _field(field: dataclasses.Field, model: Loaded) -> dict[str, Any]:
    """A setting, for the page: its name, its kind, what it may be and what it is."""
    group, _, name = field.metadata["field"].partition(".")
    value = getattr(getattr(model.stages[0].settings, group), name)
    kind = next(k for k in (bool, int, float, str) if k in (_type(field),))
    return {
        "name": field.name,
        "kind": {bool: "switch", int: "whole", float: "number", str: "text"}[kind],
        "options": ranges.options(field.metadata["kind"]),
        "help": field.metadata["help"],
        "value": str(value) if value == float("inf") else value,
    }


def _type(field: dataclasses.Field) -> Any:
    kinds: tuple[Any, ...] = typing.get_args(field.type) or (field.type,)
    return kinds[0]


def _read(field: dataclasses.Field, value: Any) -> Any:
    """A value as the type of its field; ValueError where it is of another."""
    kind = _type(field)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str) and len(value) <= _LETTERS:
        return value
    if kind in (int, float) and isinstance(value, int | float | str) and value != "":
        return kind(value)
    raise ValueError(f"{field.name} is {value!r}, which is no {kind.__name__}")
