"""Emulators of S3 (moto) and Google's storage (gcp-storage-emulator), in a separate process.

   python tests/emulators.py      prints both addresses, and serves until it is killed

S3 requires no credentials except within `locked`. The bucket "locked" of Google's storage denies
all access. The emulator lacks two features that conditional writes need, which this file adds:
the generation of objects that are read, and ifGenerationMatch.
"""

import contextlib
import http
import json
import os
import random
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

BUCKET = "bkt"
_ERRORS = "/errors/"


@contextlib.contextmanager
def locked(s3: str) -> Iterator[dict[str, str]]:
    """Let S3 require credentials, and yield the keys of a user who can read but not write."""
    import boto3

    iam = boto3.client(
        "iam", endpoint_url=s3, aws_access_key_id="x", aws_secret_access_key="y", region_name="us-east-1"
    )
    iam.create_user(UserName="reader")
    allow = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
    iam.put_user_policy(UserName="reader", PolicyName="reads", PolicyDocument=policy)
    key = iam.create_access_key(UserName="reader")["AccessKey"]

    def ask_after(requests: bytes) -> None:
        plain = {"Content-Type": "text/plain"}
        url = f"{s3}/moto-api/reset-auth"
        urllib.request.urlopen(urllib.request.Request(url, requests, plain, method="POST")).close()

    ask_after(b"0")
    try:
        names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
        yield dict(zip(names, (key["AccessKeyId"], key["SecretAccessKey"]), strict=True))
    finally:
        ask_after(b"inf")


@contextlib.contextmanager
def failing(gs: str, share: float) -> Iterator[Callable[[], int]]:
    """Let Google's storage answer this share of requests with the error 503 in this context.

    Yield a function that returns the number of errors since its last call.
    """

    def set_share(share: float) -> int:
        with urllib.request.urlopen(f"{gs}{_ERRORS}{share}") as answer:
            return int(answer.read())

    set_share(share)
    try:
        yield lambda: set_share(share)
    finally:
        set_share(0.0)


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Serve both, each with an empty bucket. Yield the environment variables that select them."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, __file__], text=True, **pipes) as server:
        assert server.stdout
        try:
            s3, gs = json.loads(server.stdout.readline())
            yield {
                "AWS_ENDPOINT_URL": s3,
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "y",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "STORAGE_EMULATOR_HOST": gs,
            }
        finally:
            server.kill()


def _serve() -> None:
    from gcp_storage_emulator import exceptions
    from gcp_storage_emulator import server as google
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.storage import Storage
    from moto.server import ThreadedMotoServer

    storage = Storage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    condition: list[str | None] = [None]
    share, refused = [0.0], [0]

    def generation(bucket: str, name: str) -> str:
        try:
            return str(storage.get_file_obj(bucket, name)["generation"])
        except exceptions.NotFound:
            return "0"

    class Failed(Exception):
        pass

    create = storage.create_file

    def create_if(bucket, name, *arguments, **options):
        wanted, condition[0] = condition[0], None
        if wanted not in (None, generation(bucket, name)):
            raise Failed(name)
        return create(bucket, name, *arguments, **options)

    storage.create_file = create_if

    class Handler(google.RequestHandler):
        def __init__(self, *arguments) -> None:
            super().__init__(storage, *arguments)

        def _query(self) -> dict[str, list[str]]:
            return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)

        def _refused(self) -> bool:
            if "/b/locked/" in self.path:
                self.send_error(http.HTTPStatus.FORBIDDEN, "locked")
            elif random.random() < share[0]:
                refused[0] += 1
                self.send_error(http.HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                return False
            return True

        def do_GET(self) -> None:
            if self.path.startswith(_ERRORS):
                share[0] = float(self.path.removeprefix(_ERRORS))
                self.send_response(http.HTTPStatus.OK)
                self.end_headers()
                self.wfile.write(b"%d" % refused[0])
                refused[0] = 0
            elif not self._refused():
                super().do_GET()

        def do_PUT(self) -> None:
            if not self._refused():
                super().do_PUT()

        def do_DELETE(self) -> None:
            if not self._refused():
                super().do_DELETE()

        def do_POST(self) -> None:
            if self._refused():
                return
            condition[0] = self._query().get("ifGenerationMatch", [None])[0]
            try:
                super().do_POST()
            except Failed:
                self.send_error(http.HTTPStatus.PRECONDITION_FAILED)

        def end_headers(self) -> None:
            parts = urllib.parse.urlsplit(self.path).path.split("/b/")[-1].split("/o/")
            if self.command == "GET" and len(parts) == 2:
                found = generation(parts[0], urllib.parse.unquote(parts[1]))
                self.send_header("x-goog-generation", found)
            super().end_headers()

        def log_message(self, *_) -> None:
            pass

    served = google.server.HTTPServer(("localhost", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    amazon = ThreadedMotoServer("localhost", 0, verbose=False)
    amazon.start()
    s3, gs = (f"http://localhost:{port}" for port in (amazon._server.port, served.server_port))
    import boto3

    boto3.client(
        "s3", endpoint_url=s3, aws_access_key_id="x", aws_secret_access_key="y", region_name="us-east-1"
    ).create_bucket(Bucket=BUCKET)
    print(json.dumps([s3, gs]), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    os.environ.setdefault("MOTO_ALLOW_NONEXISTENT_REGION", "1")
    _serve()
