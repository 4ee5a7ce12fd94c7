"""Generate the notebooks from the .py files in this folder: python -m notebooks

The notebooks clone the repository in pyproject.toml ([project.urls], Repository), and their badges
open it in Colab. A fork changes the repository there, runs this command, and commits the changes.
"""

import pathlib
import re
import tomllib

import jupytext

HERE = pathlib.Path(__file__).parent
COLAB = "https://colab.research.google.com/github"
PAGES = (HERE.parent / "docs" / "launch.md",)
"""Other files with badges."""


def repository() -> str:
    """Return the URL of the project, such as https://github.com/OWNER/NAME."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def with_repository(text: str) -> str:
    """Return a text whose REPOSITORY and badges are those of this project."""
    name = repository().removeprefix("https://github.com/")
    text = re.sub(r'(?m)^REPOSITORY = ".*"$', f'REPOSITORY = "{repository()}"', text)
    return re.sub(rf"{COLAB}/[^/]+/[^/]+/", f"{COLAB}/{name}/", text)


def main() -> None:
    """Update the .py files and the pages, and write the notebooks."""
    texts = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    for path in (*texts, *PAGES):
        path.write_text(with_repository(path.read_text()))
    for path in texts:
        book = jupytext.read(path)
        for number, cell in enumerate(book.cells):
            cell["id"] = f"cell-{number}"  # Random ones would change each time.
        jupytext.write(book, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
