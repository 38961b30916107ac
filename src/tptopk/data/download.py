"""Downloads of public benchmarks, when a user asks: checked against published checksums, never half there."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tptopk.data.cifar import read_batch
from tptopk.data.constants import BENCHMARKS, Benchmark, RemoteFile, data_folder
from tptopk.privacy.refusal import Refusal, nearest

PIECE = 1 << 20
TIMEOUT = 60.0

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, how many bytes are here, and how many there are if that is known."""


def fetch(
    name: str, data_dir: str | Path | None = None, *, mirror: str | None = None, on_progress: Progress | None = None
) -> Path:
    """Download a benchmark into its official layout and return its folder; what is there and right is left alone.

    `mirror` is another address that has files of the same names; the checksums stay the published ones.
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise Refusal(
            f"there is no benchmark {name!r} to fetch{nearest(name, [n for n, b in BENCHMARKS.items() if b.files])}"
        )
    if not benchmark.files:
        raise Refusal(
            f"{benchmark.title} cannot be fetched: its owners ask for consent and publish no checksum; get it from "
            f"{benchmark.page} and unpack it into {data_folder(data_dir) / benchmark.folder}"
        )
    root = data_folder(data_dir)
    folder = root / benchmark.folder
    try:
        if benchmark.files[0].name.endswith(".tar.gz"):
            _fetch_archive(benchmark, root, mirror, on_progress)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for file in benchmark.files:
                download(file, folder, mirror=mirror, on_progress=on_progress)
    except OSError as error:
        raise Refusal(f"cannot write to {error.filename or folder}: {error.strerror or error}") from error
    return folder


def download(file: RemoteFile, folder: Path, *, mirror: str | None = None, on_progress: Progress | None = None) -> Path:
    """Download one file into `folder`; it gets its name only when its size and its checksum are right."""
    target = folder / file.name
    if target.exists():
        if checksum(target) == file.md5:
            return target
        raise Refusal(
            f"{target} is there, but it is not the published file (its MD5 is not {file.md5}); delete it and fetch again, or "
            "give another --data-dir"
        )
    url = file.url if mirror is None else f"{mirror.rstrip('/')}/{file.name}"
    descriptor, part = tempfile.mkstemp(dir=folder, prefix=f".{file.name}.", suffix=".part")
    os.close(descriptor)
    try:
        _receive(url, Path(part), file, on_progress)
        os.chmod(part, 0o644)
        os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)
    return target


def checksum(path: Path) -> str:
    """The MD5 of a file: what the publishers give. Two files can be made with one MD5, but nobody can make one for a given MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _receive(url: str, part: Path, file: RemoteFile, on_progress: Progress | None) -> None:
    if not url.startswith(("https://", "http://")):
        raise Refusal(f"cannot fetch {url}: expected an address that begins with https:// or http://")
    digest, received = hashlib.md5(usedforsecurity=False), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, open(part, "wb") as out:
            announced = answer.headers.get("Content-Length")
            expected = file.size or (int(announced) if announced and announced.isdigit() else None)
            while piece := answer.read(PIECE):
                received += len(piece)
                if file.size is not None and received > file.size:
                    break
                digest.update(piece)
                out.write(piece)
                if on_progress is not None:
                    on_progress(file.name, received, expected)
            out.flush()
            os.fsync(out.fileno())
    except urllib.error.HTTPError as error:
        raise Refusal(
            f"{url} answered {error.code} {error.reason}; try again later, or give another --mirror"
        ) from error
    except urllib.error.URLError as error:
        raise Refusal(
            f"cannot reach {url}: {error.reason}; is there a connection? --mirror names another address"
        ) from error
    except (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        raise Refusal(
            f"the download of {url} broke off after {received} bytes ({error}); type the same again"
        ) from error
    if expected is not None and received != expected:
        raise Refusal(f"{url} sent {received} bytes, expected {expected}: truncated or another file; nothing was kept")
    if digest.hexdigest() != file.md5:
        raise Refusal(
            f"{url} has the MD5 {digest.hexdigest()}, expected {file.md5}: damaged or another file; nothing was kept"
        )


def _fetch_archive(benchmark: Benchmark, root: Path, mirror: str | None, on_progress: Progress | None) -> None:
    """Download an archive, unpack it aside, and move its folder into place when it is whole."""
    folder = root / benchmark.folder
    if folder.exists():
        absent = [name for name in benchmark.unpacked if not (folder / name).is_file()]
        if absent:
            raise Refusal(
                f"{folder} is there without {absent[0]}; delete it and fetch again, or give another --data-dir"
            )
        for name in benchmark.unpacked:
            read_batch(folder / name)  # what training could not read is not left alone
        return
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=root, prefix=f".{benchmark.folder}.", suffix=".part"))
    try:
        archive = download(benchmark.files[0], aside, mirror=mirror, on_progress=on_progress)
        try:
            _unpack(archive, aside, benchmark.folder)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise Refusal(f"{benchmark.files[0].url} cannot be unpacked: {error}; nothing was kept") from error
        for name in benchmark.unpacked:
            if not (aside / benchmark.folder / name).is_file():
                raise Refusal(f"{benchmark.files[0].url} holds no {benchmark.folder}/{name}; nothing was kept")
        os.replace(aside / benchmark.folder, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unpack(archive: Path, aside: Path, folder: str) -> None:
    """Write the archive's files, which may lie in its one folder only. (Python knows of safe filters from 3.11.4 on alone.)"""
    (aside / folder).mkdir()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.isdir() and member.name == folder:
                continue
            name = PurePosixPath(member.name)
            if not member.isfile() or str(name.parent) != folder or name.name in ("", ".", ".."):
                raise tarfile.TarError(f"it holds {member.name!r}, which is no file of {folder}")
            content = tar.extractfile(member)
            assert content is not None, "a file has content"
            (aside / folder / name.name).write_bytes(content.read())
