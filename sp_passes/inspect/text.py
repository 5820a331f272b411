# SPDX-License-Identifier: Apache-2.0
"""Graphs as torch prints them, found in any text: a file, a log of several processes.

    class GraphModule(torch.nn.Module):
        def forward(self, x: "f32[8, 64][64, 1]cpu"):
            # File: model.py:9 in forward, code: return self.proj(x)
            mm: "f32[8, 256][256, 1]cpu" = torch.ops.aten.mm.default(x, w);  x = None
            return (mm,)

or with each input and output on a line of its own, and a comment on what it is. The text is read
once, line by line; what one process prints is kept apart from the others'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .records import Dump, Record
from .statements import LONGEST_LINE, LONGEST_STATEMENT, Reader, Unreadable, read_header

_TORCH_LOG = re.compile(
    r"(?P<front>.{0,120}?)[VDIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ (?P<pid>\d+) \S+:\d+\] ?"
    r"(?:\[(?P<id>[\d/_!]+)\] )?(?:\[__(?P<artifact>\w+)\] ?)?"
)
_PAYLOAD = re.compile(r'\{"(?:artifact": \{"name": ")?(\w*graph\w*)"[:,].*"has_payload"')
_JSON_RANK = re.compile(r'"rank": (\d+)')
_RANK = re.compile(r"rank[_\s]?(\d+)|\bTP(\d+)\b", re.IGNORECASE)
_PROCESS = re.compile(r"^\((?:\w+ )?pid=\d+\) |^\(\w+ pid=\d+\) ")
# What `kubectl logs --timestamps`, a container's own log and docker compose put before a line.
_SHIPPED = re.compile(
    r"(?P<service>\S{1,80} {1,40}\| )?"
    r"(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?)?"
)
_TIME = re.compile(r"(?:\d{2,4}-)?\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?")
_CLASS = re.compile(r"(?:^|\s)class (\S+)\(torch\.nn\.Module\):\s*$")
_TITLE = re.compile(r"=====+ (.{1,200}?) =====+")
_FILE = re.compile(r"# (?:Annotation: \{.*?\} )?File: (.{1,500})$")
_PLAIN_INPUT = re.compile(r"#\s*(?:Param|Buffer)AOTInput\(target='([^']+)'")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MOST_PROCESSES = 256
MOST_RECORDS = 400_000
MOST_NOTES = 20
LONGEST_ANNOUNCED = 1 << 20


@dataclass
class _Process:
    """Where one process's print is: outside a graph, in its header, or in its body."""

    rank: int | None = None
    title: str = ""
    compile_id: str = ""
    header: list[str] = field(default_factory=list)
    in_header: bool = False
    header_chars: int = 0
    ending: str = ""
    dump: Dump | None = None
    reader: Reader | None = None
    known: set[str] = field(default_factory=set)
    source: str = ""
    names: dict[str, str] = field(default_factory=dict)


class TextReader:
    """Finds the graphs of one text.

    Args:
        origin: the file's name, for messages.
        rank: of the process that wrote it, where its folder says so.

    Attributes:
        left_out: graphs that were not kept, for memory.
        lines: read so far.
    """

    def __init__(self, origin: str, rank: int | None = None, budget: int = MOST_RECORDS) -> None:
        self.origin, self.rank, self.budget = origin, rank, budget
        self.left_out = 0
        self.lines = 0
        self._processes: dict[str, _Process] = {}
        self._busy = 0

    def read(self, lines: Iterable[str]) -> Iterator[Dump]:
        """Every graph, when it ends."""
        for line in lines:
            self.lines += 1
            if not self._busy and not _may_begin(line):
                continue
            yield from self._line(line)
        for process in self._processes.values():
            yield from self._end(process, cut=True)

    def _line(self, line: str) -> Iterator[Dump]:
        line = line.rstrip("\r\n")
        if "\x1b" in line:
            line = _COLOUR.sub("", line)
        key, compile_id, rest = _split(line)
        process = self._processes.get(key)
        if process is None:
            if len(self._processes) >= MOST_PROCESSES:
                return
            process = self._processes[key] = _Process(_rank_of(key, self.rank))
        text = rest.strip()
        if key and text.startswith('{"'):
            self._announced(text)
            return
        if process.in_header:
            self._header(process, text)
        elif process.dump is not None:
            yield from self._body(process, text)
        else:
            self._outside(process, compile_id, text)

    def _announced(self, text: str) -> None:
        """What torch's trace log says of the lines that follow, which carry no prefix."""
        found = _PAYLOAD.match(text) if len(text) < LONGEST_ANNOUNCED else None
        if found is None:
            return
        rank = _JSON_RANK.search(text)
        follows = self._processes.setdefault("", _Process(self.rank))
        follows.title = found[1]
        follows.rank = int(rank[1]) if rank else self.rank

    def _outside(self, process: _Process, compile_id: str, text: str) -> None:
        if compile_id:
            process.compile_id = compile_id
        if found := _TITLE.search(text):
            process.title = found[1]
        elif found := _CLASS.search(text):
            process.title = process.title or found[1]
        elif text.startswith("def forward(self") or text == "def forward(":
            process.in_header, process.header, process.header_chars = True, [], 0
            process.names = {}
            self._busy += 1
            self._header(process, text)

    def _header(self, process: _Process, text: str) -> None:
        if found := _PLAIN_INPUT.search(text):
            name = text.partition(":")[0].strip(" ,")
            process.names[name] = found[1]
        code = _code(text)
        process.header.append(code)
        process.header_chars += len(text)
        ends = code.endswith("):") or (code.endswith(":") and "->" in code)
        if not ends and process.header_chars < LONGEST_LINE:
            return
        process.in_header = False
        self._busy -= 1
        try:
            inputs = read_header(" ".join(process.header))
        except Unreadable:
            process.title = ""
            return
        for record in inputs:
            record.weight = process.names.get(record.name, "")
        where = f"{self.origin}:{self.lines}"
        process.dump = Dump(process.title, where, inputs, process.rank, process.compile_id)
        process.known = {record.name for record in inputs}
        process.reader, process.source, process.title = Reader(process.known), "", ""
        self._busy += 1
        self.budget -= len(inputs)

    def _body(self, process: _Process, text: str) -> Iterator[Dump]:
        dump, reader = process.dump, process.reader
        assert dump is not None and reader is not None
        if not text:
            return
        if text.startswith("#"):
            found = _FILE.match(text)
            process.source = _where(found[1]) if found else ""
            return
        if text.startswith("def ") or text.startswith("class ") or _TITLE.search(text):
            yield from self._end(process, cut=True)
            self._outside(process, "", text)
            return
        if process.ending or text == "return (":
            process.ending += f" {_code(text)}"
            if text != ")" and len(process.ending) < LONGEST_STATEMENT:
                return
            text, process.ending = process.ending.strip(), ""
        if self.budget < 0 and not text.startswith("return"):
            return  # this graph will not be kept; only its end counts
        try:
            record = reader.read(text)
        except Unreadable as error:
            if len(dump.notes) < MOST_NOTES:
                dump.notes.append(f"line {self.lines}: {error}: {text[:60]!r}")
            return
        if record is None:
            return
        record.source = process.source
        self._keep(process, record)
        if record.op == "output":
            dump.complete = True
            yield from self._end(process)

    def _keep(self, process: _Process, record: Record) -> None:
        assert process.dump is not None
        self.budget -= 1
        if self.budget >= 0 or record.op == "output":
            process.dump.records.append(record)
            process.known.add(record.name)

    def _end(self, process: _Process, cut: bool = False) -> Iterator[Dump]:
        dump, process.dump, process.reader = process.dump, None, None
        process.known, process.ending = set(), ""
        if dump is None:
            return
        self._busy -= 1
        if self.budget < 0:
            self.left_out += 1
            return
        if cut:
            dump.notes.append("no return statement: the dump was cut off, the rest is missing")
        if len(dump.records) > len(dump.notes):
            yield dump


def _code(text: str) -> str:
    """A line without the comment that says what an input or output is."""
    described = "AOTInput(" in text or "AOTOutput(" in text
    return text.partition("  #")[0].rstrip() if described else text


def _may_begin(line: str) -> bool:
    if "def forward(" in line or "class " in line or "=====" in line:
        return True
    return '"has_payload"' in line and "graph" in line


def _split(line: str) -> tuple[str, str, str]:
    """Which process printed a line, its compile id, and what it printed."""
    service = ""
    shipped = _SHIPPED.match(line) if line[:1].isalnum() else None
    if shipped is not None:
        service, line = shipped["service"] or "", line[shipped.end() :]
    found = _TORCH_LOG.match(line) if "] " in line or line.endswith("]") else None
    if found is not None:
        front = service + _TIME.sub("", found["front"]).strip()
        return f"{front} {found['pid']}", found["id"] or "", line[found.end() :]
    prefix = _PROCESS.match(line)
    if prefix is not None:
        return service + prefix[0], "", line[prefix.end() :]
    return service, "", line


def _rank_of(key: str, otherwise: int | None) -> int | None:
    found = _RANK.search(key)
    return int(found[1] or found[2]) if found else otherwise


def _where(text: str) -> str:
    """``file:line, in function: code`` of torch's ``file:line in function, code: …``."""
    place, _, code = text.partition(", code: ")
    file, _, function = place.partition(" in ")
    return file + (f", in {function}" if function else "") + (f": {code}" if code else "")
