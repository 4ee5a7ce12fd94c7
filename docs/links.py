"""A hook of the site: links that leave docs/ lead to the repository."""

import pathlib
import tomllib

PROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"


def on_page_markdown(markdown, page, **_):
    """Replace the relative links of a page that leave docs/ by links to the repository's files."""
    repository = tomllib.loads(PROJECT.read_text())["project"]["urls"]["Repository"]
    up = "../" * (1 + page.file.src_uri.count("/"))
    return markdown.replace(f"]({up}", f"]({repository}/blob/main/")
