"""Makes each notebook of the text beside it: python -m notebooks

The repository that they clone, and that their badges open in Colab, is the one that pyproject.toml
names ([project.urls], Repository): a fork changes it there, runs this, and commits what changes.
"""

import pathlib
import re
import tomllib

import jupytext

HERE = pathlib.Path(__file__).parent
COLAB = "https://colab.research.google.com/github"
PAGES = (HERE.parent / "docs" / "launch.md",)
"""Further files with badges."""


def repository() -> str:
    """Where the project is, such as https://github.com/OWNER/NAME."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def named(text: str) -> str:
    """A text whose REPOSITORY and badges are of this repository."""
    place = repository().removeprefix("https://github.com/")
    text = re.sub(r'(?m)^REPOSITORY = ".*"$', f'REPOSITORY = "{repository()}"', text)
    return re.sub(rf"{COLAB}/[^/]+/[^/]+/", f"{COLAB}/{place}/", text)


def main() -> None:
    """Writes texts, pages and notebooks."""
    texts = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    for path in (*texts, *PAGES):
        path.write_text(named(path.read_text()))
    for path in texts:
        book = jupytext.read(path)
        for number, cell in enumerate(book.cells):
            cell["id"] = f"cell-{number}"  # Random ones would change each time.
        jupytext.write(book, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
