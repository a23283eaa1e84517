"""Files of packages that tests read but do not install: `make test-packages` fetches them into one folder."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def packages_folder() -> Path:
    """Return the folder named by REBUILD_TEST_PACKAGES, `.cache/test-packages` of the repository by default."""
    return REPOSITORY / os.environ.get("REBUILD_TEST_PACKAGES", ".cache/test-packages")


def package_file(name: str) -> Path:
    """Return a file or folder by its path inside the packages folder."""
    path = packages_folder() / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `make test-packages`")
    return path
