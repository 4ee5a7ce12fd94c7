"""Write the requirements of the container images, with one hash for each package.

    for target in tpu cuda13; do
      printf 'gcsfs\\ns3fs\\nmlperf-logging\\njax[%s]\\n' $target > extra.in
      uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_36 \\
          -c constraints.txt -c launch/constraints.txt requirements.txt extra.in \\
          --format pylock.toml -o pylock.$target.toml
      python -m launch.lock < pylock.$target.toml > launch/${target%13}.txt
    done

The last command reads a lock file and prints the requirements. Each hash belongs to the wheel that
pip would choose for Python 3.12 on Linux or, if no wheel fits, to the source archive. With
--require-hashes, pip installs only files with these hashes. Run these commands after changing
requirements.txt, constraints.txt or launch/constraints.txt.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from packaging import tags
from packaging.utils import parse_wheel_filename

_GLIBC = range(5, 37)  # Minor versions. The base image, Debian bookworm, has glibc 2.36.
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in reversed(_GLIBC)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def requirements(lock: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line "NAME==VERSION --hash=sha256:..." for each package of a pylock.toml.

    Raises ValueError if a package has no wheel for Python 3.12 on Linux and no source archive.
    """
    supported = [*tags.cpython_tags((3, 12), platforms=_PLATFORMS)]
    supported += tags.compatible_tags((3, 12), "cp312", _PLATFORMS)
    ranks = {tag: rank for rank, tag in enumerate(supported)}
    for package in lock["packages"]:
        best: dict[int, str] = {}
        for wheel in package.get("wheels", ()):
            name = wheel.get("name") or wheel["url"].rpartition("/")[2]
            for tag in parse_wheel_filename(name)[3] & ranks.keys():
                best[ranks[tag]] = wheel["hashes"]["sha256"]
        if not best and "sdist" not in package:
            release = f"{package['name']} {package['version']}"
            raise ValueError(
                f"{release} has neither a wheel for Python 3.12 on Linux nor a source archive: "
                "choose another version in launch/constraints.txt"
            )
        digest = best[min(best)] if best else package["sdist"]["hashes"]["sha256"]
        yield f"{package['name']}=={package['version']} --hash=sha256:{digest}"


if __name__ == "__main__":
    print("\n".join(requirements(tomllib.load(sys.stdin.buffer))))
