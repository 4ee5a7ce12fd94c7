"""Start the web page's commands, and use the page like a person."""

import contextlib
import re
import shlex
import time
import urllib.request

from tests.imagen_jax import commands

PROMPT = "a red seven on gray paper"
PATIENCE = 60_000  # Milliseconds; enough for compilation.


@contextlib.contextmanager
def served(name, *workdirs, folder):
    """Run `python -m NAME` for the duration of the block, and yield its address."""
    folder.mkdir(exist_ok=True)
    outputs = folder / "out", folder / "err"
    flags = [f"--workdir={workdir}" for workdir in workdirs]
    match, process = None, commands.start(name, *flags, "--port=0", devices=1, outputs=outputs)
    try:
        deadline = time.monotonic() + 300
        while not match and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
            printed = outputs[0].read_text() if outputs[0].exists() else ""
            match = re.search(r"open (http://\S+)\n", printed)
        assert match, outputs[1].read_text()
        yield match[1]
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def opened(browser, address, **size):
    """Open the page in a new tab. Fails if it requests other hosts or logs an error."""
    errors = []
    context = browser.new_context(viewport={"width": 1200, "height": 800} | size)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request",
        lambda request: errors.append(request.url) if not (request.url.startswith((address, "data:"))) else None,
    )
    page.goto(address)
    page.locator("#field-steps").wait_for(state="attached")  # Hidden for a cascade.
    yield page
    context.close()
    assert errors == []


def draw(page, prompt=PROMPT, count=2, **fields):
    """Fill in the form and press Draw."""
    page.fill("#prompts", prompt)
    page.fill("#count", str(count))
    for name, value in fields.items():
        page.fill(f"#field-{name}", str(value))
    page.click("#draw")


def drawn(page):
    """Wait until all pictures are drawn, and return their bytes."""
    page.locator("#status").filter(has_text=re.compile(r"^\d+ pictures?$")).wait_for()
    return files(page, "#pictures img")


def files(page, selector):
    """Return the bytes of all images that the selector matches."""
    sources = page.locator(selector).evaluate_all("images => images.map(i => i.src)")
    return [urllib.request.urlopen(source).read() for source in sources]


def of_command(page, out, *more):
    """Run the command shown for an open picture, and return the pictures it draws, by name.

    The command reads the files that the page offers, such as image.png, from the folder `out`.
    """
    words = shlex.split(page.locator("dialog pre").inner_text())
    assert words[:2] == ["python", "-m"]
    out.mkdir(exist_ok=True)
    for link in ("save-image", "save-mask"):
        address = page.locator(f"#{link}").get_attribute("href")
        if address and not page.locator(f"#{link}").evaluate("link => link.hidden"):
            name = link.removeprefix("save-") + ".png"
            (out / name).write_bytes(urllib.request.urlopen(address).read())
            words = [word.replace(f"={name}", f"={out / name}") for word in words]
    commands.succeed(words[2], *words[3:], *more, f"--out={out}")
    return {path.name: path.read_bytes() for path in out.glob("seed_*.png")}
