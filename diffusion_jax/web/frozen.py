"""Write a report on runs: the web page as one HTML file with all data and pictures.

If the pictures are large together, the file holds small copies, with links to the runs' own files.
"""

import base64
import functools
import io
import json
import os
import pathlib
import re
import urllib.parse
from collections.abc import Sequence

from PIL import Image

from diffusion_jax import files, runs
from diffusion_jax.evaluate import sweep
from diffusion_jax.evaluate.figures import Band
from diffusion_jax.files import untrusted
from diffusion_jax.logs import run_log
from diffusion_jax.web import results

PAGE = "report.html"
_HERE = pathlib.Path(__file__).parent
_ALONE = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
_SAMPLES = 12  # The largest number of sample sheets per run in a report, besides the last one,
_SHEETS = 48  # and that of all runs together, but at least one per run.
_MAX_BYTES = 2**24  # Above this size, a report holds small copies of the pictures,
_SIDE = 640  # whose longest side has so many pixels.


def write(workdir: str | pathlib.Path) -> pathlib.Path:
    """Write the HTML report on a run into its workdir, and return the report's path."""
    out = files.path(workdir) / PAGE
    files.write_whole(out, page([workdir], folder=out.parent))
    return out


def page(workdirs: Sequence[str | pathlib.Path], bands: Sequence[Band] = (), folder: files.Path = ".") -> str:
    """Return the text of a report on runs: one self-contained HTML page.

    Args:
        workdirs: The workdirs of the runs.
        bands: Shaded areas behind the curves in the figure of FID over CLIP score.
        folder: The folder of the report, from which small copies link to the whole pictures.

    Raises:
        FileNotFoundError: A workdir holds neither logged metrics nor sweeps.
        ValueError: A file of metrics or of a sweep is damaged.
    """
    named = results.named([[str(workdir)] for workdir in workdirs])
    sweeps = [(name, one) for name, (folder,) in named.items() for one in sweep.read_all(folder)]
    for name, (workdir,) in named.items():
        root = files.path(workdir)
        if not untrusted.is_plain(root / run_log.METRICS, root) and name not in dict(sweeps):
            raise FileNotFoundError(
                f"{workdir} holds neither {run_log.METRICS} nor {runs.EVALUATION}/*/{sweep.TABLE}: it is not a workdir"
            )
    most = min(_SAMPLES, max(1, _SHEETS // len(named)))

    def data_with(show: results.Show) -> str:
        drawn, trained = results.sweeps(sweeps, show), results.training(named, show, most)
        damaged = [*drawn["damaged"], *(run["damage"] for run in trained["runs"])]
        if message := next(filter(None, damaged), ""):
            raise ValueError(message)
        content = {
            "title": " and ".join(named),
            "bands": [band._asdict() for band in bands],
            "/api/sweeps": drawn,
            "/api/training": trained,
        }
        # Without "<", no text in the data can end the <script> element.
        text = json.dumps(untrusted.printable_json(content), allow_nan=False)
        return text.replace("<", r"\u003c")

    data = data_with(_inlined)
    if len(data) > _MAX_BYTES:
        data = data_with(functools.partial(_small_copy, folder=folder))
    code = "".join(_read(name) for name in ("plots.js", "results.js"))
    code = re.sub(r"^(import .*\n|export )", "", code, flags=re.MULTILINE)
    script = f'<script type="application/json" id="kept">{data}</script>\n'
    script += f'<script type="module">\n{code}</script>'
    parts = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{_ALONE}',
        '<link rel="stylesheet" href="/page.css">': f"<style>\n{_read('page.css')}</style>",
        '<script type="module" src="/draw.js"></script>': script,
    }
    html = _read("page.html")
    for of_live_page, of_file in parts.items():
        html = html.replace(of_live_page, of_file)
    return html


def _inlined(picture: pathlib.Path) -> str:
    content = untrusted.read_plain(picture) or b""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _small_copy(picture: pathlib.Path, folder: files.Path) -> str:
    """Return the URL of a small JPEG, followed by "#" and the path of the picture from `folder`.

    From or to a bucket there is no such path.
    """
    buffer = io.BytesIO()
    try:
        image = untrusted.open_image(untrusted.read_plain(picture) or b"").convert("RGB")
    except (OSError, ValueError):  # The picture is damaged.
        image = Image.new("RGB", (1, 1))
    image.thumbnail((_SIDE, _SIDE))
    image.save(buffer, "JPEG", quality=80)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    if files.store_path(picture) or files.store_path(folder):
        return url
    return f"{url}#{urllib.parse.quote(os.path.relpath(picture, folder))}"


def _read(name: str) -> str:
    return (_HERE / name).read_text()
