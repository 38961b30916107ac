"""Where a run stood, so that it can go on after a crash. No secret of its noise or samples is in it.

A checkpoint is a safetensors file (tensors, and everything else as JSON in its metadata) that `checkpoint.json` names
with its SHA-256; the one before is kept and named too. Files are written under another name, synced, renamed, and the
folder synced, so that a crash at any moment leaves at least one whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tptopk.privacy.refusal import Refusal

FORMAT = 1
INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by part and name, and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors that were saved under `name`."""
        return {key[len(name) + 1 :]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """All of the file or none of it, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
    """Write a checkpoint of tensors by part and name, keep the last one, drop the one before that."""
    index = _read_index(folder)
    number = index["current"]["number"] + 1 if index else 1
    whole = {
        f"{part}/{name}": value.detach().cpu().contiguous().clone()
        for part, tensors in parts.items()
        for name, value in tensors.items()
    }
    try:
        text = json.dumps({"format": FORMAT, **values})
    except (TypeError, ValueError) as error:
        raise Refusal(
            f"a checkpoint cannot hold {error}; give a scheduler whose state is plain values, or no out="
        ) from error
    content = save(whole, metadata={"tptopk.checkpoint": text})
    name = f"checkpoint-{number}.safetensors"
    write_durably(folder / name, content)
    current = {"number": number, "file": name, "sha256": hashlib.sha256(content).hexdigest()}
    previous = index["current"] if index else None
    write_durably(folder / INDEX, json.dumps({"format": FORMAT, "current": current, "previous": previous}).encode())
    kept = {name, previous["file"] if previous else None}
    for old in folder.glob("checkpoint-*.safetensors"):
        if old.name not in kept:
            old.unlink(missing_ok=True)


def remove_checkpoints(folder: Path) -> None:
    """A finished run needs none."""
    for path in (folder / INDEX, *folder.glob("checkpoint-*.safetensors")):
        path.unlink(missing_ok=True)


def _read_index(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise Refusal(f"{folder / INDEX} was written by another version of tptopk (format {index['format']!r})")
        for entry in (index["current"], index["previous"]):
            if entry is not None:
                name, digest, number = entry["file"], entry["sha256"], entry["number"]
                if not (isinstance(digest, str) and isinstance(number, int) and Path(name).name == name):
                    raise ValueError("its entries are not checkpoints")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{folder / INDEX} is not readable: {error}") from error
    return dict(index)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there never was one. Nothing in it is ever executed."""
    index = _read_index(folder)
    if index is None:
        return None
    reasons = []
    for entry in (index["current"], index["previous"]):
        if entry is None:
            continue
        path = folder / entry["file"]
        try:
            if sha256_of(path) != entry["sha256"]:
                raise ValueError("it is not the file that was written")
            with safe_open(str(path), "pt") as file:
                values = json.loads((file.metadata() or {})["tptopk.checkpoint"])
                if values.get("format") != FORMAT:
                    raise Refusal(f"{path} was written by another version of tptopk (format {values.get('format')!r})")
                return Checkpoint({name: file.get_tensor(name) for name in file.keys()}, values)  # noqa: SIM118
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            reasons.append(f"{path.name}: {error}")
    raise Refusal(f"no checkpoint in {folder} can be read. " + "; ".join(reasons))
