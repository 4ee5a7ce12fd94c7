"""Generate the notebooks (.ipynb) from the .py files in this folder.

    python -m notebooks [OWNER/NAME]

The notebooks clone the repository whose URL is in pyproject.toml ([project.urls], Repository), and
their badges open the notebooks of this repository in Colab. If you pass OWNER/NAME, the name of
your repository on GitHub, the command first writes its URL into pyproject.toml. Without it, the
command asks for OWNER/NAME if the URL still contains YOUR-NAME. Commit all changed files.
"""

import pathlib
import re
import sys
import tomllib

import jupytext

HERE = pathlib.Path(__file__).parent
COLAB = "https://colab.research.google.com/github"
PROJECT = HERE.parent / "pyproject.toml"
GITHUB = "https://github.com/"


def repository() -> str:
    """Return the URL of the project's repository, such as https://github.com/OWNER/NAME."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return project["urls"]["Repository"]


def with_repository(text: str) -> str:
    """Set REPOSITORY and the links of all Colab badges in a text to this project's repository."""
    name = repository().removeprefix(GITHUB)
    text = re.sub(r'(?m)^REPOSITORY = ".*"$', f'REPOSITORY = "{repository()}"', text)
    return re.sub(rf"{COLAB}/[^/]+/[^/]+/", f"{COLAB}/{name}/", text)


def set_repository(name: str) -> None:
    """Write the URL of the GitHub repository `name` into pyproject.toml.

    Exits with an error message if `name` is not OWNER/NAME.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        sys.exit(f"error: {name!r} is not OWNER/NAME, such as alice/imagen-sd-jax")
    PROJECT.write_text(PROJECT.read_text().replace(repository(), GITHUB + name))


def main() -> None:
    """Update the URLs in the .py files, and write the notebooks."""
    if len(sys.argv) > 1:
        set_repository(sys.argv[1])
    elif "/YOUR-NAME/" in repository() and sys.stdin.isatty():
        set_repository(input("The repository on GitHub (OWNER/NAME): "))
    texts = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    for path in texts:
        path.write_text(with_repository(path.read_text()))
    for path in texts:
        book = jupytext.read(path)
        for number, cell in enumerate(book.cells):
            cell["id"] = f"cell-{number}"  # Random ids would change each time.
        jupytext.write(book, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
