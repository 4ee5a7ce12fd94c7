"""Generate the notebooks (.ipynb) from the .py files in this folder.

    python -m notebooks

The notebooks clone the repository whose URL is in pyproject.toml ([project.urls], Repository), and
their badges open the same repository in Colab. In a fork, change this URL, run this command and
commit the changes.
"""

import pathlib
import re
import tomllib

import jupytext

HERE = pathlib.Path(__file__).parent
COLAB = "https://colab.research.google.com/github"
PAGES = (HERE.parent / "docs" / "launch.md",)
"""Other files with Colab badges."""


def repository() -> str:
    """Return the URL of the project's repository, such as https://github.com/OWNER/NAME."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def with_repository(text: str) -> str:
    """Return the text with REPOSITORY and all Colab badges set to this project's repository."""
    name = repository().removeprefix("https://github.com/")
    text = re.sub(r'(?m)^REPOSITORY = ".*"$', f'REPOSITORY = "{repository()}"', text)
    return re.sub(rf"{COLAB}/[^/]+/[^/]+/", f"{COLAB}/{name}/", text)


def main() -> None:
    """Update the URLs in the .py files and other pages, and write the notebooks."""
    texts = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    for path in (*texts, *PAGES):
        path.write_text(with_repository(path.read_text()))
    for path in texts:
        book = jupytext.read(path)
        for number, cell in enumerate(book.cells):
            cell["id"] = f"cell-{number}"  # Random ids would change each time.
        jupytext.write(book, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
