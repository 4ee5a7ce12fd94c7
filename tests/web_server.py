"""A web server for the files of a folder."""

import contextlib
import functools
import http.server
import io
import re
import threading


class Files(http.server.SimpleHTTPRequestHandler):
    """Sends files, or ranges of them."""

    ranges = True
    """Whether to send only the range of bytes that is asked for."""

    def send_head(self):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (asked and self.ranges):
            return super().send_head()
        with open(self.translate_path(self.path), "rb") as file:
            part = file.read()[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def serving(folder, handler=Files):
    """Serve the files of a folder, and yield the server's name and port."""
    of_folder = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("localhost", 0), of_folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"localhost:{server.server_port}"
        server.shutdown()
