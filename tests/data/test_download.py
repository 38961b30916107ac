"""Downloads from a server on this machine: whole and right, or not there at all."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import sys
import tarfile
import threading
import warnings
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.data.made import make_cifar10, make_mnist
from tptopk.cli import main
from tptopk.data import fetch, load
from tptopk.data.constants import BENCHMARKS, RemoteFile
from tptopk.data.download import download
from tptopk.privacy.refusal import Refusal


class Server:
    """Serves `files`; a name in `cut` breaks off half way, one in `short` announces no length."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.short: set[str] = set()
        self.asked: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/").partition("?")[0]
                owner.asked.append(name)
                if name not in owner.files:
                    self.send_error(404)
                    return
                content = owner.files[name]
                self.send_response(200)
                if name not in owner.short:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if name in owner.cut | owner.short else content)

            def log_message(self, *_: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server():
    serving = Server()
    thread = threading.Thread(target=serving.http.serve_forever, daemon=True)
    thread.start()
    yield serving
    serving.http.shutdown()
    serving.http.server_close()
    thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def mnist(server, tmp_path, monkeypatch):
    """A made-up MNIST on the server, with its own checksums in place of the published ones."""
    make_mnist(tmp_path / "made")
    files = []
    for path in sorted((tmp_path / "made" / "MNIST" / "raw").iterdir()):
        server.files[path.name] = content = path.read_bytes()
        files.append(RemoteFile(f"{server.url}/{path.name}", md5(content), len(content)))
    monkeypatch.setitem(BENCHMARKS, "mnist", replace(BENCHMARKS["mnist"], files=tuple(files)))
    return server


def test_a_fetched_benchmark_can_be_loaded_and_is_not_fetched_twice(mnist, tmp_path):
    seen = []
    folder = fetch("mnist", tmp_path / "data", on_progress=lambda *progress: seen.append(progress))
    assert folder == tmp_path / "data" / "MNIST" / "raw" and len(load("mnist", tmp_path / "data")[0][1]) == 20
    assert len(mnist.asked) == 4 and {name for name, _, _ in seen} == set(mnist.files)
    assert all(received == expected for _, received, expected in seen)
    fetch("mnist", tmp_path / "data")
    assert len(mnist.asked) == 4


def test_a_mirror_has_the_same_names_and_the_same_checksums(mnist, tmp_path, monkeypatch):
    elsewhere = [replace(file, url=f"http://127.0.0.1:9/{file.name}") for file in BENCHMARKS["mnist"].files]
    monkeypatch.setitem(BENCHMARKS, "mnist", replace(BENCHMARKS["mnist"], files=tuple(elsewhere)))
    with pytest.raises(Refusal, match="cannot reach http://127.0.0.1:9"):
        fetch("mnist", tmp_path / "data")
    fetch("mnist", tmp_path / "data", mirror=mnist.url + "/")
    assert len(load("mnist", tmp_path / "data")[0][1]) == 20
    with pytest.raises(Refusal, match="begins with https"):
        fetch("mnist", tmp_path / "other", mirror=(tmp_path / "made").as_uri())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("cut", "bytes"),
        ("short", "expected 1000"),
        ("changed", "has the MD5"),
        ("longer", "expected 1000"),
        ("absent", "answered 404"),
    ],
)
@pytest.mark.parametrize("size_known", [True, False])
def test_a_bad_download_leaves_nothing(server, tmp_path, spoil, message, size_known):
    content = bytes(range(250)) * 4
    file = RemoteFile(f"{server.url}/set.bin?download=1", md5(content), len(content) if size_known else None)
    assert file.name == "set.bin"
    server.files["set.bin"] = content
    if spoil in ("cut", "short"):
        getattr(server, spoil).add("set.bin")
    elif spoil == "absent":
        server.files.clear()
    else:
        server.files["set.bin"] = content[:-1] + b"!" if spoil == "changed" else content + b"!"
    expected = "has the MD5" if not size_known and spoil in ("short", "longer") else message
    with pytest.raises(Refusal, match=expected):
        download(file, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(mnist, tmp_path):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("mnist", tmp_path / "data", on_progress=interrupt)
    assert list((tmp_path / "data" / "MNIST" / "raw").iterdir()) == []


def test_somebodys_own_file_is_not_overwritten(mnist, tmp_path):
    own = tmp_path / "data" / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    with pytest.raises(Refusal, match="not the published file.*delete it"):
        fetch("mnist", tmp_path / "data")
    assert own.read_bytes() == b"mine"


def archive(folder, names: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        if folder is not None:
            tar.add(folder, arcname=folder.name)
        for name, content in (names or {}).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def serve_cifar10(server, monkeypatch, content: bytes) -> None:
    server.files["cifar-10-python.tar.gz"] = content
    file = RemoteFile(f"{server.url}/cifar-10-python.tar.gz", md5(content), len(content))
    monkeypatch.setitem(BENCHMARKS, "cifar10", replace(BENCHMARKS["cifar10"], files=(file,)))


def test_an_archive_is_unpacked_and_moved_into_place_whole(server, tmp_path, monkeypatch):
    make_cifar10(tmp_path / "made")
    serve_cifar10(server, monkeypatch, archive(tmp_path / "made" / "cifar-10-batches-py"))
    fetch("cifar10", tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-py"]
    assert len(load("cifar10", tmp_path / "data")[0][1]) == 20
    fetch("cifar10", tmp_path / "data")
    assert len(server.asked) == 1
    (tmp_path / "data" / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(Refusal, match="without test_batch; delete it"):
        fetch("cifar10", tmp_path / "data")


def test_damage_is_found_by_fetching_as_by_reading_and_both_say_the_way_out(server, tmp_path, monkeypatch):
    make_cifar10(tmp_path / "made")
    serve_cifar10(server, monkeypatch, archive(tmp_path / "made" / "cifar-10-batches-py"))
    folder = fetch("cifar10", tmp_path / "data")
    whole = (folder / "data_batch_2").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\x80\x02}q\x00."):
        (folder / "data_batch_2").write_bytes(content)
        for attempt in (fetch, load):
            with pytest.raises(Refusal, match=f"data_batch_2 .*; delete {re.escape(str(folder))} and fetch again"):
                attempt("cifar10", tmp_path / "data")
    shutil.rmtree(folder)
    fetch("cifar10", tmp_path / "data")
    assert len(load("cifar10", tmp_path / "data")[0][1]) == 20


def test_an_archive_that_reaches_outside_or_lacks_files_is_refused(server, tmp_path, monkeypatch):
    make_cifar10(tmp_path / "made")
    folder = tmp_path / "made" / "cifar-10-batches-py"
    for content, message in (
        (archive(folder, {"../../escaped": b"x"}), "cannot be unpacked"),
        (archive(folder, {"cifar-10-batches-py/../../../escaped": b"x"}), "cannot be unpacked"),
        (archive(folder, {"cifar-10-batches-py/..": b"x"}), "cannot be unpacked"),
        (archive(folder, {str(tmp_path / "escaped"): b"x"}), "cannot be unpacked"),
        (archive(None, {"cifar-10-batches-py/data_batch_1": b"x"}), "holds no cifar-10-batches-py/data_batch_2"),
        (archive(folder)[:2000], "cannot be unpacked"),
        (b"no archive", "cannot be unpacked"),
    ):
        serve_cifar10(server, monkeypatch, content)
        with pytest.raises(Refusal, match=message):
            fetch("cifar10", tmp_path / "data")
        assert list((tmp_path / "data").iterdir()) == [] and not (tmp_path / "escaped").exists()


def test_what_cannot_be_fetched_says_so(tmp_path):
    with pytest.raises(Refusal, match="no checksum.*kaggle"):
        fetch("eyepacs", tmp_path)
    with pytest.raises(Refusal, match="did you mean 'fmnist'"):
        fetch("fminst", tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Refusal, match="cannot write to"):
        fetch("mnist", tmp_path / "file")


def test_the_published_checksums_are_whole():
    files = [file for benchmark in BENCHMARKS.values() for file in benchmark.files]
    assert len(files) == 4 + 4 + 1 + 12
    assert all(len(file.md5) == 32 and int(file.md5, 16) and file.url.startswith("http") for file in files)
    assert len({file.md5 for file in files}) == len(files)


def test_the_command_line_fetches(mnist, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TPTOPK_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["tptopk", "data", "fetch", "mnist"])
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        main()
    shown = capsys.readouterr()
    assert not ended.value.code and shown.out == "mnist is in data/MNIST/raw\n" and shown.err == ""
    assert len(load("mnist")[0][1]) == 20
