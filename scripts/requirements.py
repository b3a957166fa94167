"""Prints what pyproject.toml asks for: build, run-time and the named extras' requirements, one a line.

python scripts/requirements.py test,lint     everything that moejax[test,lint] and its build need
python scripts/requirements.py --headers     the jaxlib whose FFI headers the compiled modules are built against
"""

import pathlib
import sys
import tomllib

PROJECT = tomllib.loads(pathlib.Path(__file__).parents[1].joinpath("pyproject.toml").read_text())


def main(argument: str) -> None:
    build = PROJECT["build-system"]["requires"]
    if argument == "--headers":
        print(*[requirement for requirement in build if requirement.startswith("jaxlib==")])
        return
    extras = PROJECT["project"]["optional-dependencies"]
    # An isolated build gets CMake and Ninja where the system has none; ours is not isolated, so they are named here.
    lines = [requirement for requirement in build if not requirement.startswith("jaxlib")] + ["cmake>=3.26", "ninja"]
    lines += PROJECT["project"]["dependencies"]
    for extra in argument.split(","):
        lines += extras[extra]
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
