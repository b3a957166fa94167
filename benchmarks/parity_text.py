"""The text of the loss comparison at scale: the Python sources of a few pinned packages, the same bytes wherever it is made.

Run:    python -m benchmarks.parity_text --out FOLDER                 # downloads the packages (about 40 MB) with pip
        python -m benchmarks.parity_text --out FOLDER --wheels WHEELS # from a folder that holds them
Writes: FOLDER/text/<package>/…/*.py, and FOLDER/text.tar.xz of it, small enough to be carried to a machine without a network

66 million bytes, one document per file; `data.source=FOLDER/text` trains on it. Tokens are bytes, so no tokenizer adds to
what must be the same.
"""

import argparse
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# name, version, and sha256 over names and contents of the files taken
PACKAGES = {
    "sympy": ("1.14.0", "972084bcdf2aeda02be0f83a39ce771094bd7657efa5a0e81ac4d75cad8737a9"),
    "scikit-learn": ("1.9.1", "dbf46f4dd573d8c80d5690bfaf6c1d033998a298745fc98a1f12b55adbd5a156"),
    "astropy": ("8.0.2", "61ff05e85cb5257d366268abf309be22c5ae4f595f1b05cf3ae5fd479aa6c3bb"),
    "twisted": ("26.10.0", "98c9f0889cf6d737bc98f3d69bcc041edc01bd27c7f1f0e9cd3b0469731a9c97"),
}


def download(folder: pathlib.Path) -> None:
    names = [f"{name}=={version}" for name, (version, _) in PACKAGES.items()]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + [
        "--platform=manylinux2014_x86_64"
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        + ["--implementation=cp", *platforms, "-d", str(folder), *names],
        check=True,
    )


def extract(wheel: pathlib.Path, target: pathlib.Path) -> str:
    """Writes the UTF-8 Python files of a wheel and returns the hash of what was written."""
    total = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(".py")):
            content = archive.read(name)
            try:
                content.decode()
            except UnicodeDecodeError:
                continue
            total.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--wheels", type=pathlib.Path, help="folder that holds the wheels already")
    args = parser.parse_args()
    text = args.out / "text"
    if text.exists():
        shutil.rmtree(text)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = args.wheels or pathlib.Path(temporary)
        if args.wheels is None:
            download(wheels)
        for name, (version, expected) in PACKAGES.items():
            found = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
            if not found:
                raise SystemExit(f"{wheels} holds no wheel of {name} {version}")
            digest = extract(found[0], text / name)
            if digest != expected:
                raise SystemExit(f"{found[0].name} holds other text than expected: sha256 {digest}, not {expected}")
    files = sorted(path for path in text.rglob("*.py"))
    with tarfile.open(args.out / "text.tar.xz", "w:xz", preset=6) as archive:
        for path in files:
            archive.add(path, path.relative_to(args.out))
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files, {size:,} bytes in {text}; packed {(args.out / 'text.tar.xz').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
