"""What `--data` may name: a benchmark, an archive, a table or a folder of images."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from tptopk.data import images, table_checks, tables
from tptopk.data.cifar import load_cifar10
from tptopk.data.constants import BENCHMARKS, MEDMNIST, data_folder, is_benchmark, missing
from tptopk.data.digits import Pair, digits
from tptopk.data.eyepacs import load_eyepacs
from tptopk.data.files import read_archive, read_inputs, read_medmnist
from tptopk.data.idx import load_idx
from tptopk.privacy.refusal import Refusal, nearest

FILES = (".npz", *tables.SUFFIXES)


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    image_size: int | None = None,
    on_image: images.OnImage | None = None,
) -> tuple[Pair, Pair]:
    """(training, test) of a benchmark: images [N, C, H, W] in [0, 1], and class numbers [N].

    Bytes are divided by 255, a public constant; `normalised` shifts and scales by published channel statistics. It is read from
    `data_dir`, or TPTOPK_DATA, or the folder `data`, in the layout of its official download; nothing is downloaded.
    """
    root = data_folder(data_dir)
    if image_size is not None and name != "eyepacs":
        raise Refusal(f"{name} has images of one size; only eyepacs and folders of images take an image size")
    if name == "digits":
        return digits()
    if name in ("mnist", "fmnist"):
        return load_idx(name, root)
    if name == "cifar10":
        return load_cifar10(root)
    if name == "eyepacs":
        return load_eyepacs(root, 64 if image_size is None else image_size, on_image=on_image)
    if is_benchmark(name) or (re.fullmatch(r"\w+", name) and (root / f"{name}.npz").is_file()):
        if not (root / f"{name}.npz").is_file():
            raise missing(name, f"{name}.npz", root)
        return read_medmnist(root / f"{name}.npz")
    raise Refusal(f"there is no benchmark {name!r}{nearest(name, [*BENCHMARKS, 'digits'])}")


def read_source(
    source: str,
    *,
    data_dir: str | None = None,
    schema: str | tables.Schema | None = None,
    image_size: int | None = None,
    image_mode: str = "RGB",
    on_image: images.OnImage | None = None,
) -> tuple[Pair, Pair | None]:
    """(training, test or None) of whatever `source` names; a benchmark's name goes before a file or folder of that name."""
    path = Path(source)
    kind = _kind(source, schema, image_size, image_mode)
    if kind == "benchmark":
        return load(source, data_dir, image_size=image_size, on_image=on_image)
    if kind == "table":
        known = schema if isinstance(schema, tables.Schema) else _schema(path, schema)
        training = tables.read_with(path, known)
        if known.test is not None and (path.parent / known.test).resolve() == path.resolve():
            raise Refusal(
                f"{path}: its schema names the same file as its test table, and what is measured on private records has no guarantee"
            )
        return training, None if known.test is None else tables.read_with(path.parent / known.test, known)
    if kind == "folder":
        return images.read_folder(path, size=image_size, mode=image_mode, on_image=on_image)
    _refuse_unknown(source)
    return read_archive(path)


def read_source_inputs(
    source: str,
    *,
    data_dir: str | None = None,
    schema: str | tables.Schema | None = None,
    image_size: int | None = None,
    image_mode: str = "RGB",
    on_image: images.OnImage | None = None,
) -> Tensor:
    """Inputs to predict for: a benchmark's or folder's test images, x or x_test of an archive, all records of a table."""
    path = Path(source)
    kind = _kind(source, schema, image_size, image_mode)
    if kind == "table":
        return tables.read_table_inputs(path, schema if isinstance(schema, tables.Schema) else _schema(path, schema))
    if kind == "archive":
        _refuse_unknown(source)
        return read_inputs(path)
    training, test = read_source(
        source, data_dir=data_dir, image_size=image_size, image_mode=image_mode, on_image=on_image
    )
    return (training if test is None else test)[0]


def source_findings(source: str, schema: tables.Schema | None = None) -> list[str]:
    """What is strange of the source itself, beside the inputs that its records become."""
    if schema is not None:
        return table_checks.beyond_bounds(source, schema)
    return images.folder_findings(source) if _kind(source, None, None, "RGB") == "folder" else []


def read_schema_for(source: str, schema: str | None) -> tables.Schema | None:
    """The schema of a table; None for anything else."""
    return _schema(Path(source), schema) if is_table(source) else None


def is_table(source: str | None) -> bool:
    return source is not None and not is_benchmark(source) and Path(source).suffix in tables.SUFFIXES


def _kind(source: str, schema: object, image_size: int | None, image_mode: str) -> str:
    """benchmark, table, folder or archive; options that its kind has no use for are refused."""
    path = Path(source)
    if source == "digits" or is_benchmark(source):
        kind = "benchmark"
    elif path.suffix in tables.SUFFIXES:
        kind = "table"
    else:
        kind = "folder" if path.is_dir() else "archive"
    for option, given, fits in (
        ("--schema", schema is not None, kind == "table"),
        ("--image-size", image_size is not None, kind == "folder" or source == "eyepacs"),
        ("--image-mode", image_mode != "RGB", kind == "folder"),
    ):
        if given and not fits:
            raise Refusal(
                f"{source} is {'an' if kind == 'archive' else 'a'} {kind} that has no use for {option}: leave it out"
            )
    return kind


def _schema(path: Path, schema: str | None) -> tables.Schema:
    if schema is None and not path.with_suffix(".toml").is_file():
        tables.existing(path)
        raise Refusal(
            f"{path} needs a schema of what is publicly known of its columns: give --schema FILE.toml or put it beside the table "
            f"as {path.with_suffix('.toml').name}, with {tables.SCHEMA_EXAMPLE}"
        )
    return tables.read_schema(path.with_suffix(".toml") if schema is None else schema)


def _refuse_unknown(source: str) -> None:
    """A word that is neither a file nor a benchmark is most likely a misspelt benchmark."""
    if re.fullmatch(r"[\w-]+", source) and not Path(source).exists():
        known = ["digits", *(name for name in BENCHMARKS if name not in MEDMNIST), *MEDMNIST]
        raise Refusal(
            f"{source!r} is neither a file ({', '.join(FILES)}), a folder nor a benchmark{nearest(source, known)}"
        )
