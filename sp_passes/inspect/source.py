# SPDX-License-Identifier: Apache-2.0
"""Files, folders and archives -> graphs; what a file is, its content says, not its name.

    text                     graphs as torch prints them, logs (``text``)
    JSON                     ``sp_passes.dump``, or an exported program's model
    zip                      a .pt2 of torch.export, or a folder of the others
    folder                   every file in it

Nothing is unpickled and nothing is extracted to disk; sizes, counts and depth are bounded.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from . import exported, ours, weights
from .records import Dump, InspectError
from .text import MOST_RECORDS, TextReader

MOST_FILES = 5_000
LARGEST_JSON = 512 << 20
LARGEST_MEMBER = 1 << 30
LARGEST_RATIO = 200
LINE = 8 << 20
_RANK = re.compile(r"(?:^|[/_])(?:rank|tp)[_-]?(\d+)(?=[_./]|$)", re.IGNORECASE)
_UUID = re.compile(r"_[0-9a-f]{8}(?:_[0-9a-f]{4}){3}_[0-9a-f]{12}")
_KINDS = (
    "a graph as torch prints it (print_readable, TORCH_LOGS=post_grad_graphs), a log or folder "
    "of such, a .pt2 of torch.export, or JSON of sp_passes.dump"
)


@dataclass
class Loaded:
    """Every graph that was found.

    Attributes:
        dumps: in the order of the files, and of the lines in them.
        skipped: files with no graph in them, and why.
        left_out: graphs that were not kept, for memory.
    """

    dumps: list[Dump] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left_out: int = 0
    budget: int = MOST_RECORDS
    files: int = 0


def load(path: str | Path) -> Loaded:
    """The graphs of a file, a folder or an archive.

    Raises:
        InspectError: there is none; the message says what was found instead.
    """
    found = Loaded()
    where = Path(path)
    if where.is_dir():
        for file in _walk(where):
            _file(file, str(file.relative_to(where)), found)
    elif where.is_file():
        _file(where, where.name, found)
    else:
        what = "neither a file nor a folder; save it to a file first"
        raise InspectError(f"{path}: {what if where.exists() else 'no such file or folder'}")
    if not found.dumps:
        why = found.skipped[0] if found.skipped else f"{path}: no file in it"
        more = f" (and {len(found.skipped) - 1} more files)" if len(found.skipped) > 1 else ""
        raise InspectError(f"no graph found: {why}{more}; inspect reads {_KINDS}")
    weights.lend_names(found.dumps)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Files in a fixed order; links out of the folder are not followed."""
    root = folder.resolve()
    for count, file in enumerate(sorted(folder.rglob("*"))):
        if count >= MOST_FILES:
            return
        if file.is_file() and file.resolve().is_relative_to(root):
            yield file


def _file(path: Path, name: str, found: Loaded) -> None:
    try:
        with path.open("rb") as stream:
            _stream(stream, name, found, path.stat().st_size)
    except OSError as error:
        found.skipped.append(f"{name}: {error.strerror or error}")
    except InspectError as error:
        found.skipped.append(str(error))


def _stream(stream: BinaryIO, name: str, found: Loaded, size: int, nested: bool = False) -> None:
    found.files += 1
    if found.files > MOST_FILES:
        return
    head = stream.read(4096)
    stream.seek(0)
    if head[:4] == b"PK\x03\x04":
        if nested:
            raise InspectError(f"{name}: an archive in an archive is not read")
        _archive(stream, name, found)
    elif head.lstrip()[:1] in (b"{", b"[") and _is_json(head):
        _json(stream, name, found, size)
    elif b"\x00" in head or _is_pickle(head):
        raise InspectError(f"{name}: a binary file ({_what(head)}), which is never unpickled")
    else:
        _text(stream, name, found)


def _is_json(head: bytes) -> bool:
    """Whether what begins with a brace goes on as JSON does, and not as ``[rank0]:`` of a log."""
    return re.match(rb'\s*(?:\{\s*["}]|\[\s*[\[{"\]])', head) is not None


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and len(head) > 1 and head[1] < 6


def _what(head: bytes) -> str:
    if _is_pickle(head):
        return "a pickle"
    return "an executable" if head[:4] == b"\x7fELF" else f"starts with {head[:4].hex(' ')}"


def _json(stream: BinaryIO, name: str, found: Loaded, size: int) -> None:
    if size > LARGEST_JSON:
        raise InspectError(
            f"{name}: JSON of {size >> 20} MiB; the most read is {LARGEST_JSON >> 20}"
        )
    try:
        data = json.loads(stream.read(LARGEST_JSON + 1))
    except (ValueError, RecursionError) as error:
        raise InspectError(f"{name}: damaged JSON: {error}") from None
    if ours.is_ours(data):
        _keep(ours.read(data, name), found)
    elif exported.is_model(data):
        _keep(exported.read(data, name), found)
    else:
        raise InspectError(f"{name}: JSON, but neither of sp_passes.dump nor of torch.export")


def _keep(dump: Dump, found: Loaded) -> None:
    found.budget -= len(dump.records)
    if found.budget < 0:
        found.left_out += 1
    elif dump.records:
        dump.rank = dump.rank if dump.rank is not None else _rank(dump.origin)
        found.dumps.append(dump)


def _archive(stream: BinaryIO, name: str, found: Loaded) -> None:
    try:
        archive = zipfile.ZipFile(stream)
        members = [m for m in archive.infolist() if not m.is_dir()]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InspectError(f"{name}: a damaged archive: {error}") from None
    if any(m.filename.endswith("/data.pkl") or m.filename == "data.pkl" for m in members):
        raise InspectError(f"{name}: a file of torch.save (a pickle), which is never unpickled")
    models = [m for m in members if re.search(r"(^|/)models/[^/]+\.json$", m.filename)]
    for member in (models or members)[:MOST_FILES]:
        inside = f"{name}!{member.filename}"
        if member.file_size > LARGEST_MEMBER or _is_bomb(member):
            found.skipped.append(f"{inside}: unpacks to {member.file_size >> 20} MiB; not read")
            continue
        try:
            with archive.open(member) as packed:
                data = io.BytesIO(packed.read(LARGEST_MEMBER))
            _stream(data, inside, found, member.file_size, nested=True)
        except InspectError as error:
            found.skipped.append(str(error))
        except Exception as error:  # zipfile raises what its decompressors do
            found.skipped.append(f"{inside}: damaged: {type(error).__name__}: {error}")


def _is_bomb(member: zipfile.ZipInfo) -> bool:
    large = member.file_size > 1 << 20
    return large and member.file_size > LARGEST_RATIO * max(1, member.compress_size)


def _text(stream: BinaryIO, name: str, found: Loaded) -> None:
    reader = TextReader(name, _rank(name), found.budget)
    before = len(found.dumps)
    found.dumps.extend(reader.read(_lines(stream)))
    mine = found.dumps[before:]
    if len(mine) == 1 and mine[0].title in ("GraphModule", "<lambda>"):
        mine[0].title = _title(name) or mine[0].title
    found.budget = reader.budget
    found.left_out += reader.left_out
    if len(found.dumps) == before and not reader.left_out:
        found.skipped.append(f"{name}: text without a graph ({reader.lines} lines)")


def _title(name: str) -> str:
    """``Forward graph`` of ``__compiled_fn_1.Forward_graph.0.py``; "" where there is none."""
    parts = [p for p in re.split(r"[./!\\]", name)[:-1] if p and not p.isdecimal()]
    return _UUID.sub("", parts[-1]).replace("_", " ").strip() if parts else ""


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Lines as text; what is longer than any graph's line comes in pieces."""
    while line := stream.readline(LINE):
        yield line.decode("utf-8", errors="replace")


def _rank(name: str) -> int | None:
    found = _RANK.search(name.partition("!")[2] or name)
    return int(found[1]) if found else None
