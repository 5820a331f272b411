# SPDX-License-Identifier: Apache-2.0
"""A graph as it was read, before it is one of torch.fx again: what every reader produces.

Nothing of a dump is ever run: names of ops stay text until ``build`` looks them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import SPError


class InspectError(SPError):
    """A dump that cannot be read; one line says why, and what can."""


@dataclass(frozen=True)
class Ref:
    """The value of another node."""

    name: str


@dataclass(frozen=True)
class OpRef:
    """An op as an argument, as ``auto_functionalized`` takes it."""

    name: str


@dataclass(frozen=True)
class Const:
    """A torch constant by name, such as ``torch.float32``; or ``device``."""

    name: str


@dataclass(frozen=True)
class Expr:
    """An expression over symbolic sizes, such as ``8*s77``."""

    text: str


@dataclass(frozen=True)
class Opaque:
    """An argument that means nothing here; kept as text."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(slots=True)
class Record:
    """One node.

    Attributes:
        name: as printed.
        op: ``placeholder``, ``get_attr``, ``call``, ``method``, ``module`` or ``output``.
        target: name of what is called, or of the input.
        args, kwargs: with the classes above for what is no plain value.
        value: text of its value, such as ``bf16[s77, 64][64, 1]cpu``; "" when not printed.
        source: ``file:line, in function: code`` of where it came from, or "".
        weight: FQN, where the dump says that it is a parameter or buffer.
        placement: what its module declared, as ``S0``, ``R`` or ``P``; or "".
    """

    name: str
    op: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: str = ""
    source: str = ""
    weight: str = ""
    placement: str = ""


@dataclass
class Dump:
    """One graph of a file.

    Attributes:
        title: what the file calls it, such as ``AFTER POST GRAD``.
        origin: the file, and the line where it begins.
        records: its nodes, in order.
        rank: of the process that printed it, where the dump tells.
        compile_id: torch's ``[0/1]``, where the dump tells.
        notes: what could not be read, a line each.
        complete: its return statement was there.
        hints: example sizes of symbols, where the dump tells.
    """

    title: str
    origin: str
    records: list[Record] = field(default_factory=list)
    rank: int | None = None
    compile_id: str = ""
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    hints: dict[str, int] = field(default_factory=dict)

    @property
    def is_aten(self) -> bool:
        """Whether it calls operators, as graphs do after AOTAutograd; Dynamo's do not."""
        kinds = ("call", "method", "module")
        calls = [r.target for r in self.records if r.op in kinds]
        calls = [target for target in calls if target != "operator.getitem"]
        return sum(t.startswith("torch.ops.") for t in calls) * 10 >= len(calls) * 9
