"""Plain data out of pickle files, without running them: no name in the file is ever looked up or called."""

from __future__ import annotations

import math
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from tptopk.privacy.refusal import Refusal

# The only names a file may mention: how NumPy and Python 3 write arrays and bytes.
ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
NDARRAY, DTYPE, ENCODE = "numpy ndarray", "numpy dtype", "_codecs encode"
BYTES = {"__builtin__ bytes", "builtins bytes"}
DTYPES = {"u1", "i1", "i2", "i4", "i8", "f4", "f8"}
MARK = object()


class _Name(str):
    """A name that the file mentions."""


class _Array:
    """An array that the file has announced and not filled yet, then its values; or, with `dtype`, a type of numbers."""

    def __init__(self, dtype: str | None = None) -> None:
        self.dtype = dtype
        self.values: np.ndarray[Any, Any] | None = None


def read_pickled(path: Path) -> Any:
    """Dictionaries, lists, tuples, numbers, text, bytes and arrays of numbers in a pickle file; anything else is refused.

    Python's own reader calls whatever function a file names. This one reads the same instructions and carries out only
    those that build plain data, so a file from a stranger can be wrong but cannot do anything.
    """
    try:
        return _plain(_carry_out(path.read_bytes()))
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from error
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Refusal(f"{path} is truncated or is no pickle file of plain data ({error})") from error


def _carry_out(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = len(stack) - 1
        while stack[start] is not MARK:
            start -= 1
            if start < 0:
                raise ValueError("no mark")
        items = stack[start + 1 :]
        del stack[start:]
        return items

    argument: Any
    for code, argument, _ in pickletools.genops(content):
        match code.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(MARK)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[code.name])
            case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1" | "FLOAT" | "BINFLOAT":
                stack.append(argument)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # Python 2 text: bytes
                stack.append(argument.encode("latin-1"))
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[code.name]())
            case "TUPLE" | "LIST":
                stack.append((tuple if code.name == "TUPLE" else list)(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(code.name[-1])
                if len(stack) < count:
                    raise ValueError("too few values for a tuple")
                stack[-count:] = [tuple(stack[-count:])]
            case "DICT":
                items = since_mark()
                stack.append(dict(zip(items[::2], items[1::2], strict=True)))
            case "APPEND" | "APPENDS":
                items = [stack.pop()] if code.name == "APPEND" else since_mark()
                list.extend(stack[-1], items)
            case "SETITEM" | "SETITEMS":
                items = [stack.pop(-2), stack.pop()] if code.name == "SETITEM" else since_mark()
                dict.update(stack[-1], zip(items[::2], items[1::2], strict=True))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_allowed(argument))
            case "STACK_GLOBAL":
                name = stack.pop()
                stack.append(_allowed(f"{stack.pop()} {name}"))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_announced(stack.pop(), arguments))
            case "BUILD":
                state = stack.pop()
                _fill(stack[-1], state)
            case other:
                raise Refusal(f"it holds more than plain data (the instruction {other}), so it was not read")
    raise ValueError("no end")


def _allowed(name: str) -> _Name:
    if name not in ARRAY | BYTES | {NDARRAY, DTYPE, ENCODE}:
        raise Refusal(f"it names {name.replace(' ', '.')!r}, which is not plain data, so it was not read")
    return _Name(name)


def _announced(name: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(name, _Name):
        raise ValueError("a call of something that is not a name")
    if name == ENCODE:  # Python 3 writes bytes as text for old readers
        text, encoding = arguments
        if encoding != "latin1":
            raise ValueError(f"bytes encoded as {encoding!r}")
        return str.encode(text, "latin-1")
    if name in BYTES and arguments == ():
        return b""
    if name in ARRAY:
        return _Array()
    if name == DTYPE:
        kind = _text(arguments[0])
        if kind not in DTYPES:
            raise Refusal(f"it holds an array of {kind!r}; only numbers are read")
        return _Array(kind)
    raise ValueError(f"a call of {name}")


def _fill(target: Any, state: tuple[Any, ...]) -> None:
    if not isinstance(target, _Array):
        raise Refusal("it holds more than plain data (the state of an object), so it was not read")
    if target.dtype is not None:  # (version, byte order, …)
        if _text(state[1]) == ">":
            target.dtype = ">" + target.dtype.lstrip("><")
        return
    _, shape, kind, columns_first, content = state
    if not isinstance(kind, _Array) or kind.dtype is None or not isinstance(content, bytes):
        raise ValueError("an array without a type of numbers")
    if any(size < 0 for size in shape) or math.prod(shape) * np.dtype(kind.dtype).itemsize != len(content):
        raise ValueError(f"an array of shape {shape} in {len(content)} bytes")
    target.values = np.frombuffer(content, np.dtype(kind.dtype)).reshape(shape, order="F" if columns_first else "C")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _plain(value: Any) -> Any:
    """The same with every announced array in its place."""
    if isinstance(value, _Array):
        if value.values is None:
            raise ValueError("an array without values")
        return value.values
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(entry) for entry in value)
    if isinstance(value, _Name) or value is MARK:
        raise ValueError("a bare name")
    return value
