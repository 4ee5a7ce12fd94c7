"""Links between documents lead to files and headings that exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = "benchmarks configs diffusion_jax docs imagen_jax launch models notebooks sd_jax tests"
FILES = [*ROOT.glob("*.*"), *(path for name in FOLDERS.split() for path in (ROOT / name).rglob("*.*"))]
PAGES = [path for path in FILES if path.suffix == ".md"]
TEXTS = [path for path in FILES if path.suffix in {".py", ".md", ".jinja", ".toml"}]


def headings(page):
    """Return GitHub's anchors for the headings of a page."""
    code_blocks = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", code_blocks.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_existing_files_and_headings(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text())
    broken = []
    for file, anchor in links:
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(f"{file}#{anchor}")
    assert broken == []


def test_documents_named_in_code_and_configs_exist():
    missing = []
    for path in TEXTS:
        for name in re.findall(r"(?<![\w./])docs/[\w/]+\.md", path.read_text()):
            if not (ROOT / name).is_file():
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
