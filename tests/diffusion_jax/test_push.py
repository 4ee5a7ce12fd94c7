"""pack --push uploads a workdir through huggingface_hub to a stand-in of the hub on localhost."""

import base64
import http.server
import json
import pathlib
import re
import threading

import huggingface_hub
import pytest
from huggingface_hub import constants

from diffusion_jax import pack

ROOT = pathlib.Path(__file__).parents[2]
NAME = "someone/emoji"
# For files of Git LFS, huggingface_hub calls httpx with the deprecated argument `data`.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's API that an upload needs. Large files go through Git LFS."""

    def answer(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        hub, body, path = self.server.state, self.body(), self.path.partition("?")[0]
        owner = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if owner != "right":
            return self.answer({"error": "You don't have the rights to create a model"}, 403)
        base = f"http://localhost:{self.server.server_port}"
        if path == "/api/repos/create":
            hub["created"] = json.loads(body)
            return self.answer({"url": f"{base}/{NAME}"})
        if path == "/api/validate-yaml":
            hub["validated"] = json.loads(body)["content"]
            return self.answer({"errors": [], "warnings": []})
        if path == f"/api/models/{NAME}/preupload/main":
            mode = lambda name: "lfs" if name.endswith(".safetensors") else "regular"
            named = [file["path"] for file in json.loads(body)["files"]]
            rows = [{"path": n, "uploadMode": mode(n), "shouldIgnore": False} for n in named]
            return self.answer({"files": rows})
        if path == f"/{NAME}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            href = lambda oid: {"upload": {"href": f"{base}/lfs/{oid}"}}
            rows = [{**row, "actions": href(row["oid"])} for row in objects]
            return self.answer({"transfer": "basic", "objects": rows})
        assert path == f"/api/models/{NAME}/commit/main", path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub["files"][value["path"]] = hub["lfs"][value["oid"]]
        return self.answer({"commitOid": "1" * 40, "commitUrl": f"{base}/{NAME}/commit/1"})

    def do_PUT(self):
        self.server.state["lfs"][self.path.removeprefix("/lfs/")] = self.body()
        self.answer({})

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("localhost", 0), Hub)
    server.state = {"files": {}, "lfs": {}}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://localhost:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Its server is not emulated.
    monkeypatch.setenv("HF_TOKEN", "right")
    yield server.state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def workdir(tmp_path):
    """A packed workdir with the config of a shipped model, and a few bytes as weights."""
    (tmp_path / "checkpoints" / "3600").mkdir(parents=True)
    config = (ROOT / "models" / "emoji32" / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "checkpoints" / "3600" / "params.safetensors").write_bytes(bytes(range(200)))
    return tmp_path


def test_push_uploads_every_file_and_a_card_with_the_commands_to_draw(hub, workdir):
    assert pack.push(workdir, NAME).endswith(f"/{NAME}")
    assert (hub["created"]["name"], hub["created"]["organization"]) == ("emoji", "someone")
    local = [path for path in workdir.rglob("*") if path.is_file()]
    assert hub["files"] == {str(p.relative_to(workdir)): p.read_bytes() for p in local}
    card = hub["files"]["README.md"].decode()
    assert hub["validated"] == card and card.startswith("---\npipeline_tag: text-to-image\n")
    assert "python -m imagen_jax.sample --workdir=emoji --prompt='a cat face, noto style" in card


def test_push_keeps_a_card_that_the_user_wrote(hub, workdir):
    (workdir / "README.md").write_text("# Mine\n")
    pack.push(workdir, NAME)
    assert hub["files"]["README.md"] == b"# Mine\n"


def test_push_without_rights_is_one_line_that_names_the_way_out(hub, workdir, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ValueError, match=r"--push=someone/emoji failed \(HfHubHTTPError") as raised:
        pack.push(workdir, NAME)
    message = str(raised.value)
    assert "rights to create a model" in message and "\n" not in message
    assert message.endswith(f"write to someone, then upload the model with hf upload {NAME} {workdir}")
    assert hub["files"] == {}


def test_push_without_a_token_or_with_another_name_is_an_error_before_packing(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match=re.escape("run hf auth login, or set HF_TOKEN")):
        pack.check_push(NAME)
    with pytest.raises(ValueError, match=r"--push=emoji is no repository .*: give OWNER/NAME"):
        pack.check_push("emoji")
