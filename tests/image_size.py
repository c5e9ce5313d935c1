"""Measures the Python packages of images: python tests/image_size.py before=FOLDER now=FOLDER

FOLDER is a site-packages, or /opt/twinop of an image (`podman cp`). Byte code does not count. Prints JSON
with the bytes of each folder and of its largest packages, as in tests/results/image-size.json.
"""

import json
import sys
from collections import Counter
from pathlib import Path


def measure(folder: Path) -> dict[str, object]:
    """The bytes of a folder and of the ten largest entries in it."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix != ".pyc":
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size
    return {"bytes": sum(sizes.values()), "packages": len(list(folder.glob("*.dist-info")))} | {
        "largest": dict(sizes.most_common(10))
    }


def main() -> None:
    found = {name: measure(Path(folder)) for name, folder in (each.split("=", 1) for each in sys.argv[1:])}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
